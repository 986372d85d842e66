"""Exports of hostile text, read by real parsers: nothing runs, loads, or hides what others said.

`SIRCHAT_ATTACK=1000` exports so many chats.
"""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from attacking import CONTROLS, ODD_TEXTS, attack, odd_text, refuse_odd_display
from chatting import babbler, session
from command import run
from saved_chats import Chat, saved
from sirchat.chat.session import Session
from sirchat.chat.state import Turn
from sirchat.lab.pictures import picture_of_memory
from sirchat.saved.database import SUFFIX
from sirchat.saved.store import SessionStore
from sirchat.text.text_file import without_surrogates
from sirchat.text.transcript import parse_transcript
from sirchat.ui.exporting import export_chat
from sirchat.ui.screen import Screen

# Of pages that tried to run scripts where they should not, and what terminals might obey.
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</p></html><script>", "<!--",
    "--><svg onload=alert(1)>", "<![CDATA[", "]]>", "<?php ", "<pre>", "</pre>", "<textarea>",
    "<style>*{display:none}", "<base href=//e>", "<meta http-equiv=refresh content=0;//e>",
    "[a](javascript:alert(1))", "[a](JaVa\tScript:alert(1))", "[a](java&#10;script:alert(1))",
    "[a](&#106;avascript:alert(1))", "[a](data:text/html,<script>)", "[a](vbscript:x)",
    "[a](file:///etc/passwd)", "[a](//e.org \"x\\\" onmouseover=alert(1) y=\\\"\")",
    "![a](http://e.org/p.png)", "![a](javascript:alert(1))", "<javascript:alert(1)>",
    "[x]: javascript:alert(1)\n\n[x]", "```\"onload=alert(1) x=\"\n<b>\n", "~~~~ <script>\n",
    "```", "- ```\n  x", "> ```\n", "1. <!--", "`<b>`", "``` a`b", "| a | b |\n|---|---|\n| <i> |",
    "{{ 7 * 7 }}", "{% raw %}", "&lt;b&gt;", "&#60;b&#62;", "&", "\"'>", "</title>", "\\<b>",
    "## You", "# end", "$x$", "$$", "<!DOCTYPE x [", "&e;", "%00", "USER: hello", "\n\n", "    <b>",
    "\x9b2J", "\x0b\x0c", "\x1b]0;owned\x07", "\x9d0;owned\x9c", "\u202eabc", "\x7f", "\u2066",
    "\ufffe\uffff", "\r\nx\ry", "\ud800", "a\0b",
]  # fmt: skip


def hostile_text(random: Random) -> str:
    parts = [
        random.choice(HOSTILE) if random.random() < 0.7 else odd_text(random, 1)[:200]
        for _ in range(random.randint(1, 5))
    ]
    return random.choice(("", " ", "\n", "\n\n")).join(parts)


def sent(random: Random) -> str:
    return hostile_text(random).encode("utf-8", "replace").decode() + " end"


def hostile_chat(random: Random) -> Session:
    """A chat with hostile texts, of which the last was generated, and a model with such a name."""
    model = replace(babbler(), name=hostile_text(random))
    chat = session(model, save=False, budget=2000, recall="off", system=sent(random))
    for _ in range(random.randint(1, 3)):
        list(chat.read_user(sent(random)))
        list(chat.read_reply(sent(random)))
    chat.turns[-1] = Turn("assistant", hostile_text(random) + " end")
    return chat


def exported(chat: Session, form: str) -> str:
    export_chat(chat, Screen(io.StringIO(), io.StringIO()), f"{form} out --force")
    return Path("out").read_text(encoding="utf-8")


def headings(text: str) -> list[str]:
    """The headings of level 2 that stand in no list or quote."""
    tokens = MarkdownIt("commonmark").parse(text)
    return [
        inside.content for token, inside in pairwise(tokens)
        if token.type == "heading_open" and token.tag == "h2" and not token.level
    ]  # fmt: skip


def test_exports_of_hostile_text_run_and_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def export(random: Random) -> None:
        chat = hostile_chat(random)
        speakers = {"system": "System", "user": "You", "assistant": "Model"}
        wanted = [speakers[turn.role] for turn in chat.turns]
        shown = exported(chat, "md")
        refuse_odd_display(shown)
        rest = iter(found := headings(shown))
        if not all(any(one == speaker for one in rest) for speaker in wanted):
            raise ValueError(f"{wanted} spoke, it shows {found}")
        data = exported(chat, "json")
        if control := CONTROLS.search(data):
            raise ValueError(f"{control[0]!r} in JSON")
        read = [(turn.role, turn.content) for turn in parse_transcript(data.encode(), "out")]
        if read != [(turn.role, without_surrogates(turn.text)) for turn in chat.turns]:
            raise ValueError("the JSON is another chat")

    attack(export, few=5, seconds=20)


def test_a_picture_of_a_chat_whose_file_has_a_hostile_name_is_xml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("SIRCHAT_HOME", str(tmp_path))
    saved(tmp_path / "data" / "sessions", "a")
    (path,) = (tmp_path / "data" / "sessions").glob(f"*{SUFFIX}")

    def draw(random: Random) -> None:
        name = random.choice([*HOSTILE, *ODD_TEXTS]).encode("utf-8", "replace").decode()[:80]
        other = tmp_path / f"x{name.replace('/', '').replace(chr(0), '')}{SUFFIX}"
        other.write_bytes(path.read_bytes())
        with SessionStore.read(other) as store:
            tree = ElementTree.fromstring(picture_of_memory(store, "svg"))
        other.unlink()
        for one in tree.iter():
            links = [link for name, link in one.attrib.items() if name.endswith("href")]
            if any(not link.startswith(("#", "data:image/png;")) for link in links):
                raise ValueError(f"links {links}")
            if one.tag.rpartition("}")[2] in ("script", "foreignObject", "a"):
                raise ValueError(f"element {one.tag}")

    attack(draw, few=2, seconds=30)


def test_a_saved_chat_can_not_control_the_terminal_that_it_is_exported_to(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIRCHAT_HOME", str(tmp_path))
        chat = Chat()
        for text in ("before\x9b2J", "\x9d0;owned\x9c", "\u202eafter", "\x1b]52;c;eA==\x07"):
            list(chat.session.read_user(text))
            list(chat.session.read_reply(text))
        chat.saved_chat.save()
        chat.saved_chat.close()
        for words in (("export", "last"), ("list",), ("show", "last"), ("search", "after")):
            done = run("sessions", *words, SIRCHAT_HOME=str(tmp_path), NO_COLOR="1")
            assert not CONTROLS.findall(done.stdout + done.stderr), words
    done = run("sessions", "export", "last", SIRCHAT_HOME=str(tmp_path))
    texts = [turn.content for turn in parse_transcript(done.stdout.encode(), "x")]
    assert texts[0] == "before\x9b2J"
