"""What others send is text: nothing in it runs, asks the network, or controls a terminal.

Profiles and model folders; and who can read what sirchat writes.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from chatting import hub_tokenizer, save_babbler
from command import run
from plain_model import load_model
from saved_chats import Chat
from sirchat.config.profile_files import load_profile
from sirchat.errors import SettingError, SirchatError
from sirchat.saved.session_list import list_sessions

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
