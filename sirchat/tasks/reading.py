"""Ids read round by round under one setting, in an engine of its own; nothing comes back there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sirchat.chat.settings import build_cache_settings
from sirchat.config.profile import Profile
from sirchat.engine.engine import Engine
from sirchat.engine.records import TurnRef
from sirchat.memory.ledger import Role
from sirchat.models.model import LoadedModel
from sirchat.text.anchors import ends_sequence
from sirchat.text.template import Template, TurnIds


def open_engine(model: LoadedModel, setting: Profile) -> Engine:
    """An engine that has read nothing yet; what it forgets is not kept."""
    return Engine(
        model,
        replace(build_cache_settings(setting), archive=0, folder=None),
        seed=setting.seed,
        ends_sequence=ends_sequence(model.tokenizer, model.anchors),
    )


def read_ids(
    engine: Engine,
    ids: Sequence[int],
    number: int,
    to_come: int = 0,
    roles: Sequence[Role] | None = None,
) -> None:
    """Read ids [n] as round `number`, which stays open for `to_come` more.

    Without `roles` [n] the user says all of it.

    Raises ContextFullError when they do not fit and none may be forgotten.
    """
    place = TurnRef(number, number)
    for _ in engine.open_turn(len(ids), to_come, place):
        pass
    for _ in engine.feed(ids, roles or [Role.USER] * len(ids), place):
        pass


def read_round(engine: Engine, template: Template, user: str, reply: str, number: int) -> None:
    """Read a round whole, user and reply, as round `number`, which begins the chat if it is 1."""
    whole = whole_round(template, user, reply, first=number == 1)
    read_ids(engine, whole.ids, number, roles=whole.roles)
    engine.close_round()


def whole_round(template: Template, user: str, reply: str, *, first: bool = False) -> TurnIds:
    """A round of a chat, as it is read: what the user says, the reply, and what closes it."""
    asked = template.opening(user)[1] if first else template.user(user)
    said, closing = template.assistant(reply), template.closing
    roles = [*asked.roles, *said.roles, *[Role.TEMPLATE] * len(closing)]
    return TurnIds([*asked.ids, *said.ids, *closing], roles, asked.content)
