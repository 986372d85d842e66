"""A GGUF file is a model like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chatting import answer, session, tiny
from sirchat.models.model import load_model
from sirchat.paths import tiny_dir

gguf = pytest.importorskip("gguf")


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k as GGUF's llama stores them: rotary pairs side by side."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _tensors(module: Any) -> dict[str, torch.Tensor]:
    config = module.config
    out = {}
    for name, weight in module.state_dict().items():
        if name == "model.embed_tokens.weight":
            out["token_embd.weight"] = weight
        elif name == "model.norm.weight":
            out["output_norm.weight"] = weight
        elif name.startswith("model.layers."):
            layer, part = name.removeprefix("model.layers.").split(".", 1)
            part = part.removesuffix(".weight")
            if part == "self_attn.q_proj":
                weight = _permuted(weight, config.num_attention_heads)
            elif part == "self_attn.k_proj":
                weight = _permuted(weight, config.num_key_value_heads)
            out[f"blk.{layer}.{_NAMES[part]}.weight"] = weight
    return out


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, written as GGUF in float32."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    module, config = tiny().module, tiny().module.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokenizer = json.loads((tiny_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    words = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words |= special
    ordered = sorted(words, key=words.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(ordered)
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in ordered]
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(tiny().tokenizer.bos_token_id)
    writer.add_eos_token_id(tiny().tokenizer.eos_token_id)
    writer.add_chat_template(tiny().tokenizer.chat_template)
    for name, weight in _tensors(module).items():
        writer.add_tensor(name, weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
