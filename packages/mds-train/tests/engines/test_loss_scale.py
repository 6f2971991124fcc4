from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mds_train.config.fp16 import Fp16Config
from mds_train.engines.loss_scale import LossScale


def scales(config: Fp16Config, flags: list[int], *, first: LossScale | None = None) -> list[float]:
    """The scale after each step, where 1 in ``flags`` is an overflow."""
    scale, found = first or LossScale.first(config), []
    for flag in flags:
        scale = scale.after_step(overflow=bool(flag), config=config)
        found.append(scale.scale)
    return found


FLAGS = [1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0]
AFTER = [65536.0, 32768.0, *[16384.0] * 5, *[32768.0] * 4]
CONFIG = Fp16Config(window=4)


def test_the_scale_follows_deepspeeds_rule() -> None:
    assert scales(CONFIG, FLAGS) == AFTER


def test_the_recorded_case_of_public_reports_is_met() -> None:
    folders = [parent / "shared" / "cases" for parent in Path(__file__).resolve().parents]
    folder = next((each for each in folders if (each / "C06").is_dir()), None)
    folder = Path(os.environ["MDS_CASES_DIR"]) if "MDS_CASES_DIR" in os.environ else folder
    if folder is None:
        pytest.skip("the cases (../shared/cases or MDS_CASES_DIR) are not here")
    case = json.loads((folder / "C06" / "expected.json").read_text())
    row = case["A: start 65536, window 4, hysteresis 2"]

    assert scales(CONFIG, row["overflow flags"]) == row["scale after each step"]


def test_a_resumed_scale_goes_on_in_the_row() -> None:
    scale = LossScale.first(CONFIG)
    for flag in FLAGS[:5]:
        scale = scale.after_step(overflow=bool(flag), config=CONFIG)

    resumed = LossScale.from_record(json.loads(json.dumps(scale.record())))

    assert scales(CONFIG, FLAGS[5:], first=resumed) == AFTER[5:]


def test_overflows_at_the_floor_cannot_be_answered() -> None:
    config = Fp16Config(initial_scale=16.0, hysteresis=1)
    scale, seen = LossScale.first(config), []
    while not scale.at_floor(config):
        scale = scale.after_step(overflow=True, config=config)
        seen.append(scale.scale)

    assert seen == [8.0, 4.0, 2.0, 1.0]


def test_a_fixed_scale_stays() -> None:
    config = Fp16Config(loss_scale=128.0)

    assert scales(config, [0, 1, 1, 0]) == [128.0] * 4
    assert LossScale.first(config).at_floor(config)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"window": 0}, "fp16.window is 0"),
        ({"loss_scale": -1.0}, "fp16.loss_scale is -1.0"),
        ({"initial_scale": 0.5}, "fp16.initial_scale 0.5 is below fp16.min_scale 1.0"),
    ],
)
def test_a_scale_that_makes_no_sense_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp16Config(**values)  # type: ignore[arg-type]
