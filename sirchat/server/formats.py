"""Makes replies follow a format, JSON or calls of tools; llguidance says which tokens it allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.chat.session import Session
from sirchat.server.requests import FunctionFields, RequestError
from sirchat.server.tools import CLOSE, OPEN
from sirchat.text.other_templates import ToolTemplate

# JSON has blanks only where Python's `json.dumps` writes them: with others allowed, small models
# would write blanks without end.
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Formats:
    """Makes the masks of next ids that hold a model's replies to JSON or to calls of tools.

    The model's vocabulary is prepared at first use.
    """

    def __init__(self) -> None:
        self._vocabulary: Any = None

    def json_format(self, schema: dict[str, Any], session: Session) -> ReplyFormat:
        """The format of a reply in JSON by this schema; RequestError if that is not possible."""
        return self._format(
            session,
            "response_format",
            lambda matcher: matcher.grammar_from_json_schema(json.dumps(schema), overrides=_BLANKS),
        )

    def tool_call_format(
        self, tools: Sequence[FunctionFields], most: int, session: Session
    ) -> ReplyFormat:
        """The format of a reply that consists of one to `most` calls of these tools.

        RequestError if the chat template does not write calls as JSON, or if the model or a schema
        can't be used.
        """
        template = session.template
        form = template.call_form() if isinstance(template, ToolTemplate) else None
        if form is None or (form[0].strip(), form[2].strip()) not in (("", ""), (OPEN, CLOSE)):
            problem = "the model's chat template does not write calls as JSON"
            raise _refusal("tool_choice", f"can't have a tool in it: {problem}")
        most = most if form[0] else 1  # without tags, a reply can be only one call
        grammar = _grammar(tools, most, *form)
        return self._format(
            session, "tool_choice", lambda matcher: matcher.grammar_from_lark(grammar)
        )

    def _format(self, session: Session, param: str, grammar: Callable[[Any], str]) -> ReplyFormat:
        """The format by the text that `grammar` makes with llguidance's class `LLMatcher`."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            problem = "needs the package llguidance: pip install 'sirchat[server]'"
            raise _refusal(param, problem) from None
        model, template = session.model, session.template
        if template.marks.is_open:
            problem = "can't be had from a model that begins every reply with reasoning"
            raise _refusal(param, problem)
        if self._vocabulary is None:
            declared = getattr(model.module.generation_config, "eos_token_id", None)
            ends = sorted(template.end_ids(declared))
            try:
                written = model.tokenizer.backend_tokenizer.to_str()
                self._vocabulary = LLTokenizer(written, n_vocab=model.vocab_size, eos_token=ends)
            except Exception as error:  # llguidance supports most kinds of tokenizers, but not all
                raise _refusal(param, f"can't be had from this model: {error}") from None
        try:
            written = grammar(LLMatcher)
            problem = LLMatcher.validate_grammar(written, self._vocabulary)
        except ValueError as error:  # such as a number that is too large
            problem = str(error)
        if problem:
            raise _refusal(param, f"has a schema that can't be used: {problem}")
        return ReplyFormat(LLMatcher(self._vocabulary, written), model.vocab_size)


def _grammar(
    tools: Sequence[FunctionFields], most: int, opening: str, arguments: str, closing: str
) -> str:
    """A grammar, in llguidance's dialect of Lark, for one to `most` calls, each on its own line.

    `opening` and `closing` stand around a call; `arguments` names the field for its arguments.
    """
    before, after = ([json.dumps(text)] if text else [] for text in (opening, closing))
    calls = f"({' | '.join(f'call{number}' for number in range(len(tools)))})"
    lines = [
        "start: call" + (f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""),
        f"call: {' '.join([*before, calls, *after])}",
    ]
    for number, tool in enumerate(tools):
        begun = f'{{"name": {json.dumps(tool.name)}, {json.dumps(arguments)}: '
        schema = json.dumps(_forbid_other_arguments(tool.parameters) | {"x-guidance": _BLANKS})
        lines.append(f'call{number}: {json.dumps(begun)} arguments{number} "}}"')
        lines.append(f"arguments{number}: %json {schema}")
    return "\n".join(lines)


def _forbid_other_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, changed to allow only those that it names.

    Unchanged if it has no `properties`, or combines other schemas.
    """
    # small models would invent more and more arguments
    is_plain = "properties" in schema and not {"allOf", "anyOf", "oneOf", "$ref"} & set(schema)
    return {"additionalProperties": False, **schema} if is_plain else schema


class ReplyFormat:
    """Called with the ids of the reply so far, returns which ids may follow: a mask, bool [V].

    `matcher` is llguidance's, which reads the ids one after another; `size` is V.
    """

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size
        self._read = 0

    def __call__(self, ids: Sequence[int]) -> Tensor:
        for token in ids[self._read :]:
            self._matcher.consume_token(token)
        self._read = len(ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._size].astype(bool))


def _refusal(param: str, problem: str) -> RequestError:
    return RequestError(f"{param} {problem[:300]}", param=param)
