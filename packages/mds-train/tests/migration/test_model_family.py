"""The original's entry files say what kind of model is trained, and what its tokenizer adds."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mds_train.config.loading import build
from mds_train.migration.importing import import_arguments

SHAPE = "--hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64"
RUN = "--micro-batch-size 2 --global-batch-size 4 --lr 3e-3 --train-iters 10 --save run"
BERT = f"pretrain_bert.py --num-layers 4 {SHAPE} --seq-length 64 {RUN} --data-path pair"
T5 = f"""pretrain_t5.py --encoder-num-layers 4 --decoder-num-layers 3 {SHAPE} {RUN}
    --encoder-seq-length 64 --decoder-seq-length 32 --vocab-extra-ids 20 --data-path pair"""


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]) + "\n")
    return path


def test_a_script_of_bert_becomes_a_bert(vocabulary: Path) -> None:
    words = shlex.split(f"{BERT} --vocab-file {vocabulary} --bert-no-binary-head --mask-prob 0.2")

    imported = import_arguments(words, name="arguments")

    assert (imported.missing, imported.left_out) == ([], [])
    config = build(imported.settings)
    assert (config.model.family, config.model.binary_head) == ("bert", False)
    # As the original's tokenizer has it: [BOS] and [EOS] come on top.
    assert config.model.vocab_size == 9
    assert (config.data.tokenizer, config.data.mask_probability) == (str(vocabulary), 0.2)
    assert imported.settings["model.family"].origin == "pretrain_bert.py"


def test_a_script_of_t5_becomes_a_t5_with_its_sentinels(vocabulary: Path) -> None:
    words = shlex.split(f"{T5} --vocab-file {vocabulary}")

    imported = import_arguments(words, name="arguments")

    assert (imported.missing, imported.left_out) == ([], [])
    config = build(imported.settings)
    assert (config.model.family, config.model.num_layers) == ("t5", 4)
    assert config.model.decoder_num_layers == 3
    assert config.model.vocab_size == 9 + 20
    assert (config.data.seq_length, config.data.decoder_seq_length) == (64, 32)


def test_what_a_t5_lacks_is_said(vocabulary: Path) -> None:
    words = shlex.split(f"{T5.replace('--decoder-seq-length 32', '')} --vocab-file {vocabulary}")

    imported = import_arguments(words, name="arguments")

    assert "data.decoder_seq_length is not set" in imported.left_out[0]


def test_a_gpt_needs_no_tokenizer(vocabulary: Path) -> None:
    words = shlex.split(BERT.replace("pretrain_bert", "pretrain_gpt"))
    words += ["--vocab-file", str(vocabulary), "--vocab-size", "640"]

    settings = import_arguments(words, name="arguments").settings

    assert "data.tokenizer" not in settings
    assert build(settings).model.family == "gpt"
