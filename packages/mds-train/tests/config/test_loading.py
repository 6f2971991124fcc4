from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mds_train.config.loading import (
    Setting,
    build,
    document_with_origins,
    read_toml,
    read_variables,
)
from mds_train.errors import InputError

TINY = """\
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
vocab_size = 64
max_position_embeddings = 16
[data]
store = "store"
seq_length = 16
[train]
run_dir = "run"
train_steps = 4
global_batch_size = 2
"""


def write(folder: Path, text: str, *, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_becomes_a_configuration_with_defaults(tmp_path: Path) -> None:
    config = build(read_toml(write(tmp_path, TINY)))

    assert config.model.num_layers == 2
    assert config.parallel.tp_size == 1
    assert config.optimizer.beta2 == 0.95


def test_a_file_overrides_its_base_and_names_the_file_of_each_value(tmp_path: Path) -> None:
    write(tmp_path, TINY + "[optimizer]\nlr = 1\n", name="base.toml")
    path = write(tmp_path, 'base = "base.toml"\n[model]\nnum_layers = 3\n')

    settings = read_toml(path)

    assert settings["model.num_layers"] == Setting(value=3, origin=str(path))
    assert settings["optimizer.lr"].value == 1.0  # a whole number where a number is asked for
    assert settings["optimizer.lr"].origin == str(tmp_path / "base.toml")


def test_a_file_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 'base = "run.toml"\n')

    with pytest.raises(InputError, match=r"run\.toml: the file is its own base"):
        read_toml(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[model]\nnum_layer = 2\n",
            r'table \[model\]: unknown key "num_layer"; did you mean "num_layers"',
        ),
        ("[model]\nlr = 2\n", r'table \[model\]: unknown key "lr"; it belongs to \[optimizer\]'),
        ("[models]\nnum_layers = 2\n", r"unknown table \[models\]; did you mean \[model\]"),
        ("lr = 1.0\n", r'"lr" stands outside its table; write it under \[optimizer\]'),
        ("model = 3\n", r"model is a table; write its keys under \[model\]"),
        ("[model]\nnum_layers = 2.0\n", r"num_layers is 2\.0, but it must be a whole number"),
        ("[model]\nnum_layers = true\n", r"num_layers is True, but it must be a whole number"),
        ('[model]\nnum_layers = "2"\n', r"num_layers is '2', but it must be a whole number"),
        ('[model]\nactivation = "swigluu"\n', r"activation is 'swigluu', but it must be 'gelu' or"),
        ("[watch]\ntensorboard = 1\n", r"tensorboard is 1, but it must be true or false"),
        ("[model\n", r"run\.toml: not valid TOML"),
        ("base = 3\n", r"base is 3, but it must be a file name"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_right(
    tmp_path: Path, text: str, message: str
) -> None:
    path = write(tmp_path, text)

    with pytest.raises(InputError, match=message):
        read_toml(path)


def test_a_missing_file_and_a_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.toml: there is no such configuration file"):
        read_toml(tmp_path / "nowhere.toml")
    with pytest.raises(InputError, match=r"a folder, not a TOML file; `mds-train resume`"):
        read_toml(tmp_path)


def test_none_takes_back_what_a_base_has_set(tmp_path: Path) -> None:
    write(tmp_path, TINY + "[checkpoint]\nsave_interval = 5\n", name="base.toml")
    path = write(tmp_path, 'base = "base.toml"\n[checkpoint]\nsave_interval = "none"\n')

    assert build(read_toml(path)).checkpoint.save_interval is None


def test_a_missing_required_key_names_the_key_the_table_and_the_option(tmp_path: Path) -> None:
    path = write(tmp_path, TINY.replace('store = "store"\n', ""))

    with pytest.raises(ValueError, match=r"data\.store is not set.*\[data\].*--data\.store"):
        build(read_toml(path))


def test_variables_set_fields_and_others_are_left_alone() -> None:
    settings = read_variables(
        {"MDS_PARALLEL__TP_SIZE": "2", "MDS_CKPT_HOME": "x", "HOME": "/", "MDS_WATCH__CURVES": "no"}
    )

    assert {key: item.value for key, item in settings.items()} == {
        "parallel.tp_size": 2,
        "watch.curves": False,
    }
    assert settings["parallel.tp_size"].origin == "environment MDS_PARALLEL__TP_SIZE"


def test_a_wrong_variable_names_the_nearest_or_the_type() -> None:
    with pytest.raises(
        InputError, match=r"MDS_PARALLEL__TP_SISE.*did you mean MDS_PARALLEL__TP_SIZE"
    ):
        read_variables({"MDS_PARALLEL__TP_SISE": "2"})
    with pytest.raises(InputError, match="'two', but it must be a whole number"):
        read_variables({"MDS_PARALLEL__TP_SIZE": "two"})


def test_the_printed_configuration_is_toml_that_gives_the_same_configuration(
    tmp_path: Path,
) -> None:
    settings = read_toml(write(tmp_path, TINY + '[checkpoint]\nload = "a \\"b\\""\n'))

    text = document_with_origins(settings)

    assert "num_layers = 2" in text
    assert str(tmp_path / "run.toml") in text
    assert "# default" in text
    again = write(tmp_path, text, name="again.toml")
    assert build(read_toml(again)) == build(settings)
    assert tomllib.loads(text)["checkpoint"]["load"] == 'a "b"'
