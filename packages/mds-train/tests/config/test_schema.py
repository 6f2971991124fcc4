from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from engine_cases import MODEL, tiny_config

from mds_core.pipeline import SCHEDULES
from mds_train.config import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    MemoryConfig,
    OptimizerConfig,
    ParallelConfig,
    ScheduleConfig,
    WatchConfig,
)
from mds_train.config.parallel import INTERLEAVED, STAGES_PER_RANK


def test_the_configuration_is_frozen_and_json_can_hold_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)

    with pytest.raises(FrozenInstanceError):
        config.train.seed = 3  # type: ignore[misc]
    assert json.loads(json.dumps(config.as_dict()))["model"]["family"] == "gpt"


def test_the_core_configuration_is_the_table_without_the_family() -> None:
    core = MODEL.core()

    assert not hasattr(core, "family")
    assert (core.num_layers, core.vocab_size) == (2, 100)


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        (DataConfig, {"store": "", "seq_length": 4}, "data.store is not set"),
        (DataConfig, {"store": "s", "seq_length": 0}, "data.seq_length is 0"),
        (DataConfig, {"store": "s", "seq_length": 4, "split": "a,b"}, "up to three weights"),
        (DataConfig, {"store": "s", "seq_length": 4, "order": "odd"}, "fast, megatron"),
        (OptimizerConfig, {"beta2": 1.0}, r"optimizer.beta2 is 1.0, but it must be in \[0, 1\)"),
        (OptimizerConfig, {"name": "adam"}, "must be one of adamw, lion, muon, sgd"),
        (ScheduleConfig, {"kind": "steps"}, "constant, linear, cosine"),
        (ScheduleConfig, {"kind": "wsd"}, "needs schedule.wsd_decay_steps"),
        (ParallelConfig, {"zero_stage": 4}, "must be 0, 1, 2 or 3"),
        (ParallelConfig, {"zero_stage": 3, "ep_size": 2}, "use zero_stage 0 to 2, or ep_size 1"),
        (ParallelConfig, {"schedule": "2f2b"}, "must be one of gpipe, 1f1b, interleaved-1f1b"),
        (ParallelConfig, {"schedule": "zb-v", "virtual_stages": 3}, 'schedule "zb-v" puts 2 on'),
        (ParallelConfig, {"schedule": "1f1b", "virtual_stages": 2}, 'schedule "1f1b" puts 1 on'),
        (ParallelConfig, {"partition": "3;5"}, "must be layers, parameters, time, or the number"),
        (MemoryConfig, {"recompute": "some"}, "must be one of none, selective, full, modules"),
        (MemoryConfig, {"recompute": "modules"}, "give the list together with"),
        (MemoryConfig, {"recompute_modules": ("norm",)}, "give the list together with"),
        (
            MemoryConfig,
            {"recompute": "modules", "recompute_modules": ("mlp", "activation")},
            "has mlp and activation, which is a part of it",
        ),
        (
            MemoryConfig,
            {"recompute": "modules", "recompute_modules": ("head",)},
            "must be one of core_attention, attention, norm",
        ),
        (MemoryConfig, {"offload_optimizer": "nvme"}, "from which no checkpoint can be written"),
        (MemoryConfig, {"offload_parameters": "disk"}, "must be one of none, cpu"),
        (MemoryConfig, {"offload_ratio": 1.5}, "must be above 0 and at most 1"),
        (MemoryConfig, {"offload_ratio": 0.5}, "but nothing is moved"),
        (OptimizerConfig, {"implementation": "apex"}, "must be one of torch, deepspeed-cpu"),
        (
            OptimizerConfig,
            {"name": "lion", "implementation": "deepspeed-cpu"},
            'steps adamw, but optimizer.name is "lion"',
        ),
        (MemoryConfig, {"recompute_layers": 2}, 'memory.recompute is "none"; only "full"'),
        (CheckpointConfig, {"load_weights_only": True}, "checkpoint.load names no checkpoint"),
        (CheckpointConfig, {"keep_last": -1}, "must not be negative"),
        (WatchConfig, {"log_interval": 0}, "must be greater than 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(
    table: type, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        table(**values)


@pytest.mark.parametrize("values", [{"precision": "fp8"}, {"device": "tpu"}])
def test_a_precision_or_device_that_we_lack_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"train\.(precision|device)"):
        LoopConfig(run_dir="r", train_steps=1, global_batch_size=1, **values)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_zero_runs_at_every_stage_and_its_conflict_with_a_pipeline_says_what_to_write(
    zero_stage: int,
) -> None:
    assert ParallelConfig(zero_stage=zero_stage, pp_size=1).zero_stage == zero_stage
    if zero_stage < 2:
        assert ParallelConfig(zero_stage=zero_stage, pp_size=2).pp_size == 2
    else:
        with pytest.raises(ValueError, match=r"zero_stage .*pp_size 2\): use zero_stage 1"):
            ParallelConfig(zero_stage=zero_stage, pp_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"seq_length": 17}}, "longer than model.max_position_embeddings 16"),
        ({"schedule": {"min_lr": 1.0}}, "schedule.min_lr 1.0 is above optimizer.lr"),
        ({"schedule": {"warmup_steps": 6}}, "leaves nothing of the 6 updates"),
        ({"parallel": {"ep_size": 2}}, "parallel.ep_size.* the model has no experts to share out"),
        (
            {"memory": {"offload_optimizer": "cpu"}, "parallel": {"zero_stage": 0}},
            "use zero_stage 1 to 3",
        ),
        (
            {"memory": {"offload_optimizer": "cpu"}, "optimizer": {"name": "muon"}},
            "puts whole matrices together where the model computes",
        ),
        ({"memory": {"offload_parameters": "cpu"}}, "only zero_stage 3 can do that"),
        (
            {
                "memory": {"offload_optimizer": "cpu", "offload_ratio": 0.5},
                "parallel": {"zero_stage": 3},
            },
            'needs optimizer.implementation "deepspeed-cpu"',
        ),
        ({"parallel": {"tp_size": 3}}, "does not divide model.num_attention_heads 4"),
        (
            {"parallel": {"tp_size": 2, "ulysses_size": 4}},
            "leaves 2 on each of 2 tensor-parallel ranks, fewer than ulysses_size",
        ),
        (
            {"parallel": {"ulysses_size": 2}, "data": {"seq_length": 15}},
            "data.seq_length 15 is not a multiple of parallel.ulysses_size 2",
        ),
        (
            {
                "parallel": {"ulysses_size": 4, "sequence_sharing": "ring"},
                "data": {"seq_length": 12},
            },
            "data.seq_length 12 is not a multiple of 8, twice parallel.ulysses_size 4",
        ),
        (
            {"parallel": {"tp_size": 2, "sequence_parallel": True}, "data": {"seq_length": 15}},
            r"15 is not a multiple of .* tp_size 2 \(parallel.sequence_parallel\)",
        ),
    ],
)
def test_tables_that_contradict_each_other_are_refused(
    tmp_path: Path, changes: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **changes)


