"""What others send is text: nothing in it runs, asks the network, or controls a terminal.

Exported chats and pictures, chats, profiles, model folders; and who can read what sirchat writes.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from attacking import attack, odd_text, refuse_odd_display
from chatting import babbler, hub_tokenizer, save_babbler
from command import run
from plain_model import load_model
from saved_chats import Chat
from sirchat.chat.session import Session
from sirchat.chat.state import Turn
from sirchat.config.profile import Profile
from sirchat.config.profile_files import load_profile
from sirchat.errors import SettingError, SirchatError
from sirchat.saved.session_list import list_sessions
from sirchat.text.text_file import without_surrogates
from sirchat.text.transcript import parse_transcript
from sirchat.ui.exporting import export_chat
from sirchat.ui.screen import Screen

# Texts that browsers, XML readers or terminals might obey.
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>",
    "</style><script>alert(1)</script>", "</title><script>alert(1)</script>", "<!--", "-->",
    "[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](java\tscript:alert(1))",
    "[a](&#106;avascript:alert(1))", "[a](data:text/html,<script>alert(1)</script>)",
    "[a](vbscript:x)", "[a](file:///etc/passwd)", "<javascript:alert(1)>", "<data:text/html,x>",
    "![p](http://evil.example/p.png)", "![p](javascript:alert(1))", "[r]: javascript:alert(1)",
    "[a][r]", '[a](http://e.org "x\\" onmouseover=\\"alert(1)")', '[a](http://e.org/"onclick="x)',
    '```"><script>alert(1)</script>\nx\n```', "```js onload=alert(1)\nx\n```", "&lt;script&gt;",
    "<iframe src=//evil.example>", "<base href=//evil.example>", "<meta http-equiv=refresh>",
    "<link rel=stylesheet href=//evil.example/a.css>", "<form action=//evil.example>", "]]>",
    "url(http://evil.example)", "@import '//evil.example'", "<?xml-stylesheet href='x'?>",
    "<!DOCTYPE x [<!ENTITY e SYSTEM 'file:///etc/passwd'>]>&e;", "\ufffe\uffff", "\x0b\x0c",
    "| a | b |\n|---|---|\n| <script> | x |", "> <script>", "# <b>", "{x}", "{{x}}", "\x9b2J",
    "<![CDATA[x]]>", "</textarea><b>", "<plaintext>", "<!-- open", "&amp;lt;", "&#0;", "&notin;",
    "</p></body></html>x", "<a\nhref=x>", "\r\nx\ry", "\xa0", "\u2028", "\ud800", "a\0b",
    "\x1b]0;owned\x07", "\x9d0;owned\x9c", "\u202eabc", "\x7f", "\u2066",
]  # fmt: skip

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def text_of(random: Random) -> str:
    parts = [random.choice((*HOSTILE, odd_text(random, 1)[:100])) for _ in range(4)]
    return random.choice((" ", "\n", "\n\n", "")).join(parts[: random.randint(1, 4)])


def chat_of(random: Random) -> Session:
    """A chat with hostile texts, and a model with a hostile name."""
    model = replace(babbler(), name=text_of(random))
    chat = Session(model, Profile(budget=1500, system=_sent(random)))
    list(chat.read_user(_sent(random)))
    list(chat.read_reply(_sent(random)))
    chat.turns[-1] = Turn("assistant", text_of(random))  # as if it had been generated
    return chat


def _sent(random: Random) -> str:
    return text_of(random).encode("utf-8", "replace").decode() or "x"


def exported(chat: Session, format: str, folder: Path) -> str:
    path = folder / f"out.{format}"
    path.unlink(missing_ok=True)
    export_chat(chat, Screen(io.StringIO(), io.StringIO()), f'{format} "{path}"')
    return path.read_text(encoding="utf-8")


def test_exports_of_hostile_texts_hold_nothing_but_text(tmp_path: Path) -> None:
    def export(random: Random) -> None:
        chat = chat_of(random)
        if not any(turn.text.strip() for turn in chat.turns):
            return
        refuse_odd_display(exported(chat, "md", tmp_path))
        data = exported(chat, "json", tmp_path)
        if found := _CONTROLS.search(data):
            raise ValueError(f"{found[0]!r} in JSON")
        said = [turn.text for turn in chat.turns if turn.text.strip()]
        read = [turn.content for turn in parse_transcript(data.encode(), "out.json")]
        if read != [without_surrogates(text) for text in said]:
            raise ValueError("other words are read again")

    attack(export)


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
            assert not _CONTROLS.findall(done.stdout + done.stderr), words
    done = run("sessions", "export", "last", SIRCHAT_HOME=str(tmp_path))
    texts = [turn.content for turn in parse_transcript(done.stdout.encode(), "x")]
    assert texts[0] == "before\x9b2J"


# Model folders and profiles.


@contextmanager
def nothing_asked() -> Iterator[None]:
    """Context manager: a look at the network, or at standard input, is an AssertionError."""

    def refuse(*what: object, **options: object) -> Any:
        raise AssertionError(f"asked: {what}")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("getaddrinfo", "create_connection", "gethostbyname"):
            patch.setattr(socket, name, refuse)
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr("builtins.input", refuse)
        patch.setenv("HF_HUB_OFFLINE", "0")
        yield


def write_code(path: Path, marker: Path) -> None:
    """A module that makes the file `marker` when it runs, from wherever it may have been copied."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"open({str(marker)!r}, 'w').close()\n", encoding="utf-8")


