"""Makes replies follow a format, JSON or calls of tools; llguidance says which tokens it allows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.chat.session import Session
from sirchat.engine.sampling import Allowed
from sirchat.errors import format_value
from sirchat.server.fields import RequestError
from sirchat.server.requests import ChatRequest, FunctionFields, NamedTool, TextRequest
from sirchat.server.rule import FORMATS, NOT_KEPT
from sirchat.text.other_templates import ToolTemplate
from sirchat.text.tool_calls import CLOSE, OPEN, PYTHON

_MOST_BIAS = 100
_MOST_CALLS = 8  # in a reply that must call tools
# Keywords of a schema: with schemas by names, and with values.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")
# Bounds of numbers, and whether they are lower ones. llguidance fails, or even crashes, with some
# that are far from zero; an upper bound above all numbers that models write is left out.
_BOUNDS = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}
_FAR = 10**18
_REF = re.compile(r'"\$ref": "(#[^"]*)"')  # in JSON
# JSON has blanks only where Python's `json.dumps` writes them: with others allowed, small models
# would write blanks without end.
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Formats:
    """Makes the masks of next ids that hold a model's replies to JSON or to calls of tools.

    The model's vocabulary is prepared at first use.
    """

    def __init__(self) -> None:
        self._vocabulary: Any = None

    def of(
        self, asked: ChatRequest | TextRequest, notes: list[str], session: Session
    ) -> Allowed | None:
        """The format of the reply to a request, if it has one: JSON, calls, or strict calls.

        Also what it says of single tokens, `logit_bias`. What of a schema is not kept is added to
        `notes`. RequestError if the model or a schema can't be used, if the chat template does not
        write calls as JSON, or if the reply has begun in another way.
        """
        allowed = self._of_chat(asked, notes, session) if isinstance(asked, ChatRequest) else None
        if not asked.logit_bias:
            return allowed
        bias = torch.zeros(size := session.model.vocab_size)
        for name, value in asked.logit_bias.items():
            if int(name) >= size:
                raise _refusal("logit_bias", f"has the token {name}; allowed: 0 to {size - 1}")
            bias[int(name)] = -math.inf if value <= -_MOST_BIAS else min(value, _MOST_BIAS)
        if allowed is None:
            return lambda ids: bias
        return lambda ids: bias.masked_fill(~allowed(ids), -math.inf)

    def _of_chat(self, asked: ChatRequest, notes: list[str], session: Session) -> Allowed | None:
        made = self._made(asked, notes, session)
        begun = session.template.as_text((asked.prefill or "").rstrip())
        if made is None or not begun:
            return made
        problem = "end with the beginning of a reply that its format can't go on with"
        try:
            made(begun)
        except RequestError:
            raise _refusal("messages", problem) from None
        if isinstance(made, StrictCalls) and made.is_in_call:
            raise _refusal("messages", "can't end within a call of a tool")
        return lambda ids: made([*begun, *ids])

    def _made(
        self, asked: ChatRequest, notes: list[str], session: Session
    ) -> ReplyFormat | StrictCalls | None:
        schema, called = asked.response_format.schema_of_reply, asked.called_tools
        is_open = asked.tool_choice == "auto" and isinstance(session.template, ToolTemplate)
        tools = called or [each.function for each in asked.tools if is_open]
        is_free = not called and schema is None
        if is_free and not any(tool.strict for tool in tools):
            return None
        param = "tool_choice" if called else "tools" if is_free else "response_format"
        starts = [] if schema is None or called else [_json(schema, notes, param)]
        form = self._call_form(session, param) if tools else None
        if form is None:
            return self._format(session, param, f"start: {starts[0]}", None, is_free)
        if is_free:
            starts = ["after"]
            tools = [t if t.strict else t.model_copy(update={"parameters": {}}) for t in tools]
        else:  # without tags, a reply can be only one call
            is_one = not (form.opening and asked.parallel_tool_calls)
            most = 1 if is_one or isinstance(asked.tool_choice, NamedTool) else _MOST_CALLS
            starts.append(f'call ("\\n" call){{0,{most - 1}}}' if most > 1 else "call")
        lines = [f"start: {' | '.join(starts)}", *form.rules(tools, notes, param)]
        made = self._format(session, param, "\n".join(lines), form, is_free)
        ids = session.model.tokenizer
        return StrictCalls(made, ids, self._vocabulary, bool(form.opening)) if is_free else made

    def _call_form(self, session: Session, param: str) -> _CallForm:
        template = session.template
        form = template.call_form() if isinstance(template, ToolTemplate) else None
        if form is None or (form[0].strip(), form[2].strip()) not in (("", ""), (OPEN, CLOSE)):
            problem = "the model's chat template does not write calls as JSON"
            what = "can't be strict" if param == "tools" else "can't be had with a tool"
            raise _refusal(param, f"{what}: {problem}")
        return _CallForm(*form, {text: i for i, text in template.controls.items()})

    def _format(
        self, session: Session, param: str, grammar: str, form: _CallForm | None, is_free: bool
    ) -> ReplyFormat:
        """The format by a grammar, with the control tokens that `form` has."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            problem = "needs the package llguidance: pip install 'sirchat[server]'"
            raise _refusal(param, problem) from None
        model, template = session.model, session.template
        if template.marks.is_open and not is_free:
            problem = "can't be had from a model that begins every reply with reasoning"
            raise _refusal(param, problem)
        declared = getattr(model.module.generation_config, "eos_token_id", None)
        ends = sorted(template.end_ids(declared))
        if self._vocabulary is None:
            try:
                written = json.loads(model.tokenizer.backend_tokenizer.to_str())
                _rename_controls(written, template.controls)
                text, size = json.dumps(written | {"post_processor": None}), model.vocab_size
                self._vocabulary = LLTokenizer(text, n_vocab=size, eos_token=ends)
            except Exception as error:  # llguidance supports most kinds of tokenizers, but not all
                raise _refusal(param, f"can't be had from this model: {error}") from None
        if problem := LLMatcher.validate_grammar(grammar, self._vocabulary):
            raise _refusal(param, f"has a schema that can't be used: {problem}")
        tags = (OPEN, CLOSE) if form else ()
        never = [i for i, text in template.controls.items() if text not in tags and i not in ends]
        return ReplyFormat(LLMatcher(self._vocabulary, grammar), model.vocab_size, never, ends)


