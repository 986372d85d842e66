"""The settings that a saved chat goes on with."""

from __future__ import annotations

from collections.abc import Collection

from sirchat.config.profile import Profile
from sirchat.errors import SessionError
from sirchat.memory.policies import refuse_untrusted
from sirchat.saved.store import SessionStore


def saved_profile(store: SessionStore, trusted: Collection[str] = ()) -> Profile:
    """The settings of a saved session.

    `trusted` are the `module:Class` policies that it may name, else SettingError is raised. Raises
    SessionError for settings of another version.
    """
    head = store.head()
    try:
        profile = Profile.model_validate(head.fields.get("profile")) if head else Profile()
    except ValueError:
        raise SessionError(
            f"session {store.id} has settings that this sirchat does not know",
            hint="sirchat sessions export writes its text, which replay reads",
        ) from None
    refuse_untrusted(profile.policy, f"session {store.id}", trusted)
    return profile
