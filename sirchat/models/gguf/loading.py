"""Makes a transformers model from a GGUF file: an empty model first, then one tensor at a time.

Reads only the most common architectures. transformers reads the others itself, in several passes
over the file, and meanwhile has all weights in memory twice. Blocks are laid out as in ggml
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sirchat.errors import ModelError
from sirchat.models.gguf.contents import config_values, parameter_name
from sirchat.models.gguf.header import BLOCKS, FOUR_BIT, GgufFile, GgufTensor
from sirchat.models.packed import (
    GROUP,
    Int4Linear,
    Int8Head,
    Int8Linear,
    PackedLinear,
    SharedEmbedding,
    WeightStore,
    eight_bits,
    fuse_projections,
)
from sirchat.models.progress import Progress
from sirchat.models.threads import trim_memory


class FourBit(NamedTuple):
    """A matrix [N, K] of weights `q * scale + minimum`.

    Attributes:
        q: uint8 [N, K], 0 to 15.
        scale: float32 [N, K / 32], one for each group of 32.
        minimum: float32 [N, K / 32], also one for each group.
    """

    q: Tensor
    scale: Tensor
    minimum: Tensor


def four_bit(tensor: GgufTensor) -> FourBit:
    """Split a matrix of a type in `FOUR_BIT` into values, scales and minima, without loss."""
    rows, columns = tensor.shape
    blocks = torch.from_numpy(np.array(tensor.blocks))  # [b, bytes of a block]
    taken = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}[tensor.type](blocks)
    return FourBit(taken.q.reshape(rows, columns), *(x.reshape(rows, -1) for x in taken[1:]))


def floats(tensor: GgufTensor) -> Tensor:
    """Unpack a tensor of any known type to float32; F16 and BF16 keep their own type."""
    if tensor.type == "BF16":
        return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).reshape(tensor.shape)
    if tensor.type in ("F32", "F16"):
        kind = np.float32 if tensor.type == "F32" else np.float16
        return torch.from_numpy(np.array(tensor.data).view(kind)).reshape(tensor.shape)
    if tensor.type in FOUR_BIT and len(tensor.shape) == 2:
        q, scale, minimum = four_bit(tensor)
        grouped = q.view(*scale.shape, GROUP)
        return (grouped * scale[..., None] + minimum[..., None]).view(tensor.shape)
    if tensor.type == "Q8_0":
        blocks = torch.from_numpy(np.array(tensor.blocks))
        return (blocks[:, 2:].view(torch.int8) * _half(blocks, 0)).reshape(tensor.shape)
    if tensor.type == "Q6_K":  # the embeddings of most four-bit files
        return _q6_k(torch.from_numpy(np.array(tensor.blocks))).view(tensor.shape)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize  # for the rarer formats

    kind = GGMLQuantizationType(BLOCKS[tensor.type][0])
    return torch.from_numpy(dequantize(tensor.blocks, kind)).reshape(tensor.shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block [b, bytes], as float32 [b, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(bytes_: Tensor) -> Tensor:
    """The low four bits of n bytes [b, n], then their high four bits: [b, 2 n]."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1)


def _q4_0(blocks: Tensor) -> FourBit:
    scale = _half(blocks, 0)
    return FourBit(_nibbles(blocks[:, 2:]), scale, -8 * scale)


def _q4_1(blocks: Tensor) -> FourBit:
    return FourBit(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: Tensor) -> FourBit:
    """Split blocks of eight groups of 32; scales and minima are six-bit multiples of two floats."""
    packed = blocks[:, 4:16].view(-1, 3, 4)
    low, high, mixed = packed.unbind(1)  # [b, 4] each
    scale = torch.cat((low & 63, (mixed & 15) | (low >> 6 << 4)), -1)
    minimum = torch.cat((high & 63, (mixed >> 4) | (high >> 6 << 4)), -1)
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256)
    return FourBit(q, scale * _half(blocks, 0), minimum * -_half(blocks, 2))


def _q6_k(blocks: Tensor) -> Tensor:
    """Unpack blocks of sixteen groups of 16; a scale is an eight-bit multiple of one float."""
    low = _nibbles(blocks[:, :128].view(-1, 2, 64))  # [b, 2, 128]
    pairs = blocks[:, 128:192].view(-1, 2, 32)
    high = torch.cat([pairs >> shift & 3 for shift in (0, 2, 4, 6)], -1)  # [b, 2, 128]
    q = (low | high << 4).view(torch.int8).sub_(32).view(-1, 16, 16)
    scale = blocks[:, 192:208].contiguous().view(torch.int8) * _half(blocks, 208)  # [b, 16]
    return q * scale[..., None]


_ROWS = 4096  # rows of a matrix that are float32 at a time
_SOME = 10  # tensors after which free memory is returned to the system


def load_tokenizer(folder: str, name: str, architecture: str) -> Any:
    """Load the tokenizer of a GGUF file with one of the `ARCHITECTURES`."""
    if architecture == "llama":
        return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=name)
    return AutoTokenizer.from_pretrained(folder, gguf_file=name, tokenizer_type="qwen2")


