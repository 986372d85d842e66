"""A session's state after its last turn: as the head of its file, and back, checked.

A file is not trusted: what does not fit together is reported as damage, before any of it is used.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from sirchat.chat.conversation import Conversation, Tally, Turn
from sirchat.chat.events import Finish
from sirchat.chat.session import Session
from sirchat.engine.records import EngineState
from sirchat.memory.ledger import ROW, Flag, Role
from sirchat.saved.database import decoding, require
from sirchat.saved.store import Head, SessionStore

_MOST = 2**53
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Seconds = Annotated[float, Field(ge=0)]
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class _Tally(BaseModel):
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
    reply: _Tally
    owed: list[_Count]
    totals: _Tally
    attempt: _Count


class _Fields(BaseModel):
    """The JSON of the head, but for the profile, which has its own checks."""

    model_config = _STRICT

    log_decay: Annotated[float, Field(le=0)]
    unknown_surprisal: float
    round: _Count
    pinned: list[_Count]
    retired: list[_Count] = []
    recalled: list[_Count] = []
    kv: str
    conversation: _Conversation


def saved_head(saved: EngineState, session: Session, stamp: str = "") -> Head:
    """The head that describes a session whose engine's state is `saved`."""
    now = session.conversation
    pinned = np.flatnonzero(saved.rows["flags"] & Flag.PINNED)
    fields = {
        "profile": session.profile.model_dump(),
        "log_decay": saved.log_decay,
        "unknown_surprisal": saved.unknown_surprisal,
        "round": saved.round,
        "pinned": pinned.tolist(),
        "retired": np.flatnonzero(saved.rows["flags"] & Flag.RETIRED).tolist(),
        "recalled": saved.recalled.tolist(),
        "kv": stamp,
        "conversation": {
            "round": now.round,
            "in_round": now.in_round,
            "system": [now.system.start, now.system.stop],
            "prompt": now.prompt,
            "reply": asdict(now.reply),
            "owed": now.owed,
            "totals": asdict(now.totals),
            "attempt": now.attempt,
        },
    }
    return Head(len(saved.rows), saved.held, saved.logits, fields)


def read_state(
    store: SessionStore, head: Head, vocabulary: int
) -> tuple[EngineState, Conversation, str]:
    """The state of the engine, the conversation, and the stamp of keys and values.

    Raises SessionError where they contradict each other, or have ids beyond the `vocabulary`.
    """
    with decoding(store.path):
        fields, turns = _Fields.model_validate(head.fields), store.turns()
        now, rows = fields.conversation, store.rows(ROW)
        _check_rows(rows, len(turns), fields.round, vocabulary)
        pinned, retired, recalled = (
            np.asarray(one, np.int64) for one in (fields.pinned, fields.retired, fields.recalled)
        )
        require(all((one < head.seen).all() for one in (pinned, retired)))
        require(bool(np.isin(recalled, head.held).all() and (np.diff(recalled) > 0).all()))
        require(now.system[0] <= now.system[1] <= head.seen)
        require(head.logits is None or len(head.logits) == vocabulary)
        require(all(one < vocabulary for one in now.owed))
        require(now.round == fields.round)
        rows["flags"] &= ~np.uint8(Flag.PINNED | Flag.RETIRED)
        rows["flags"][pinned] |= np.uint8(Flag.PINNED)
        rows["flags"][retired] |= np.uint8(Flag.RETIRED)
        saved = EngineState(
            rows=rows,
            held=head.held,
            log_decay=fields.log_decay,
            unknown_surprisal=fields.unknown_surprisal,
            logits=head.logits,
            round=fields.round,
            recalled=recalled,
        )
        conversation = Conversation(
            turns=[Turn(t.role, t.text, t.finish) for t in turns],  # type: ignore[arg-type]
            round=now.round,
            in_round=now.in_round,
            system=range(*now.system),
            prompt=now.prompt,
            reply=Tally(**now.reply.model_dump()),
            owed=now.owed,
            totals=Tally(**now.totals.model_dump()),
            attempt=now.attempt,
        )
        return saved, conversation, fields.kv


def _check_rows(rows: NDArray[np.void], turns: int, rounds: int, vocabulary: int) -> None:
    """Raise ValueError for ledger rows that no session has."""
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
    # Unknown (NaN) is the first token's, and that of the first after a turn that was cut off.
    require(not np.isinf(rows["surprisal"]).any() and not (rows["surprisal"] < -1).any())
