"""Exports of hostile text, read by real parsers: nothing runs, loads, or hides what others said.

`SIRCHAT_ATTACK=1000` exports so many chats.
"""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from attacking import ODD_TEXTS, attack, odd_text
from chatting import session
from saved_chats import saved
from sirchat.chat.session import Session
from sirchat.lab.pictures import picture_of_memory
from sirchat.saved.database import SUFFIX
from sirchat.saved.store import SessionStore
from sirchat.text.transcript import parse_transcript
from sirchat.ui.exporting import export_chat
from sirchat.ui.screen import Screen
from sirchat.ui.text import displayable

pytestmark = pytest.mark.slow

# Of pages that tried to run scripts where they should not.
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
]  # fmt: skip
_ELEMENTS = {
    "html", "meta", "title", "style", "h1", "h2", "h3", "h4", "h5", "h6", "p", "strong", "em", "s",
    "code", "pre", "a", "ul", "ol", "li", "blockquote", "hr", "br", "table", "thead", "tbody",
    "tr", "th", "td",
}  # fmt: skip
_ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "href", "title", "class", "start", "style",
}  # fmt: skip
_SAFE_STYLE = re.compile(r"text-align: ?(left|right|center)")
_VOID = {"meta", "hr", "br"}


class Page(HTMLParser):
    """What a page is made of; raises ValueError for what could run, load or escape its place."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open = list[str]()
        self.speakers, self.typed = list[str](), list[str]()
        self.metas = 0
        self._is_typed = False
        self.feed(page)
        self.close()
        if self.open != ["html"] and self.open:
            raise ValueError(f"elements stay open: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.metas += tag == "meta"
        if tag not in _ELEMENTS or not {name for name, _ in attrs} <= _ATTRIBUTES:
            raise ValueError(f"element {tag} {attrs}")
        for name, value in attrs:
            plain = re.sub(r"[\0-\x20\x7f]", "", value or "").lower()
            if name == "href" and re.match(r"(javascript|vbscript|data|file):", plain):
                raise ValueError(f"a link to {value!r}")
            if name == "style" and not _SAFE_STYLE.fullmatch(value or ""):
                raise ValueError(f"a style {value!r}")
        if tag not in _VOID:
            self.open.append(tag)
        if ("class", "as-typed") in attrs:
            self.typed.append("")
            self._is_typed = True
        if tag == "h2" and not attrs and self.open[-2:] == ["html", "h2"]:
            self.speakers.append("")

    def handle_endtag(self, tag: str) -> None:
        if self.open.pop() != tag:
            raise ValueError(f"</{tag}> within another element")
        self._is_typed = False

    def handle_data(self, data: str) -> None:
        if self._is_typed:
            self.typed[-1] += data
        if self.open[-1:] == ["h2"] and self.speakers:
            self.speakers[-1] += data

    def handle_comment(self, data: str) -> None:
        raise ValueError(f"a comment: {data[:50]!r}")

    def unknown_decl(self, data: str) -> None:
        raise ValueError(f"a declaration: {data[:50]!r}")

    def handle_pi(self, data: str) -> None:
        raise ValueError(f"an instruction: {data[:50]!r}")


def hostile_text(random: Random) -> str:
    parts = [
        random.choice(HOSTILE) if random.random() < 0.7 else odd_text(random, 1)[:200]
        for _ in range(random.randint(1, 5))
    ]
    return random.choice(("", " ", "\n", "\n\n")).join(parts)


def hostile_chat(random: Random) -> Session:
    chat = session(save=False, policy="sink", budget=512, recall="off")
    for _ in range(random.randint(1, 3)):
        list(chat.read_user(hostile_text(random) + " end"))
        list(chat.read_reply(hostile_text(random) + " end"))
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
        said = [(turn.role, displayable(turn.text).strip()) for turn in chat.turns if turn.text]
        page = Page(exported(chat, "html"))
        typed = [text for role, text in said if role != "assistant"]
        if page.typed != typed or page.metas != 3:
            raise ValueError(f"typed was {typed}, the page has {page.typed}")
        wanted = [{"user": "You", "assistant": "Model"}[role] for role, _ in said]
        for form, found in (("html", page.speakers), ("md", headings(exported(chat, "md")))):
            rest = iter(found)
            if not all(any(one == speaker for one in rest) for speaker in wanted):
                raise ValueError(f"{form}: {wanted} spoke, it shows {found}")
        turns = parse_transcript(exported(chat, "json").encode(), "out")
        if [(turn.role, turn.content) for turn in turns] != [(t.role, t.text) for t in chat.turns]:
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
        name = random.choice([*HOSTILE, *ODD_TEXTS]).replace("/", "").replace("\0", "")[:80]
        other = tmp_path / f"x{name.encode(errors='surrogateescape').decode(errors='replace')}"
        other = other.with_name(f"{other.name}{SUFFIX}")
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
