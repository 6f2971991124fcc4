"""Fine-tuning on GLUE and RACE is what transformers' models and a plain loop give."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mds_train.cli import main

WORDS = ["good", "bad", "film", "fox", "ran", "sat", "the", "a", "who", "what", "day", "night"]
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TUNING = {"epochs": 2, "batch": 4, "lr": 3e-3, "warmup": 0.25, "decay": 0.05, "seed": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = {word: number for number, word in enumerate([*MARKS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(2)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(2, 7)))


def glue_rows(task: str, count: int, *, seed: int) -> list[tuple[str, str | None, str]]:
    draw = random.Random(seed)
    if task == "STS-B":
        return [(sentence(draw), sentence(draw), f"{draw.random() * 5:.2f}") for _ in range(count)]
    texts = [sentence(draw) for _ in range(count)]
    return [(text, None, str(int("good" in text))) for text in texts]


def write_glue(path: Path, task: str, rows: list[tuple[str, str | None, str]]) -> Path:
    head = "sentence1\tsentence2\tscore" if task == "STS-B" else "sentence\tlabel"
    lines = ["\t".join(cell for cell in row if cell is not None) for row in rows]
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def options(folder: Path, train: Path, valid: Path, output: Path) -> list[str]:
    return [
        *(str(folder), "--train-data", str(train), "--valid-data", str(valid)),
        *("--epochs", str(TUNING["epochs"]), "--batch-size", str(TUNING["batch"])),
        *("--lr", str(TUNING["lr"]), "--warmup", str(TUNING["warmup"]), "--dropout", "0"),
        *("--weight-decay", str(TUNING["decay"]), "--seed", str(TUNING["seed"])),
        *("--output", str(output)),
    ]


def plain_loop(model, head, rows: list[dict], labels: list[float], loss_of) -> list[float]:
    """Mean training loss of each epoch; the order and the new head are the command's."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(TUNING["seed"])
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.02)
        head.bias.zero_()
    named = list(model.named_parameters())
    small = [p for name, p in named if name.endswith("bias") or "LayerNorm" in name]
    large = [p for name, p in named if not (name.endswith("bias") or "LayerNorm" in name)]
    optimizer = torch.optim.AdamW(
        [{"params": large, "weight_decay": TUNING["decay"]}, {"params": small, "weight_decay": 0}],
        lr=TUNING["lr"],
    )
    steps = TUNING["epochs"] * -(-len(rows) // TUNING["batch"])
    schedule = transformers.get_linear_schedule_with_warmup(
        optimizer, round(steps * TUNING["warmup"]), steps
    )
    losses = []
    for epoch in range(TUNING["epochs"]):
        generator = torch.Generator().manual_seed(TUNING["seed"] + epoch)
        total = 0.0
        for places in torch.randperm(len(rows), generator=generator).split(TUNING["batch"]):
            batch = [rows[place] for place in places]
            loss = loss_of(model, batch, torch.tensor([labels[place] for place in places]))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.item() * len(batch)
        losses.append(total / len(rows))
    return losses


@pytest.mark.parametrize("task", ["SST-2", "STS-B"])
def test_a_task_of_glue_is_tuned_as_transformers_would(
    folder: Path, tmp_path: Path, task: str
) -> None:
    rows, held_out = glue_rows(task, 14, seed=1), glue_rows(task, 9, seed=2)
    train = write_glue(tmp_path / "train.tsv", task, rows)
    valid = write_glue(tmp_path / "dev.tsv", task, held_out)
    output = tmp_path / "result.json"

    assert main(["evaluate", "glue", *options(folder, train, valid, output), "--task", task]) == 0

    outputs = 1 if task == "STS-B" else 2
    model = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=outputs)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
    )

    def scores(model, batch: list[dict]) -> torch.Tensor:
        first, second = [row["a"] for row in batch], [row["b"] for row in batch]
        pair = (first,) if second[0] is None else (first, second)
        inputs = tokenizer(*pair, padding=True, return_tensors="pt", return_token_type_ids=True)
        return model(**inputs).logits

    def loss_of(model, batch, labels) -> torch.Tensor:
        found = scores(model, batch)
        if outputs == 1:
            return torch.nn.functional.mse_loss(found[:, 0], labels)
        return torch.nn.functional.cross_entropy(found, labels.long())

    samples = [{"a": a, "b": b} for a, b, _ in rows]
    labels = [float(label) for _, _, label in rows]
    losses = plain_loop(model, model.classifier, samples, labels, loss_of)
    with torch.no_grad():
        found = scores(model.eval(), [{"a": a, "b": b} for a, b, _ in held_out])
    right = torch.tensor([float(label) for _, _, label in held_out])
    result = json.loads(output.read_text())
    assert [each["train_loss"] for each in result["epochs"]] == pytest.approx(losses, rel=1e-4)
    if outputs == 1:
        expected = torch.corrcoef(torch.stack([found[:, 0], right]))[0, 1].item()
        assert result["pearson"] == pytest.approx(expected, abs=1e-3)
    else:
        expected = (found.argmax(-1) == right).double().mean().item()
        assert result["accuracy"] == pytest.approx(expected)


