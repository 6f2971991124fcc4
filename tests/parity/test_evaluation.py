"""Perplexity and LAMBADA are what transformers' models give, BLEU is its published formula."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from hf_folders import write_folder

from mds_train.cli import main

TEXT = """\
 = Robert Foxley =
 He paid 1 @,@ 000 dollars ( about half ) for it , and the " quick " fox ran away at once . A model
 reads a text and says what may come next ; the likeliest word is not always right .
""".replace("\n", " \n")  # as its lines end
CLEAN = """\
 = Robert Foxley =
He paid 1,000 dollars (about half) for it, and the "quick" fox ran away at once. A model
reads a text and says what may come next; the likeliest word is not always right.
"""
PASSAGES = [
    "The quick brown fox jumps over the lazy dog",
    "A model reads a text and says what may come next",
    "Numbers are made of several pieces",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hf"), family="llama")


@pytest.fixture(scope="module")
def theirs(folder: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def measured(*arguments: object, output: Path) -> dict:
    assert main(["evaluate", *map(str, arguments), "--output", str(output)]) == 0
    return json.loads(output.read_text())


@torch.no_grad()
def sliding_loss(model, ids: torch.Tensor, *, length: int, stride: int) -> float:
    """The sum of losses over windows; a label of -100 is context."""
    total, known, size = 0.0, 1, ids.size(1)
    while known < size:
        end = min(length if known == 1 else known + stride, size)
        window = ids[:, max(end - length, 0) : end]
        labels = window.clone()
        labels[:, : window.size(1) - (end - known)] = -100
        total += model(window, labels=labels).loss.item() * (end - known)
        known = end
    return total


@pytest.mark.parametrize("stride", [31, 8])
def test_the_perplexity_of_wikitext_is_theirs(
    folder: Path, theirs, tmp_path: Path, stride: int
) -> None:
    (tmp_path / "wiki.tokens").write_text(TEXT)

    found = measured(
        *("perplexity", folder, "--data", tmp_path / "wiki.tokens", "--wikitext"),
        *("--seq-length", 31, "--stride", stride),
        output=tmp_path / "result.json",
    )

    model, tokenizer = theirs
    ids = tokenizer(CLEAN, return_tensors="pt", add_special_tokens=False).input_ids
    total = sliding_loss(model, ids, length=32, stride=stride)  # 31 inputs and the last target
    words, size = len(TEXT.split()), len(TEXT.encode())
    assert found["tokens"] == ids.size(1) - 1
    assert found["perplexity"] == pytest.approx(math.exp(total / found["tokens"]), rel=1e-4)
    assert found["word_perplexity"] == pytest.approx(math.exp(total / (words - 1)), rel=1e-4)
    assert found["byte_perplexity"] == pytest.approx(math.exp(total / size), rel=1e-4)
    # Megatron's "adjusted" perplexity is that of words, if the ratio of both is meant.
    ratio = (ids.size(1) - 1) / (words - 1)
    assert found["word_perplexity"] == pytest.approx(math.exp(found["loss"] * ratio), rel=1e-6)


@pytest.mark.parametrize("strict", [True, False])
def test_lambada_is_theirs(folder: Path, theirs, tmp_path: Path, strict: bool) -> None:
    model, tokenizer = theirs
    passages = [*PASSAGES]
    for text in PASSAGES:  # and some that the model gets right
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        answer = model.generate(**ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        passages.append(tokenizer.decode(answer[0]))
    lines = [json.dumps({"text": text}) for text in passages]
    (tmp_path / "lambada.jsonl").write_text("\n".join(lines))

    found = measured(
        *("lambada", folder, "--data", tmp_path / "lambada.jsonl"),
        *(["--strict"] if strict else []),
        output=tmp_path / "result.json",
    )

    losses, right = [], 0
    for text in passages:
        context, target = split(tokenizer, text, strict=strict)
        whole = torch.tensor([[*context, *target]])
        with torch.no_grad():
            logits = model(whole).logits[0, len(context) - 1 : -1].log_softmax(-1)
        losses.append(-sum(logits[place, token].item() for place, token in enumerate(target)))
        right += logits.argmax(-1).tolist() == target
    assert found["correct"] == right
    assert strict or right > 0
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)


def split(tokenizer, text: str, *, strict: bool) -> tuple[list[int], list[int]]:
    encode = {"add_special_tokens": False}
    if not strict:
        ids = tokenizer(text, **encode).input_ids
        return ids[:-1], ids[-1:]
    before, word = text.rstrip().rsplit(" ", 1)
    return tokenizer(before.rstrip(), **encode).input_ids, tokenizer(" " + word, **encode).input_ids


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """Papineni et al. 2002, equations 2 to 4, with one reference and words split at spaces."""
    logarithms = []
    for order in range(1, 5):
        matches = total = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            ours, right = ngrams(hypothesis, order), ngrams(reference, order)
            matches += sum(min(count, right[each]) for each, count in ours.items())
            total += sum(ours.values())
        logarithms.append(math.log(matches / total))
    size = sum(len(text.split()) for text in hypotheses)
    right_size = sum(len(text.split()) for text in references)
    brevity = min(0.0, 1 - right_size / size)
    return 100 * math.exp(brevity + sum(logarithms) / 4)


def ngrams(text: str, order: int) -> Counter:
    words = text.split()
    return Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))


def test_bleu_is_its_formula(tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu", reason="the extra [evaluate] is not installed")
    references = ["the cat sat on the old mat today", "a dog runs through the green park"]
    hypotheses = ["the cat sat on the mat today", "a dog runs through a green park"]
    (tmp_path / "ref.txt").write_text("\n".join(references) + "\n")
    lines = [json.dumps({"prompt": "x", "text": f" {text}\n"}) for text in hypotheses]
    (tmp_path / "hyp.jsonl").write_text("\n".join(lines))

    found = measured(
        *("bleu", "--hypotheses", tmp_path / "hyp.jsonl", "--references", tmp_path / "ref.txt"),
        *("--tokenize", "none"),
        output=tmp_path / "result.json",
    )

    assert found["bleu"] == pytest.approx(bleu(hypotheses, references), rel=1e-9)
    assert found["sentences"] == 2
    assert "tok:none" in found["signature"]


def test_translations_and_references_of_other_numbers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sacrebleu", reason="the extra [evaluate] is not installed")
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("a\n")
    two.write_text("a\nb\n")

    code = main(["evaluate", "bleu", "--hypotheses", str(one), "--references", str(two)])

    assert code == 3
    assert "1 translations, but reference 1 has 2 sentences" in capsys.readouterr().err