def test_ranks_that_share_out_experts_must_be_data_parallel(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model=replace(MODEL, num_experts=4), parallel={"ep_size": 2})

    config.check_world(2)
    with pytest.raises(ValueError, match="ep_size 2 does not divide the 1 data-parallel rank of 1"):
        config.check_world(1)


def test_the_schedules_are_those_of_the_pipeline() -> None:
    assert set(STAGES_PER_RANK) == set(SCHEDULES)
    assert {name: SCHEDULES[name].stages_per_rank(None) for name in SCHEDULES} == STAGES_PER_RANK
    assert tuple(n for n, each in SCHEDULES.items() if each.placement == "loop") == INTERLEAVED


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"pp_size": 3}, "model.num_layers 2 are too few for 3 stages"),
        ({"pp_size": 2, "schedule": "zb-v"}, "too few for 4 stages .*pp_size 2.*zb-v"),
        ({"pp_size": 2, "partition": "2,1"}, "2 stages together 3 layers, but .*num_layers 2"),
        ({"pp_size": 2, "partition": "1,0,1"}, "must be layers, parameters, time, or the number"),
        ({"pp_size": 2, "split_rank": 2}, "at least 1 and below parallel.pp_size 2"),
        ({"pp_size": 2, "schedule": "zb-v", "split_rank": 1}, "goes with one stage on each rank"),
        ({"pp_size": 2, "split_rank": 1}, "only a t5 has an encoder and a decoder to split"),
    ],
)
def test_stages_without_layers_are_refused(
    tmp_path: Path, parallel: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, parallel=parallel)


def test_virtual_stages_choose_the_interleaved_schedule() -> None:
    parallel = ParallelConfig(pp_size=2, virtual_stages=3)

    assert (parallel.pipeline_schedule, parallel.stage_count) == ("interleaved-1f1b", 6)
    assert ParallelConfig(pp_size=2).pipeline_schedule == "1f1b"


def test_a_schedule_needs_its_micro_batches(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, parallel={"pp_size": 2})

    config.check_world(2)  # 4 micro batches
    with pytest.raises(ValueError, match=r"1f1b needs at least 2 .* there are 1; .*micro_batch"):
        config.check_world(8)


def test_the_batch_must_divide_over_the_ranks(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)

    config.check_world(4)
    with pytest.raises(
        ValueError, match=r"8 is not a multiple of train.micro_batch_size 2 \* 3 data"
    ):
        config.check_world(3)


@pytest.mark.parametrize("inner", ["", "checkpoints"])
def test_weights_alone_are_not_taken_of_the_run_itself(tmp_path: Path, inner: str) -> None:
    own = tiny_config(tmp_path).train.run_dir

    with pytest.raises(ValueError, match=r"is the run's own folder.*another train.run_dir"):
        tiny_config(
            tmp_path, checkpoint={"load": str(Path(own) / inner), "load_weights_only": True}
        )


def test_ranks_that_the_layout_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="5 ranks cannot be divided by tp_size 2"):
        ParallelConfig(tp_size=2).dp_size(5)


def test_a_run_may_end_before_its_schedule() -> None:
    loop = LoopConfig(run_dir="r", train_steps=10, global_batch_size=1, exit_step=4)

    assert loop.last_step == 4
