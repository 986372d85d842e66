"""Makes training rows with anchors from synthetic dialogue, and from files.

A row has a fixed number of tokens. It holds one or more documents. A document is a text or a
conversation, and its tokens attend only to tokens of the same document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from sirchat.errors import SettingError
from sirchat.lab.studies.reading import read_data_text
from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.lab.synthetic.rounds import Message, draw_length
from sirchat.text.anchors import Anchors, plain_text_ids
from sirchat.text.detokenizer import SentenceEnds
from sirchat.text.template import Template
from sirchat.text.transcript import TranscriptTurn, parse_json, parse_transcript

_HINT = (
    '{"text": ...}, {"messages": [{"role": ..., "content": ...}, ...]}, {"conversations": [...]}, '
    'or {"role": ..., "content": ...}'
)
TOKENS_PER_ROUND, TOKENS_PER_QUIZ = 23, 54  # averages, to choose how many rounds to generate
_PREFIXES = ("USER:", "ASSISTANT:", "SYSTEM:")


def load_text(path: Path) -> Iterator[str | list[Message]]:
    """Yield the plain texts (str) and the conversations (lists of messages) in a file.

    Raises SettingError for a file that can't be read, TranscriptError for a broken transcript.
    """
    text = read_data_text(path)
    if path.suffix == ".jsonl":
        yield from _lines(text, path)
    elif path.suffix == ".json":
        yield from _sharegpt(text, path)
    elif text.lstrip().startswith(_PREFIXES):
        yield _messages(parse_transcript(text.encode(), str(path), "text"))
    else:
        yield text


def _lines(text: str, path: Path) -> Iterator[str | list[Message]]:
    """The texts and conversations in lines of JSON; successive messages are one conversation."""
    entries = (
        (number, parse_json(line, str(path), number))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    )
    for is_message, group in groupby(entries, key=lambda one: _has(one[1], "role")):
        if is_message:
            number, first = next(group)
            messages = [first, *(entry for _, entry in group)]
            yield _conversation(messages, f"{path}, from line {number} on")
            continue
        for number, entry in group:
            if _has(entry, "messages") or _has(entry, "conversations"):
                yield _conversation(entry, f"{path}, in line {number}")
            elif _has(entry, "text") and isinstance(entry["text"], str):
                yield entry["text"]
            else:
                raise SettingError(
                    f"{path}, line {number}, is neither a text nor a conversation",
                    hint=f"a line is one of {_HINT}",
                )


def _has(entry: object, key: str) -> bool:
    return isinstance(entry, dict) and key in entry


def _sharegpt(text: str, path: Path) -> Iterator[list[Message]]:
    whole = parse_json(text, str(path))
    if not isinstance(whole, list) or not all(_has(one, "conversations") for one in whole):
        whole = [whole]  # one conversation, as an object or a list of messages
    for number, one in enumerate(whole, 1):
        yield _conversation(one, f"{path}, conversation {number}")


def _conversation(entry: object, name: str) -> list[Message]:
    found = entry.get("conversations", entry) if isinstance(entry, dict) else entry
    if isinstance(found, list) and all(_has(one, "from") for one in found):  # ShareGPT's names
        roles = {"human": "user", "gpt": "assistant"}
        found = [
            {"role": roles.get(one["from"], one["from"]), "content": one.get("value")}
            for one in found
        ]
    return _messages(parse_transcript(json.dumps(found).encode(), name, "jsonl"))


def _messages(turns: Iterable[TranscriptTurn]) -> list[Message]:
    return [Message(turn.role, turn.content) for turn in turns]


# Loss weight of the tokens of a conversation's replies; all other tokens have weight 1
ANSWER_WEIGHT = 4.0

# A training row as columns [tokens], by name: `input_ids`, `is_anchor`, `weight`, `document`.
# `weight` is a token's loss weight, and `document` is the number of its document
Row = dict[str, Tensor]


@dataclass(frozen=True)
class Document:
    """A text or a conversation as token ids, for training.

    `is_anchor` says for each token whether it is an anchor; `weight` has its loss weight.
    """

    ids: list[int]
    is_anchor: list[bool]
    weight: list[float]


class Writer:
    """Turns texts and conversations into training documents of token ids, with anchor tokens.

    `anchors` says where the anchor tokens are placed; None for documents without anchors.
    """

    def __init__(self, tokenizer: Any, anchors: Anchors | None) -> None:
        self._tokenizer, self._anchors = tokenizer, anchors
        self._template = Template(tokenizer, anchors)

    def conversation_document(self, messages: Iterable[Message]) -> Document:
        """Make a training document of a conversation, as the chat template renders it.

        Replies before the first user message, and system messages after it, are left out.
        """
        ids: list[int] = []
        weight: list[float] = []
        system, template, header = None, self._template, None

        def add(more: Sequence[int], loss_weight: float = 1.0) -> None:
            ids.extend(more)
            weight.extend([loss_weight] * len(more))

        for one in messages:
            if one.role == "system" and not ids:
                system = one.text
            elif one.role == "user":
                if ids:
                    turn = template.user_turn(one.text)
                else:
                    block, turn = template.opening(one.text, system)
                    add(block.ids if block else [])
                turn = template.followed_by(turn, "assistant")
                add(turn.ids)
                header = turn.header
            elif one.role == "assistant" and ids:
                reply = template.assistant_turn(one.text, header)
                add([*reply.ids, *template.closing], ANSWER_WEIGHT)
        return self._document(ids, weight)

    def text_document(self, text: str) -> Document:
        """Turn a plain text into a training document, with anchor tokens at their places.

        The document begins with the BOS token, if the tokenizer has one.
        """
        bos = self._tokenizer.bos_token_id
        ids = [] if bos is None else [bos]
        ids += plain_text_ids(text, self._anchors, self._encode)
        return self._document(ids, [1.0] * len(ids))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return ids

    def _document(self, ids: list[int], weight: list[float]) -> Document:
        if self._anchors is None:
            is_anchor = [False] * len(ids)
        elif self._anchors.variant == "ac":
            is_anchor = [one == self._anchors.token_id for one in ids]
        else:
            ends = SentenceEnds(self._tokenizer)
            is_anchor = [ends(one) for one in ids]
        return Document(ids, is_anchor, weight)


class TalkRows(Dataset[Row]):
    """A dataset of `rows` training rows of synthetic dialogue, with `tokens` tokens each.

    Row i is generated when it is read. The seed and i decide its content.
    """

    def __init__(self, writer: Writer, mix: Mix, rows: int, tokens: int, seed: int) -> None:
        self._writer, self._mix = writer, mix
        self._rows, self._tokens, self._seed = rows, tokens, seed

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, number: int) -> Row:
        rng = Random(f"{self._seed}/anchors/{number}")
        return packed(self._documents(rng), self._tokens)

    def _documents(self, rng: Random) -> Iterator[Document]:
        left, mix = self._tokens, self._mix
        while left > 0:
            length = left if rng.random() < 0.4 else draw_length(rng, 60, left)
            each = TOKENS_PER_ROUND + mix.quiz * (TOKENS_PER_QUIZ - TOKENS_PER_ROUND)
            one = self._writer.conversation_document(dialogue(rng, max(2, int(length / each)), mix))
            left -= len(one.ids)
            yield one


class TextRows(Dataset[Row]):
    """A dataset of training rows from the texts and conversations in files.

    All documents are concatenated, and cut into rows of `tokens` tokens. Raises SettingError if all
    files together do not fill one row, or a file can't be read.
    """

    def __init__(self, writer: Writer, files: Sequence[Path], tokens: int) -> None:
        self._tokens = tokens
        self._columns = packed(one for file in files for one in _documents(writer, file))
        if not len(self):
            raise SettingError(
                f"the data has {len(self._columns['input_ids']):,} tokens, "
                f"less than one row ({tokens:,})",
                hint="give more files, or a smaller --tokens",
            )

    def __len__(self) -> int:
        return len(self._columns["input_ids"]) // self._tokens

    def __getitem__(self, number: int) -> Row:
        part = slice(number * self._tokens, (number + 1) * self._tokens)
        return {name: column[part] for name, column in self._columns.items()}


def packed(documents: Iterable[Document], tokens: int | None = None) -> Row:
    """Concatenate documents to one training row, which may be cut after `tokens` tokens."""
    ids, is_anchor, weight, document = list[int](), list[bool](), list[float](), list[int]()
    for number, one in enumerate(documents):
        ids += one.ids
        is_anchor += one.is_anchor
        weight += one.weight
        document += [number] * len(one.ids)
    return {
        "input_ids": torch.tensor(ids[:tokens]),
        "is_anchor": torch.tensor(is_anchor[:tokens]),
        "weight": torch.tensor(weight[:tokens]),
        "document": torch.tensor(document[:tokens]),
    }


def _documents(writer: Writer, file: Path) -> Iterator[Document]:
    for one in load_text(file):
        yield (
            writer.text_document(one) if isinstance(one, str) else writer.conversation_document(one)
        )
