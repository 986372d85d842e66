"""A GGUF file loads like any other model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from chatting import answer, session, tiny
from gguf_file import write_gguf
from sirchat.models.gguf.header import parse_gguf
from sirchat.models.gguf.translate import is_supported
from sirchat.models.load import load_model
from sirchat.models.model import wrap_model

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


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_other_families_too(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = CONFIG_MAPPING[kind](vocab_size=tiny().vocab_size, **sizes, **heads)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config).eval()
    for parameter in module.parameters():  # biases and norms differ from their defaults
        parameter.data += 0.1 * torch.randn_like(parameter)
    theirs = wrap_model(kind, module, tiny().tokenizer)
    file = write_gguf(tmp_path / "model.gguf", theirs)
    assert is_supported(parse_gguf(file))
    ours, ids = load_model(str(file), device="cpu"), list(range(10, 40))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert ours.tokenizer.backend_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert ours.tokenizer.encode("It's 12:30!") == tokenizer.encode("It's 12:30!")
    found, wanted = (one.forward(ids, one.new_cache(64)) for one in (ours, theirs))
    assert torch.allclose(found, wanted, atol=1e-4)


def test_it_chats(file: Path) -> None:
    chat = session(load_model(str(file), device="cpu"), max_new_tokens=30)
    list(chat.ask("My name is Anna."))
    assert "Anna" in answer(list(chat.ask("What is my name?")))
