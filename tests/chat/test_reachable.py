"""What may be held again is found without a look at the whole stream."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Literal

import numpy as np
import pytest

from chatting import tiny
from sirchat import Profile, Session
from sirchat.errors import UndoError
from sirchat.memory.ledger import Flag, State


@pytest.mark.slow
@pytest.mark.parametrize("recall", ["cosine", "off"])
@pytest.mark.parametrize("limit", ["200KiB", "64MiB"])
def test_reachable_tokens_are_those_that_a_scan_of_all_finds(
    limit: str, recall: Literal["cosine", "off"]
) -> None:
    draw = random.Random(limit + recall)
    chat = Session(tiny(), Profile(budget=96, archive_limit=limit, recall=recall, seed=1))
    for n in range(14):
        list(chat.read_user(f"{n} is {draw.random()}, and so on. " * draw.randint(1, 5)))
        list(chat.read_reply("Yes. " * draw.randint(1, 9)))
        match draw.randrange(5):
            case 0:
                chat.switch("test", budget=draw.choice((80, 160)))
            case 1:
                chat.switch("test", recall=draw.choice(("cosine", "off")))
            case 2:
                with suppress(UndoError):  # what the turn pushed out may be gone
                    chat.undo()
            case 3:
                chat.switch("test", system=f"You are number {n}.")
        ledger = chat.ledger
        is_gone = ledger.column("state") == State.GONE
        is_excluded = ledger.column("flags") & Flag.EXCLUDED != 0
        expected = np.flatnonzero(~(is_gone | is_excluded))
        assert chat.engine.store.reachable().tolist() == expected.tolist()
