"""Lines that name memory agree with the ledger, in random chats: what is held, restored, erased.

The oracle knows what the test typed, and reads the ledger's columns; texts are decoded by the
tokenizer itself. `SIRCHAT_ATTACK` raises the number of chats, `SIRCHAT_ATTACK_FROM` begins later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from attacking import FIRST, MANY
from chatting import hub_tokenizer, tiny
from drawing import NONE, lines
from saved_chats import Chat
from sirchat.errors import SirchatError
from sirchat.memory.ledger import Flag, Role, State
from sirchat.ui.live import LiveView
from sirchat.ui.panel import draw_memory

NAMES = ["Anna", "Rome", "Luna", "Oslo", "Rex", "Paul", "green", "Berta", "Lisbon"]
TOLD = ["My name is {}.", "My cat is called {}.", "I live in {}.", "I moved to {}.", "{} is nice."]
TOLD += ["Actually, my name is {}.", "My brother {} is a baker.", "My favourite colour is {}."]
ASKED = ["What is my name?", "Where do I live?", "What is my cat called?", "Who is my brother?"]
ASKED += ["Tell me a joke.", "Hello!", "What is the capital of Italy?"]
SETTINGS = ["/policy sink", "/policy entropy", "/policy window", "/budget 56", "/budget 96"]
SETTINGS += ["/recall words", "/recall words", "/recall cosine", "/recall off", "/recall off"]
DONE = re.compile(
    r"(?:, recalled (\d+) tokens?(.*?))?(?:, (\d+) evicted(.*?))?, cache holds (\d+)/"
)


class Talk:
    """A chat, and what is known of it without the code that tells of it."""

    def __init__(self, draw: Random) -> None:
        self.draw = draw
        start = {
            "policy": draw.choice(["sink", "entropy"]),
            "recall": draw.choice(["words", "off"]),
        }
        self.chat = Chat(tiny(), budget=64, recent=0, max_new_tokens=24, recall_n=20, **start)
        self.branches, self.branch = dict[str, str](), "main"
        self.by_hand = False  # words were restored for the next message
        self.recalled = 0  # tokens, for the last message; none once recall was switched off

    def column(self, name: str) -> np.ndarray:
        return self.chat.session.ledger.column(name)

    @property
    def held(self) -> set[int]:
        return set(np.flatnonzero(self.column("state") == State.HELD).tolist())

    @property
    def recalled_now(self) -> int:
        return int((self.column("flags") & Flag.RECALLED != 0).sum())

    def text(self, at: Iterable[int]) -> str:
        """The text of these tokens, with a mark where one is missing between two."""
        ids, before = self.column("token_id"), -1
        flags, runs = self.column("flags"), list[list[int]]()
        for position in sorted(at):
            if flags[position] & Flag.ERASED:
                continue
            if position != before + 1 or not runs:
                runs.append([])
            runs[-1].append(int(ids[position]))
            before = position
        return "|".join(map(hub_tokenizer().decode, runs))

    def said(self) -> str:
        return "\n".join(turn.text for turn in self.chat.session.turns)

    def name(self) -> str:
        """A name that was said, if any was."""
        return self.draw.choice([name for name in NAMES if name in self.said()] or NAMES)

    def facts(self) -> list[tuple[str, str]]:
        """Each statement that was typed and is whole, and whether it is held, in order."""
        found = list[tuple[str, str]]()
        for turn, one in enumerate(self.chat.session.turns):
            of_turn = (self.column("turn") == turn) & (self.column("role") == Role.USER)
            at = np.flatnonzero(of_turn)
            is_erased = (self.column("flags")[at] & Flag.ERASED != 0).any()
            if one.role == "user" and re.search(r"\b[Mm]y|\bI\b", one.text) and not is_erased:
                count = len(self.held & set(at.tolist()))
                how = "held" if count == len(at) else "partly held" if count else "evicted"
                if not one.text.endswith("?") and one.text != "Tell me a joke.":
                    found.append((how, one.text))
        return found

    def say(self) -> None:
        draw, session, before = self.draw, self.chat.session, self.held
        text = draw.choice([*TOLD, *ASKED]).format(draw.choice(NAMES))
        start, most, shown = session.seen, 0, len(self.chat.out.getvalue())
        with LiveView(session, self.chat.screen) as view:
            for event in session.ask(text):
                most = max(most, self.recalled_now)
                view.show(event)
        self.chat.saved_chat.save()
        shown_line = self.chat.out.getvalue()[shown:]
        (match,) = DONE.finditer(" ".join(shown_line.split()))
        tokens, quoted, evicted, words, holds = match.groups()
        assert int(holds) == len(self.held) <= session.budget
        assert not self.recalled_now, "recall ends with the reply"
        assert int(tokens or 0) == most, shown_line
        assert session.profile.recall != "off" or self.by_hand or not tokens
        for quote in re.findall(r'"(.*?)[…"]', quoted or ""):
            assert quote in " ".join(self.said().split()), quote
        if not self.by_hand:  # else some of what was held before had stepped aside
            gone = (before | set(range(start, session.seen))) - self.held
            assert int(evicted or 0) == len(gone)
        held = self.text(self.held).casefold()
        for word in re.findall(r"[\w']+", (words or "").partition("your words:")[2]):
            assert not re.search(rf"\b{re.escape(word.casefold())}\b", held), word
            assert word in "\n".join(one.text for one in session.turns if one.role == "user")
        self.by_hand, self.recalled = False, most

    def set(self) -> None:
        line = self.draw.choice(SETTINGS)
        before = self.chat.session.profile.recall
        self.do(line)
        if line == "/recall off" and before != "off":
            self.recalled = 0

    def restore(self) -> None:
        word, pins = self.name(), self.column("flags") & Flag.PINNED
        before = self.held
        shown = " ".join(self.do(f'/recall "{word}"').split())
        if not shown:
            return
        self.by_hand = True
        assert (self.column("flags") & Flag.PINNED == pins).all(), "nothing is pinned"
        count, came = map(int, re.findall(r"(\d+) tokens?, (\d+) of them were evicted", shown)[0])
        assert came == len(self.held - before) <= count
        aside = re.findall(r"(\d+) others step aside", shown)
        assert int(*aside or [0]) == len(before - self.held)
        told = re.findall("“(.*?)”", shown)[0]
        assert re.search(rf"\b{word}\b", told, re.IGNORECASE)
        held = " ".join(self.text(self.held).split())
        assert all(part.strip() in held for part in told.removesuffix("…").split("…")), told

    def erase(self) -> None:
        word = self.name()
        pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
        others = {name for name, text in self.branches.items() if name != self.branch}
        stays = {name for name in others if pattern.search(self.branches[name])}
        shown = " ".join(self.do(f"/erase --yes {word}").split())
        if not shown:
            return
        assert not pattern.search(self.text(range(self.chat.session.seen)))
        assert not pattern.search(self.said())
        named = re.findall("it stays in branches (.*?): /switch", shown)
        assert set(", ".join(named).split(", ")) - {""} == stays
        self.by_hand, self.recalled = self.by_hand, 0

    def leave(self) -> None:
        if not self.chat.session.turns:
            return
        self.branches[self.branch] = self.said()
        if len(self.branches) > 1 and self.draw.random() < 0.5:
            self.branch = self.draw.choice(sorted({*self.branches} - {self.branch}))
            self.do(f"/switch {self.branch}")
            self.by_hand, self.recalled = False, 0  # it is loaded anew
        else:
            self.branch = f"twig-{len(self.branches)}"
            self.do(f"/branch {self.branch}")

    def do(self, line: str) -> str:
        """What a command shows; nothing if it is refused."""
        try:
            return self.chat.do(line)
        except SirchatError:
            return ""

    def check(self) -> None:
        """`/recall`, `/facts` and the panel, as they are now."""
        session, facts = self.chat.session, self.facts()
        shown = self.do("/recall")
        assert ("recalled text" in shown or "held anyway" in shown) or not self.recalled
        if session.profile.recall == "off" and not self.recalled:
            assert shown == "recall is off\n"
        listed = self.do("/facts").splitlines()[1:]
        rows = [re.split(r"  +", line.strip())[1:] for line in listed]
        assert [tuple(row) for row in rows] == facts
        panel = lines(
            draw_memory(session.snapshot(strongest=0), session.facts(), NONE, 4000, 1), 4000
        )
        names = {"held": "held, of what you told", "partly held": "held in part"}
        names["evicted"] = "evicted, of what you told"
        for how, name in names.items():
            of_kind = [text for one, text in facts if one == how]
            row = next((line for line in panel if line.startswith(f"{name}: ")), "")
            if how != "partly held" and "none whole" not in row:
                assert sorted(re.findall('"(.*?)"', row)) == sorted(of_kind), name
            assert row.count('"') == 2 * len(of_kind)
        assert any("recalled for" in line for line in panel) <= (self.recalled > 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, FIRST + (MANY or 30)))
def test_lines_that_name_memory_agree_with_the_ledger(
    seed: int, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    draw = Random(seed)
    talk = Talk(draw)
    for _ in range(4):
        talk.say()
    for _ in range(12):
        draw.choice(
            [talk.say] * 5 + [talk.set] * 2 + [talk.restore] * 2 + [talk.erase, talk.leave]
        )()
        talk.check()
    talk.chat.saved_chat.close()
