"""The time model beside what others measured."""

from __future__ import annotations

import pytest

from mds_train.cli import main
from mds_train.plan.calibration import PublishedRun, fit, published_runs
from mds_train.plan.machines import FITTED, Fitted


def runs_on(kind: str) -> list[PublishedRun]:
    return [run for run in published_runs() if run.machine.name == kind]


@pytest.mark.parametrize(
    ("name", "seconds"),
    # Iteration times of arXiv 2205.05198, table 5, which the shares of the peak come from.
    [("GPT 22B", 1.10), ("GPT 175B", 13.75), ("GPT 530B", 37.83), ("GPT 1T", 71.49)],
)
def test_shares_of_the_peak_become_the_published_seconds(name: str, seconds: float) -> None:
    (run,) = (run for run in published_runs() if run.name == name and "2205" in run.source)

    assert run.step_seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("kind", FITTED)
def test_constants_fitted_on_half_of_the_runs_predict_the_other_half(kind: str) -> None:
    runs = runs_on(kind)

    constants = fit(runs[1::2])

    errors = {run.name: run.ratio(constants) - 1 for run in runs[0::2]}
    assert max(map(abs, errors.values())) < 0.15, errors


@pytest.mark.parametrize("kind", FITTED)
def test_the_machine_has_the_constants_of_all_runs(kind: str) -> None:
    constants = fit(runs_on(kind))

    assert FITTED[kind].efficiency == pytest.approx(constants.efficiency, abs=6e-4)
    assert FITTED[kind].exposed == pytest.approx(constants.exposed, abs=6e-4)


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    hidden = Fitted(efficiency=0.55, exposed=0.3)
    runs = [
        PublishedRun(
            source=run.source, name=run.name, machine=run.machine, gpus=run.gpus,
            config=run.config, fused_attention=run.fused_attention,
            step_seconds=run.planned(hidden).step_seconds,
        )
        for run in runs_on("a100-80")
    ]  # fmt: skip

    found = fit(runs)

    assert found.efficiency == pytest.approx(0.55)
    assert found.exposed == pytest.approx(0.3)


def test_the_residuals_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--published"]) == 0

    shown = capsys.readouterr().out
    for word in ("GPT 1T", "71.43 s", "torchtitan"):
        assert word in shown


def test_without_a_configuration_the_plan_says_what_it_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan"]) == 2

    assert "recipes list" in capsys.readouterr().err
