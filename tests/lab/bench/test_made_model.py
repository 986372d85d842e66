"""`sirchat bench make-model` writes a GGUF file that sirchat and other programs can read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command import run
from sirchat.lab.bench.made_model import CONTEXT, write_model
from sirchat.lab.bench.ratio import SHAPES
from sirchat.models.load import load_model

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 3000,
}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False)])
def test_a_made_model_is_loaded_packed_and_computes(
    tmp_path: Path, kind: str, family: str, tied: bool
) -> None:
    shape = SMALL | {"model_type": family, "tie_word_embeddings": tied}
    model = load_model(str(write_model(tmp_path / "made.gguf", shape, kind)))
    config = model.module.config.to_dict()
    assert {name: config[name] for name in shape} == shape
    assert config["max_position_embeddings"] == CONTEXT
    assert "packed" in model.precision
    assert model.decode_step is not None
    assert model.tokenizer is not None
    assert model.tokenizer.backend_tokenizer.id_to_token(2999) == "<unused-2999>"
    assert model.tokenizer.decode(model.tokenizer.encode("hello there")) == "hello there"
    logits = model.module(torch.tensor([[5, 6, 7, 2999]])).logits
    assert 0.1 < logits.std() < 10
    weights = model.module.model.layers[1].mlp.down_proj.unpacked().float()
    assert 0.01 < weights.std() < 0.03
    assert abs(weights.mean()) < 0.004


def test_other_programs_read_the_same_fields(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    shape = SMALL | {"model_type": "qwen3", "tie_word_embeddings": False}
    read = gguf.GGUFReader(write_model(tmp_path / "made.gguf", shape))
    said = {name: field.contents() for name, field in read.fields.items()}
    assert said["general.architecture"] == "qwen3"
    assert said["qwen3.block_count"] == 2
    assert said["qwen3.attention.key_length"] == 128
    assert len(said["tokenizer.ggml.tokens"]) == said["qwen3.vocab_size"] == 3000
    assert "<|assistant|>" in said["tokenizer.chat_template"]
    tensors = {one.name: one for one in read.tensors}
    assert list(tensors["blk.1.ffn_down.weight"].shape) == [512, 256]
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "Q4_K"
    assert tensors["output.weight"].tensor_type.name == "Q6_K"
    assert tensors["blk.0.attn_k_norm.weight"].data.tolist() == [1.0] * 128


def test_the_command_writes_a_shape_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "135m", SHAPES["135m"] | SMALL)
    path = tmp_path / "made.gguf"
    assert run("bench", "make-model", "135m", str(path)).returncode == 0
    assert path.stat().st_size > 1_000_000
    again = run("bench", "make-model", "135m", str(path))
    assert again.returncode == 2
    assert f"{path} exists already" in again.stderr
    other = run("bench", "make-model", "2b", str(tmp_path / "b.gguf"))
    assert other.returncode == 2
    assert "135m, 1b, 4b, 8b" in other.stderr
    wrong = run("bench", "make-model", "135m", str(tmp_path / "b.gguf"), "--type", "Q8_0")
    assert "--type 'Q8_0' is none of Q4_0, Q4_1, Q4_K" in wrong.stderr
    assert not (tmp_path / "b.gguf").exists()
