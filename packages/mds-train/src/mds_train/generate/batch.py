"""Continuous batching: sequences join and leave a batch while the others go on.

Shapes: ``b`` active sequences, ``s`` tokens of a prompt, ``h`` hidden, ``v`` vocabulary.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import islice, takewhile

import torch
from torch import Tensor

from mds_core.layers.cache import SlotRows
from mds_core.models import GPT
from mds_train.generate.request import (
    FinishReason,
    Request,
    Running,
    Token,
    check_length,
    likelihoods,
)
from mds_train.generate.sampling import next_token

__all__ = ["ContinuousBatch"]


class ContinuousBatch:
    """Continues many sequences at once, one token each a step.

    What a sequence becomes does not depend on which others are there. Active sequences fill the
    first slots of the cache without gaps, so that a step computes on them where they lie. With
    tensor parallelism every rank makes the same calls and chooses the same tokens.

    Args:
        model: In evaluation mode.
        slots: Most sequences at a time; others wait.
        max_length: Most tokens of a sequence, prompt included.
    """

    def __init__(self, model: GPT, *, slots: int, max_length: int) -> None:
        self._model = model
        self.slots = slots
        self.max_length = max_length
        self._cache = model.new_slots(slots, max_length=max_length)
        self._active: list[Running] = []
        self._waiting: deque[Running] = deque()
        self._device = next(model.parameters()).device

    @property
    def active(self) -> int:
        """Sequences that get tokens now."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """Sequences without a slot yet."""
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Raise ValueError if the request does not fit the model or the cache."""
        check_length(
            self._model.config,
            prompt=request.prompt,
            max_new_tokens=request.max_new_tokens,
            longest=self.max_length,
        )

    def add(self, request: Request) -> Running:
        """Let a request join with the next step that has a free slot.

        Raises:
            ValueError: If it does not fit the model or the cache.
        """
        self.check(request)
        running = Running(request)
        self._waiting.append(running)
        return running

    @torch.inference_mode()
    def end(self, running: Running, reason: FinishReason) -> None:
        """Stop a sequence, whether it waits or runs; one that has ended stays as it is."""
        if running.finish_reason is not None:
            return
        running.finish_reason = reason
        if running not in self._active:
            self._waiting.remove(running)
            return
        place, last = self._active.index(running), len(self._active) - 1
        if place != last:  # the last one moves into the gap
            self._cache.copy(last, place)
            self._active[place] = self._active[last]
        self._active.pop()
        self._cache.clear(last)

    @torch.inference_mode()
    def step(self) -> list[Running]:
        """Give each active sequence its next token, and new ones their first.

        Returns:
            The sequences that got a token or ended.
        """
        earlier = list(self._active)
        joined = self._admit()
        if earlier:
            self._continue(earlier)
        for running in joined:
            self._end_if_done(running)
        return [*earlier, *joined]

    def _admit(self) -> list[Running]:
        """Compute the prompts of those for whom there are slots, and choose their first tokens."""
        joined: list[Running] = []
        while self._waiting and len(self._active) < self.slots:
            group = self._next_group()
            logits = self._read_prompts(group)
            for running, row in zip(group, logits, strict=True):
                self._waiting.popleft()
                self._active.append(running)
                if running.request.max_new_tokens > 0:
                    _choose(running, row)
            joined += group
        return joined

    def _next_group(self) -> list[Running]:
        """Those whose prompts are computed together: the same one, or equally long ones."""
        free = self.slots - len(self._active)
        first = self._waiting[0]
        for alike in (_same_prompt, _same_length):
            group = list(islice(takewhile(partial(alike, first), self._waiting), free))
            if len(group) > 1 or first.request.prompt_logprobs:
                break
        return group

    def _read_prompts(self, group: list[Running]) -> Tensor:
        """Fill the next slots with a group's prompts; logits [b, v] of what comes after each."""
        slot = len(self._active)
        rows = group[:1] if all(_same_prompt(group[0], each) for each in group) else group
        tokens = torch.tensor([running.request.prompt for running in rows], device=self._device)
        hidden = self._hidden(tokens, self._cache.rows(slot, len(rows)))
        for copy in range(slot + len(rows), slot + len(group)):
            self._cache.copy(slot, copy)
        if group[0].request.prompt_logprobs:
            self._tell_prompt(group, self._model.logits(hidden)[0])
        logits = self._model.logits(hidden[:, -1:])[:, 0].float().cpu()
        return logits.expand(len(group), -1)

    def _tell_prompt(self, group: list[Running], logits: Tensor) -> None:
        """Note how likely the tokens of the one prompt were, given [s, v]."""
        request = group[0].request
        rest = likelihoods(logits[:-1], request.prompt[1:], top=request.logprobs or 0)
        for running in group:
            running.prompt_tokens = [Token(id=request.prompt[0]), *rest]

    def _continue(self, earlier: list[Running]) -> None:
        tokens = torch.tensor([[running.tokens[-1].id] for running in earlier], device=self._device)
        hidden = self._hidden(tokens, self._cache.rows(0, len(earlier)))
        logits = self._model.logits(hidden)[:, 0].float().cpu()
        for running, row in zip(earlier, logits, strict=True):
            _choose(running, row)
        for running in earlier:
            self._end_if_done(running)

    def _hidden(self, tokens: Tensor, rows: SlotRows) -> Tensor:
        """Hidden states [b, s, h] of the model's end; the rows then hold the tokens."""
        count = tokens.size(1)
        hidden = self._model.forward_stage(tokens, position_ids=rows.positions(count), cache=rows)
        rows.advance(count)
        return hidden

    def _end_if_done(self, running: Running) -> None:
        request, tokens = running.request, running.tokens
        if tokens and tokens[-1].id in request.end_tokens:
            tokens.pop()
            self.end(running, "stop")
        elif len(tokens) >= request.max_new_tokens:
            self.end(running, "length")


def _same_prompt(one: Running, other: Running) -> bool:
    a, b = one.request, other.request
    same_likelihoods = (a.prompt_logprobs, a.logprobs) == (b.prompt_logprobs, b.logprobs)
    return a.prompt == b.prompt and same_likelihoods


def _same_length(one: Running, other: Running) -> bool:
    same = len(one.request.prompt) == len(other.request.prompt)
    return same and not other.request.prompt_logprobs


def _choose(running: Running, logits: Tensor) -> None:
    """Append the token that comes next, given what the model says [v]."""
    request = running.request
    chosen = next_token(
        logits,
        sampling=request.sampling,
        generator=running.generator,
        prompt=request.prompt,
        answer=running.answer,
    )
    if request.logprobs is None:
        running.tokens.append(Token(id=chosen))
    else:
        running.tokens += likelihoods(logits[None], [chosen], top=request.logprobs)
