"""Our losses are those of Megatron-DeepSpeed: its data, its order, its initial weights, fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_runs import golden_folder, golden_losses, write_initial_checkpoint
from layouts import always
from recorded_runs import losses_on

from mds_kernels.testing import TOLERANCES
from mds_train.config import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)

pytestmark = pytest.mark.timeout(420)

# The original's 40 padded rows take part in its softmax, so here they are part of the vocabulary.
GPT = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=640,
    max_position_embeddings=64,
)
LLAMA = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=640,
    max_position_embeddings=64,
    ffn_hidden_size=96,
    position_embedding="rope",
    normalization="rmsnorm",
    activation="swiglu",
    add_bias=False,
    tie_embeddings=False,
)


def golden_config(
    folder: Path,
    model: ModelConfig,
    *,
    weights: str,
    clipping: float,
    parallel: ParallelConfig,
) -> TrainConfig:
    """The argv of the original's runs in our words."""
    initial = write_initial_checkpoint(folder / "initial", weights=weights, model=model)
    return TrainConfig(
        model=model,
        data=DataConfig(
            store=str(golden_folder() / "datasets" / "pydoc_text_document"),
            seq_length=64,
            split="90,5,5",
            order="megatron",
        ),
        train=LoopConfig(
            run_dir=str(folder / "run"),
            train_steps=20,
            global_batch_size=8,
            micro_batch_size=2,
            gradient_clipping=clipping,
        ),
        optimizer=OptimizerConfig(lr=3e-3, beta2=0.95, weight_decay=0.1),
        schedule=ScheduleConfig(kind="cosine", min_lr=3e-4, warmup_steps=2),
        parallel=parallel,
        checkpoint=CheckpointConfig(load=str(initial), load_weights_only=True, save_final=False),
    )


RUNS = {
    # our layout: ranks, tensor parallel, pipeline, ZeRO stage; and the original's run
    "gpt, one process, ZeRO 0": (1, 1, 1, 0, "traj_tp1pp1dp1_fp32"),
    "gpt, one process, ZeRO 1": (1, 1, 1, 1, "trajz1_tp1pp1dp1_fp32"),
    "gpt, dp 2, ZeRO 0": (2, 1, 1, 0, "traj_tp1pp1dp2_fp32"),
    "gpt, dp 2, ZeRO 2": (2, 1, 1, 2, "traj_tp1pp1dp2_fp32"),
    "gpt, tp 2, ZeRO 1": (2, 2, 1, 1, "traj_tp2pp1dp1_fp32"),
    # With clipping the original's own two stages differ from its one by 4e-4: its norm counts the
    # tied embedding twice.
    "gpt, pp 2, ZeRO 0": (2, 1, 2, 0, "trajnoclip_tp1pp2dp1_fp32"),
    "gpt, tp 2 dp 2, ZeRO 3": (4, 2, 1, 3, "traj_tp2pp2dp2_fp32"),
    "gpt, tp 2 pp 2 dp 2, ZeRO 1": (8, 2, 2, 1, "traj_tp2pp2dp2_fp32"),
    "llama, one process, ZeRO 1": (1, 1, 1, 1, "trajnoclip_llama_tp1pp1dp1_fp32"),
    "llama, tp 2 dp 2, ZeRO 1": (4, 2, 1, 1, "trajnoclip_llama_tp2pp2dp2_fp32"),
    "llama, tp 2 pp 2 dp 2, ZeRO 1": (8, 2, 2, 1, "trajnoclip_llama_tp2pp2dp2_fp32"),
}


def config_of(name: str, folder: Path) -> TrainConfig:
    llama = name.startswith("llama")
    _, tp_size, pp_size, zero_stage, run = RUNS[name]
    return golden_config(
        folder / name.replace(", ", "-").replace(" ", ""),
        LLAMA if llama else GPT,
        weights="init_llama.npz" if llama else "init_gpt.npz",
        clipping=0.0 if run.startswith("trajnoclip") else 1.0,
        parallel=ParallelConfig(tp_size=tp_size, pp_size=pp_size, zero_stage=zero_stage),
    )


@pytest.mark.parametrize("ranks", always([1, 2, 8], [4]))
def test_losses_are_the_originals(tmp_path: Path, ranks: int) -> None:
    configs = {name: config_of(name, tmp_path) for name, run in RUNS.items() if run[0] == ranks}

    found = losses_on(configs, ranks=ranks)

    for name, losses in found.items():
        golden = golden_losses(RUNS[name][-1])
        tolerance = TOLERANCES["golden_loss_float32"]
        assert losses == pytest.approx(golden, abs=tolerance), name
