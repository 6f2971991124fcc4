"""Stretched positions pass from config.json through a checkpoint's record to the model and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers

from mds_ckpt.families.llama import LLAMA
from mds_core import GPTConfig

TABLES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 24,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize("rope_type", TABLES)
def test_a_scaling_survives_the_way_from_config_json_and_back(rope_type) -> None:
    table = {"rope_type": rope_type, **TABLES[rope_type]}
    parameters = table | {"rope_theta": 500000.0}
    config = transformers.LlamaConfig(max_position_embeddings=64, rope_parameters=parameters)
    record = LLAMA.from_hf_config(config.to_dict())

    ours = GPTConfig.from_record(record.config)

    assert ours.rope_scaling is not None
    assert ours.rope_scaling.table() == table
    written = LLAMA.to_hf_config(replace(record, config=ours.record()))
    assert written["rope_parameters"] == parameters
