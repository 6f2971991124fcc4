"""What a resumed run says of settings that differ from its checkpoint's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from shell_cases import tiny_config

from mds_train.changed_settings import changed_settings


def test_every_setting_that_can_change_the_run_is_named_with_both_values() -> None:
    config = tiny_config(Path("run"))
    saved = json.loads(json.dumps(config.as_dict()))
    now = replace(
        config,
        optimizer=replace(config.optimizer, beta2=0.9),
        train=replace(config.train, run_dir="elsewhere", exit_step=1, gradient_clipping=0.5),
        watch=replace(config.watch, log_interval=7),
    )

    said = changed_settings(saved, now.as_dict())

    assert said == (
        "Changed since the checkpoint: train.gradient_clipping 1.0 -> 0.5; "
        f"optimizer.beta2 {config.optimizer.beta2} -> 0.9."
    )


def test_nothing_is_said_of_what_is_the_same_or_was_not_recorded() -> None:
    config = tiny_config(Path("run"))
    saved = json.loads(json.dumps(config.as_dict()))
    del saved["optimizer"]["beta2"], saved["parallel"]

    assert changed_settings(saved, config.as_dict()) == ""
    assert changed_settings({}, config.as_dict()) == ""
