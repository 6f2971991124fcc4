"""Fine-tunes a classifier on a task's samples, and judges it after each epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mds_train.evaluate.classifier import Classifier, Sample

__all__ = ["Tuning", "guesses", "tune"]

logger = logging.getLogger(__name__)

_NO_DECAY = ("bias", "layernorm.weight", "layer_norm.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """How to fine-tune; the defaults are BERT's."""

    epochs: int = 3
    batch_size: int = 32
    lr: float = 2e-5
    """The highest; it rises over ``warmup`` and then falls to 0 in a line."""
    warmup: float = 0.1
    """Share of the steps."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Most length of the gradient."""
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.batch_size < 1 or not self.lr > 0 or not 0 <= self.warmup < 1:
            raise ValueError(
                "epochs must not be negative, batch_size at least 1, lr above 0, and warmup a "
                "share below 1."
            )


def tune(
    model: Classifier,
    samples: Sequence[Sample],
    settings: Tuning,
    *,
    judged: Callable[[], Mapping[str, float]],
) -> list[dict[str, float]]:
    """Fine-tune, and judge after each epoch.

    Args:
        model: trained in place.
        samples: of the training file.
        settings: how.
        judged: measures the model as it is.

    Returns:
        Mean training loss and the measures of each epoch.
    """
    steps = settings.epochs * -(-len(samples) // settings.batch_size)
    optimizer = torch.optim.AdamW(_groups(model, settings), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _share(step, steps=steps, warmup=settings.warmup)
    )
    history = []
    torch.manual_seed(settings.seed)  # the head's dropout
    for epoch in range(settings.epochs):
        model.train()
        total = 0.0
        for numbers, batch in _batches(samples, settings, epoch=epoch):
            loss = _loss(model(batch, numbers=numbers), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.item() * len(batch)
        found = {"epoch": epoch + 1.0, "train_loss": total / len(samples), **judged()}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items() if name != "epoch")
        logger.info("Epoch %d of %d: %s.", epoch + 1, settings.epochs, shown)
        history.append(found)
    return history


@torch.inference_mode()
def guesses(model: Classifier, samples: Sequence[Sample], *, batch_size: int) -> list[float]:
    """The likeliest label of each sample, or the number that the model gives."""
    model.eval()
    found: list[float] = []
    for first in range(0, len(samples), batch_size):
        scores = model(samples[first : first + batch_size]).float()
        best = scores[:, 0] if scores.size(1) == 1 else scores.argmax(-1)
        found += best.tolist()
    return [float(each) for each in found]


def _batches(
    samples: Sequence[Sample], settings: Tuning, *, epoch: int
) -> Iterator[tuple[Tensor, list[Sample]]]:
    """Each sample once, in an order that follows from seed and epoch."""
    generator = torch.Generator().manual_seed(settings.seed + epoch)
    order = torch.randperm(len(samples), generator=generator)
    for number, places in enumerate(torch.split(order, settings.batch_size)):
        begin = epoch * len(samples) + number * settings.batch_size
        numbers = torch.arange(begin, begin + len(places))
        yield numbers, [samples[place] for place in places.tolist()]


def _loss(scores: Tensor, batch: Sequence[Sample]) -> Tensor:
    labels = torch.tensor([sample.label for sample in batch], device=scores.device)
    if scores.size(1) == 1:
        return F.mse_loss(scores[:, 0], labels)
    return F.cross_entropy(scores, labels.long())


def _share(step: int, *, steps: int, warmup: float) -> float:
    """Of the highest rate, in a step."""
    rising = warmup * steps
    if step < rising:
        return step / rising
    return max(steps - step, 0) / max(steps - rising, 1)


def _groups(model: Classifier, settings: Tuning) -> list[dict[str, object]]:
    """Biases and norms do not decay."""
    decaying: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (others if name.endswith(_NO_DECAY) else decaying).append(parameter)
    return [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
