"""Makes replies follow a format: JSON, JSON that matches a schema, or calls of tools.

At each step, the package llguidance says which tokens the format allows next, and the model chooses
one of these tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sirchat.chat.session import Session
from sirchat.server.requests import RequestError
from sirchat.server.tool_fields import FunctionFields
from sirchat.server.tools import CLOSE, OPEN
from sirchat.text.other_templates import ToolTemplate

_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance: JSON has blanks only where Python's `json.dumps` writes them.

If other blanks were allowed, small models would write blanks without end.
"""


class Formats:
    """Makes the formats of replies (`ReplyFormat`) for one model.

    When the first format is made, the model's vocabulary is prepared for llguidance.
    """

    def __init__(self) -> None:
        self._vocabulary: Any = None

    def json(self, schema: dict[str, Any], session: Session) -> ReplyFormat:
        """Make the format of a reply that is JSON and matches the JSON schema `schema`.

        Raises RequestError if the schema can't be used, or if the model can't have formats.
        """
        return self._format(
            session,
            "response_format",
            lambda matcher: matcher.grammar_from_json_schema(json.dumps(schema), overrides=_BLANKS),
        )

    def calls(self, tools: Sequence[FunctionFields], most: int, session: Session) -> ReplyFormat:
        """Make the format of a reply that consists of one to `most` calls of the given tools.

        Raises RequestError if the chat template does not write calls as JSON, if a tool's schema
        can't be used, or if the model can't have formats.
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
        """Make a reply format from a grammar.

        `grammar` is a function that takes llguidance's class `LLMatcher`, and returns the grammar
        as text. `param` is the field of the request that asks for the format. A RequestError that
        is raised names this field.
        """
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            problem = "needs the package llguidance: pip install 'sirchat[server]'"
            raise _refusal(param, problem) from None
        model, template = session.model, session.template
        if template.opens_reasoning:
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
    """A grammar for a reply of one to `most` calls of `tools`, each call on its own line.

    The grammar is text in llguidance's dialect of Lark. `opening` and `closing` are the texts
    before and after a call; `arguments` is the name of the JSON field for a call's arguments.
    """
    before, after = ([json.dumps(text)] if text else [] for text in (opening, closing))
    one = f"({' | '.join(f'call{number}' for number in range(len(tools)))})"
    lines = [
        "start: call" + (f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""),
        f"call: {' '.join([*before, one, *after])}",
    ]
    for number, tool in enumerate(tools):
        begun = f'{{"name": {json.dumps(tool.name)}, {json.dumps(arguments)}: '
        schema = json.dumps(_closed(tool.parameters) | {"x-guidance": _BLANKS})
        lines.append(f'call{number}: {json.dumps(begun)} arguments{number} "}}"')
        lines.append(f"arguments{number}: %json {schema}")
    return "\n".join(lines)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Change the schema of a tool's arguments to allow only the arguments that the schema names.

    Without this change, small models would invent more and more arguments. A schema that has
    `additionalProperties` or that combines schemas (such as `anyOf`) stays unchanged.
    """
    is_plain = "properties" in schema and not {"allOf", "anyOf", "oneOf", "$ref"} & set(schema)
    return {"additionalProperties": False, **schema} if is_plain else schema


class ReplyFormat:
    """Says which tokens may come next in a reply that must follow a format.

    An instance is called with the ids of the reply so far. It returns a mask, a boolean tensor [V],
    that is true for each id that may come next.

    Args:
        matcher: llguidance's matcher, which reads the ids one after another.
        size: the size of the vocabulary, V.
    """

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size
        self._read = 0

    def __call__(self, ids: Sequence[int]) -> Tensor:
        for one in ids[self._read :]:
            self._matcher.consume_token(one)
        self._read = len(ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._size].astype(bool))


def _refusal(param: str, problem: str) -> RequestError:
    return RequestError(f"{param} {problem[:300]}", param=param)
