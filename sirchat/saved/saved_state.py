"""Converts a session's state after its last turn to the contents of its files, and back.

The state is saved in two parts: the head, in the session's file, and tensors, in a file beside it.
All data that is read from these files is checked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, astuple
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter

from sirchat.chat.events import Finish
from sirchat.chat.pinned_summary import PREFIX
from sirchat.chat.pinned_text import PinnedText, pinned_text
from sirchat.chat.session import Session
from sirchat.chat.state import ConversationState, Turn, TurnStats
from sirchat.config.profile import Profile, with_new_names
from sirchat.engine.types import EngineState
from sirchat.errors import SessionError
from sirchat.memory.attention import AttentionCheckpoint, QueryWindow
from sirchat.memory.cache_layers import CacheState
from sirchat.memory.key_values import KeyValues
from sirchat.memory.ledger import ROW, Flag, Role
from sirchat.memory.policies import refuse_untrusted
from sirchat.saved.database import decoding, require
from sirchat.saved.store import Head, SessionStore

_MOST = 2**53
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Seconds = Annotated[float, Field(ge=0)]
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class _TurnStats(BaseModel):
    model_config = _STRICT

    index: _Count
    role: str
    tokens_in: _Count
    tokens_out: _Count
    evicted: _Count
    seconds_prefill: _Seconds
    seconds_decode: _Seconds
    finish: Finish


class _Conversation(BaseModel):
    model_config = _STRICT

    round: _Count
    in_round: bool
    system: Annotated[list[_Count], Field(min_length=2, max_length=2)]
    prompt: str | None
    reply: _TurnStats
    pending_ids: list[_Count] = Field(validation_alias=AliasChoices("pending_ids", "owed"))
    totals: _TurnStats
    attempt: _Count
    summaries: list[_Count] | None = None  # indices of turns; not in old files


class _Fields(BaseModel):
    """The JSON fields of a saved head, with the limits of their values.

    A head is the record of a session's state after its last turn. Its field `profile` is checked by
    `saved_profile`.
    """

    model_config = _STRICT

    log_decay: Annotated[float, Field(le=0)]
    unknown_surprisal: float
    round: _Count
    pinned: list[_Count]
    excluded: list[_Count] = Field([], validation_alias=AliasChoices("excluded", "retired"))
    recalled: list[_Count] = []
    kv: str
    conversation: _Conversation


def saved_head(saved: EngineState, session: Session, stamp: str = "") -> Head:
    """Make the head of `session`: the record of its state after the last turn.

    `saved` is the engine's state. `stamp` identifies the saved keys and values; "" if none are
    saved.
    """
    now = session.conversation
    pinned = np.flatnonzero(saved.rows["flags"] & Flag.PINNED)
    fields = {
        "profile": session.profile.model_dump(),
        "log_decay": saved.log_decay,
        "unknown_surprisal": saved.unknown_surprisal,
        "round": saved.round,
        "pinned": pinned.tolist(),
        "pins": [list(astuple(one)) for one in pinned_text(session)],
        "excluded": np.flatnonzero(saved.rows["flags"] & Flag.EXCLUDED).tolist(),
        "recalled": saved.recalled.tolist(),
        "kv": stamp,
        "conversation": {
            "round": now.round,
            "in_round": now.in_round,
            "system": [now.system.start, now.system.stop],
            "prompt": now.prompt,
            "reply": asdict(now.reply),
            "pending_ids": now.pending_ids,
            "totals": asdict(now.totals),
            "attempt": now.attempt,
            "summaries": [index for index, turn in enumerate(now.turns) if turn.is_summary],
        },
    }
    return Head(len(saved.rows), saved.held, saved.logits, fields)


def decode_state(
    store: SessionStore, head: Head, vocabulary: int
) -> tuple[EngineState, ConversationState, str]:
    """Read a saved session; returns the engine's state, the conversation, and a stamp.

    The stamp identifies the saved keys and values. Raises SessionError if the saved data is damaged
    or contradicts itself, or if a token id is not below `vocabulary`.
    """
    with decoding(store.path):
        fields, turns = _Fields.model_validate(head.fields), saved_turns(store, head)
        now, rows = fields.conversation, store.rows(ROW)
        _check_rows(rows, len(turns), fields.round, vocabulary)
        pinned, excluded, recalled = (
            np.asarray(one, np.int64) for one in (fields.pinned, fields.excluded, fields.recalled)
        )
        require(all((one < head.seen).all() for one in (pinned, excluded)))
        require(bool(np.isin(recalled, head.held).all() and (np.diff(recalled) > 0).all()))
        require(now.system[0] <= now.system[1] <= head.seen)
        require(head.logits is None or len(head.logits) == vocabulary)
        require(all(one < vocabulary for one in now.pending_ids))
        require(now.round == fields.round)
        rows["flags"] &= ~np.uint8(Flag.PINNED | Flag.EXCLUDED)
        rows["flags"][pinned] |= np.uint8(Flag.PINNED)
        rows["flags"][excluded] |= np.uint8(Flag.EXCLUDED)
        saved = EngineState(
            rows=rows,
            held=head.held,
            log_decay=fields.log_decay,
            unknown_surprisal=fields.unknown_surprisal,
            logits=head.logits,
            round=fields.round,
            recalled=recalled,
        )
        conversation = ConversationState(
            turns=turns,
            round=now.round,
            in_round=now.in_round,
            system=range(*now.system),
            prompt=now.prompt,
            reply=TurnStats(**now.reply.model_dump()),
            pending_ids=now.pending_ids,
            totals=TurnStats(**now.totals.model_dump()),
            attempt=now.attempt,
        )
        return saved, conversation, fields.kv


def saved_turns(store: SessionStore, head: Head) -> list[Turn]:
    """The turns of a saved session; in a file of an old version, the text tells the summaries."""
    conversation = head.fields.get("conversation")
    listed = conversation.get("summaries") if isinstance(conversation, dict) else None
    return [
        Turn(
            turn.role,
            turn.text,
            turn.finish,  # type: ignore[arg-type]
            turn.index in listed if isinstance(listed, list) else turn.text.startswith(PREFIX),
        )
        for turn in store.turns()
    ]


_PINS = TypeAdapter(
    list[Annotated[list[_Count], Field(min_length=3, max_length=3)]], config=_STRICT
)


def saved_pins(head: Head) -> list[PinnedText]:
    """The parts of the text that the user pinned, as a session's head records them.

    Returns an empty list if the parts are saved in an unknown format.
    """
    try:
        return [PinnedText(*one) for one in _PINS.validate_python(head.fields.get("pins", []))]
    except ValueError:
        return []


def _check_rows(rows: NDArray[np.void], turns: int, rounds: int, vocabulary: int) -> None:
    """Raise ValueError if a value in the saved ledger rows (one row per token) is impossible.

    `turns` and `rounds` are the session's numbers of turns and rounds; token ids must be below
    `vocabulary`.
    """
    limits = {
        "token_id": (0, vocabulary - 1),
        "turn": (0, max(0, turns - 1)),
        "round": (0, rounds),
        "role": (min(Role), max(Role)),
        "flags": (0, sum(Flag)),
        "birth_decay": (-np.inf, 0),
        "arrival_key": (0, 1),
    }
    for name, (least, most) in limits.items():
        require(bool(((rows[name] >= least) & (rows[name] <= most)).all()))
    for name in ("turn", "round"):
        require(bool((np.diff(rows[name]) >= 0).all()))
    require(bool(np.isfinite(rows["birth_decay"]).all()))
    # The surprisal of the first token, and of the first after a turn that was cut off, is NaN.
    require(not np.isinf(rows["surprisal"]).any() and not (rows["surprisal"] < -1).any())
    require(not np.isinf(rows["learned_score"]).any())


def saved_profile(store: SessionStore, trusted: Collection[str] = ()) -> Profile:
    """Read the settings of a saved session.

    Raises SettingError if the policy is a class of the user's own, `module:Class`, that is not in
    `trusted`. Raises SessionError if this version of sirchat does not know all settings.
    """
    head = store.head()
    try:
        profile = _profile(head.fields.get("profile")) if head else Profile()
    except ValueError:
        raise SessionError(
            f"session {store.id} has settings that this version of sirchat does not know",
            hint="`sirchat sessions export` writes its text, for `sirchat replay` to read",
        ) from None
    refuse_untrusted(profile.policy, f"session {store.id}", trusted)
    return profile


def _profile(values: object) -> Profile:
    return Profile.model_validate(with_new_names(values) if isinstance(values, dict) else values)


_ATTENTION = "attention."
_STATE = "state."


def row_tensors(rows: KeyValues) -> dict[str, torch.Tensor]:
    """The tensors to save for the keys and values `rows`, by name.

    The tensors of `rows.tensors`, in their order, are named "0", "1", ... The tensor `positions`
    has the stream positions of the rows, and `written_at` their rotary positions.
    """
    named = {str(n): tensor for n, tensor in enumerate(rows.tensors)}
    positions, written_at = map(torch.from_numpy, (rows.positions, rows.written_at))
    return {**named, "positions": positions, "written_at": written_at}


def attention_tensors(received: AttentionCheckpoint) -> dict[str, torch.Tensor]:
    """The tensors to save, by name, for the attention that tokens have received.

    The result is empty if no attention was counted.
    """
    counted = [received.total, received.repeated]
    if not any(one is not None and one.any() for one in counted):
        return {}
    named: dict[str, NDArray[Any]] = {
        "positions": received.positions,
        "total": received.total,
        "log_decay": received.log_decay,
    }
    if received.repeated is not None:
        named["repeated"] = received.repeated
    for number, part in enumerate(received.window):
        named |= {f"{number}.positions": part.positions, f"{number}.weights": part.weights}
    return {_ATTENTION + key: torch.from_numpy(array.copy()) for key, array in named.items()}


def state_tensors(state: CacheState) -> dict[str, torch.Tensor]:
    """The tensors to save, by name, for the state of recurrent and convolution layers."""
    return {
        f"{_STATE}{number}.{kind}.{which}": tensor.contiguous()
        for number, layer in enumerate(state)
        for (kind, which), tensor in layer.items()
    }


def pop_state(tensors: dict[str, torch.Tensor], one: CacheState) -> CacheState:
    """Remove the tensors of recurrent layers' state from `tensors`, and return this state.

    `one` is a state of the same model; the returned state is on its device. If the saved tensors
    have other names, shapes or dtypes than `one`, returns the empty tuple: the state must then be
    computed again.
    """
    saved = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_STATE)}
    wanted = state_tensors(one)
    if saved.keys() != wanted.keys() or any(
        (saved[name].shape, saved[name].dtype) != (like.shape, like.dtype)
        for name, like in wanted.items()
    ):
        return ()
    return tuple(
        {
            (kind, which): saved[f"{_STATE}{number}.{kind}.{which}"].to(like.device)
            for (kind, which), like in layer.items()
        }
        for number, layer in enumerate(one)
    )


def pop_attention(tensors: dict[str, torch.Tensor]) -> AttentionCheckpoint | None:
    """Remove the attention that tokens have received from saved tensors, and return it.

    Returns None if no attention is saved.
    """
    keys = [key for key in tensors if key.startswith(_ATTENTION)]
    named = {key.removeprefix(_ATTENTION): tensors.pop(key).numpy() for key in keys}
    if not named:
        return None
    count = sum(key.endswith(".weights") for key in named)
    window = [QueryWindow(named[f"{n}.positions"], named[f"{n}.weights"]) for n in range(count)]
    return AttentionCheckpoint(
        named["positions"],
        named["total"],
        named["log_decay"],
        tuple(window),
        named.get("repeated"),
    )


def pop_rows(tensors: dict[str, torch.Tensor]) -> KeyValues:
    """Make rows of keys and values from saved tensors.

    Removes `positions` and `written_at` from `tensors`, which may then have only keys and values.
    """
    positions = tensors.pop("positions").numpy()
    written_at = tensors.pop("written_at").numpy()
    return KeyValues(positions, written_at, [tensors[str(n)] for n in range(len(tensors))])


def rows_fit(rows: KeyValues, one: KeyValues, seen: int) -> bool:
    """Whether saved rows of keys and values fit a model and a stream of `seen` tokens.

    `one` is a single row of this model: saved rows must have the same shapes and dtypes. Their
    stream positions must ascend and be below `seen`.
    """
    count, shapes = len(rows), [(*t.shape[:1], len(rows), *t.shape[2:]) for t in one.tensors]
    return (
        _ascend(rows.positions, seen)
        and rows.written_at.shape == (count,)
        and rows.written_at.dtype == np.int64
        and bool(((rows.written_at >= 0) & (rows.written_at < 2**31)).all())
        and [tuple(tensor.shape) for tensor in rows.tensors] == shapes
        and [tensor.dtype for tensor in rows.tensors] == [tensor.dtype for tensor in one.tensors]
    )


def attention_fits(received: AttentionCheckpoint, seen: int) -> bool:
    """Whether the arrays of saved attention fit each other and a stream of `seen` tokens.

    Their shapes must match, and their stream positions must ascend and be below `seen`.
    """
    columns = [received.total, received.log_decay, received.repeated]
    shapes = {column.shape for column in columns if column is not None}
    return (
        _ascend(received.positions, seen)
        and shapes == {received.positions.shape}
        and all(
            _ascend(part.positions, seen) and part.weights.shape[1:] == part.positions.shape
            for part in received.window
        )
    )


def _ascend(positions: NDArray[Any], seen: int) -> bool:
    """Whether `positions` [n] are ascending stream positions, all of them below `seen`."""
    if positions.ndim != 1 or positions.dtype != np.int64:
        return False
    inside = ((positions >= 0) & (positions < seen)).all()
    return bool(inside and (np.diff(positions) > 0).all())