def load_module(
    file: GgufFile,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    keep_packed: bool = False,
) -> Any:
    """Make the transformers model of a GGUF file, with its weights unpacked to `dtype`.

    With `keep_packed`, four-bit matrices stay as they are, and matrices in other blocks get eight
    bits with a scale for each row. Raises ModelError if tensors are missing or of another shape.
    """
    values = config_values(file) or {}
    _check_sizes(file, values)
    config = AutoConfig.for_model(**values)
    with init_empty_weights(include_buffers=False):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    store = WeightStore(_most_packed(file) if keep_packed else 0)
    for done, (name, tensor) in enumerate(file.tensors.items(), 1):
        target = parameter_name(name) or ""
        packed = _packed(tensor, name, file) if keep_packed else None
        if packed is None:
            _put(module, target, _in_rows(floats(tensor).to(dtype), name, file))
        else:
            _replace(module, target, packed, dtype, store)
        file.leave_pages()
        if done % _SOME == 0 or done == len(file.tensors):
            trim_memory()
        if progress is not None:
            progress("Reading weights", done, len(file.tensors))
    if not isinstance(module.get_input_embeddings(), SharedEmbedding):
        module.tie_weights()
    head = module.get_output_embeddings()
    if isinstance(head, Int8Linear):
        module.set_output_embeddings(Int8Head.of(head))
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"the GGUF file has no {name}", hint="the file may be incomplete")
    return module


def _check_sizes(file: GgufFile, values: Mapping[str, Any]) -> None:
    """Raise ModelError if the config's sizes do not fit the tensors, before a model is made."""
    layers, hidden = values.get("num_hidden_layers"), values.get("hidden_size")
    embedding = file.tensors.get("token_embd.weight")
    queries = file.tensors.get(f"blk.{(layers or 0) - 1}.attn_q.weight")
    if embedding is None or queries is None:
        raise ModelError(
            f"the GGUF file lacks weights of some of its {layers} layers",
            hint="the file may be incomplete",
        )
    heads = values.get("num_attention_heads") or 0
    rows = heads * (values.get("head_dim") or (hidden or 0) // max(1, heads))
    if embedding.shape != (values["vocab_size"], hidden) or queries.shape != (rows, hidden):
        raise ModelError("the sizes of the GGUF file's weights do not match its header")


def _in_rows(weight: Tensor, name: str, file: GgufFile) -> Tensor:
    """Reorder llama's query and key rows from rotary pairs to the halves of transformers."""
    if file.architecture != "llama" or not re.search(r"\.attn_[qk]\.", name):
        return weight
    which = "head_count" if ".attn_q." in name else "head_count_kv"
    default = file.metadata["llama.attention.head_count"]
    heads = int(file.metadata.get(f"llama.attention.{which}", default))
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])  # [H, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(weight.shape)


def _packed(tensor: GgufTensor, name: str, file: GgufFile) -> PackedLinear | None:
    """A matrix stored in blocks as a packed layer without bias; None for any other tensor."""
    if len(tensor.shape) != 2 or BLOCKS[tensor.type][1] == 1:
        return None
    if _has_four_bits(tensor, name) and Int4Linear.fits(*tensor.shape):
        return Int4Linear(*(_in_rows(one, name, file) for one in four_bit(tensor)))
    q = torch.empty(tensor.shape, dtype=torch.int8)
    scale = torch.empty(tensor.shape[0], dtype=torch.bfloat16)
    parts = zip(
        torch.split(q, _ROWS), torch.split(scale, _ROWS), tensor.row_blocks(_ROWS), strict=True
    )
    for rows, factors, part in parts:  # in parts, which saves memory
        for here, found in zip((rows, factors), eight_bits(floats(part)), strict=True):
            here.copy_(found)
    return Int8Linear(_in_rows(q, name, file), _in_rows(scale, name, file))


def _has_four_bits(tensor: GgufTensor, name: str) -> bool:
    """Whether a matrix keeps its four bits; embeddings and the output head get eight."""
    return tensor.type in FOUR_BIT and name not in ("token_embd.weight", "output.weight")


def _most_packed(file: GgufFile) -> int:
    """An upper bound for the bytes of all packed layers."""
    return sum(
        # 32 weights take 20 bytes (four bits each, two bfloat16) or 32 (eight bits); a row 2 more
        prod(one.shape) // 32 * (20 if _has_four_bits(one, name) else 32) + 2 * one.shape[0] + 128
        for name, one in file.tensors.items()
        if len(one.shape) == 2 and BLOCKS[one.type][1] > 1
    )


def _replace(
    module: Any, name: str, packed: PackedLinear, dtype: torch.dtype, store: WeightStore
) -> None:
    """Put `packed` in place of the layer with the weight `name`, and give it that layer's bias.

    The packed weights go into `store`. Packed embeddings return vectors of type `dtype`; they
    also become the output head if that has the same weights.
    """
    if name == "model.embed_tokens.weight" and isinstance(packed, Int8Linear):
        store.move(packed)
        module.set_input_embeddings(SharedEmbedding(packed, dtype))
        if module.config.tie_word_embeddings:
            module.set_output_embeddings(packed)
        return
    path = name.removesuffix(".weight")
    before = module.get_submodule(path)
    wanted = [packed.out_features, packed.in_features]
    if not isinstance(before, nn.Linear) or list(before.weight.shape) != wanted:
        raise ModelError(
            f"{name} has the shape {wanted} in the GGUF file, another one in the model"
        )
    packed.bias = before.bias
    module.set_submodule(path, packed)
    fuse_projections(module, path, store)


def _put(module: nn.Module, name: str, weight: Tensor) -> None:
    """Set the parameter `name`; raises ModelError if the model lacks it or its shape differs."""
    owner_name, _, own = name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
        wanted = owner.get_parameter(own).shape
    except AttributeError:
        raise ModelError(f"the GGUF file has {name}, but the model does not") from None
    if wanted != weight.shape:
        shapes = f"{list(weight.shape)}, must be {list(wanted)}"
        raise ModelError(f"the GGUF file's {name} is {shapes}")
    setattr(owner, own, nn.Parameter(weight))