def _rename_controls(written: dict[str, Any], controls: Collection[int]) -> None:
    """Give the control tokens of a tokenizer's JSON names that no schema has as text."""
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
    """How a chat template writes a call: JSON with the key `arguments`, and what is around it.

    `tokens` are the ids of control tokens, by their texts.
    """

    opening: str
    arguments: str
    closing: str
    tokens: Mapping[str, int]

    def rules(self, tools: Sequence[FunctionFields], notes: list[str], param: str) -> list[str]:
        """Rules of a grammar in llguidance's dialect of Lark: `call`, and `after`, without OPEN."""
        before, mark, rest = self.opening.partition(OPEN)
        names = " | ".join(f"call{number}" for number in range(len(tools)))
        lines = [
            f"call: {self._text(before + mark)} {self._text(rest)} called",
            f"after: {self._text(rest) + '?' if rest else ''} called",
            f"called: ({names}) {self._text(self.closing)}",
        ]
        for number, tool in enumerate(tools):
            begun = f'{{"name": {json.dumps(tool.name)}, {json.dumps(self.arguments)}: '
            schema = {**tool.parameters, "type": "object"}
            # Small models would invent more and more arguments.
            if "properties" in schema and not {"allOf", "anyOf", "oneOf", "$ref"} & set(schema):
                schema = {"additionalProperties": False, **schema}
            arguments = _json(schema, notes, param)
            lines.append(f'call{number}: {json.dumps(begun)} {arguments} "}}"')
        return lines

    def _text(self, text: str) -> str:
        """A text in a grammar, in which tags that are control tokens stand by their ids."""
        parts, ids = filter(None, re.split(f"({OPEN}|{CLOSE})", text)), self.tokens
        return " ".join(f"<[{ids[p]}]>" if p in ids else json.dumps(p) for p in parts)


def _json(schema: dict[str, Any], notes: list[str], param: str) -> str:
    """JSON by a schema, in a grammar."""
    if not _can_end(schema):
        raise _refusal(param, "has a schema that no JSON can meet: it needs itself within itself")
    return f"%json {json.dumps({**_kept(schema, notes, param), 'x-guidance': _BLANKS})}"


