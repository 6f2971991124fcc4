from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_cases import MODEL, tiny_config

from mds_core import ProcessGroups
from mds_train.config import MemoryConfig, ParallelConfig
from mds_train.model_building import build_model, execution_of, global_shapes, stages


@pytest.mark.parametrize(
    ("partition", "sizes"),
    [("layers", [3, 3]), ("parameters", [2, 4]), ("1,5", [1, 5])],
)
def test_stages_share_out_the_layers_as_the_partition_says(
    tmp_path: Path, partition: str, sizes: list[int]
) -> None:
    # A table of positions that weighs two layers stands on the first stage.
    model = replace(MODEL, num_layers=6, max_position_embeddings=800)
    config = tiny_config(tmp_path, model=model)
    config = replace(config, parallel=ParallelConfig(pp_size=2, partition=partition))

    assert [len(stage.layers) for stage in stages(config)] == sizes


def test_measured_times_cut_the_stages_where_asked_for(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model=replace(MODEL, num_layers=4))
    config = replace(config, parallel=ParallelConfig(pp_size=2, partition="time"))

    measured = stages(config, costs=(3.0, 1.0, 1.0, 1.0))
    planned = stages(config)

    assert [len(stage.layers) for stage in measured] == [1, 3]
    assert [len(stage.layers) for stage in planned] == [2, 2]


def test_a_stage_without_experts_is_named_where_ranks_share_them_out(tmp_path: Path) -> None:
    model = replace(MODEL, num_layers=4, num_experts=4, expert_interval=2)
    parallel = ParallelConfig(pp_size=2, ep_size=2)
    config = replace(tiny_config(tmp_path, model=model), parallel=parallel)

    assert len(stages(config)) == 2
    with pytest.raises(ValueError, match=r"but stage 0 \(layers \[0\]\) has none"):
        stages(replace(config, parallel=replace(parallel, partition="1,3")))


def test_settings_reach_the_model(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, train={"precision": "bf16"})
    config = replace(config, memory=MemoryConfig(recompute="full", recompute_layers=2))

    model = build_model(config, ProcessGroups.single(), device=torch.device("cpu"))

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    execution = execution_of(config)
    assert (execution.recompute, execution.recompute_layers) == ("full", 2)
    assert model.decoder.execution == execution  # type: ignore[union-attr]


def test_modules_to_recompute_and_where_activations_stay_reach_the_model(tmp_path: Path) -> None:
    memory = MemoryConfig(
        recompute="modules", recompute_modules=("norm", "mlp"), offload_activations=True
    )

    execution = execution_of(replace(tiny_config(tmp_path), memory=memory))

    assert execution.expert_tensor_parallel
    assert execution.recompute_modules == ("norm", "mlp")
    assert execution.offload_activations


def test_global_shapes_have_the_true_vocabulary_and_the_order_of_the_model(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)

    shapes = global_shapes(config)

    assert next(iter(shapes)) == "embedding.word_embeddings.weight"
    assert shapes["embedding.word_embeddings.weight"] == (100, 32)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == config.model.num_params()


def test_sharing_activations_with_nobody_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, parallel={"sequence_parallel": True})

    build_model(config, ProcessGroups.single(), device=torch.device("meta"))

    assert "parallel.sequence_parallel does nothing" in caplog.text
