"""Real tokenizers: as their makers wrote them, and the header of a GGUF file of each."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# By name: what `tokenizer.ggml.pre` is called; None for a vocabulary of pieces with scores.
REAL = {
    "llama2": None,
    "qwen3": "qwen2",
    "deepseek_v3": "deepseek-v3",
    "gemma3": None,
    "llama3_1": "llama-bpe",
    "gptoss": "gpt-4o",
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
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
    """The header of a GGUF file with this vocabulary, as llama.cpp's converters write it."""
    made = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    pre, model = REAL[folder.name], made["model"]
    added = {token["content"]: token for token in made["added_tokens"]}
    ids = model["vocab"] | {token: about["id"] for token, about in added.items()}
    size = max(ids.values()) + 1
    tokens, kinds = [f"[PAD{at}]" for at in range(size)], [_UNUSED] * size
    for token, at in ids.items():
        tokens[at], kinds[at] = token, _NORMAL
        if token in added:
            is_control = added[token]["special"] or _looks_like_control(token)
            kinds[at] = _CONTROL if is_control else _USER_DEFINED
            tokens[at] = token if is_control else token.replace("▁", " ")
        elif pre is None and len(token) == 6 and token.startswith("<0x"):
            kinds[at] = _BYTE
    said: dict[str, Any] = {
        "model": "gpt2" if pre else "llama",
        "pre": pre or "default",
        "tokens": tokens,
    }
    for ours, theirs in _KEYS.items():
        token = config.get(f"{ours}_token")
        if (text := token["content"] if isinstance(token, dict) else token) is not None:
            said[f"{theirs}_token_id"] = ids[text]
    merges = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    if pre:
        said["merges"] = [" ".join(pair) for pair in merges]
    else:
        kinds[said["unknown_token_id"]] = _UNKNOWN
        ranks = {left + right: at for at, (left, right) in reversed(list(enumerate(merges)))}
        added_kinds = (_UNKNOWN, _CONTROL, _USER_DEFINED)
        said["scores"] = [
            -1000.0 if kind in added_kinds else -float(ranks.get(token, 0))
            for token, kind in zip(tokens, kinds, strict=True)
        ]
        if "gemma" in folder.name:
            said["add_space_prefix"] = False
    if "add_bos_token" in config:
        said["add_bos_token"] = config["add_bos_token"]
    said["token_type"] = kinds
    header = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    return header | {"tokenizer.chat_template": config.get("chat_template")}


def _looks_like_control(token: str) -> bool:
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        token.startswith(start) and token.endswith(end)
        for start, end in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    )
