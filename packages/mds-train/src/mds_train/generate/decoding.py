"""Continues a batch of prompts token by token; a cache lets each token be computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from mds_core.models import GPT
from mds_train.generate.sampling import Sampling, next_tokens

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 1234,
    end_token: int | None = None,
) -> list[list[int]]:
    """Continue prompts, which may have different lengths.

    Args:
        model: the model, in evaluation mode.
        prompts: token ids of each prompt, at least one each.
        max_new_tokens: the most tokens that each prompt gets.
        sampling: how tokens are chosen; greedy when left out.
        seed: makes the choice repeatable.
        end_token: a sequence ends when this token is chosen; it is not part of the answer.

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: If a prompt is empty or the model has not enough positions.
    """
    sampling = sampling or Sampling(temperature=0.0)
    lengths = [len(prompt) for prompt in prompts]
    _check(model, lengths, max_new_tokens=max_new_tokens)
    generator = torch.Generator().manual_seed(seed)
    sequences = [list(prompt) for prompt in prompts]
    finished = [max_new_tokens == 0] * len(prompts)
    cache = model.new_cache(len(prompts), max_length=max(lengths) + max_new_tokens)
    device = next(model.parameters()).device
    position = min(lengths)  # the next token to be known in every sequence
    fresh = torch.tensor([sequence[:position] for sequence in sequences], device=device)
    while not all(finished):
        logits = cast("Tensor", model(fresh, cache=cache))[:, -1]
        chosen = next_tokens(logits, sampling=sampling, generator=generator).tolist()
        for row, token in enumerate(chosen):
            if position < lengths[row]:
                continue  # this prompt is longer: its own token stands there
            if finished[row] or token == end_token:
                finished[row] = True
                sequences[row].append(token)  # keeps the rows equally long; cut off below
                continue
            sequences[row].append(token)
            finished[row] = len(sequences[row]) - lengths[row] >= max_new_tokens
        fresh = torch.tensor([[sequence[position]] for sequence in sequences], device=device)
        position += 1
    answers = [sequence[length:] for sequence, length in zip(sequences, lengths, strict=True)]
    return [_until(answer[:max_new_tokens], end_token) for answer in answers]


def _until(tokens: list[int], end_token: int | None) -> list[int]:
    if end_token is not None and end_token in tokens:
        return tokens[: tokens.index(end_token)]
    return tokens


def _check(model: GPT, lengths: Sequence[int], *, max_new_tokens: int) -> None:
    if not lengths or min(lengths) == 0:
        raise ValueError("A prompt has no token; give each prompt at least one.")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens ({max_new_tokens}) must not be negative.")
    config, needed = model.config, max(lengths) + max_new_tokens
    if config.position_embedding == "learned" and needed > config.max_position_embeddings:
        raise ValueError(
            f"The prompt of {max(lengths)} tokens and {max_new_tokens} new ones need {needed} "
            f"positions, but the model has {config.max_position_embeddings}; shorten the prompt or "
            "ask for fewer tokens."
        )
