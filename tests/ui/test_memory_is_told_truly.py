"""Lines that name memory agree with the ledger, in random chats: what is held, restored, erased.

The oracle knows what the test typed, and reads the ledger's columns; texts are decoded by the
tokenizer itself. `SIRCHAT_ATTACK` raises the number of chats, `SIRCHAT_ATTACK_FROM` begins later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest

from attacking import FIRST, MANY
from chatting import hub_tokenizer, tiny
from drawing import NONE, lines
from saved_chats import Chat
from sirchat.chat import summary
from sirchat.errors import SirchatError
from sirchat.memory.ledger import Flag, Role, State
from sirchat.ui.live import LiveView
from sirchat.ui.panel import draw_prompt_panel

NAMES = ["Anna", "Rome", "Luna", "Oslo", "Rex", "Paul", "green", "Berta", "Lisbon"]
# By what they are about: a later one about the same may be called newer
TOLD = {
    "name": ["My name is {}.", "Actually, my name is {}."],
    "cat": ["My cat is called {}.", "Actually, my cat is called {}."],
    "home": ["I live in {}.", "I now live in {}.", "I moved to {}."],
    "brother": ["My brother {} is a baker."],
    "colour": ["My favourite colour is {}."],
    "": ["{} is nice."],
}
RULES = ["Never use emojis.", "Always say Rome.", "Call me Anna from now on."]  # pinned when said
ASKED = ["What is my name?", "Where do I live?", "What is my cat called?", "Who is my brother?"]
ASKED += ["Tell me a joke.", "Hello!", "What is the capital of Italy?"]
SETTINGS = ["/policy sink", "/policy entropy", "/policy window", "/budget 56", "/budget 96"]
SETTINGS += ["/recall words", "/recall words", "/recall cosine", "/recall off", "/recall off"]
DONE = re.compile(
    r"(?:, recalled (\d+) tokens?(.*?))?(?:, (\d+) evicted(.*?))?, cache holds (\d+)/"
)
QUOTED = re.compile('"(.*?)"')


@dataclass(frozen=True, eq=False)
class Said:
    """A sentence that the test typed."""

    about: str
    text: str
    at: np.ndarray  # stream positions of its tokens


class Talk:
    """A chat, and what is known of it without the code that tells of it; `false` are its lies."""

    def __init__(self, draw: Random) -> None:
        self.draw, self.false = draw, list[str]()
        start = {
            "policy": draw.choice(["sink", "entropy"]),
            "recall": draw.choice(["words", "off"]),
        }
        self.chat = Chat(tiny(), budget=64, recent=0, max_new_tokens=16, recall_n=20, **start)
        self.told = list[Said]()
        self.branches, self.branch = dict[str, tuple[str, list[Said]]](), "main"
        self.by_hand = False  # words were restored for the next message
        self.recalled = 0  # tokens, for the last message; none once recall was switched off

    def claim(self, what: object, line: str) -> None:
        """Note a line that is not true."""
        if not what:
            self.false.append(line)

    def column(self, name: str) -> np.ndarray:
        return self.chat.session.ledger.column(name)

    @property
    def held(self) -> set[int]:
        return set(np.flatnonzero(self.column("state") == State.HELD).tolist())

    def flagged(self, flag: Flag) -> set[int]:
        return set(np.flatnonzero(self.column("flags") & flag).tolist())

    def text(self, at: Iterable[int]) -> str:
        """The text of these tokens, with a mark where one is missing between two."""
        ids, before, runs = self.column("token_id"), -1, list[list[int]]()
        for position in sorted(set(at) - self.flagged(Flag.ERASED)):
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

    def whole(self) -> list[Said]:
        erased = self.flagged(Flag.ERASED)
        return [one for one in self.told if not erased & set(one.at.tolist())]

    def facts(self) -> list[tuple[str, Said]]:
        """Each statement that was typed and is whole, and whether its words are held, in order.

        First those rules of which all is pinned.
        """
        pins, found = self.flagged(Flag.PINNED), list[tuple[str, Said]]()
        rules = [one for one in self.whole() if one.text in RULES and pins.issuperset(one.at)]
        for one in [*rules, *(one for one in self.whole() if one.about)]:
            of_words = {at for at in one.at.tolist() if re.search(r"\w", self.text([at]))}
            count = len(self.held & of_words)
            how = "held" if count == len(of_words) else "partly held" if count else "evicted"
            found.append((how, one))
        return found

    def lacks(self, one: Said, state: str, is_newer: bool) -> bool:
        """Whether the words that `state` says a statement is without are those with a gap."""
        ids, gone = self.column("token_id"), list[str]()
        ends = [len(hub_tokenizer().decode(ids[one.at[: n + 1]])) for n in range(len(one.at))]
        text = hub_tokenizer().decode(ids[one.at])
        for match in re.finditer(r"\w+", text):
            of_word = [
                at
                for at, start, end in zip(one.at.tolist(), [0, *ends], ends, strict=False)
                if start < match.end() and end > match.start()
            ]
            gone += [match[0]] * (not self.held.issuperset(of_word))
        if not state.startswith("partly held") or is_newer:
            return True
        more = [f" and {len(gone) - 2} more"] if len(gone) > 2 else [""]
        named = ", ".join(f'"{word}"' for word in gone[:2])
        return state == f"partly held, without {named}{more[0]}"

    def sentence(self) -> tuple[str, str]:
        draw = self.draw
        if draw.random() < 0.3:
            return "", draw.choice([*ASKED, *RULES])
        about = draw.choice(list(TOLD))
        return about, draw.choice(TOLD[about]).format(draw.choice(NAMES))

    def say(self) -> None:
        session, before = self.chat.session, self.held
        parts = [self.sentence() for _ in range(self.draw.choice([1, 1, 2]))]
        text = " ".join(one for _, one in parts)
        start, most, shown = session.seen, 0, len(self.chat.out.getvalue())
        turn = len(session.turns) if session.turns else 0
        with LiveView(session, self.chat.screen) as view:
            for event in session.ask(text):
                most = max(most, len(self.flagged(Flag.RECALLED)))
                view.show(event)
        self.chat.saved_chat.save()
        of_turn = (self.column("turn") == turn) & (self.column("role") == Role.USER)
        at, end = np.flatnonzero(of_turn), 0
        ids = self.column("token_id")[at].tolist()
        ends = np.array([len(hub_tokenizer().decode(ids[: n + 1])) for n in range(len(ids))])
        assert hub_tokenizer().decode(ids) == text
        for about, one in parts:
            start_of, end = end, end + len(one) + (end > 0)
            self.told.append(Said(about, one, at[(ends > start_of) & (ends <= end)]))
        line = " ".join(self.chat.out.getvalue()[shown:].split())
        (match,) = DONE.finditer(line)
        tokens, quoted, evicted, words, holds = match.groups()
        self.claim(int(holds) == len(self.held) <= session.budget, line)
        self.claim(not self.flagged(Flag.RECALLED), f"recall ends with the reply: {line}")
        self.claim(int(tokens or 0) == most, line)
        self.claim(session.profile.recall != "off" or self.by_hand or not tokens, line)
        for quote in QUOTED.findall(quoted or ""):  # … stands for what is missing or cut
            self.claim(all(map(self.was_said, quote.split("…"))), line)
        if not self.by_hand:  # else some of what was held before had stepped aside
            gone = (before | set(range(start, session.seen))) - self.held
            self.claim(int(evicted or 0) == len(gone), line)
        held = self.text(self.held).casefold()
        for word in re.findall(r"[\w']+", (words or "").partition("your words:")[2]):
            is_held = re.search(rf"\b{re.escape(word.casefold())}\b", held)
            typed = "\n".join(one.text for one in session.turns if one.role == "user")
            self.claim(not is_held and word in typed, line)
        self.by_hand, self.recalled = False, most

    def was_said(self, text: str) -> bool:
        """Whether somebody said it so, and no words were erased from what is told of it."""
        is_left = (
            len(text.split()) > 1
            and self.flagged(Flag.ERASED)
            and any(
                text.strip() in one.text or one.text in text
                for one in self.told
                if one not in self.whole()
            )
        )
        said = " ".join(self.said().split())
        is_torn = is_left and text.strip() not in self.typed_whole()
        return " ".join(text.split()) in said and not is_torn

    def typed_whole(self) -> str:
        whole = " ".join(one.text for one in self.whole())
        replies = (one.text for one in self.chat.session.turns if one.role == "assistant")
        return " ".join([whole, *replies])

    def set(self) -> None:
        line, before = self.draw.choice(SETTINGS), self.chat.session.profile.recall
        shown = self.do(line)
        for holds in re.findall(r"cache holds (\d+)/", shown):
            self.claim(int(holds) == len(self.held), shown)
        if line == "/recall off" and before != "off":
            self.recalled = 0

    def restore(self) -> None:
        word, pins, before = self.name(), self.flagged(Flag.PINNED), self.held
        shown = " ".join(self.do(f'/recall "{word}"').split())
        if not shown:
            return
        self.claim(self.flagged(Flag.PINNED) == pins, f"restored words are pinned: {shown}")
        if not (match := re.search(r"” (\d+) tokens?(?:, (\d+) of them were evicted)?", shown)):
            return
        self.by_hand = True
        came = (self.held - before) & set(self.chat.session.state.restored_by_user)
        self.claim(int(match[2] or 0) == len(came) <= int(match[1]), shown)
        self.claim(shown.startswith("restored") == bool(came), shown)
        aside = re.findall(r"(\d+) stepped aside", shown)
        self.claim(int(*aside or [0]) == len(before - self.held), shown)
        told = re.findall("“(.*?)”", shown)[0]
        self.claim(re.search(rf"\b{word}\b", told, re.IGNORECASE), shown)
        held = " ".join(self.text(self.held).split())
        parts = told.removesuffix("…").split("…")
        self.claim(all(part.strip() in held for part in parts), shown)

    def pin(self) -> None:
        word, before, now = self.name(), self.flagged(Flag.PINNED), self.held
        shown = " ".join(self.do(f"{self.draw.choice(['/pin', '/unpin'])} {word}").split())
        pins = self.flagged(Flag.PINNED)
        if match := re.search(r"pinned: “(.*?)” (\d+) tokens?(?:, (\d+) of them restored)?", shown):
            self.claim(int(match[2]) == len(pins - before), shown)
            self.claim(int(match[3] or 0) == len((pins - before) & (self.held - now)), shown)
            self.claim(all(part.strip() in self.text(pins) for part in match[1].split("…")), shown)
        if match := re.search(r"(\d+) tokens? no longer pinned", shown):
            self.claim(int(match[1]) == len(before - pins), shown)
        for holds in re.findall(r"holds (\d+)/", shown):
            self.claim(int(holds) == len(self.held), shown)

    def erase(self) -> None:
        whole = self.draw.choice([one.text for one in self.whole()] or [""])
        word = self.draw.choice([self.name(), self.name(), whole])
        pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
        others = {name for name in self.branches if name != self.branch}
        stays = {name for name in others if pattern.search(self.branches[name][0])}
        before = self.flagged(Flag.ERASED)
        shown = " ".join(self.do(f'/erase --yes "{word}"').split())
        if not shown or not word:
            return
        self.claim(not pattern.search(self.text(range(self.chat.session.seen))), shown)
        self.claim(not pattern.search(self.said()), shown)
        for count in re.findall(r"erased (\d+) tokens?|(\d+) tokens? erased", shown):
            self.claim(int("".join(count)) == len(self.flagged(Flag.ERASED) - before), shown)
        named = re.findall("it stays in branches (.*?): /load", shown)
        self.claim(set(", ".join(named).split(", ")) - {""} == stays, f"{stays}: {shown}")
        self.recalled = 0

    def leave(self) -> None:
        if not self.chat.session.turns:
            return
        self.branches[self.branch] = self.said(), list(self.told)
        if len(self.branches) == 1:
            self.do("/save main")
        if len(self.branches) > 1 and self.draw.random() < 0.5:
            self.branch = self.draw.choice(sorted({*self.branches} - {self.branch}))
            self.do(f"/load {self.branch}")
            self.told = list(self.branches[self.branch][1])
            self.by_hand, self.recalled = False, 0  # it is loaded anew
        else:
            self.branch = f"twig-{len(self.branches)}"
            self.do(f"/branch {self.branch}")

    def why(self) -> None:
        word = self.name()
        shown = " ".join(self.do(f"/why {word}").split())
        held, count = self.text(self.held), r"of the (\d+) held tokens"
        for kind, is_held in (("evicted", False), ("held", True)):
            if f"“{word}” is {kind}" in shown:
                self.claim(bool(re.search(rf"\b{word}\b", held)) == is_held, shown)
        for number in re.findall(count, shown):
            self.claim(int(number) == len(self.held), shown)

    def sum_up(self) -> None:
        try:
            stated = self.chat.session.facts()
            text = summary.make_summary(self.chat.session, stated)
        except SirchatError:
            return
        facts, typed = [one for _, one in self.facts()], self.typed_whole()
        for sentence in re.findall(r"\S.*?[.!?](?=\s|$)", text):
            self.claim(sentence in typed, f"/summarize: {sentence}")
            later = [one for one in facts if one.text.startswith(("Actually, ", "I now"))]
            for number, one in enumerate(facts):
                cues = [other for other in facts[number + 1 :] if other in later]
                forms = [TOLD[one.about][0].format(name) for name in NAMES] if cues else []
                newer = [two for two in cues if two.about == one.about]
                values = [{*other.text.split()} - {*one.text.split()} for other in newer]
                is_gone = newer and all(len(value) > 2 for value in values) and one.text in forms
                again = any(other.text == one.text for other in facts[number + 1 :])
                if is_gone and not again:
                    self.claim(sentence != one.text, f"/summarize keeps what was corrected: {one}")
        if hasattr(summary, "omitted_facts"):
            line = "".join(one.text for one in summary.omitted_facts(stated, text))
            named = QUOTED.findall(line)
            self.claim(all(one not in text and one in typed for one in named), line)
            missing = {one.text for one in facts if one.text not in text}
            self.claim("more" in line or missing == set(named), f"{missing}: {line}")

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
        is_told = "by the words" in shown
        self.claim(is_told or not self.recalled, shown)
        if session.profile.recall == "off" and not self.recalled:
            self.claim(shown == "recall is off\n", shown)
        for row in re.findall(r"^(?:you|model), .*? {2,}\d+ +(.*)$", shown, re.MULTILINE):
            parts = re.split(r"…|<\|\w+\|>", re.split(" {2,}", row)[-1])
            self.claim(all(map(self.was_said, parts)), row)
        listed = self.do("/facts")
        rows = [re.split(r"  +", line.strip())[1:] for line in listed.splitlines()[1:]]
        texts = [(re.split("; newer: |, without |, pinned", row[0])[0], row[1]) for row in rows]
        self.claim(not rows or texts == [(how, one.text) for how, one in facts], listed)
        for number, row in enumerate(rows if len(rows) == len(facts) else []):
            newer = row[0].partition('; newer: "')[2].rstrip('"')
            state = row[0].partition(";")[0].removesuffix(", pinned as a rule")
            self.claim(self.lacks(facts[number][1], state, bool(newer)), f"{row}")
            later = [one.text for _, one in facts[number + 1 :]]
            is_rule = facts[number][1].text in RULES
            self.claim(row[0].endswith(", pinned as a rule") == is_rule, f"{row}")
            same = [one.text for _, one in facts if one.about == facts[number][1].about]
            self.claim(not newer or (newer in later and newer in same), f"{row}")
        try:
            found = session.facts()
        except SirchatError:
            found, facts = [], []
        panel = lines(draw_prompt_panel(session.snapshot(strongest=0), found, NONE, 4000, 1), 4000)
        names = {"held": "held, of what you told", "partly held": "held in part"}
        names["evicted"] = "evicted, of what you told"
        for how, name in names.items():
            of_kind = [one.text for kind, one in facts if kind == how]
            row = next((line for line in panel if line.startswith(f"{name}: ")), "")
            if how != "partly held" and "none whole" not in row:
                self.claim(sorted(QUOTED.findall(row)) == sorted(of_kind), row)
            self.claim(row.count('"') == 2 * len(of_kind), row)
        row = next((line for line in panel if "recalled for" in line), "")
        self.claim(not row or self.recalled, row)
        for quote in QUOTED.findall(row):
            self.claim(all(map(self.was_said, quote.split("…"))), row)


def false_lines(seed: int) -> list[str]:
    """Let a random chat happen; returns the lines of it that are not true."""
    draw = Random(seed)
    talk = Talk(draw)
    for _ in range(3):
        talk.say()
    for _ in range(8):
        ways = [talk.say] * 5 + [talk.set] * 2 + [talk.restore] * 2
        draw.choice([*ways, talk.pin, talk.why, talk.sum_up, talk.erase, talk.leave])()
        talk.check()
    talk.chat.saved_chat.close()
    return talk.false


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, FIRST + (MANY or 2)))
def test_lines_that_name_memory_agree_with_the_ledger(
    seed: int, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert not false_lines(seed)
