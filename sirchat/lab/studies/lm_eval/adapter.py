"""Lets lm-eval use a model under a sirchat setting, by lm-eval's interface for models.

Text is encoded as by lm-eval's adapter for Hugging Face models, but text never becomes a control
token, and no text begins with two BOS tokens. Requests with the same context share one prefill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.engine.extra_passes import score_continuations
from sirchat.engine.sampling import Sampler, Sampling
from sirchat.engine.types import ContinuationScore, GeneratedToken, TurnRef
from sirchat.errors import ModelError, SettingError, UsageError, format_value
from sirchat.lab.studies.reading import open_engine, read_ids
from sirchat.memory.policies import policy_class
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import Anchors
from sirchat.text.detokenizer import TextStream
from sirchat.text.template import Template

_CONTENT_ONLY = "{{ messages[0].content }}"

_AFTER_BLANK_LINE = re.compile(r"(?<=\n\n)(?!\n)")

Ids = list[int]


class TextEncoder:
    """Encodes contexts, and the continuations of contexts, as token ids.

    `chat` says whether contexts were rendered by the chat template. Raises ModelError if the
    tokenizer has neither BOS nor EOS, or if `chat` is true and the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: Any, *, chat: bool = False, anchors: Anchors | None = None
    ) -> None:
        if chat and not tokenizer.chat_template:
            raise ModelError(
                "the model has no chat template", hint="leave out --apply-chat-template"
            )
        prefix = tokenizer.bos_token_id
        prefix = tokenizer.eos_token_id if prefix is None else prefix
        if prefix is None:
            raise ModelError("the tokenizer has no token that begins or ends a text")
        self.prefix = int(prefix)
        self._tokenizer, self._chat = tokenizer, chat
        self._anchor = anchors.token_id if anchors is not None else None
        Template(tokenizer)  # sets `chat_control_tokens`
        control = map(re.escape, tokenizer.chat_control_tokens)
        self._control = re.compile("|".join(sorted(control, key=len, reverse=True)) or r"(?!)")

    def encode(self, text: str, *, special: bool = True) -> Ids:
        """The token ids of a text."""
        if self._chat:
            has_prefix = text.startswith(self._tokenizer.decode([self.prefix]))
            return self._encode(text, special and not has_prefix)
        if self._control.search(text):
            return [*self._encode("", special), *self._encode_as_plain_text(text)]
        return self._encode(text, special)

    def context(self, text: str) -> Ids:
        """The token ids of a context.

        If the model has anchors, there is an anchor token after each few-shot example.
        """
        if self._anchor is None or self._chat:
            return self.encode(text)
        first, *others = _AFTER_BLANK_LINE.split(text)
        ids = self.encode(first)
        for one in others:
            ids += [self._anchor, *self.encode(one, special=False)]
        return ids

    def pair(self, context: str, continuation: str) -> tuple[Ids, Ids]:
        """The token ids of a context and those of its continuation; neither list is empty.

        Raises UsageError for a continuation without ids.
        """
        end = len(context.rstrip())
        text = context[end:] + (self._plain(continuation) if self._chat else continuation)
        if end:
            head = self.context(context[:end])
            tail = self.encode(context[:end] + text)[len(self.encode(context[:end])) :]
        else:
            head, tail = [self.prefix], self.encode(text, special=False)
        if not tail:
            raise UsageError(
                f"continuation {format_value(continuation)} adds no token of its own to its context"
            )
        return head or [self.prefix], tail

    def conversation(self, messages: list[dict[str, str]], *, prompt: bool) -> str:
        """A conversation as text, rendered by the chat template; `encode` makes ids of the text."""
        clean = [{**one, "content": self._plain(one["content"])} for one in messages]
        try:
            return self._render_with_anchors(clean, prompt)
        except TemplateError:
            return self._render_with_anchors(
                [one for one in clean if one["role"] != "system"], prompt
            )

    def _encode(self, text: str, special: bool) -> Ids:
        return list(self._tokenizer.encode(text, add_special_tokens=special))

    def _encode_as_plain_text(self, text: str) -> Ids:
        """The token ids of a text; the text of a control token is encoded like any other text."""
        ids = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            chat_template=_CONTENT_ONLY,
            sanitize_control_tokens=True,
            tokenize=True,
            return_dict=False,
        )
        return list(ids)

    def _plain(self, text: str) -> str:
        """A copy of a text without the texts of control tokens, such as `<|im_end|>`."""
        while (left := self._control.sub("", text)) != text:
            text = left
        return text

    def _render_with_anchors(self, messages: list[dict[str, str]], prompt: bool) -> str:
        end = {"add_generation_prompt": prompt, "continue_final_message": not prompt}
        text = self._render(messages, **end)
        if self._anchor is None:
            return text
        for count in range(len(messages) - 1, 0, -1):
            before = (
                ""
                if messages[count - 1]["role"] == "user"
                else self._render_beginning(messages[:count])
            )
            if before and text.startswith(before):
                text = before + self._tokenizer.decode([self._anchor]) + text[len(before) :]
        return text

    def _render_beginning(self, messages: list[dict[str, str]]) -> str:
        """The first messages of a conversation as text; '' if the chat template refuses them."""
        try:
            return self._render(messages)
        except TemplateError:
            return ""

    def _render(self, messages: list[dict[str, str]], **options: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text


_LONGEST_REPLY = 256  # largest number of tokens in a reply if a task sets no limit, as in lm-eval


class HarnessAdapter:
    """The methods that lm-eval's class `LM` requires; `language_model` adds `LM` as a base class.

    A request is an object of lm-eval's class Instance. Its `args` are a context and a continuation,
    or a text, or a context and generation options, depending on the method.
    """

    def __init__(self, reader: TextReader, texts: TextEncoder) -> None:
        super().__init__()
        self._reader, self._texts = reader, texts
        self.truncated = 0

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """For each request, how likely its continuation is after its context.

        Raises UsageError for a continuation that adds no token of its own to its context.
        """
        by_context: dict[tuple[int, ...], list[tuple[int, Ids]]] = {}
        for number, request in enumerate(requests):
            context, continuation = self._texts.pair(*request.args)
            context = self._truncate(context, len(continuation) - 1)
            by_context.setdefault(tuple(context), []).append((number, continuation))
        found: dict[int, tuple[float, bool]] = {}
        for shared, numbered in by_context.items():
            scores = self._reader.score_continuation(shared, [ids for _, ids in numbered])
            for (number, _), one in zip(numbered, scores, strict=True):
                found[number] = sum(one.log_probabilities), one.greedy
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-probability, in nats, of the text of each request.

        The text is read after the BOS token or, if the tokenizer has none, the EOS token.
        """
        return [
            self._rolling_log_probability(self._texts.encode(*one.args, special=False))
            for one in requests
        ]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The greedy reply to each request's context, up to the first of the task's stop strings.

        Raises SettingError for a task that samples its replies.
        """
        return [self._generate(*request.args) for request in requests]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, rendered by the model's chat template, to be used as context."""
        return self._texts.conversation(chat_history, prompt=add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """A name for the tokenizer: the model's name, with `__` in place of each slash."""
        return self._reader.model.name.replace("/", "__")

    def _rolling_log_probability(self, ids: Ids) -> float:
        """The log-probability of a text in nats; long text is split into windows, as in lm-eval."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        longest = self._reader.longest or len(ids)
        self.truncated += len(ids) > longest
        windows = get_rolling_token_windows(ids, self._texts.prefix, max(1, longest), 1)
        pairs = map(make_disjoint_window, windows)
        return sum((self._reader.log_probability(*pair) for pair in pairs), 0.0)

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        from lm_eval.models.utils import normalize_gen_kwargs

        limits = normalize_gen_kwargs(options, _LONGEST_REPLY)
        if limits["do_sample"]:
            raise SettingError(
                f"the task samples replies (temperature {limits['temperature']}), but "
                "sirchat eval always takes the most likely token",
                hint="choose a task with do_sample: false",
            )
        longest, stops = limits["max_gen_toks"], [one for one in limits["until"] if one]
        ids = self._texts.context(context) or [self._texts.prefix]
        text, stream = "", TextStream(self._reader.model.tokenizer)
        for token_id in self._reader.reply(self._truncate(ids, longest), longest):
            text += stream.push(token_id)
            if any(stop in text for stop in stops):
                break
        else:
            text += stream.flush()
        for stop in stops:
            text = text.split(stop)[0]
        return text

    def _truncate(self, context: Ids, more: int) -> Ids:
        """`context`, cut at its start if it and `more` further ids exceed the context length."""
        longest = self._reader.longest
        if longest is None or len(context) + more <= longest:
            return context
        if more >= longest:
            raise SettingError(
                f"the task asks for {more} tokens, but the model's context length is {longest}",
                hint="choose another policy than full, or a model with a longer context",
            )
        self.truncated += 1
        return context[more - longest :]


def language_model(reader: TextReader, texts: TextEncoder) -> Any:
    """Create a HarnessAdapter that is also an instance of `lm_eval.api.model.LM`."""
    from lm_eval.api.model import LM

    class BudgetedLM(HarnessAdapter, LM):  # type: ignore[misc]
        """lm-eval's `LM` with the methods of HarnessAdapter."""

    return BudgetedLM(reader, texts)


@dataclass(frozen=True)
class TextReader:
    """Reads, scores and generates text with a model under a setting."""

    model: LoadedModel  # the model and the profile
    setting: Profile
    piece: int | None = None  # number of tokens in a round; if None, a context is read as one round

    @property
    def longest(self) -> int | None:
        """The largest number of tokens that can be read: the model's context length.

        If the policy evicts tokens, there is no limit, and the result is None.
        """
        return None if policy_class(self.setting.policy).bounded else self.model.context_length

    def read(self, ids: Sequence[int], reply: int = 0) -> Engine:
        """Create an engine, and let it read ids [n], n > 0; it keeps room for `reply` more ids.

        Raises ContextFullError if the policy evicts nothing and the ids do not fit.
        """
        engine = open_engine(self.model, self.setting)
        size = self.piece or len(ids)
        for number, start in enumerate(range(0, len(ids), size), 1):
            if number > 1:
                engine.decay_at_round_end()
            to_come = reply if start + size >= len(ids) else 0
            read_ids(engine, ids[start : start + size], number, to_come)
        return engine

    def score_continuation(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> list[ContinuationScore]:
        """Read a context once, and return a score for each of its continuations (not empty).

        A score has the log-probability of each of the continuation's tokens.
        """
        engine = self.read(context)
        return [score_continuations(engine.reader, [ids])[0] for ids in continuations]

    def log_probability(self, context: Sequence[int], ids: Sequence[int]) -> float:
        """The log-probability, in nats, of ids [n], n > 0, that follow a context."""
        engine = self.read([*context, *ids[:-1]])
        surprisals = engine.ledger.column("surprisal")[len(context) : engine.ledger.seen]
        (last,) = score_continuations(engine.reader, [ids[-1:]])[0].log_probabilities
        return last - float(surprisals.sum(dtype=np.float64))

    def reply(self, context: Sequence[int], longest: int) -> Iterator[int]:
        """Yield the ids of a greedy reply to a context, up to a stop id, at most `longest` ids."""
        number = 1 + (len(context) - 1) // (self.piece or len(context))
        for record in self.read(context, longest).generate(
            Sampler(Sampling()),
            TurnRef(number, number),
            stop_ids=self._stop_ids,
            max_new_tokens=longest,
        ):
            if isinstance(record, GeneratedToken):
                yield record.id

    @property
    def _stop_ids(self) -> frozenset[int]:
        declared = getattr(self.model.module.generation_config, "eos_token_id", None)
        ids = [*(declared if isinstance(declared, list) else [declared])]
        ids.append(self.model.tokenizer.eos_token_id)
        return frozenset(one for one in ids if one is not None)
