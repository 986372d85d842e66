"""The KV cache takes memory for the budget alone, and freed memory goes back to the system."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from chatting import babbler, session
from sirchat.chat.session import Session
from sirchat.memory.free_memory import trim_memory
from sirchat.ui.turn_commands import parse_retry, retry


def cache_bytes(chat: Session) -> int:
    return sum(memory.cache for memory in chat.memory)


def test_the_cache_shrinks_with_the_budget_and_after_a_reply_with_all_held() -> None:
    chat, small = (session(babbler(), budget=n, max_new_tokens=8) for n in (1024, 64))
    for text in ("red " * 60, "blue " * 60):
        for one in (chat, small):
            list(one.ask(text))
    assert cache_bytes(chat) > 8 * cache_bytes(small)
    chat.switch("/budget", budget=64)
    assert cache_bytes(chat) == cache_bytes(small)
    chat.switch("/budget", budget=128)
    assert cache_bytes(chat) > 1.9 * cache_bytes(small)
    chat.switch("/budget", budget=64)
    list(retry(chat, parse_retry("full"), lambda: False))
    assert cache_bytes(chat) == cache_bytes(small)


def test_a_chat_that_ends_frees_its_cache_at_once() -> None:
    chat = session(babbler(), budget=64, policy="sink", max_new_tokens=4, recall="words")
    gc.disable()  # a circle of references would wait for it, while the next chat takes memory, too
    try:
        for text in ("My name is Anna.", "blue " * 60, "What is my name?"):
            list(chat.ask(text))
        cache = ref(chat.engine.cache)
        del chat
        assert cache() is None
    finally:
        gc.enable()


def test_another_c_library_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    trim_memory()
