"""Lets lm-evaluation-harness ask our models.

The harness is EleutherAI's lm-eval (extra ``[evaluate]``); tasks are its own or YAML files of
yours. Where arguments are flags or unnamed, that is how it calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_core.models import GPT
from mds_data.chat.template import ChatTemplate
from mds_train.errors import InputError
from mds_train.evaluate.scoring import Passage, score
from mds_train.generate.decoding import complete
from mds_train.generate.request import Request
from mds_train.generate.sampling import Sampling

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError as error:
    raise ImportError(
        "The harness needs lm-eval: pip install 'mds-train[evaluate]'", name="lm_eval"
    ) from error

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["HarnessModel", "run_harness"]

_DEFAULT_NEW_TOKENS = 256


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model as lm-eval sees one.

    Args:
        model: In evaluation mode.
        tokenizer: Of the model.
        end_tokens: Tokens that end an answer; the smallest also begins texts that have no context.
        batch_size: Passages that are computed together.
        template: How conversations are written, for tasks with chat templates.
        name: What results call it.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        *,
        end_tokens: frozenset[int],
        batch_size: int = 8,
        template: ChatTemplate | None = None,
        name: str = "mds",
    ) -> None:
        super().__init__()
        if not end_tokens:
            raise InputError("The tokenizer has no end-of-text token, which lm-eval begins with.")
        self.model, self._words, self._ends = model, tokenizer, end_tokens
        self._batch_size, self._template, self._name = batch_size, template, name
        self.max_length = model.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """What stands before a text without context."""
        return min(self._ends)

    @property
    def tokenizer_name(self) -> str:
        """What the harness keys its caches by."""
        return self._name

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,  # noqa: FBT001
        **_: object,
    ) -> list[int]:
        """Tokens of a text; with those that begin a text only where that is asked for."""
        return list(self._words.encode(string, add_special_tokens=bool(add_special_tokens)).ids)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        **_: object,
    ) -> list[tuple[float, bool]]:
        passages = [_passage(context, rest, self.max_length) for _, context, rest in requests]
        scores = score(self.model, passages, batch_size=self._batch_size)
        return [(each.logprob, each.is_greedy) for each in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: object) -> list[float]:
        """Log-probability of whole texts, in windows that do not overlap."""
        found = []
        for request in requests:
            pairs = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.eot_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows = [make_disjoint_window(pair) for pair in pairs]
            passages = [_passage(context, rest, self.max_length) for context, rest in windows]
            scores = score(self.model, passages, batch_size=self._batch_size)
            found.append(sum(each.logprob for each in scores))
        return found

    def generate_until(self, requests: Sequence[Any], **_: object) -> list[str]:
        """Answers that end before one of a request's strings."""
        answers: dict[int, str] = {}
        settings = [json.dumps(request.args[1], sort_keys=True) for request in requests]
        order = sorted(range(len(requests)), key=settings.__getitem__)
        for _same, group in groupby(order, key=settings.__getitem__):
            places = list(group)
            contexts = [requests[place].args[0] for place in places]
            texts = self._answer(contexts, requests[places[0]].args[1])
            answers |= dict(zip(places, texts, strict=True))
        return [answers[place] for place in range(len(requests))]

    def _answer(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        until = settings.get("until") or []
        stop = [until] if isinstance(until, str) else list(until)
        # The harness' own models count so, by either name.
        count = int(settings.get("max_gen_toks", settings.get("max_tokens", _DEFAULT_NEW_TOKENS)))
        count = min(count, self.max_length - 1)
        prompts = [
            (self.tok_encode(text) or [self.eot_token_id])[-(self.max_length - count) :]
            for text in contexts
        ]
        request = Request(
            prompt=(),
            max_new_tokens=count,
            sampling=_sampling(settings),
            end_tokens=self._ends,
        )
        found = complete(
            self.model,
            self._words,
            prompts,
            request=request,
            stop=[text for text in stop if text],
            slots=self._batch_size,
            max_length=self.max_length,
        )
        return [completion.text for (completion,) in found]

    def apply_chat_template(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002
        **_: object,
    ) -> str:
        """The text of a conversation."""
        if self._template is None:
            raise InputError(
                "The checkpoint has no chat template; name one with --chat-template NAME."
            )
        return self._template.render(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(
        self,
        chat_template: bool | str = False,  # noqa: FBT001, FBT002
    ) -> str | None:
        """The template's text, which the harness notes in its results."""
        return self._template.source if chat_template and self._template else None


def _passage(context: Sequence[int], rest: Sequence[int], length: int) -> Passage:
    """Both, of the context only as much as fits."""
    tokens = [*context, *rest][-(length + 1) :]
    return Passage(tokens, max(len(tokens) - len(rest), 1))


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    temperature = float(settings.get("temperature", 0.0) or 0.0)
    if not settings.get("do_sample", temperature > 0):
        return Sampling(temperature=0.0)
    return Sampling(
        temperature=temperature or 1.0,
        top_k=int(settings.get("top_k", 0) or 0),
        top_p=float(settings.get("top_p", 1.0) or 1.0),
    )


def run_harness(
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
    show: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Run tasks.

    Args:
        model: what is asked.
        tasks: names of lm-eval's tasks, or of those in ``include``.
        include: a folder with YAML files of tasks.
        shots: examples before each question; the task's own number when left out.
        limit: only so many questions of each task.
        chat: write the questions as conversations.
        show: is given the table of the results.

    Returns:
        The harness' results, as JSON can hold them.

    Raises:
        InputError: If there is no such task.
    """
    manager = TaskManager(include_path=None if include is None else str(include))
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise InputError(
            f"lm-eval knows no task {', '.join(unknown)}; `lm-eval ls tasks` lists them, and "
            "--include DIR adds your own."
        )
    results = simple_evaluate(
        model=model,
        tasks=list(tasks),
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        apply_chat_template=chat,
        log_samples=False,
        bootstrap_iters=1000,
    )
    if show is not None:
        show(make_table(results))
    kept = ("results", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")
    text = json.dumps({name: results[name] for name in kept if name in results}, default=str)
    found: dict[str, Any] = json.loads(text)
    return found
