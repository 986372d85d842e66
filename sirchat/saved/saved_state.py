"""Converts a session's state to the head of its file, and back, with checks of all data."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, astuple
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from sirchat import __version__
from sirchat.chat.rereading import pinned_text
from sirchat.chat.session import Session
from sirchat.chat.state import ConversationState, SystemPrompt, Turn, TurnStats
from sirchat.config.profile import Profile, rename_old_settings
from sirchat.engine.types import EngineState
from sirchat.errors import SessionError
from sirchat.memory.ledger import ROW, Flag, Role
from sirchat.memory.policies import refuse_untrusted
from sirchat.models.model import LoadedModel
from sirchat.paths import name_or_absolute_path
from sirchat.saved.database import as_damage_errors, require
from sirchat.saved.store import PASSAGE, SavedPassages, SessionStore, StateRecord

_Count = Annotated[int, Field(ge=0, le=2**53)]
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
# The fields of `ConversationState` that are saved as they are, by their names in the file.
_COPIED_FIELDS = {
    "round": "round",
    "in_round": "in_round",
    "tools": "tools_json",
    "heads": "result_pins",
    "asked": "restored_by_user",
    "pending_ids": "pending_ids",
    "attempt": "attempt",
}
# Entries of a config that depend on how a model was saved or loaded, not on the model.
_IGNORED_CONFIG_KEYS = (
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "distributed_config",
)


class _Conversation(BaseModel):
    model_config = _STRICT

    round: _Count
    in_round: bool
    system: tuple[_Count, _Count]
    prompt: str | None
    tools: str
    heads: list[_Count]
    asked: list[_Count]
    reply: TurnStats
    pending_ids: list[_Count]
    totals: TurnStats
    attempt: _Count
    unpinned: frozenset[tuple[_Count, str]]


class SavedState(BaseModel):
    """The fields of a saved head, except `profile`, which `saved_profile` checks."""

    model_config = _STRICT

    log_decay: Annotated[float, Field(le=0)]
    unknown_surprisal: float
    round: _Count
    pins: list[tuple[_Count, _Count, _Count, bool]]  # see `PinnedText`
    kv: str  # the stamp of the keys and values that were saved with it
    passages: _Count  # the stream position up to which recall has made passages
    encoder: int
    conversation: _Conversation


def make_state_record(saved: EngineState, session: Session, stamp: str = "") -> StateRecord:
    """The record of a session with the engine state `saved`; `stamp` is that of keys and values."""
    conversation, system = session.state, session.state.system.positions
    fields = {
        "profile": session.profile.model_dump() | _named_files(session.profile),
        "log_decay": saved.log_decay,
        "unknown_surprisal": saved.unknown_surprisal,
        "round": saved.round,
        "pins": [astuple(text) for text in pinned_text(session)],
        "kv": stamp,
        "passages": int(session.recall.passage_search.passages.state()["until"][0]),
        "encoder": session.model.passage_encoder.checksum,
        "conversation": {
            **{name: getattr(conversation, field) for name, field in _COPIED_FIELDS.items()},
            "system": [system.start, system.stop],
            "prompt": conversation.system.text,
            "reply": asdict(conversation.last_reply_stats),
            "totals": asdict(conversation.totals),
            "unpinned": sorted(conversation.unpinned_sentences),
        },
    }
    cached = session.ledger.held_positions.copy()
    return StateRecord(session.seen, saved.held, saved.logits, fields, cached)


def _named_files(profile: Profile) -> dict[str, str]:
    """The settings that may name a file or a folder, so that other folders know it, too."""
    return {
        key: name_or_absolute_path(value)
        for key in ("model", "json_schema", "recall_encoder")
        if (value := getattr(profile, key)) != Profile.model_fields[key].default
    }


def checked_state(store: SessionStore, record: StateRecord) -> SavedState:
    """The fields of the head of `store`; raises SessionError if they are damaged."""
    with as_damage_errors(store.path):
        return SavedState.model_validate_json(json.dumps(record.fields))  # where tuples are lists


def decode_state(
    store: SessionStore, record: StateRecord, state: SavedState, vocabulary: int
) -> tuple[EngineState, ConversationState]:
    """The state of the engine and of the conversation; `state` has the head's fields.

    Raises SessionError for data that is damaged or contradicts itself, and for a token id that is
    not below `vocabulary`.
    """
    with as_damage_errors(store.path):
        turns, chat, rows = saved_turns(store), state.conversation, store.rows(ROW)
        _check_rows(rows, len(turns), state.round, vocabulary)
        require(chat.system[0] <= chat.system[1] <= record.seen)
        require(record.logits is None or len(record.logits) == vocabulary)
        require(all(token_id < vocabulary for token_id in chat.pending_ids))
        require(max([*chat.heads, *chat.asked], default=-1) < record.seen)
        require(chat.round == state.round)
        saved = EngineState(
            rows=rows,
            held=record.held,
            log_decay=state.log_decay,
            unknown_surprisal=state.unknown_surprisal,
            logits=record.logits,
            round=state.round,
        )
        conversation = ConversationState(
            turns=turns,
            saved_turns=len(turns),
            system=SystemPrompt(range(*chat.system), chat.prompt),
            last_reply_stats=chat.reply,
            totals=chat.totals,
            unpinned_sentences=chat.unpinned,
            **{field: getattr(chat, name) for name, field in _COPIED_FIELDS.items()},
        )
        return saved, conversation


def saved_turns(store: SessionStore) -> list[Turn]:
    turns = list[Turn]()
    for turn in store.turns():
        fields = asdict(turn)
        del fields["index"]
        turns.append(Turn(**fields))
    return turns


def new_passages(session: Session, saved: int = 0) -> tuple[SavedPassages, int]:
    """The passages of complete turns that end after stream position `saved`.

    Also returns the end of the passages before them. There are none if no passage has a vector.
    """
    session.recall.update()
    passages = session.recall.passage_search.passages
    if not passages.vectors.shape[1]:
        return SavedPassages(), 0
    count = int(passages.rows["end"].searchsorted(saved, side="right"))
    new = SavedPassages(passages.rows[count:].astype(PASSAGE), passages.vectors[count:])
    return new, int(passages.rows["end"][count - 1]) if count else 0


def load_passages(session: Session, store: SessionStore, state: SavedState) -> None:
    """Load the saved passages into recall, if the model's encoder made their vectors.

    Otherwise recall makes them anew, without vectors. Raises SessionError if they are damaged.
    """
    saved, encoder, seen = store.passages(), session.model.passage_encoder, session.seen
    if not len(saved.rows) or state.encoder != encoder.checksum:
        return
    with as_damage_errors(store.path):
        require(int(saved.rows["end"][-1]) <= state.passages <= seen)
        require(saved.vectors.shape[1] == encoder.size)
        require(
            bool((saved.rows["turn"] == session.ledger.column("turn")[saved.rows["start"]]).all())
        )
        until = np.array([state.passages])
        passages = {"rows": saved.rows, "vectors": saved.vectors, "until": until}
        session.recall.passage_search.passages.load(passages)


def saved_profile(store: SessionStore) -> Profile:
    """The settings of a saved session.

    Raises SettingError for a policy path `module:Class` whose module is not imported, and
    SessionError for settings that this version of sirchat does not know.
    """
    record = store.state_record()
    try:
        saved = record.fields.get("profile") if record else {}
        known = rename_old_settings(saved) if isinstance(saved, dict) else saved
        profile = Profile.model_validate(known)
        profile = profile.with_origins(dict.fromkeys(profile.model_fields_set, "saved chat"))
    except ValueError:
        raise SessionError(
            f"session {store.id} has settings that this version of sirchat does not know",
            hint="`sirchat sessions export` writes its text, for `sirchat replay` to read",
        ) from None
    refuse_untrusted(profile.policy, f"session {store.id}")
    return profile


def model_fingerprint(model: LoadedModel) -> str:
    """A hash of a model's config, vocabulary size, rotary frequencies and some of its weights.

    The packed weights of a GGUF file count by the file.
    """
    digest, file_sample = hashlib.sha256(), model.packed_file_sample
    config = model.module.config.to_diff_dict()
    for name in _IGNORED_CONFIG_KEYS:
        config.pop(name, None)
    digest.update(repr(sorted(config.items(), key=str)).encode())
    digest.update(str(len(model.tokenizer)).encode())
    for rotation in (layer.key for layer in model.rotations):
        if rotation is not None:
            digest.update(rotation.inv_freq.numpy().tobytes())
    for shape, sample in model.weight_samples(with_packed=not file_sample):
        digest.update(str(shape).encode())
        digest.update(sample.numpy().tobytes())
    digest.update(file_sample)
    return digest.hexdigest()[:16]


def session_metadata(model: LoadedModel, family: str) -> dict[str, Any]:
    """The facts to save about a session: model, dtype, versions, and `Autosave.family`, if any."""
    return {
        **({"family": family} if family else {}),
        "model": name_or_absolute_path(model.name),
        "fingerprint": model_fingerprint(model),
        "dtype": model.precision,
        "sirchat": __version__,
        "torch": torch.__version__,
    }


def check_model(store: SessionStore, model: LoadedModel) -> None:
    """Raise SessionError if a session was made with another model or dtype than `model`."""
    meta = {name: store.meta.get(name, "?") for name in ("model", "fingerprint", "dtype")}
    dtype = model.precision  # checked first, because the fingerprint depends on it
    again = f"sirchat --resume {store.id}"
    rebuild = "or --rebuild, to let the loaded model read the chat again"
    kind, _, packed = meta["dtype"].partition(" ")
    how = " and the same --quantize" if packed or " " in dtype else ""
    names = map(name_or_absolute_path, (meta["model"], model.name))  # older chats: as it was typed
    if meta["dtype"] != dtype and len(set(names)) == 1:
        raise SessionError(
            f"session {store.id} has dtype {meta['dtype']}, but the model is loaded as {dtype}",
            hint=f"to continue this chat: {again} --dtype {kind}{how}; {rebuild}",
        )
    if meta["fingerprint"] != model_fingerprint(model):
        raise SessionError(
            f"session {store.id} was made with model {meta['model']}, not with this {model.name}",
            hint=f"to continue this chat: {again} --model {shlex.quote(meta['model'])}; {rebuild}",
        )


def _check_rows(rows: NDArray[np.void], turns: int, rounds: int, vocabulary: int) -> None:
    """Raise ValueError if a value in the saved ledger rows is impossible."""
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
