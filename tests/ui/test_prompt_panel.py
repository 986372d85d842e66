"""The panel above the prompt: whose tokens fill the budget, and what is left of what you told."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from chatting import babbler, session, smallest
from drawing import lines
from fake_terminal import FakeTerminal
from saved_chats import Chat
from sirchat.chat.events import Switched
from sirchat.chat.panel_snapshot import HeldShare
from sirchat.chat.session import Session
from sirchat.chat.statements import StatedFact
from sirchat.chat.summary import pin_summary
from sirchat.errors import UsageError
from sirchat.models.model import LoadedModel
from sirchat.recall import RecalledTurn
from sirchat.ui.panel import draw_full_panel, draw_prompt_panel
from sirchat.ui.switching import describe_change
from sirchat.ui.theme import find_theme
from template_shapes import HEADERS, with_template
from typed_chat import TypedChat

NONE = find_theme("none", {})
CAT, GATE, NAME = "I have a cat.", "It leaves from gate 12.", "My name is Priya."


def fact(text: str, held: int, newer: int | None = None) -> StatedFact:
    left, missing = ("It … gate 12.", ("leaves", "from")) if text == GATE else ("", ())
    return StatedFact(0, text, None, 8, held, newer, left=left, missing=missing)


def _with_own_prompt(own: str) -> LoadedModel:
    it = with_template(own + HEADERS["thinking is kept"].replace("</think>{% endif", "{% endif"))
    return smallest("own", it)


def test_segments_add_up_to_the_budget() -> None:
    chat = session(babbler(), policy="sink", budget=64, system="Be brief.", max_new_tokens=20)
    for _ in range(4):
        list(chat.ask("My dog is called Rex, and I live in Lisbon."))
        now = chat.snapshot(strongest=0)
        assert sum(now.held_by.values()) == now.resident == chat.resident
        bar, counts = lines(draw_prompt_panel(now, [], NONE, 120), 120)[0].split(" 64 tokens: ")
        parts = {part.rsplit(" ", 1)[0][2:]: int(part.split()[-1]) for part in counts.split("  ")}
        assert sum(parts.values()) == 64
        assert parts["yours"] == now.held_by["user"]
        assert abs(bar.count("\u2588") - len(bar) * parts["yours"] / 64) <= 1
        assert abs(bar.count("\u00b7") - len(bar) * parts.get("free", 0) / 64) <= 1


def test_in_80_columns_no_count_is_cut_whoever_has_tokens() -> None:
    chat = session(babbler(), policy="sink", budget=64, max_new_tokens=4)
    list(chat.ask("Hi."))
    held = {"user": 282, "assistant": 87, "system": 4, "summary": 129, "template": 10}
    now = replace(chat.snapshot(strongest=0), budget=1024, held_by=held)
    line = lines(draw_prompt_panel(now, [], NONE, 80), 80)[0]
    assert re.findall(r" ([\d,]+)", line) == ["1,024", *map(str, held.values())]


def test_a_system_prompt_of_the_template_and_a_summary_are_neither_yours_nor_the_models() -> None:
    own = "<|im_start|>system\nYou are kind.<|im_end|>\n"
    chat = session(_with_own_prompt(own), policy="full", max_new_tokens=4)
    switched = Switched("system", None, "Be brief.", 0, 0)
    assert describe_change(switched) == "system: none -> Be brief."
    list(chat.ask("Hi."))
    list(pin_summary(chat, "They met."))
    now, rows = chat.snapshot(), chat.tokens(range(chat.seen))
    written = "".join(row.text for row in rows[: now.held_by["system"]])
    assert written == own
    assert now.held_by["user"] == sum(row.role == "user" and row.turn == 0 for row in rows)
    assert now.held_by["summary"] == sum(row.turn > 1 and row.role != "template" for row in rows)
    page = "\n".join(lines(draw_full_panel(now, NONE, 160), 160))
    assert re.findall(r"(?m)^│ +(\d) (\w+) ", page)[:5] == [
        *(("0", "system"), ("0", "you"), ("1", "model"), ("2", "summary"), ("3", "summary"))
    ]


def test_words_of_the_templates_own_system_prompt_are_explained_listed_and_restored() -> None:
    model = _with_own_prompt("<|im_start|>system\nYou are a kind pirate.<|im_end|>\n")
    settings = {"sinks": 2, "budget": 32, "recent": 0, "max_new_tokens": 6, "recall": "off"}
    chat = Chat(model, policy="sink", save=False, **settings)
    chat.say("Hi.")
    assert "“pirate” is held" in chat.do("/why pirate")
    chat.say("Hello there.", "How are you?")
    assert "“pirate” is evicted: of the" in chat.do("/why pirate")
    rows = [line.split() for line in chat.do("/evicted").splitlines()]
    assert rows[1][:3] == ["0", "system", "all"]
    assert {word.strip(",") for word in rows[1][4:]} == {"You", "are", "a", "kind", "pirate"}
    assert rows[2][:3] == ["0", "you", "all"]
    assert rows[2][4:] == ["Hi"]
    assert "a kind pirate." in chat.do("/recall pirate")
    assert "pirate" not in chat.do("/pin turn 0")
    assert "pinned: “pirate" in chat.do("/pin pirate")
    with pytest.raises(UsageError, match="chat template adds"):
        chat.do("/erase pirate")
    assert "“pirate” is" in chat.do("/why pirate")


def test_of_several_turns_that_the_template_adds_no_text_is_taken() -> None:
    turns = (f"<|im_start|>{role}\nBe kind.<|im_end|>\n" for role in ("system", "developer"))
    chat = session(_with_own_prompt("".join(turns)), policy="full", max_new_tokens=4)
    list(chat.ask("Hi."))
    with pytest.raises(UsageError, match="not in this chat"):
        chat.why("kind")
    assert "developer" in "".join(row.text for row in chat.tokens(range(chat.snapshot().prompt)))


def test_what_you_told_is_held_in_part_or_evicted() -> None:
    now = replace(
        session().snapshot(strongest=0),
        leaving_words={"fox": "user", "go": "assistant", "hill": "user"},
        turns=(HeldShare(0, "user", 6, 0, None, 0),),
        recalled_turns=(RecalledTurn(0, 6, (), CAT),),
    )
    facts = [fact(CAT, 0), fact(GATE, 3), fact(NAME, 8), fact("I am Anna.", 8, newer=4)]
    _, *rows = lines(draw_prompt_panel(now, facts, NONE, 80), 80)
    assert [row.rstrip() for row in rows] == [
        f'held, of what you told: "{NAME}", "I am Anna."',
        'held in part: "It … gate 12."',
        f'evicted, of what you told: "{CAT}"',
        f'recalled for the last reply alone: you: "{CAT}"',
        "evicted next, yours: fox, hill; the model's: go",
    ]


@pytest.mark.parametrize("rows", [40, 16])
def test_it_leaves_the_screen_when_a_line_is_entered(
    terminal: FakeTerminal, own_home: Path, rows: int
) -> None:
    def shown(panel: str) -> list[str]:
        terminal.resize(rows, 80)
        lines = list[str]()
        with TypedChat(terminal, babbler(), max_new_tokens=6, save=False, panel=panel) as chat:
            for line in ("My dog is Rex.", "I live in Lisbon. " * 9, "a\\\rb", "never sent\x03"):
                has_panel = panel == "prompt" and chat.session.seen > 0
                lines += chat.press(f"{line}\r").splitlines()
                assert ("the model's" in terminal.getvalue()) == has_panel
        # How fast a reply came decides where the line that says so is broken.
        return [line.rstrip() for line in lines if not re.search("tok/s|limit|panel", line)]

    with_panel, without = shown("prompt"), shown("off")
    if rows == 40:  # where the panel has scrolled off in part, it stays
        assert with_panel == without
    told = [line for line in without if line.startswith(("> ", "  "))]
    assert [line for line in with_panel if line in told][: len(told)] == told


def test_what_fails_in_it_is_said_in_its_place_and_the_chat_goes_on(
    terminal: FakeTerminal, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Session, **_: object) -> None:
        raise ValueError("a number is missing")

    with TypedChat(terminal, babbler(), max_new_tokens=3, save=False, panel="prompt") as chat:
        chat.ask("Hello.")
        os.environ["SIRCHAT_DEBUG"] = ""
        monkeypatch.setattr(Session, "facts", fail)
        assert "since the chat began" in chat.press("Hello.\r/stats\r")
        assert "no panel: ValueError: a number is missing" in terminal.getvalue()


def test_of_much_that_you_told_the_newest_is_shown_and_of_little_that_none_is_whole() -> None:
    _, *rows = lines(
        draw_prompt_panel(session().snapshot(strongest=0), [fact(GATE, 3)], NONE, 80), 80
    )
    said = [row.rstrip() for row in rows]
    assert said == ["held, of what you told: none whole", 'held in part: "It … gate 12."']
    told = [fact(f"I own {n} green books in house {n}.", 8) for n in range(30)]
    _, first, second = lines(draw_prompt_panel(session().snapshot(strongest=0), told, NONE, 60), 60)
    assert first.startswith('held, of what you told: "I own 29 green')
    assert second.rstrip().endswith(" more")
    assert max(map(len, (first, second))) < 60
    count = first.count("I own") + second.count("I own")
    assert f" and {30 - count} more" in second


@pytest.mark.parametrize("width", range(50, 90, 3))
def test_a_sentence_that_is_cut_keeps_its_closing_quote(width: int) -> None:
    told = "I have been exploring the caves below the old harbour of the town since last March."
    now = replace(
        session().snapshot(strongest=0),
        turns=(HeldShare(0, "user", 6, 0, None, 0),),
        recalled_turns=(RecalledTurn(0, 6, (), told),),
        leaving_words={f"harbour{n}": "assistant" for n in range(9)},
    )
    _, *rows = lines(draw_prompt_panel(now, [fact(told, 8), fact(told, 8)], NONE, width), width)
    for row in rows[:-1]:
        assert row.count('"') == 2
        assert re.search(r'\u2026"|\."', row)
    assert max(map(len, rows)) <= width
    assert rows[-1].rstrip().endswith("\u2026")
