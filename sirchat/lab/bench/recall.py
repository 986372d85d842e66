"""Measures what recall costs: the time of its search, and of a turn with and without recall.

Recall restores the archived tokens that fit a message.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
from random import Random
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from sirchat.chat.events import Recalled
from sirchat.chat.session import Session
from sirchat.chat.state import ConversationState, Turn
from sirchat.config.profile import Profile
from sirchat.config.profile_files import changed_profile
from sirchat.engine.types import EngineState
from sirchat.errors import UsageError
from sirchat.lab.bench.ratio import BenchOptions, Ratio, compare
from sirchat.lab.synthetic.dialogue import Mix, dialogue
from sirchat.memory import archive
from sirchat.memory.archive import Segment
from sirchat.memory.key_values import KeyValues, Positions
from sirchat.memory.ledger import ROW, Role
from sirchat.memory.random_numbers import Purpose, uniform
from sirchat.models.model import LoadedModel
from sirchat.recall.retrievers import retriever

_MIX = Mix(tell=0.3, ask=0.1, repeat=0.02, story=0.2, quiz=0.1, untold=0.05)
_RECALLED = 100  # tokens
_REPLY = 32
_QUESTION_SEED = 1
_AT_ONCE = 4096  # tokens that are put into the archive


def bench_recall(
    model: LoadedModel, options: BenchOptions, sizes: Sequence[int], retrievers: Sequence[str]
) -> Iterator[Ratio]:
    """Compare the time of a turn with recall and without it, in chats of several lengths.

    Raises UsageError for a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise UsageError(f"recall compares text, and {model.name} has no tokenizer")
    profile = changed_profile(
        Profile(),
        "bench",
        budget=options.cache,
        max_new_tokens=_REPLY,
        temperature=0.0,
        archive_limit="1TiB",  # a full archive drops tokens, which an undo would need
    )
    for size in sizes:
        session = long_chat(model, profile, size)
        asked = [_question(number) for number in range(options.rounds + 1)]
        for name in retrievers:
            yield _turns(session, asked, name, options)


def _turns(session: Session, asked: list[str], name: str, options: BenchOptions) -> Ratio:
    """Measure turns with the retriever `name` against turns without recall."""
    searches: list[float] = []
    session.stop_ids = frozenset()  # else turns with and without recall are of different lengths

    def seconds(recall: str) -> Iterator[float]:
        for text in itertools.cycle(asked):
            # Even where nothing fits, something comes back.
            session.switch("bench", recall=recall, recall_n=_RECALLED)
            start = time.perf_counter()
            for event in session.ask(text):
                if isinstance(event, Recalled):
                    searches.append(event.seconds)
            taken = time.perf_counter() - start
            session.undo()
            yield taken

    size = session.seen
    ratio = compare(
        f"turn with recall {name} against a turn without, {size:,} tokens read",
        lambda: seconds(name),
        lambda: seconds("off"),
        options,
    )
    low, median, high = np.quantile(searches[1:], [0.25, 0.5, 0.75]) * 1000
    reads = "" if not retriever(name).needs_turn else ", reading the turn included"
    search = f"search {median:.1f} ms ({low:.1f} to {high:.1f}){reads}"
    return replace(ratio, note=f"{name} in {size:,} tokens: {search}", unit="turn")


def _question(number: int) -> str:
    """Generate user message number `number` for the turns that are timed."""
    said = dialogue(Random(f"question/{_QUESTION_SEED}/{number}"), 8, _MIX)
    return [message.text for message in said if message.role == "user"][-1]


def long_chat(model: LoadedModel, profile: Profile, tokens: int) -> Session:
    """Make a session that looks like a chat of about `tokens` tokens, which no model has read."""
    session = Session(model, profile)
    as_text = cache(session.template.as_text)
    frame = {"user": session.template.user("a"), "assistant": session.template.assistant("a")}
    turns, columns = list[Turn](), dict[str, list[int]](token_id=[], turn=[], role=[])
    for number, (role, text) in enumerate(_said()):
        ids, (start, end) = as_text(text), frame[role].content
        before, after = frame[role].ids[:start], frame[role].ids[end:]
        if role == "assistant":
            after = [*after, *session.template.closing]
        said = [Role[role.upper()]] * len(ids)
        turns.append(Turn(role, text))
        columns["token_id"] += [*before, *ids, *after]
        columns["role"] += [Role.TEMPLATE] * len(before) + said + [Role.TEMPLATE] * len(after)
        columns["turn"] += [number] * (len(before) + len(ids) + len(after))
        if len(columns["turn"]) >= tokens and role == "assistant":
            break
    count = len(columns["turn"])
    rows = np.zeros(count, ROW)
    for name, values in columns.items():
        rows[name] = values
    rows["round"] = rows["turn"] // 2 + 1
    rows["surprisal"] = -np.log1p(-np.random.default_rng(0).random(count)) * 2
    rows["arrival_key"] = uniform(profile.seed, Purpose.ARRIVAL, np.arange(count))
    held = np.arange(max(0, count - profile.budget // 2), count)
    logits = np.zeros(model.vocab_size, np.float32)
    rounds = int(rows["round"][-1])
    state = EngineState(rows, held, 0.0, 1.0, logits, rounds)
    zeros = _zeros(model)
    blocks = np.array_split(np.arange(held[0]), 1 + held[0] // _AT_ONCE)
    evicted = (_repeated(zeros, at) for at in blocks if len(at))
    with patch.object(archive, "Segment", partial(_shared, Segment(zeros))):
        conversation = ConversationState(turns=turns, round=rounds)
        session.load(state, conversation, _repeated(zeros, held), evicted=evicted)
    session.recall.update()
    passages = session.recall.search.passages
    if size := model.passage_encoder.size:
        vectors = np.random.default_rng(0).normal(size=(len(passages), size)).astype(np.float16)
        passages.vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return session


def _said() -> Iterator[tuple[str, str]]:
    """The roles and texts of 300 generated conversations, again and again."""
    said: list[tuple[str, str]] = []
    for number in range(300):
        for message in dialogue(Random(f"long chat/{number}"), 30, _MIX):
            if message.role == ("assistant" if len(said) % 2 else "user"):
                said.append((message.role, message.text))
    return itertools.cycle(said[: len(said) // 2 * 2])


def _zeros(model: LoadedModel) -> list[Tensor]:
    """Make keys and values [H, 1, D] of one token that are zero."""
    cache = model.new_cache(1)
    model.forward([0], cache)
    cache.commit(1)
    one = cache.first_written(torch.zeros(1, dtype=torch.int64), np.zeros(1, np.int64))
    return [torch.zeros_like(tensor) for tensor in one.tensors]


def _repeated(zeros: list[Tensor], positions: Positions) -> KeyValues:
    """Keys and values of the tokens at `positions` [n] that take the memory of one token."""
    tensors = [tensor.expand(-1, len(positions), -1) for tensor in zeros]
    return KeyValues(positions, np.zeros(len(positions), np.int64), tensors)


def _shared(first: Segment, like: list[Tensor]) -> Segment:
    """A segment of the archive that takes no memory: all have the tensors of the first."""
    one = copy(first)
    one.positions, one.written_at = first.positions.copy(), first.written_at.copy()
    return one
