"""Real tokenizers: as their makers wrote them, and the header of a GGUF file of each."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gguf_file import tokenizer_entries

# By name: what `tokenizer.ggml.pre` is called; None for a vocabulary of pieces with scores.
REAL = {
    "llama2": None,
    "qwen3": "qwen2",
    "deepseek_v3": "deepseek-v3",
    "gemma3": None,
    "llama3_1": "llama-bpe",
    "gptoss": "gpt-4o",
}
_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def unpacked(data: Path, name: str, to: Path) -> Path:
    """The folder of a real tokenizer, with its files as a model's folder has them."""
    source, folder = data / "tokenizers" / name, to / name
    folder.mkdir()
    text = lzma.decompress((source / "tokenizer.json.xz").read_bytes())
    (folder / "tokenizer.json").write_bytes(text)
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return folder


def original(folder: Path) -> Tokenizer:
    """The tokenizer as its makers wrote it."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def gguf_header(folder: Path) -> dict[str, Any]:
    """The header of a GGUF file with this vocabulary."""
    made = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    tokens = {name: config.get(f"{key}_token") for key, name in _KEYS.items()}
    named = {k: one["content"] if isinstance(one, dict) else one for k, one in tokens.items()}
    is_gemma = "gemma" in folder.name
    header = tokenizer_entries(made, named, REAL[folder.name], has_space_prefix=not is_gemma)
    if "add_bos_token" in config:
        header["tokenizer.ggml.add_bos_token"] = config["add_bos_token"]
    return header | {"tokenizer.chat_template": config.get("chat_template")}
