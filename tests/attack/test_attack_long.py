"""A long chat with recall, an archive on disk and autosave takes no more of anything as it grows.

`SIRCHAT_ATTACK=1000` reads 100,000 tokens.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from attacking import MANY
from chatting import tiny
from sirchat.chat.session import Session
from sirchat.config.profile import Profile
from sirchat.saved.autosave import Autosave

TOKENS = 100 * MANY or 1_500
PARTS = 4
_BYTES_A_TOKEN = 400  # most that the ledger, the texts, and the index of their words take

_SLACK = 24 * 2**20
WORDS = ["Anna", "Rome", "green", "violin", "harbour", "baker", "Tuesday", "lunch", "my", "is"]


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: maps of the archive's files do not count."""
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="ascii").splitlines() if status.exists() else ():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def descriptors() -> Counter[str]:
    """What this process has open, but for the folder that is read to see it."""
    folder = Path("/proc/self/fd")
    found = []
    for one in folder.iterdir() if folder.exists() else ():
        try:
            found.append(os.readlink(one))
        except OSError:
            continue
    return Counter(one for one in found if not one.startswith("/proc/"))


def say(chat: Session, random: Random) -> None:
    text = " ".join(random.choices(WORDS, k=random.randint(3, 60)))
    number = random.randrange(100, 10_000)
    if random.random() < 0.03:
        list(chat.ask(f"What was {number}?"))
        return
    list(chat.read_user(f"{text}, and the code of it is {number}."))
    list(chat.read_reply(text))


def test_memory_descriptors_and_threads_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    if not MANY:  # so that a short chat fills several files
        monkeypatch.setattr("sirchat.memory.archive.SEGMENT_ROWS", 128)
    random, profile = Random(0), Profile(
        budget=256, max_new_tokens=8, recall="words", archive="disk", archive_limit="64GiB"
    )  # fmt: skip
    chat = Session(tiny(), profile)
    saving = Autosave(chat)
    taken: list[tuple[int, Counter[str], set[threading.Thread]]] = []
    for part in range(1, PARTS + 1):
        while chat.seen < part * TOKENS // PARTS:
            say(chat, random)
            saving.save()
            assert chat.resident <= chat.budget
        chat.engine.store.archive._files.wait()
        gc.collect()
        taken.append((anonymous_bytes(), descriptors(), set(threading.enumerate())))
    saving.close()
    first, last = taken[0], taken[-1]
    # No more: what an earlier test left running in this process may end meanwhile.
    assert not last[1] - first[1]
    assert not last[2] - first[2]
    assert last[0] - first[0] <= _SLACK + _BYTES_A_TOKEN * TOKENS
    assert chat.ledger.archived_count >= TOKENS - 300
