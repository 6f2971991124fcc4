"""What a family of models asks of the other tables: the sentence names what clashes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import MODEL, tiny_config
from family_cases import BERT, T5, family_config

from mds_core.bert_config import BertConfig
from mds_core.t5_config import T5Config
from mds_train.config import ModelConfig


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (T5, {"data": {"decoder_seq_length": None}}, "data.decoder_seq_length is not set; a T5"),
        (T5, {"data": {"decoder_seq_length": 33}}, "33 is longer than model.max_position_embed"),
        (T5, {"data": {"segments": "next"}}, "data.segments means nothing to samples of a t5"),
        (T5, {"data": {"pairs": True, "mask_probability": 0.2}}, "spans cut out of a text"),
        (T5, {"data": {"pairs": True, "order": "megatron"}}, "is not known for pairs"),
        (BERT, {"data": {"pairs": True}}, "data.pairs means nothing to samples of a bert"),
        (BERT, {"data": {"mask_probability": 1.5}}, "it must lie from 0 to 1"),
        (BERT, {"parallel": {"pp_size": 2, "split_rank": 1}}, "only a t5 has an encoder and a"),
        (T5, {"parallel": {"pp_size": 4}}, "num_layers 2 . decoder_num_layers 1 are too few for"),
        (
            T5,
            {"parallel": {"pp_size": 3, "split_rank": 1}},
            "model.decoder_num_layers 1 are too few for the 2 ranks that parallel.split_rank 1",
        ),
        (T5, {"parallel": {"ulysses_size": 2}}, "parallel.ulysses_size is 2, but a t5"),
        (T5, {"memory": {"sequence_chunk": 8}}, "only a gpt cuts its sequences"),
        (
            T5,
            {
                "data": {"decoder_seq_length": 15},
                "parallel": {"tp_size": 2, "sequence_parallel": True},
            },
            "data.decoder_seq_length 15 is not a multiple of parallel.tp_size 2",
        ),
        (
            BERT,
            {"data": {"curriculum_start_length": 8, "curriculum_steps": 2}},
            "those of a bert .* cannot be",
        ),
    ],
)
def test_what_does_not_go_together_is_named(
    tmp_path: Path, model: ModelConfig, changes: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        family_config(tmp_path, model, **changes)


def test_segments_without_a_head_that_judges_them_are_refused(tmp_path: Path) -> None:
    one = replace(BERT, binary_head=False)

    with pytest.raises(ValueError, match=r"data.segments 'next' makes the two segments"):
        family_config(tmp_path, one, data={"segments": "next"})


@pytest.mark.parametrize("name", ["mask_probability", "short_probability", "decoder_seq_length"])
def test_a_gpt_has_no_masks_and_no_decoder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.{name} means nothing to samples of a gpt"):
        tiny_config(tmp_path, data={name: 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"binary_head": False}, r"model\.binary_head is a bert's, but model\.family is 'gpt'"),
        ({"family": "bert", "decoder_num_layers": 2}, r"model\.decoder_num_layers is a t5's"),
        ({"family": "bert", "tie_embeddings": False}, "must be True for a BERT"),
        ({"family": "t5", "position_embedding": "rope"}, "must be 'learned' for a T5"),
        ({"family": "vit"}, "must be one of gpt, bert, t5"),
    ],
)
def test_a_family_has_its_own_fields_and_no_others(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **fields)


def test_the_core_configuration_is_that_of_the_family() -> None:
    bert, t5 = BERT.core(), T5.core()

    assert isinstance(bert, BertConfig)
    assert (bert.binary_head, bert.num_token_types) == (True, 2)
    assert isinstance(t5, T5Config)
    assert t5.decoder_layers == 1
    assert replace(T5, decoder_num_layers=None).num_params() > T5.num_params() == t5.num_params()
    flops = T5.flops_of_sample(24, decoder_seq_length=16)
    assert flops == t5.flops_per_sample(24, decoder_length=16)
