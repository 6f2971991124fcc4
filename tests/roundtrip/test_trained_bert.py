"""A BERT that mds-train trains is transformers' BERT: each step's loss, and what is exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mds_ckpt import convert  # noqa: E402
from mds_ckpt.cli import main as mds_ckpt  # noqa: E402
from mds_data import BertDataset, StoreWriter, TokenizerFile, open_store  # noqa: E402
from mds_data.tokenizers.bert import load_bert_tokenizer  # noqa: E402
from mds_train import train  # noqa: E402
from mds_train.config import (  # noqa: E402
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)

pytestmark = pytest.mark.timeout(240)

STEPS, BATCH, LENGTH = 4, 6, 32
MODELS = {"BertForPreTraining": True, "MegatronBertForPreTraining": False}
"""transformers' classes, and whether their norms stand behind the residual."""


@dataclass
class Losses:
    """A watcher."""

    steps: list[float] = field(default_factory=list)

    def on_step(self, report: Any) -> None:
        self.steps.append(report.loss)

    def __getattr__(self, name: str) -> Any:
        return lambda report: None


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences")
    vocabulary = folder / "vocab.txt"
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("\n".join([*marks, *(f"w{number}" for number in range(50))]) + "\n")
    tokenizer = load_bert_tokenizer(vocabulary, lower_case=True)
    file = TokenizerFile(kind=tokenizer.kind, content=tokenizer.file.content)
    random = np.random.default_rng(0)
    with StoreWriter(
        folder / "store", vocab_size=tokenizer.vocab_size, sentences=True, tokenizer=file
    ) as writer:
        for _ in range(30):
            lengths = random.integers(3, 12, 5).tolist()
            writer.add(random.integers(5, 55, sum(lengths)), sentence_lengths=lengths)
        writer.commit()
    return folder / "store"


def config_of(store: Path, run_dir: Path, *, post: bool) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            family="bert",
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=57,
            max_position_embeddings=LENGTH,
            residual_post_layernorm=post,
            norm_epsilon=1e-12,
            init_std=0.1,
        ),
        data=DataConfig(store=str(store), seq_length=LENGTH, segments="next", split="100,0,0"),
        train=LoopConfig(
            run_dir=str(run_dir), train_steps=STEPS, global_batch_size=BATCH, micro_batch_size=2
        ),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig(kind="constant"),
        checkpoint=CheckpointConfig(save_initial=True),
    )


@pytest.mark.parametrize("name", MODELS)
def test_each_step_and_the_result_are_those_of_transformers(
    name: str, store: Path, tmp_path: Path
) -> None:
    config, losses = config_of(store, tmp_path / "run", post=MODELS[name]), Losses()

    train(config, watchers=[losses])  # type: ignore[list-item]

    steps = tmp_path / "run" / "checkpoints"
    for step in (0, STEPS):
        convert(steps / f"step-{step}", tmp_path / f"hf-{step}", to="hf")
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "hf-0")
    assert losses.steps == pytest.approx(plain_losses(theirs, config), rel=1e-6)
    ours = getattr(transformers, name).from_pretrained(tmp_path / "hf-4").state_dict()
    trained = theirs.state_dict()
    # A bias of the keys changes no attention: its gradient is rounding, which Adam makes large.
    for key, value in trained.items():
        if key.endswith("attention.self.key.bias"):
            continue
        torch.testing.assert_close(ours[key], value, rtol=0, atol=2e-5, msg=key)
    assert mds_ckpt(["inspect", str(steps / "step-4")]) == 0
    assert mds_ckpt(["verify", str(steps / "step-4")]) == 0


def plain_losses(model: Any, config: TrainConfig) -> list[float]:
    """transformers' own loss over each whole batch, torch's AdamW."""
    own = list(model.parameters())
    groups = [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in own if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    dataset = BertDataset(
        open_store(Path(config.data.paths[0])),
        seq_length=LENGTH,
        seed=config.train.seed,
        split=("100,0,0", "train"),
        segments="next",
        num_samples=STEPS * BATCH,
    )
    model.eval()  # without dropout
    losses = []
    for step in range(STEPS):
        samples = [dataset[step * BATCH + number] for number in range(BATCH)]
        loss = model(**inputs(samples)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def inputs(samples: list[Mapping[str, Any]]) -> dict[str, Any]:
    def stack(key: str) -> Any:
        return torch.from_numpy(np.stack([sample[key] for sample in samples]))

    labels = stack("labels")
    return {
        "input_ids": stack("tokens"),
        "attention_mask": stack("padding_mask"),
        "token_type_ids": stack("token_types"),
        "labels": labels.masked_fill(labels < 0, -100),
        "next_sentence_label": stack("is_random"),
    }
