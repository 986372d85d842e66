"""`/model`: another model goes on with the chat, whose text it reads anew; `/undo` goes back."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sirchat.chat.events import Notice
from sirchat.chat.model_defaults import DRAWING, with_model_defaults
from sirchat.chat.rereading import own_pins, read_again
from sirchat.chat.session import Session
from sirchat.config.profile import FIXED, Profile
from sirchat.config.profile_files import resolve
from sirchat.config.values import as_typed
from sirchat.models.bars import Progress
from sirchat.models.freed_memory import give_back
from sirchat.models.listing import model_names
from sirchat.models.model import LoadedModel
from sirchat.models.of_profile import load_of
from sirchat.ui.interrupt import Interrupt
from sirchat.ui.loading import loading_bar
from sirchat.ui.models_table import in_bytes
from sirchat.ui.saved_chat import SavedChat
from sirchat.ui.screen import Screen

_FOLLOWING = ("budget", *DRAWING)
"""Settings that follow the model as long as they are what they would be for it."""


@dataclass(frozen=True)
class _Former:
    """The session before the last change of the model, and what is compared with it.

    Attributes:
        session: it, as it was.
        profile: the settings of the session that replaced it, at its beginning.
        stamp: epoch and erasures of that session.
    """

    session: Session
    profile: Profile
    stamp: tuple[int, int]


class ModelSwitching:
    """Changes the model of a chat.

    The former session stays in memory, for `/undo`, until the next message or until the
    conversation is erased. `trusted` are the `module:Class` policies that settings may name.
    """

    def __init__(
        self, screen: Screen, saved_chat: SavedChat, trusted: Collection[str] = ()
    ) -> None:
        self._screen, self._saved_chat, self._trusted = screen, saved_chat, trusted
        self._former: _Former | None = None

    def show(self, session: Session) -> None:
        """Say which model it is, and which others are here."""
        name = session.model.name
        others = ", ".join(one for one in model_names() if one != name)
        self._screen.note(f"model is {name}; here are: {others}; sirchat models pull gets more")

    def switch(self, session: Session, name: str) -> Session | None:
        """The session that goes on with the model of that name; None if it is the present one.

        Raises SirchatError if it can't be loaded or can't hold the chat; nothing has changed then.
        """
        if name == session.model.name:
            self._screen.note(f"model is {name} already")
            return None
        with loading_bar(self._screen, name) as report:
            model = self._loaded(name, session.profile, report)
            new = Session(model, self._profile(session, model, name))
            read_again(new, session.turns, report)
        self._former = _Former(session, new.profile, (new.epoch, new.erasures))
        self._go_on_with(new)
        self._report(session, new)
        return new

    def go_back(self, session: Session) -> Session | None:
        """The session before the last change of the model, if it is still kept, else None.

        Settings that were changed since are changed there, too. Raises SettingError if they can't.
        """
        if self._former is None:
            return None
        former, at_first = self._former.session, self._former.profile.model_dump()
        now = session.profile.model_dump()
        changed = {k: v for k, v in now.items() if k not in FIXED and v != at_first[k]}
        if changed:
            former.switch("/undo", **changed)
        self._go_on_with(former)
        self.let_go()
        self._screen.note(
            f"back to {former.model.name}, with the chat as it was; "
            f"holds {former.resident:,}/{former.budget:,}"
        )
        return former

    def let_go(self) -> None:
        """Give up the former session, and its memory."""
        if self._former is not None:
            self._former = None
            give_back()

    def check(self, session: Session) -> None:
        """Give up the former session if something was erased from `session`, or all of it."""
        if self._former and self._former.stamp != (session.epoch, session.erasures):
            self.let_go()

    def _loaded(self, name: str, profile: Profile, report: Progress | None) -> LoadedModel:
        if self._former is not None and self._former.session.model.name == name:
            return self._former.session.model
        return load_of(profile.model_copy(update={"model": name}), progress=report)

    def _profile(self, session: Session, model: LoadedModel, name: str) -> Profile:
        """The settings of the chat; those that followed the old model follow the new one."""
        profile, updates = session.profile, dict[str, Any](model=name)
        trusted = [*self._trusted, profile.policy]
        given = resolve(None, {"trust_policy": trusted}, os.environ)
        before, usual = (with_model_defaults(given, one) for one in (session.model, model))
        for group in (("budget",), DRAWING):
            if all(getattr(profile, key) == getattr(before, key) for key in group):
                updates |= {key: getattr(usual, key) for key in group}
        return profile.model_copy(update=updates)

    def _go_on_with(self, session: Session) -> None:
        with Interrupt():  # all or nothing of it
            self._saved_chat.go_on_with(session)

    def _report(self, before: Session, now: Session) -> None:
        name, weights = before.model.name, in_bytes(_weight_bytes(before.model))
        self._screen.note(
            f"now {now.model.name}; {now.seen:,} tokens read anew, "
            f"holds {now.resident:,}/{now.budget:,}"
        )
        changed = [
            f"{key} {as_typed(old)} -> {as_typed(new)}"
            for key in _FOLLOWING
            if (old := getattr(before.profile, key)) != (new := getattr(now.profile, key))
        ]
        if changed:
            self._screen.note(f"as usual for this model: {', '.join(changed)}")
        if pins := own_pins(before):
            self._screen.note(f"{pins:,} tokens that you had pinned are not pinned here")
        for event in now.start():
            if isinstance(event, Notice):
                self._screen.note(event.text)
        self._screen.note(
            f"/undo goes back to {name}, which stays in memory ({weights}) until the next message"
        )


def _weight_bytes(model: LoadedModel) -> int:
    """Bytes of all weights; those that several layers share count once."""
    tensors = (*model.module.parameters(), *model.module.buffers())
    storages = [one.untyped_storage() for one in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
