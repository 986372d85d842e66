"""Restricts replies to a format, JSON or calls of tools; llguidance computes the allowed tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sirchat.engine.sampling import TokenFilter
from sirchat.errors import ModelError, SettingError
from sirchat.models.model import LoadedModel
from sirchat.text.json_schema import (
    check_grammar,
    format_error,
    import_llguidance,
    json_rule,
    load_schema,
)
from sirchat.text.other_templates import ToolTemplate
from sirchat.text.template import Template
from sirchat.text.tool_calls import CALL_CLOSE, CALL_OPEN, PYTHON

MAX_CALLS_PER_REPLY = 8  # in a reply that must call tools, or be JSON

Schema = dict[str, Any] | None  # None: no JSON, only calls
Tools = Sequence[tuple[str, dict[str, Any]]]  # names, and the schemas of their arguments


class _Chat(Protocol):
    """What a format needs of the session that replies."""

    model: LoadedModel
    template: Template


class ModelFormats:
    """Makes the masks of next ids that restrict a model's replies to JSON or to calls of tools.

    The model's vocabulary is prepared at first use. In its methods, `subject` is the source of the
    format, with which errors begin, and `notes` gets the parts of a schema that can't be enforced.
    """

    def __init__(self) -> None:
        self._vocabulary: Any = None
        self._last: tuple[str, Schema] | None = None

    def from_file(
        self,
        chat: _Chat,
        notes: list[str],
        file: str,
        tools: Tools,
        started_ids: Sequence[int],
        *,
        is_same_round: bool,
    ) -> TokenFilter | None:
        """The filter for JSON by the schema in `file`, or calls of `tools`, after `started_ids`.

        None if `file` is `off`. The file is not read again in the same round; a change adds a note.
        Raises SettingError if the file can't be used, or forbids `started_ids`.
        """
        subject, new_notes, before = f"json_schema {file}", list[str](), self._last
        is_known = is_same_round and before is not None and before[0] == file
        if (schema := before[1] if before and is_known else load_schema(file)) is None:
            return None
        made = self.json_or_calls(chat, subject, new_notes, schema, tools, MAX_CALLS_PER_REPLY)
        if before != (file, schema):
            self._last = file, schema
            if before is not None and before[0] == file:
                notes.append(f"{file} has changed: replies are as it says now")
            notes += new_notes
        try:
            made(started_ids)
        except ModelError:
            raise format_error(subject, "does not allow how the reply has begun") from None
        return lambda ids: made([*started_ids, *ids])

    def json_or_calls(
        self, chat: _Chat, subject: str, notes: list[str], schema: Schema, tools: Tools, most: int
    ) -> ReplyFormat:
        """The format of JSON by `schema`, if given, or of at most `most` calls of `tools`, if any.

        Raises SettingError if the model or a schema can't be used, or if the chat template does not
        write calls as JSON.
        """
        if chat.template.marks.opens_in_header:
            problem = "can't be had from a model that begins every reply with reasoning"
            raise format_error(subject, problem)
        starts = [] if schema is None else [json_rule(schema, subject)]
        if not tools:
            return self._compile(chat, subject, notes, f"start: {starts[0]}", None)
        form = _CallForm.of(chat.template, subject, "can't be had with a tool")
        most = most if form.opening else 1  # without tags, a reply can be only one call
        starts.append(f'call ("\\n" call){{0,{most - 1}}}' if most > 1 else "call")
        lines = [f"start: {' | '.join(starts)}", *form.rules(tools, subject)]
        return self._compile(chat, subject, notes, "\n".join(lines), form)

    def strict(self, chat: _Chat, subject: str, notes: list[str], tools: Tools) -> StrictCalls:
        """The format of any text in which calls of `tools` follow their schemas."""
        form = _CallForm.of(chat.template, subject, "can't be strict")
        grammar = "\n".join(["start: after", *form.rules(tools, subject)])
        made = self._compile(chat, subject, notes, grammar, form)
        return StrictCalls(made, chat.model.tokenizer, self._vocabulary, bool(form.opening))

    def _compile(
        self, chat: _Chat, subject: str, notes: list[str], grammar: str, form: _CallForm | None
    ) -> ReplyFormat:
        """The format by a grammar, with the control tokens of `form`."""
        library, model, template = import_llguidance(subject), chat.model, chat.template
        declared = getattr(model.module.generation_config, "eos_token_id", None)
        ends = sorted(template.end_ids(declared))
        # llguidance takes other added tokens such as `</think>` for control tokens, too.
        added = model.tokenizer.added_tokens_decoder
        controls = {i: token.content for i, token in added.items() if token.content[:1] == "<"}
        controls |= template.controls
        if self._vocabulary is None:
            try:
                written = json.loads(model.tokenizer.backend_tokenizer.to_str())
                _rename_controls(written, controls)
                text, size = json.dumps(written | {"post_processor": None}), model.vocab_size
                self._vocabulary = library.LLTokenizer(text, n_vocab=size, eos_token=ends)
            except Exception as error:  # llguidance supports most kinds of tokenizers, but not all
                raise format_error(subject, f"can't be had from this model: {error}") from None
        check_grammar(grammar, subject, self._vocabulary, notes)
        tags = (CALL_OPEN, CALL_CLOSE) if form else ()
        never = [i for i, text in controls.items() if text not in tags and i not in ends]
        matcher = library.LLMatcher(self._vocabulary, grammar, log_level=0)
        return ReplyFormat(matcher, model.vocab_size, never, ends)


def _rename_controls(written: dict[str, Any], controls: Collection[int]) -> None:
    """Rename the control tokens in a tokenizer's JSON to texts that no schema has."""
    known = written["model"]["vocab"]
    for token in written["added_tokens"]:
        if (number := token["id"]) in controls:
            before, token["content"] = token["content"], f"\ue000{number}\ue001"
            if isinstance(known, dict) and known.pop(before, None) is not None:
                known[token["content"]] = number
            elif isinstance(known, list) and number < len(known):
                known[number][0] = token["content"]


