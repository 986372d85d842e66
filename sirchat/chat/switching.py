"""Switches settings in the middle of a conversation: all of them, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sirchat.chat.settings import (
    check_attention,
    check_budget,
    check_key_values,
    check_recall,
    refuse_fixed,
)
from sirchat.config.layers import changed
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.models.model import LoadedModel

if TYPE_CHECKING:  # it imports this module
    from sirchat.chat.session import Session


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
    if (after.policy, after.policy_options) != (before.policy, before.policy_options):
        check_key_values(after, model, source)
    return after


@contextmanager
def all_or_nothing(engine: Engine) -> Iterator[None]:
    """Restore the engine's pins and settings if anything in this block fails."""
    settings, pinned = engine.settings, engine.ledger.pinned_positions
    try:
        yield
    except Exception:  # whatever a new policy raises
        engine.ledger.pin_only(pinned)
        engine.switch(settings)
        raise


@contextmanager
def temporarily(session: Session, source: str, updates: dict[str, Any]) -> Iterator[None]:
    """Within this, `updates` are in force. Raises SettingError, which blames `source`."""
    before = {name: getattr(session.profile, name) for name in updates}
    if updates:
        session.switch(source, **updates)
    try:
        yield
    finally:
        if updates:
            session.switch(source, **before)
