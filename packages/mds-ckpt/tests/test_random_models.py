"""Random tiny models, random layouts, random ways through the formats: every number comes back.

``MDS_FUZZ=N`` tries N examples instead of a few, with up to 101 layers.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from deepspeed_samples import Sample
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from mds_ckpt import convert, open_checkpoint

EXAMPLES = int(os.environ.get("MDS_FUZZ", "0"))
# Few deep ones: what goes wrong with many layers goes wrong with any such model, and takes longer.
DEEP = [1, 2, 3, 4, 5] * 6 + [6, 7, 8, 9, 10, 11, 12, 30, 99, 101]
LAYERS = st.sampled_from(DEEP) if EXAMPLES else st.integers(1, 4)
STATES = ("weight", "exp_avg", "exp_avg_sq")

samples = st.builds(
    Sample,
    layers=LAYERS,
    heads=st.just(4),
    groups=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([8, 16, 24]),
    vocab=st.integers(1, 70),
    positions=st.integers(1, 9),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    gated=st.booleans(),
    tied=st.booleans(),
    slice_mappings=st.booleans(),
    stage=st.sampled_from([1, 3]),
    pipeline=st.booleans(),
    first_block=st.sampled_from([2, 3]),
    norm_gap=st.integers(0, 2),
)
degrees = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([1, 2]),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "pipeline": st.booleans(),
        "distributed": st.booleans(),
    }
)
ways = st.lists(
    st.tuples(st.sampled_from(["deepspeed", "megatron", "universal", "mds"]), degrees),
    min_size=1,
    max_size=3,
)


def possible(sample: Sample) -> bool:
    """Whether the training code itself could have written the sample."""
    if sample.tp > sample.groups or sample.pp > sample.layers:
        return False
    is_plain = not sample.pipeline
    return (sample.stage == 1 or is_plain) and (sample.pp == 1 or sample.pipeline)


def options(target: str, wanted: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """What of the wanted layout the target has, made possible."""
    tp, pp = min(wanted["tp"], sample.groups), min(wanted["pp"], sample.layers)
    if target == "mds":
        return {}
    if target == "universal":
        stage = 1 if wanted["pipeline"] else max(1, wanted["zero_stage"])
        return {"pipeline": wanted["pipeline"], "zero_stage": stage}
    if target == "megatron":
        flat = {"use_distributed_optimizer": True, "dp": wanted["dp"]}
        return {"tp": tp, "pp": pp} | (flat if wanted["distributed"] else {})
    stage = min(wanted["zero_stage"], 1) if wanted["pipeline"] else wanted["zero_stage"]
    pp = pp if wanted["pipeline"] else 1
    chosen = {"tp": tp, "pp": pp, "dp": wanted["dp"], "pipeline": wanted["pipeline"]}
    return {**chosen, "zero_stage": stage}


@settings(
    max_examples=EXAMPLES or 8,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(samples, ways)
def test_any_model_comes_back_through_any_formats(
    tmp_path_factory: Any, sample: Sample, ways: list[tuple[str, dict[str, Any]]]
) -> None:
    assume(possible(sample))
    folder: Path = tmp_path_factory.mktemp("way")
    try:
        at, is_whole = sample.write(folder / "0"), sample.stage == 1
        for number, (target, wanted) in enumerate(ways, start=1):
            more = options(target, wanted, sample)
            convert(at, folder / str(number), to=target, **more)
            at = folder / str(number)
            # These hold fp32 masters alone; the sample's weights are others, to show a mix-up.
            is_whole = is_whole and target != "universal" and more.get("zero_stage") != 3
        found = open_checkpoint(at)
        assert all(len(found.states[state]) == len(sample.names) for state in STATES)
        for state in STATES if is_whole else STATES[1:]:
            for name in sample.names:
                wanted_values = sample.tensors[f"{state}/{name}"]
                values = found.tensor(name, state).numpy()
                np.testing.assert_array_equal(values, wanted_values, err_msg=f"{state} {name}")
        assert found.counters["consumed_samples"] == 24
        assert found.config["num_layers"] == sample.layers
    finally:
        shutil.rmtree(folder)


def test_a_hundred_and_one_layers_keep_their_order(tmp_path: Path) -> None:
    """Layer files are named with two digits up to 99 and with three behind."""
    sample = Sample(layers=101, hidden=4, heads=2, groups=1, width=4, vocab=3, positions=2)

    convert(sample.write(tmp_path / "in"), tmp_path / "out", to="deepspeed", weights_only=True)

    found = open_checkpoint(tmp_path / "out")
    assert found.config["num_layers"] == 101
    assert (tmp_path / "out" / "global_step3" / "layer_102-model_00-model_states.pt").is_file()
    for layer in (0, 9, 10, 98, 99, 100):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        wanted = sample.tensors[f"weight/{name}"]
        np.testing.assert_array_equal(found.tensor(name).numpy(), wanted)