def test_race_is_tuned_as_transformers_would(folder: Path, tmp_path: Path) -> None:
    draw = random.Random(5)
    articles = []
    for _ in range(4):
        answers = [draw.sample(WORDS, 4) for _ in range(3)]
        articles.append(
            {
                "article": " ".join(draw.choices(WORDS, k=30)),  # has to be cut
                "questions": ["who _ the fox", "what ran", "the _ day"],
                "options": answers,
                "answers": draw.choices("ABCD", k=3),
            }
        )
    (tmp_path / "train").mkdir()
    for number, article in enumerate(articles):
        (tmp_path / "train" / f"{number}.txt").write_text(json.dumps(article))
    output = tmp_path / "result.json"
    settings = options(folder, tmp_path / "train", tmp_path / "train" / "0.txt", output)

    assert main(["evaluate", "race", *settings]) == 0

    model = transformers.BertForMultipleChoice.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]"
    )
    samples, labels = [], []
    for article in articles:
        for question, choices, letter in zip(
            article["questions"], article["options"], article["answers"], strict=True
        ):
            filled = [
                question.replace("_", each) if "_" in question else f"{question} {each}"
                for each in choices
            ]
            samples.append({"article": article["article"], "statements": filled})
            labels.append(float("ABCD".index(letter)))

    def loss_of(model, batch, labels) -> torch.Tensor:
        inputs = tokenizer(
            [row["article"] for row in batch for _ in range(4)],
            [text for row in batch for text in row["statements"]],
            padding=True,
            truncation="only_first",
            max_length=32,
            return_tensors="pt",
            return_token_type_ids=True,
        )
        shaped = {name: value.view(len(batch), 4, -1) for name, value in inputs.items()}
        return torch.nn.functional.cross_entropy(model(**shaped).logits, labels.long())

    losses = plain_loop(model, model.classifier, samples, labels, loss_of)
    result = json.loads(output.read_text())
    assert [each["train_loss"] for each in result["epochs"]] == pytest.approx(losses, rel=1e-4)
    assert result["train_samples"] == 12
    assert result["valid_samples"] == 3


def test_dropout_follows_from_the_seed(folder: Path, tmp_path: Path) -> None:
    train = write_glue(tmp_path / "train.tsv", "SST-2", glue_rows("SST-2", 8, seed=1))
    results = []
    for seed in (1, 1, 2):
        arguments = options(folder, train, train, tmp_path / "result.json")
        arguments += ["--task", "SST-2", "--dropout", "0.2", "--seed", str(seed)]
        assert main(["evaluate", "glue", *arguments]) == 0
        results.append(json.loads((tmp_path / "result.json").read_text())["epochs"])

    assert results[0] == results[1]
    assert results[0] != results[2]


def test_what_cannot_be_tuned_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_glue(tmp_path / "train.tsv", "SST-2", glue_rows("SST-2", 4, seed=1))
    arguments = options(folder, train, train, tmp_path / "out.json")

    assert main(["evaluate", "glue", *arguments, "--task", "WNLI"]) == 2
    assert "take one of CoLA" in capsys.readouterr().err
    assert main(["evaluate", "glue", *arguments, "--task", "MRPC"]) == 3
    assert "names no column #1 String" in capsys.readouterr().err
    assert main(["evaluate", "glue", *arguments, "--task", "SST-2", "--seq-length", "99"]) == 3
    assert "the 32 positions" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
