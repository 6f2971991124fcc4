from __future__ import annotations

import pytest

from mds_train.config.overrides import print_help, read_overrides
from mds_train.errors import UsageError


def values(*arguments: str) -> dict[str, object]:
    overrides = read_overrides(arguments, prog="mds-train run")
    return {key: item.value for key, item in overrides.settings.items()}


def test_nested_options_set_fields_in_any_spelling() -> None:
    assert values("--parallel.tp-size", "2", "--model.num_layers=3") == {
        "parallel.tp_size": 2,
        "model.num_layers": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("--watch.tensorboard",), True),
        (("--watch.no-tensorboard",), False),
        (("--watch.tensorboard", "false"), False),
        (("--watch.tensorboard=True",), True),
        (("--watch.tensorboard=true",), True),
    ],
)
def test_switches_take_a_value_or_none(arguments: tuple[str, ...], value: bool) -> None:
    assert values(*arguments, "--optimizer.lr", "1e-3") == {
        "watch.tensorboard": value,
        "optimizer.lr": 1e-3,
    }


@pytest.mark.parametrize("word", ["none", "None"])
def test_an_optional_field_can_be_taken_back(word: str) -> None:
    assert values("--checkpoint.save-interval", word) == {"checkpoint.save_interval": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parallel.tp-sise", "2"), r"did you mean --parallel\.tp-size\?"),
        (("--tp-size", "2"), r"did you mean --parallel\.tp-size\?"),
        (("--tensor-model-paralel-size", "2"), "did you mean --tensor-model-parallel-size"),
        (("2",), "Unexpected argument '2'"),
    ],
)
def test_an_unknown_option_names_the_nearest(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        values(*arguments)


def test_a_value_of_the_wrong_type_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        values("--parallel.tp-size", "two")

    assert stop.value.code == 2
    assert "--parallel.tp-size" in capsys.readouterr().err


def test_help_shows_every_setting_with_its_documentation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_help(prog="mds-train run", settings={})

    text = capsys.readouterr().out
    assert "--parallel.tp-size" in text
    assert "Tensor parallel" in text
