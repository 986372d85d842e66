"""Random conversations with everything that changes what is held, and a record of each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sirchat.chat.events import Event, Evicted, Recalled, Restored, TurnDone
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.errors import SirchatError
from sirchat.models.model import LoadedModel
from sirchat.saved.autosave import Autosave, resume_session
from sirchat.saved.database import SUFFIX
from sirchat.saved.saved_state import saved_profile
from sirchat.saved.store import SessionStore

PLAIN = ("entropy", "salience", "sink", "reservoir", "random", "interval", "window", "full")
WITH_STATISTICS = ("h2o", "tova", "snapkv", "kvzip", "knorm", "keydiff", "vase")
RETRIEVERS = ("off", "words", "bm25", "hybrid", "attention", "mips", "cosine", "cosine-pairwise")

_TEXT = (
    "anna walks to the old lake with her grey dog and a red boat while tom reads his letters "
    "about winter bread stars and seven small towns near the river where nobody sells apples"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Step:
    """What a step did: its name, its events or error, the held rows and the logits after it."""

    what: str
    happened: list[Any]
    held: list[int]
    logits: NDArray[np.float32] | None


def sentence(random: Random) -> str:
    return " ".join(random.choices(_WORDS, k=random.randint(6, 24))) + "."


def _of(event: Event) -> Any:
    match event:
        case Evicted() | Restored() | Recalled():
            return type(event).__name__, event.positions
        case TurnDone():
            return event.role, event.text, event.resident, event.evicted
    return None


class RandomSession:
    """A session with a model, of random settings and steps; equal seeds give equal ones.

    The settings have none of the policies `without`.
    """

    def __init__(
        self, model: LoadedModel, seed: int, folder: Path, without: Collection[str] = ()
    ) -> None:
        self._policies = [one for one in PLAIN + WITH_STATISTICS if one not in without]
        self._random, self._model, self._folder = Random(seed), model, folder
        profile = Profile(save=False, save_kv="on", temperature=0.0, **self._settings())
        self._session = Session(model, profile)

    def _settings(self) -> dict[str, Any]:
        random = self._random
        return {
            "policy": random.choice(self._policies),
            "budget": random.choice((72, 96, 128)),
            "recent": random.choice((8, 16)),
            "sinks": random.choice((0, 4)),
            "max_new_tokens": random.choice((6, 20)),
            "recall": random.choice(RETRIEVERS),
            "recall_n": random.choice(("auto", 12)),
            "decay": random.choice(("auto", 0.9)),
            "evict": random.choice(("when-full", "before-turn", "between-turns")),
            "positions": random.choice(("cache", "stream")),
            "archive": random.choice(("ram", "disk")),
            "lookup": random.random() < 0.5,
        }

    def run(self, steps: int) -> Iterator[Step]:
        ways = [self._ask] * 4 + [
            self._switch, self._switch, self._undo, self._retry, self._pin, self._erase,
            self._resume, self._read, self._score, self._trial,
        ]  # fmt: skip
        for number in range(steps):
            way: Callable[[], list[Event]] = self._ask if number < 2 else self._random.choice(ways)
            try:
                happened = [found for one in way() if (found := _of(one)) is not None]
            except SirchatError as error:
                happened = [str(error)]
            saved = self._session.save()
            yield Step(way.__name__, happened, saved.held.tolist(), saved.logits)

    def _ask(self) -> list[Event]:
        return list(self._session.ask(sentence(self._random)))

    def _read(self) -> list[Event]:
        events = list(self._session.read_user(sentence(self._random)))
        return events + list(self._session.read_reply(sentence(self._random)))

    def _switch(self) -> list[Event]:
        changes = self._settings()
        names = self._random.sample(sorted(changes), 3)
        return self._session.switch("/set", **{name: changes[name] for name in names})

    def _undo(self) -> list[Event]:
        return self._session.undo()

    def _retry(self) -> list[Event]:
        return list(self._session.retry())

    def _pin(self) -> list[Event]:
        word = self._random.choice(_WORDS)
        return self._session.pin(word, pinned=self._random.random() < 0.7, around=1)

    def _erase(self) -> list[Event]:
        return self._session.erase(self._random.choice(_WORDS))

    def _score(self) -> list[Event]:
        replies = [sentence(self._random) for _ in range(2)]
        self._session.score_continuations(replies)
        self._session.snapshot()
        return []

    def _trial(self) -> list[Event]:
        with self._session.trial("trial", {"policy": self._random.choice(self._policies)}):
            return list(self._session.ask(sentence(self._random)))

    def _resume(self) -> list[Event]:
        """Save the session, and go on with what was saved."""
        saving = Autosave(self._session, folder=self._folder)
        saving.close()
        with SessionStore.open(self._folder / f"{saving.id}{SUFFIX}") as store:
            self._session = Session(self._model, saved_profile(store))
            resume_session(self._session, store)
        return []
