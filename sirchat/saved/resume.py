"""Continues a saved chat (`--resume`).

If keys and values were not saved, those of the held tokens are computed again, which gives nearly
the same cache.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from sirchat.chat.rereading import PinnedText, read_again
from sirchat.chat.session import Session
from sirchat.errors import SessionError
from sirchat.memory.attention import AttentionCheckpoint
from sirchat.memory.cache import BoundedCache
from sirchat.memory.key_values import CacheState, KeyValues
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import Autosave
from sirchat.saved.saved_state import (
    check_model,
    checked_state,
    decode_state,
    load_passages,
    saved_turns,
)
from sirchat.saved.saved_tensors import (
    attention_fits,
    key_values_fit,
    pop_attention,
    pop_key_values,
    pop_state,
)
from sirchat.saved.store import SessionStore


def resume_session(session: Session, store: SessionStore, *, rebuild: bool = False) -> None:
    """Load the conversation saved in `store` into `session`, which is new and empty.

    With `rebuild`, the model reads the saved text again. Raises SessionError if no turn is saved
    or, without `rebuild`, if the session was saved with another model or dtype.
    """
    record = store.state_record()
    if record is None:
        raise SessionError(f"session {store.id} holds no message yet")
    state = checked_state(store, record)
    if rebuild:
        pins = [PinnedText(*place) for place in state.pins]
        read_again(session, saved_turns(store), pins, state.conversation.unpinned)
        autosave = Autosave(session, store)
        autosave.replace_session(session)
        autosave.save()
        return
    check_model(store, session.model)
    saved, conversation = decode_state(store, record, state, session.model.vocab_size)
    cache = _one_token_cache(session.model)
    example = cache.first_written_rows(torch.arange(1), np.arange(1))
    rows, received, recurrent = _load_tensors(store, state.kv, example, cache.state, record.seen)
    saved = replace(saved, state=recurrent)
    session.load(saved, conversation, rows, received)
    load_passages(session, store, state)


def _one_token_cache(model: LoadedModel) -> BoundedCache:
    cache = model.new_cache(1)
    model.forward([0], cache)
    cache.commit(1)
    return cache


def _load_tensors(
    store: SessionStore, stamp: str, example: KeyValues, example_state: CacheState, seen: int
) -> tuple[KeyValues | None, AttentionCheckpoint | None, CacheState]:
    """The saved tensors with this stamp; None or () for those missing or not fitting the model."""
    tensors = store.kv.load(stamp)
    if tensors is None:
        return None, None, ()
    try:
        state = pop_state(tensors, example_state)
        received, rows = pop_attention(tensors), pop_key_values(tensors)
    except (LookupError, TypeError):  # some are missing, or of a type that numpy lacks
        return None, None, ()
    if not key_values_fit(rows, example, seen):
        return None, None, ()
    if received is not None and not attention_fits(received, seen):
        received = None
    return rows, received, state
