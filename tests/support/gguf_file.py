"""A Llama or Qwen model written as a GGUF file, as llama.cpp stores it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sirchat.models.gguf.header import BLOCKS, parse_gguf
from sirchat.models.model import LoadedModel
from sirchat.paths import tiny_model_dir

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # kinds of tokens


def write_gguf(path: Path, model: LoadedModel, kind: str = "F32") -> Path:
    """Write a model that has the bundled tokenizer to `path`; returns the path.

    Matrices are of a type such as `Q4_1`, embeddings of `Q8_0` then, all else of float32.
    """
    import gguf

    from gguf_models import add_settings, finish, tensors_of

    architecture = model.module.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, model.module, architecture)
    bundled = json.loads((tiny_model_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    named = {"bos": model.tokenizer.bos_token, "eos": model.tokenizer.eos_token}
    entries = tokenizer_entries(bundled, named, "gpt-2")
    add_tokenizer(writer, entries, model.tokenizer.chat_template)
    for name, weight in tensors_of(model.module, architecture).items():
        values = weight.float().contiguous().numpy()
        if kind == "F32" or weight.ndim < 2:
            writer.add_tensor(name, values)
            continue
        stored = gguf.GGMLQuantizationType["Q8_0" if name == "token_embd.weight" else kind]
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    return finish(writer, path)


def write_first_layers(path: Path, whole: Path, count: int, *, has_lists: bool = True) -> Path:
    """Copy a Llama model's GGUF file to `path` with its first `count` layers; returns the path.

    The copied tensors keep their bytes, and the header all its metadata but the number of layers,
    and the tokens with their types and merges, unless it `has_lists`.
    """
    data, alignment = whole.read_bytes(), 32
    read = parse_gguf(whole, with_text_lists=False)
    left_out = tuple(f"blk.{n}." for n in range(count, read.metadata["llama.block_count"]))
    tensors = {name: one for name, one in read.tensors.items() if not name.startswith(left_out)}
    name = next(iter(read.tensors)).encode()
    first_entry = data.index(struct.pack("<Q", len(name)) + name)
    header = bytearray(data[:first_entry])
    header[8:16] = struct.pack("<Q", len(tensors))
    key = b"llama.block_count"
    at = header.index(key) + len(key) + 4  # behind the type
    header[at : at + 4] = struct.pack("<I", count)
    if not has_lists:
        ends = (
            header.index(b"tokenizer.ggml.%s" % key) - 8 for key in (b"tokens", b"bos_token_id")
        )
        del header[slice(*ends)]
        header[16:24] = struct.pack("<Q", struct.unpack("<Q", header[16:24])[0] - 3)
    body = bytearray()
    for title, one in tensors.items():
        encoded, shape = title.encode(), one.shape[::-1]
        header += struct.pack("<Q", len(encoded)) + encoded
        header += struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, BLOCKS[one.type][0], len(body)
        )
        body += one.data.tobytes()
        body += bytes(-len(body) % alignment)
    path.write_bytes(header + bytes(-len(header) % alignment) + body)
    return path


def tokenizer_entries(
    made: dict[str, Any],
    named: Mapping[str, str | None],
    pre: str | None,
    *,
    has_space_prefix: bool = True,
) -> dict[str, Any]:
    """What a header says of a tokenizer, as llama.cpp's converters write it.

    `made` is its tokenizer.json; `named` are the tokens `bos`, `eos`, `unknown` and `padding`.
    `pre` is the name of its split into words; None for a vocabulary of pieces with scores.
    """
    model = made["model"]
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
    said = {f"{name}_token_id": ids[token] for name, token in named.items() if token is not None}
    said |= {"model": "gpt2" if pre else "llama", "pre": pre or "default", "tokens": tokens}
    merges = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
    if pre:
        said["merges"] = [" ".join(pair) for pair in merges]
    else:
        kinds[said["unknown_token_id"]] = _UNKNOWN
        ranks = {left + right: at for at, (left, right) in reversed(list(enumerate(merges)))}
        others = (_UNKNOWN, _CONTROL, _USER_DEFINED)
        said["scores"] = [
            -1000.0 if kind in others else -float(ranks.get(token, 0))
            for token, kind in zip(tokens, kinds, strict=True)
        ]
        if not has_space_prefix:
            said["add_space_prefix"] = False
    said["token_type"] = kinds
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}


def add_tokenizer(writer: Any, entries: Mapping[str, Any], template: str) -> None:
    """Write the entries of a tokenizer, and its chat template."""
    import gguf

    for key, value in entries.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_chat_template(template)


def _looks_like_control(token: str) -> bool:
    return token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        token.startswith(start) and token.endswith(end)
        for start, end in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    )
