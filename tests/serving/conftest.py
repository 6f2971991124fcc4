"""A small model in a folder, loaded, and served, for all tests of this folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from hf_folders import write_folder

from mds_train.generate.command import LoadedModel
from mds_train.generate.model import end_tokens, load_model, load_tokenizer
from mds_train.model_source import open_model

if TYPE_CHECKING:
    from served_model import Served


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a chat template."""
    folder = write_folder(tmp_path_factory.mktemp("served") / "tiny", family="llama", positions=256)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def ready(folder: Path) -> LoadedModel:
    checkpoint = open_model(folder)
    tokenizer = load_tokenizer(checkpoint)
    return LoadedModel(
        model=load_model(checkpoint),
        tokenizer=tokenizer,
        end_tokens=end_tokens(checkpoint, tokenizer),
        checkpoint=checkpoint,
        is_first=True,
    )


@pytest.fixture(scope="session")
def server(ready: LoadedModel) -> Iterator[Served]:
    from served_model import serving  # without the extra [serve] its users are skipped

    with serving(ready) as served:
        yield served
