"""A GGUF file loads like any other model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chatting import answer, session, tiny
from gguf_file import write_gguf
from sirchat.models.model import load_model

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, written as GGUF in float32."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny())


def test_its_logits_are_those_of_the_safetensors(file: Path) -> None:
    model = load_model(str(file), device="cpu")
    ids = list(range(10, 40))
    ours = model.forward(ids, model.new_cache(64))
    theirs = tiny().forward(ids, tiny().new_cache(64))
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_it_chats(file: Path) -> None:
    chat = session(load_model(str(file), device="cpu"), max_new_tokens=30)
    list(chat.ask("My name is Anna."))
    assert "Anna" in answer(list(chat.ask("What is my name?")))
