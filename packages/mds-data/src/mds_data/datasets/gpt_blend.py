"""Train, valid and test datasets from stores and weights, as one blend or one a split."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from mds_data.datasets.blended import BlendedDataset
from mds_data.datasets.gpt import GPTDataset
from mds_data.sampling.blend import balanced_blend, megatron_counts
from mds_data.store.token_store import TokenStore

__all__ = ["Blend", "gpt_datasets"]

Blend = Sequence[tuple[float, TokenStore]]
_PARTS = ("train", "valid", "test")


def gpt_datasets(
    blend: Blend | Mapping[str, Blend],
    *,
    seq_length: int,
    num_samples: Mapping[str, int],
    split: str = "969,30,1",
    seed: int = 1234,
    order: Literal["fast", "megatron"] = "fast",
    **options: Any,
) -> dict[str, BlendedDataset | GPTDataset]:
    """The datasets of a training run.

    For ``order="megatron"`` they are those of Megatron-DeepSpeed for the same ``--data-path`` (or
    ``--train-data-path`` ...), bit for bit: each source is laid out 0.5 % longer than its share,
    and the blend is as long as all of them.

    Args:
        blend: ``(weight, store)`` pairs whose documents are split; or such pairs by part (train,
            valid, test), whose documents are all used.
        seq_length: Tokens of a sample.
        num_samples: Samples of each part; a part without any is left out.
        split: Megatron's split string; unused where the parts have blends of their own.
        seed: Chooses the order.
        order: ``"fast"`` or ``"megatron"``.
        options: Passed on to `GPTDataset`, such as ``eod_mask_loss=True``.

    Returns:
        A dataset for each part that has samples and documents; a plain `GPTDataset` of one store.

    Raises:
        ValueError: A part's name or a weight can't be, or a part holds no documents.
    """
    own = blend if isinstance(blend, Mapping) else dict.fromkeys(_PARTS, blend)
    documents = None if isinstance(blend, Mapping) else split
    unknown = {*own, *num_samples} - {*_PARTS}
    if unknown:
        raise ValueError(f"parts are train, valid and test, not {sorted(unknown)}")
    datasets: dict[str, BlendedDataset | GPTDataset] = {}
    for part in _PARTS:
        sources = own.get(part)
        count = num_samples.get(part, 0)
        if not sources or not count:
            continue
        make = partial(
            GPTDataset,
            seq_length=seq_length,
            seed=seed,
            split=None if documents is None else (documents, part),
            order=order,
            **options,
        )
        datasets[part] = _part(list(sources), count, make, order=order)
    return datasets


def _part(
    sources: Sequence[tuple[float, TokenStore]],
    count: int,
    make: Callable[..., GPTDataset],
    *,
    order: Literal["fast", "megatron"],
) -> BlendedDataset | GPTDataset:
    weights = [weight for weight, _ in sources]
    if len(sources) == 1:
        return make(sources[0][1], num_samples=count)
    if order == "megatron":
        needed = megatron_counts(weights, num_samples=count)
    else:
        needed = balanced_blend(weights, count=count).counts(count)
    datasets = [
        make(store, num_samples=samples)
        for (_, store), samples in zip(sources, needed, strict=True)
    ]
    if order == "megatron":
        return BlendedDataset(datasets, weights, num_samples=sum(needed), order="megatron")
    return BlendedDataset(datasets, weights, num_samples=count)