@dataclass(frozen=True)
class _CallForm:
    """How a chat template writes a call: JSON with the key `arguments`, and the text around it."""

    opening: str
    arguments: str
    closing: str
    tokens: Mapping[str, int]  # ids of control tokens, by their texts

    @classmethod
    def of(cls, template: Template, subject: str, refused: str) -> _CallForm:
        """The form of a chat template; SettingError if it does not write calls as JSON."""
        form = template.call_form() if isinstance(template, ToolTemplate) else None
        tags = None if form is None else (form[0].strip(), form[2].strip())
        if form is None or tags not in (("", ""), (CALL_OPEN, CALL_CLOSE)):
            problem = "the model's chat template does not write calls as JSON"
            raise format_error(subject, f"{refused}: {problem}")
        return cls(*form, {text: i for i, text in template.controls.items()})

    def rules(self, tools: Tools, subject: str) -> list[str]:
        """Grammar rules in llguidance's Lark dialect: `call`, and `after`, a call without OPEN."""
        before, mark, rest = self.opening.partition(CALL_OPEN)
        names = " | ".join(f"call{number}" for number in range(len(tools)))
        lines = [
            f"call: {self._text(before + mark)} {self._text(rest)} called",
            f"after: {self._text(rest) + '?' if rest else ''} called",
            f"called: ({names}) {self._text(self.closing)}",
        ]
        for number, (name, parameters) in enumerate(tools):
            beginning = f'{{"name": {json.dumps(name)}, {json.dumps(self.arguments)}: '
            schema = {**parameters, "type": "object"}
            # Small models would invent more and more arguments.
            if "properties" in schema and not {"allOf", "anyOf", "oneOf", "$ref"} & set(schema):
                schema = {"additionalProperties": False, **schema}
            arguments = json_rule(schema, subject)
            lines.append(f'call{number}: {json.dumps(beginning)} {arguments} "}}"')
        return lines

    def _text(self, text: str) -> str:
        """A text in a grammar, in which tags that are control tokens are given by their ids."""
        parts, ids = filter(None, re.split(f"({CALL_OPEN}|{CALL_CLOSE})", text)), self.tokens
        return " ".join(f"<[{ids[p]}]>" if p in ids else json.dumps(p) for p in parts)


class ReplyFormat:
    """Called with the reply's ids so far, returns a mask, bool [V], of the ids that may follow.

    llguidance's `matcher` reads the ids; `size` is V. Ids in `never` may not follow, ids in `ends`
    only where the reply may end. Raises ModelError or SettingError if no id may follow.
    """

    def __init__(self, matcher: Any, size: int, never: list[int], ends: list[int]) -> None:
        self.matcher, self.size = matcher, size
        self._never, self._ends, self._read = never, ends, 0

    def __call__(self, ids: Sequence[int]) -> Tensor:
        self.matcher.consume_tokens(list(ids[self._read :]))
        self._read = len(ids)
        return self.mask()

    def mask(self) -> Tensor:
        """The mask [V] of ids that may follow the ids read by the matcher."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self.size].astype(bool)
        mask[self._never] = False
        if not self.matcher.is_accepting():
            mask[self._ends] = False
        if self.matcher.is_error() or not mask.any():
            problem, _, _ = (self.matcher.get_error() or "no token may follow").partition("\n")
            kind = ModelError if self._read else SettingError  # before the reply, it is to blame
            raise kind(f"the format can't be kept: {problem}")
        return torch.from_numpy(mask)


class StrictCalls:
    """As `ReplyFormat`, for a reply in which any id may follow outside calls of tools.

    A call begins with OPEN, or, if the template has no tags, with `{` at the reply's start. `call`
    is the format of the text after that.
    """

    def __init__(self, call: ReplyFormat, tokenizer: Any, vocabulary: Any, tagged: bool) -> None:
        self._call, self._tagged = call, tagged
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._free = torch.ones(call.size, dtype=torch.bool)
        self.is_in_call = self._is_text = False
        self._read = 0
        self._newest: list[int] = []  # outside calls

    def __call__(self, ids: Sequence[int]) -> Tensor:
        matcher = self._call.matcher
        for token in ids[self._read :]:
            if self.is_in_call:
                matcher.consume_token(token)
                self.is_in_call = not (self._tagged and matcher.is_accepting())
                continue
            self._newest = [*self._newest[-len(CALL_OPEN) :], token]
            if (beginning := self._call_beginning()) is not None:
                matcher.reset()
                matcher.consume_tokens(self._vocabulary.tokenize_str(beginning))
                self.is_in_call, self._newest = True, []
        self._read = len(ids)
        return self._call.mask() if self.is_in_call else self._free

    def _call_beginning(self) -> str | None:
        """The text of a call in the newest ids; None if no call has begun."""
        text = self._tokenizer.decode(self._newest, clean_up_tokenization_spaces=False)
        if self._tagged:
            _, opening, beginning = text.partition(CALL_OPEN)
            return beginning if opening else None
        text = text.lstrip().removeprefix(PYTHON)
        self._is_text |= bool(text) and not text.startswith("{")
        return text if text and not self._is_text else None
