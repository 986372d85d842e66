"""A Llama or Qwen model written as a GGUF file, as llama.cpp stores it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from sirchat.models.gguf.header import BLOCKS, parse_gguf
from sirchat.models.model import LoadedModel
from sirchat.paths import tiny_model_dir


def write_gguf(path: Path, model: LoadedModel, kind: str = "F32") -> Path:
    """Write a model that has the bundled tokenizer to `path`; returns the path.

    Matrices are of a type such as `Q4_1`, embeddings of `Q8_0` then, all else of float32.
    """
    import gguf

    from gguf_models import add_settings, finish, tensors_of

    architecture = model.module.config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, model.module, architecture)
    _add_tokenizer(writer, model.tokenizer)
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


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import gguf

    bundled = json.loads((tiny_model_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in bundled["added_tokens"]}
    ids = dict(bundled["model"]["vocab"]) | special
    ordered = sorted(ids, key=ids.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in ordered]
    merges = bundled["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(ordered)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