def _can_end(root: dict[str, Any]) -> bool:
    """Whether some finite JSON matches the schema `root`: no part needs itself within itself."""
    places, ended = set(_REF.findall(json.dumps(root))), set[str]()
    while new := {at for at in places - ended if _ends(_part(root, at), ended)}:
        ended |= new
    return _ends(root, ended)


def _ends(schema: Any, ended: Collection[str]) -> bool:
    """Whether some finite JSON matches a schema, if some does of each of the places `ended`."""
    if not isinstance(schema, dict):
        return True
    place, known = schema.get("$ref"), schema.get("properties")
    if isinstance(place, str) and place.startswith("#") and place not in ended:
        return False
    required, needed = schema.get("required"), list[Any]()
    if isinstance(known, dict) and isinstance(required, list):
        needed += [known.get(str(name)) for name in required]
    needed += [schema.get("items")] if schema.get("minItems") else []
    choices = [schema.get(name) for name in ("anyOf", "oneOf")]
    return all(_ends(one, ended) for one in needed) and all(
        any(_ends(one, ended) for one in group)
        for group in choices
        if isinstance(group, list) and group
    )


def _part(root: Any, place: str) -> Any:
    for name in place.split("/")[1:]:
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _kept(schema: Any, notes: list[str], param: str) -> Any:
    """A schema without what is not kept, which is added to `notes`."""
    if isinstance(schema, list):
        return [_kept(item, notes, param) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, value in schema.items():
        is_far = name in _BOUNDS and isinstance(value, int | float) and abs(value) >= _FAR
        if is_far and (value > 0) == _BOUNDS[name]:
            raise _refusal(param, f"has a schema whose {name} can't be kept: {format_value(value)}")
        if name in NOT_KEPT or (name == "format" and value not in FORMATS) or is_far:
            if value:
                notes.append(f"{name} of the schema is not kept")
        elif name in _NAMED and isinstance(value, dict):
            kept[name] = {key: _kept(item, notes, param) for key, item in value.items()}
        else:
            kept[name] = value if name in _VALUES else _kept(value, notes, param)
    return kept


class ReplyFormat:
    """Called with the ids of the reply so far, returns which ids may follow: a mask, bool [V].

    `matcher` is llguidance's, which reads the ids one after another; `size` is V. The ids `never`
    may not follow, and the `ends` only where the reply may end. RequestError if the matcher fails.
    """

    def __init__(self, matcher: Any, size: int, never: list[int], ends: list[int]) -> None:
        self.matcher, self.size = matcher, size
        self._never, self._ends, self._read = never, ends, 0

    def __call__(self, ids: Sequence[int]) -> Tensor:
        self.matcher.consume_tokens(list(ids[self._read :]))
        self._read = len(ids)
        return self.mask()

    def mask(self) -> Tensor:
        """Which ids may follow what the matcher has read."""
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self.size].astype(bool)
        mask[self._never] = False
        if not self.matcher.is_accepting():
            mask[self._ends] = False
        if self.matcher.is_error() or not mask.any():
            problem, _, _ = (self.matcher.get_error() or "no token may follow").partition("\n")
            status = 500 if self._read else 400  # before the reply, the format is to blame
            raise RequestError(f"the format can't be kept: {problem}", status=status)
        return torch.from_numpy(mask)


class StrictCalls:
    """As `ReplyFormat`, for a reply in which all ids may follow, but for those within calls.

    A call begins with OPEN, or, if the template has no such tags, with a `{` at the reply's start;
    `call` is the format of what follows then; `is_in_call` is whether a call has begun.
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
            self._newest = [*self._newest[-len(OPEN) :], token]
            if (begun := self._begun()) is not None:
                matcher.reset()
                matcher.consume_tokens(self._vocabulary.tokenize_str(begun))
                self.is_in_call, self._newest = True, []
        self._read = len(ids)
        return self._call.mask() if self.is_in_call else self._free

    def _begun(self) -> str | None:
        """What the newest ids have of a call; None if none has begun."""
        text = self._tokenizer.decode(self._newest, clean_up_tokenization_spaces=False)
        if self._tagged:
            _, opening, begun = text.partition(OPEN)
            return begun if opening else None
        text = text.lstrip().removeprefix(PYTHON)
        self._is_text |= bool(text) and not text.startswith("{")
        return text if text and not self._is_text else None


def _refusal(param: str, problem: str) -> RequestError:
    return RequestError(f"{param} {problem[:300]}", param=param)