CODE = {
    "auto_map": {
        "AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
    },
    "auto_map of another": {
        "AutoConfig": "evil/code--evil.Evil", "AutoModelForCausalLM": "evil/code--evil.Evil",
        "AutoTokenizer": ["evil/code--evil.Evil", None],
    },
}  # fmt: skip


def hostile_folder(folder: Path, family: str, kind: str) -> Path:
    """A model folder of this type whose files ask for code in every way that transformers knows."""
    if family == "babbler":
        save_babbler(folder)
    else:
        config = AutoConfig.for_model(
            family, vocab_size=len(hub_tokenizer()), hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
            max_position_embeddings=256,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        hub_tokenizer().save_pretrained(folder)
    for name in ("evil", "custom_generate/generate", "tokenizers", "json", "configuration_evil"):
        write_code(folder / f"{name}.py", folder.parent / "ran")
    more: dict[str, Any] = {
        "attention": {"_attn_implementation": "evil/kernel"},
        "experts": {"_experts_implementation": "evil/kernel"},
        "adapter": {},
        "quantized": {"quantization_config": {"quant_method": "evil"}},
    }
    asked = {"auto_map": CODE[kind]} if kind in CODE else more[kind]
    for file in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = folder / file
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | asked))
    if kind == "adapter":
        about = {
            "base_model_name_or_path": "evil/base", "peft_type": "LORA", "task_type": "CAUSAL_LM",
            "auto_mapping": {"parent_library": "evil", "base_model_class": "Evil"},
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(about))
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    return folder


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("babbler", kind) for kind in (*CODE, "attention", "experts", "adapter", "quantized")),
        *((family, "auto_map") for family in ("qwen2", "gpt_neox")),
    ],
)
def test_a_model_folder_runs_no_code_and_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    folder = hostile_folder(tmp_path / "model", family, kind)
    monkeypatch.chdir(folder)  # as if it had been unpacked there
    with nothing_asked(), suppress(SirchatError):
        load_model(str(folder), device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "line",
    [
        "policy: evil:Evil",
        "!!python/object/apply:os.system ['touch ran']",
        "model: !!python/name:os.system",
        "policy_options: {a: !!python/object/new:os.system ['touch ran']}",
        "description: !!binary eA==",
        "&a [*a, *a]",
    ],
)
def test_a_profile_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_code(tmp_path / "evil.py", tmp_path / "ran")
    (tmp_path / "sent.yaml").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(SettingError):
        load_profile("./sent.yaml")
    assert not (tmp_path / "ran").exists()


# Who can read what is written.


@pytest.fixture(params=[0o000, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_all_that_is_written_is_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("SIRCHAT_HOME", str(home))
    monkeypatch.chdir(here)
    modes: dict[str, int] = {}

    def note() -> None:
        for path in [home, *tmp_path.rglob("*")]:
            if path != here and path.exists():
                modes[str(path.relative_to(tmp_path))] = stat.S_IMODE(path.lstat().st_mode)

    monkeypatch.setattr("sirchat.memory.archive.SEGMENT_ROWS", 32)
    chat = Chat(archive="disk", budget=64, save_kv="on")
    chat.say("Some words, and more of them. " * 9, "more")
    chat.session.engine.store.archive._files.wait()
    chat.do("/save good")
    for format in ("md", "json"):
        chat.do(f"/export {format} out.{format}")
    chat.do("/branch other")
    note()
    chat.saved_chat.close()
    for words in (
        ("sessions", "export", "last", "out.jsonl"),
        ("sessions", "search", "words"),
        ("profiles", "init", "mine"),
        ("models", "default", "tiny"),
        ("ask", "Hello", "--max-new-tokens", "2"),
    ):
        assert run(*words).returncode == 0, words
    note()
    assert len(list_sessions(home / "data" / "sessions").sessions) >= 2
    assert any("archives" in name for name in modes)
    wrong = {name: oct(mode) for name, mode in modes.items() if mode not in (0o600, 0o700)}
    assert not wrong
