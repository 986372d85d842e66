"""A model under a setting, as lm-eval asks models: https://github.com/EleutherAI/lm-evaluation-harness

Requests that share a context, as the options of one question do, share one reading of it. Where
nothing may be forgotten, a context that is too long loses its beginning, as in lm-eval, and
`cut` counts it; any other policy reads all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sirchat.errors import SettingError
from sirchat.tasks.lm_eval.reader import TextReader
from sirchat.tasks.lm_eval.text import Ids, TextEncoder
from sirchat.text.detokenizer import TextStream

_LONGEST_REPLY = 256
"""Tokens, where a task does not say; lm-eval's own number."""


class HarnessAdapter:
    """What lm-eval asks for, without being an `LM`; `language_model` makes it one.

    A request is lm-eval's Instance: its `args` are a context with a continuation, a text, or a
    context with options for generating.
    """

    def __init__(self, reader: TextReader, texts: TextEncoder) -> None:
        super().__init__()
        self._reader, self._texts = reader, texts
        self.truncated = 0

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """For each continuation its log-probability, in nats, and whether it is the likeliest.

        Raises UsageError for a continuation without a token of its own.
        """
        together: dict[tuple[int, ...], list[tuple[int, Ids]]] = {}
        for number, request in enumerate(requests):
            context, continuation = self._texts.pair(*request.args)
            context = self._fitting(context, len(continuation) - 1)
            together.setdefault(tuple(context), []).append((number, continuation))
        found: dict[int, tuple[float, bool]] = {}
        for shared, asked in together.items():
            weighed = self._reader.score_continuation(shared, [ids for _, ids in asked])
            for (number, _), one in zip(asked, weighed, strict=True):
                found[number] = sum(one.log_probabilities), one.greedy
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """For each text its log-probability, in nats, after a begin token."""
        return [self._rolled(self._texts.encode(*one.args, special=False)) for one in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """For each context the likeliest reply, up to a string that the task stops at.

        Raises SettingError for a task that wants replies to be drawn.
        """
        return [self._replied(*request.args) for request in requests]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The context that the chat template makes of messages."""
        return self._texts.conversation(chat_history, prompt=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """A name for what the chat template belongs to."""
        return self._reader.model.name.replace("/", "__")

    def _rolled(self, ids: Ids) -> float:
        """In windows where the text is too long, each with one token before it, as in lm-eval."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        longest = self._reader.longest or len(ids)
        self.truncated += len(ids) > longest
        windows = get_rolling_token_windows(ids, self._texts.prefix, max(1, longest), 1)
        pairs = map(make_disjoint_window, windows)
        return sum((self._reader.log_probability(*pair) for pair in pairs), 0.0)

    def _replied(self, context: str, options: dict[str, Any]) -> str:
        from lm_eval.models.utils import normalize_gen_kwargs

        asked = normalize_gen_kwargs(options, _LONGEST_REPLY)
        if asked["do_sample"]:
            raise SettingError(
                f"the task draws its replies (temperature {asked['temperature']}); "
                "here they are the likeliest",
                hint="choose a task with do_sample: false",
            )
        longest, stops = asked["max_gen_toks"], [one for one in asked["until"] if one]
        ids = self._texts.context(context) or [self._texts.prefix]
        text, stream = "", TextStream(self._reader.model.tokenizer)
        for token_id in self._reader.reply(self._fitting(ids, longest), longest):
            text += stream.push(token_id)
            if any(stop in text for stop in stops):
                break
        else:
            text += stream.flush()
        for stop in stops:
            text = text.split(stop)[0]
        return text

    def _fitting(self, context: Ids, more: int) -> Ids:
        """The end of a context that leaves room for `more` tokens."""
        longest = self._reader.longest
        if longest is None or len(context) + more <= longest:
            return context
        if more >= longest:
            raise SettingError(
                f"{more} tokens are to follow a context, but the model's length is {longest}",
                hint="choose another policy than full, or a model with a longer context",
            )
        self.truncated += 1
        return context[more - longest :]


def language_model(reader: TextReader, texts: TextEncoder) -> Any:
    """An lm_eval.api.model.LM, with `cut`: how many contexts were too long, so far."""
    from lm_eval.api.model import LM

    class BudgetedLM(HarnessAdapter, LM):  # type: ignore[misc]
        """Answers under a budget."""

    return BudgetedLM(reader, texts)
