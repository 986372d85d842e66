"""Settings that change in the middle of a conversation: all that was asked for, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sirchat.chat.settings import check_attention, check_budget, check_recall, refuse_fixed
from sirchat.config.layers import changed
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.models.model import LoadedModel


def switched(before: Profile, model: LoadedModel, source: str, updates: dict[str, Any]) -> Profile:
    """The settings with `updates`.

    Raises SettingError, blaming `source`, for a value that is not allowed, or not for this model,
    or not in a running chat.
    """
    after = changed(before, source, **updates)
    refuse_fixed(before, after, source)
    check_budget(after, model, source)
    if after.recall != before.recall:  # to check it, the model has to run
        check_recall(after, model, source)
    if (after.policy, after.attention) != (before.policy, before.attention):
        check_attention(after, model, source)
    return after


@contextmanager
def all_or_nothing(engine: Engine) -> Iterator[None]:
    """Give the engine its pins and settings back if anything in this block fails."""
    memory, ledger = engine.settings, engine.ledger
    flags = ledger.column("flags")[: ledger.seen].copy()
    try:
        yield
    except Exception:  # whatever a new policy raises
        ledger.column("flags")[:] = flags
        list(engine.switch(memory))
        raise
