"""A launch script becomes a configuration; nothing of it is swallowed."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from mds_train import cli
from mds_train.config.fields import field_table
from mds_train.config.loading import Settings, build, read_toml
from mds_train.config.schema import TrainConfig
from mds_train.errors import InputError
from mds_train.migration.deepspeed_json import read_deepspeed_json
from mds_train.migration.importing import import_arguments, import_script, toml_text
from mds_train.migration.megatron_defaults import DIFFERENT_DEFAULTS

ARGUMENTS = shlex.split("""
    pretrain_gpt.py --num-layers 4 --hidden-size 32 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2
    --global-batch-size 8 --lr 3e-3 --train-iters 20 --vocab-size 640
    --data-path corpus_text_document --save run
""")
DEEPSPEED = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "curriculum_learning": {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 64,
        "schedule_type": "fixed_root",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2},
    },
    "steps_per_print": 10,
    "data_efficiency": {"enabled": False},
    "elasticity": {"enabled": True},
    "my_key": 1,
}


def values(settings: Settings) -> dict[str, Any]:
    return {key: item.value for key, item in settings.items()}


@pytest.mark.parametrize(
    ("flags", "drawn"),
    [
        ("--num-experts 4", {"model.moe_drop_policy": "random"}),
        ("--num-experts 4 --topk 1 --disable-moe-token-dropping", {}),
        ("--num-experts 4 --topk 2", {"model.moe_sample_second": True}),
        (
            "--num-experts 4 --topk 2 --disable-moe-top2-2nd-expert-sampling",
            {"model.moe_sample_second": False},
        ),
        ("", {}),
    ],
)
def test_a_router_draws_what_the_originals_draws(flags: str, drawn: dict[str, Any]) -> None:
    imported = import_arguments([*ARGUMENTS, *flags.split()], name="arguments")

    found = values(imported.settings)
    keys = ("model.moe_drop_policy", "model.moe_sample_second")
    assert {key: found[key] for key in keys if key in found} == drawn


def test_flags_and_the_originals_defaults_make_a_configuration() -> None:
    imported = import_arguments(ARGUMENTS, name="arguments")

    assert (imported.missing, imported.left_out) == ([], [])
    config = build(imported.settings)
    assert (config.model.num_layers, config.train.train_steps) == (4, 20)
    # What was not typed is as the original has it.
    assert config.model.activation == "gelu_tanh"
    assert (config.model.hidden_dropout, config.optimizer.beta2) == (0.1, 0.999)
    assert (config.schedule.kind, config.data.order) == ("linear", "megatron")
    assert config.watch.eval_samples == 800
    assert imported.settings["optimizer.beta2"].origin == "Megatron's default of --adam-beta2"


def test_the_written_file_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    imported = import_arguments([*ARGUMENTS, "--rampup-batch-size", "4", "4", "16"], name="x")
    path = tmp_path / "run.toml"
    path.write_text(toml_text(imported))

    assert build(read_toml(path)) == build(imported.settings)


def test_deepspeeds_json_counts_and_contradictions_are_said(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    words = [*ARGUMENTS, "--clip-grad", "1.0", "--zero-stage", "1", "--deepspeed"]

    imported = import_arguments(words, name="x", json_file=path)

    found = values(imported.settings)
    assert found["parallel.zero_stage"] == 2
    assert found["train.gradient_clipping"] == 0.5
    assert found["train.precision"] == "bf16"
    assert found["data.curriculum_start_length"] == 8
    assert (found["data.curriculum_steps"], found["data.curriculum_root"]) == (10, 2)
    assert "parallel.zero_stage: --zero-stage says 1, DeepSpeed's" in " ".join(imported.remarks)
    left_out = " ".join(imported.left_out)
    assert found["memory.offload_optimizer"] == "cpu"
    assert "elasticity" in left_out
    assert "my_key" in left_out
    assert "data_efficiency" not in left_out
    assert any("steps_per_print does nothing here" in sentence for sentence in imported.idle)


@pytest.mark.parametrize(
    ("zero", "settings", "said"),
    [
        ({"offload_param": {"device": "cpu"}}, {"memory.offload_parameters": "cpu"}, ""),
        (
            {"offload_optimizer": {"device": "cpu", "ratio": 0.4, "buffer_count": 4}},
            {"memory.offload_optimizer": "cpu", "memory.offload_ratio": 0.4},
            "zero_optimization.offload_optimizer: buffer_count do nothing here",
        ),
        ({"cpu_offload": True}, {"memory.offload_optimizer": "cpu"}, ""),
        ({"offload_param": {"device": "nvme"}}, {}, "no checkpoint could be written from there"),
        ({"offload_param": "cpu"}, {}, "is no object"),
    ],
)
def test_what_deepspeed_offloads_is_carried_or_said(
    zero: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    findings = read_deepspeed_json({"gradient_clipping": 1.0, "zero_optimization": zero})

    del findings.settings["train.gradient_clipping"]
    assert findings.settings == settings
    assert said in " ".join(findings.idle + findings.left_out)


def test_a_json_without_clipping_clips_nothing() -> None:
    words = [*ARGUMENTS, "--clip-grad", "1.0", "--deepspeed"]

    imported = import_arguments(words, name="x", json_text='{"train_batch_size": 8}')

    assert imported.settings["train.gradient_clipping"].value == 0.0
    assert any("the original clips nothing" in sentence for sentence in imported.remarks)


@pytest.mark.parametrize(
    ("changes", "place", "message"),
    [
        (["--squeeze", "3", "4"], "left_out", "--squeeze: no such flag is known here."),
        (["--retro-add-retriever"], "left_out", "retrieval models are not trained here"),
        (["--no-bias-gelu-fusion"], "idle", "kernels are chosen by device"),
        (["--deepspeed"], "missing", "give it with --deepspeed-config FILE"),
        (["--lr", "much"], "left_out", "'much', but optimizer.lr must be a number"),
        (["--warmup", "2"], "left_out", "As it stands, a run would refuse it: schedule.warmup"),
    ],
)
def test_nothing_is_swallowed(changes: list[str], place: str, message: str) -> None:
    imported = import_arguments([*ARGUMENTS, *changes], name="x")

    found = getattr(imported, place)
    assert any(message in sentence for sentence in found), found
    if place == "left_out":
        assert len(found) == 1


def test_what_the_original_works_out_is_worked_out_or_asked_for(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(json.dumps({"a": 0, "b": 1, "c": 2}))
    words = [word for word in ARGUMENTS if word not in ("--vocab-size", "640", "--save", "run")]

    counted = import_arguments([*words, "--vocab-file", str(vocabulary), "--swiglu"], name="x")
    asked = import_arguments([*words, "--load", "a"], name="x")

    assert counted.settings["model.vocab_size"].value == 3
    assert counted.settings["model.ffn_hidden_size"].value == 64  # 4 * 32 * 2 / 3 = 85.3
    assert [sentence.partition(":")[0] for sentence in asked.missing] == [
        "model.vocab_size",
        "train.run_dir",
    ]


def test_one_folder_to_save_and_load_is_a_pair() -> None:
    imported = import_arguments([*ARGUMENTS, "--load", "run"], name="x")

    assert imported.settings["checkpoint.from_scratch_if_missing"].value is True


def test_a_script_with_its_json_and_its_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "#!/bin/bash\nBATCH=8\ncat <<EOT > ds.json\n"
        '{"train_batch_size": $BATCH, "zero_optimization": {"stage": 3}}\n'
        "EOT\ntorchrun --nproc_per_node=4 --nnodes 2 " + " ".join(ARGUMENTS[:-2]) + " \\\n"
        "  --save /ckpt/$(hostname) --tensorboard-dir $HOME/x \\\n"
        "  --deepspeed --deepspeed_config ds.json\n"
    )

    imported = import_script(script)

    assert imported.settings["parallel.zero_stage"].value == 3
    assert imported.start == "torchrun --nnodes 2 --nproc-per-node 4 -m mds_train run"
    assert imported.left_out == [
        "--save: its value depends on $(hostname), which only a running script knows."
    ]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("tasks/main.py", "main.py does not pretrain a model"),
        ("pretrain_ict.py", r"model of another kind \(ict\)"),
    ],
)
def test_other_programs_are_refused(program: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_arguments([program, *ARGUMENTS[1:]], name="x")


@pytest.mark.parametrize("text", ["[1", "[]", '"x"', "[" * 100_000])
def test_what_is_no_json_object_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)

    with pytest.raises(InputError, match=r"ds\.json: (no valid JSON|.*a JSON object)"):
        import_arguments([*ARGUMENTS, "--deepspeed"], name="x", json_file=path)


def test_the_loss_scale_comes_over() -> None:
    scale = {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "consecutive_hysteresis": False,
    }

    findings = read_deepspeed_json({"fp16": scale, "gradient_clipping": 1.0})

    assert findings.settings == {
        "train.gradient_clipping": 1.0,
        "train.precision": "fp16",
        "fp16.initial_scale": 4096.0,
        "fp16.window": 500,
        "fp16.hysteresis": 2,
        "fp16.min_scale": 1,
    }
    assert findings.left_out == [
        "fp16.consecutive_hysteresis: no setting of that name is known here."
    ]
    assert set(findings.settings) <= set(field_table(TrainConfig))


def test_auto_is_no_number() -> None:
    findings = read_deepspeed_json({"train_batch_size": "auto", "gradient_clipping": True})

    assert len(findings.left_out) == 2
    assert findings.settings == {}


def test_every_differing_default_does_differ_and_names_a_field() -> None:
    specs = field_table(TrainConfig)
    for item in DIFFERENT_DEFAULTS:
        assert specs[item.key].default != item.value, item.key


def test_the_command_writes_the_file_and_says_what_was_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run.toml"
    words = ["config", "import", *ARGUMENTS, "--retro-add-retriever", "--output", str(output)]

    assert cli.main(words) == 0

    printed = capsys.readouterr()
    assert "retrieval models are not trained here" in printed.err
    assert f"Start: mds-train run {output}" in printed.err.replace("\n", "")
    assert build(read_toml(output)).model.num_layers == 4
    assert cli.main(["config", "import", *ARGUMENTS]) == 0
    assert "[model]\nnum_layers = 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["gone.sh"], 3, "gone.sh: there is no such script"),
        (["empty.sh"], 3, "no command with --num-layers or --micro-batch-size"),
        (["empty.sh", "--set", "x"], 2, "--set x is not of the form NAME=VALUE"),
        (["empty.sh", "--squeeze"], 2, "Unknown argument '--squeeze'"),
        (["list.json"], 3, "list.json: it must hold a list of words"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.sh").write_text("echo hello\n")
    (tmp_path / "list.json").write_text('{"argv": 3}')

    assert cli.main(["config", "import", *words]) == code

    assert message in capsys.readouterr().err


def golden_argument_lists() -> list[Any]:
    """Of the original's recorded runs, where they are beside the repository."""
    given = os.environ.get("MDS_GOLDEN_DIR")
    folders = [Path(given)] if given else []
    folders += [parent / "shared" / "fixtures" for parent in Path(__file__).resolve().parents]
    for folder in folders:
        if (folder / "trajectories").is_dir():
            return [
                pytest.param(path, id=path.parent.name)
                for path in sorted(folder.glob("gpt*/expected.json"))
                + sorted(folder.glob("llama*/expected.json"))
                if "argv" in json.loads(path.read_text())
            ]
    return [pytest.param(None, marks=pytest.mark.skip(reason="no golden fixtures here"))]


@pytest.mark.parametrize("path", golden_argument_lists())
def test_the_argument_lists_of_recorded_runs_become_configurations(path: Path) -> None:
    recorded = json.loads(path.read_text())["argv"]

    imported = import_arguments(
        [*recorded, "--vocab-size", "600"],
        name=str(path),
        json_text='{"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}',
    )

    found = values(imported.settings)
    assert (found["model.num_layers"], found["model.hidden_size"]) == (4, 32)
    assert (found["train.train_steps"], found["train.global_batch_size"]) == (10, 8)
    assert (found["optimizer.lr"], found["optimizer.beta2"]) == (3e-3, 0.95)
    assert (found["schedule.warmup_steps"], found["schedule.decay_steps"]) == (2, 20)
    assert found["model.hidden_dropout"] == found["model.attention_dropout"] == 0.0
    assert imported.missing == []
    # Whether a run accepts it depends on what the layouts of this version are.
    assert not [text for text in imported.left_out if "cpu" not in text and "refuse" not in text]
