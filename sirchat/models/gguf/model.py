"""Makes a model from a GGUF file: first an empty model, then one tensor at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.errors import ModelError
from sirchat.memory.free_memory import trim_memory
from sirchat.models.decoder import Decoder
from sirchat.models.gguf.blocks import NativePacking, split_blocks, split_four_bit, unpack_floats
from sirchat.models.gguf.header import BLOCK_LAYOUTS, BLOCKS, FOUR_BIT, GgufFile, GgufTensor
from sirchat.models.gguf.translate import Conversion, architectures, config_values, find_target
from sirchat.models.model_config import DecoderConfig
from sirchat.models.packed import (
    GROUP,
    BlockGpuHead,
    BlockGpuLinear,
    BlockHead,
    BlockLinear,
    Int8Head,
    Int8Linear,
    PackedLinear,
    RowLinear,
    SharedEmbedding,
    int4_class,
)
from sirchat.models.packing import (
    PackedExperts,
    fuse_projections,
    quantize_int8,
    same_input_names,
)
from sirchat.models.progress import Progress, switch_off_bars

_WEIGHTS_AT_ONCE = 2**20  # weights that are unpacked at a time: few calls, little memory
_TRIM_AFTER_BYTES = 2**26  # bytes to read before memory is given back again
_CPU = torch.device("cpu")
_EMBEDDINGS = "model.embed_tokens.weight"
_EXPERT_PARTS: tuple[Conversion, ...] = ("gate", "up", "down")


def load_module(
    file: GgufFile, dtype: torch.dtype, progress: Progress | None = None, **options: Any
) -> Any:
    """Make the model of a GGUF file, with weights of `dtype` on the CPU, or packed on a device.

    `options` are the fields of `_Loader`. Raises ModelError if tensors are missing or of a wrong
    shape.
    """
    loader = _Loader(file, dtype, **options)
    read = 0
    for done, (name, tensor) in enumerate(file.tensors.items(), 1):
        try:
            loader.add(name, tensor)
        except RuntimeError as error:  # of a change that needs another shape
            raise ModelError(f"the GGUF file's {name} does not fit its header: {error}") from error
        file.release_pages()
        read += tensor.data.nbytes
        if read >= _TRIM_AFTER_BYTES or done == len(file.tensors):
            read = 0
            trim_memory()
        if progress is not None:
            progress("Reading weights", done, len(file.tensors))
    return finish_module(loader.module)


@dataclass
class _Loader:
    file: GgufFile
    dtype: torch.dtype
    keep_packed: bool = False  # four-bit matrices keep four bits, and other blocks get eight
    for_hub: bool = False  # the model is one of transformers
    device: torch.device = _CPU  # of packed weights
    cpu_layers: int = 0  # number of the first layers that are on the CPU, with the embeddings
    native: NativePacking | None = None  # keeps the file's bits instead, on the CPU

    def __post_init__(self) -> None:
        self.values = config_values(self.file)
        # A GPU's captured step reads sliding-window layers only by transformers' modules.
        slides = self.device.type != "cpu" and bool(self.values.get("sliding_window"))
        self.module = empty_module(self.values, self.dtype, for_hub=self.for_hub or slides)
        self.targets = {name: find_target(name, self.file) for name in self.file.tensors}
        self.tensors = {one.name: self.file.tensors[name] for name, one in self.targets.items()}
        self.joined = dict[str, BlockLinear]()  # by the module of its parts
        self.waiting = defaultdict[str, dict[Conversion, Any]](dict)

    def add(self, name: str, tensor: GgufTensor) -> None:
        target, conversion = self.targets[name]
        if not target:
            return
        if conversion in (*_EXPERT_PARTS, "gate and up"):
            self._add_experts(name, target, conversion, tensor)
        elif self._can_stay_packed(target, tensor):
            is_head_or_embeddings = name.endswith("token_embd.weight") or name == "output.weight"
            how = tensor, conversion, not is_head_or_embeddings
            packed = self._pack(*how, self._place(target), self._part_of_joined(target, tensor))
            _replace_layer(self.module, target, packed, self.dtype)
            is_tied = self.module.config.tie_word_embeddings
            if self.cpu_layers and is_tied and target == _EMBEDDINGS:  # the head is elsewhere
                self.module.set_output_embeddings(self._pack(*how, self.device))
        else:
            weight = _undo_conversion(unpack_floats(tensor), conversion, self.values)
            set_weight(self.module, target, weight.to(self.dtype))

    def _place(self, target: str) -> torch.device:
        """The device of a weight that stays packed."""
        _, kind, at, *_ = f"{target}..".split(".")
        is_first = target == _EMBEDDINGS or (kind == "layers" and int(at) < self.cpu_layers)
        return _CPU if self.cpu_layers and is_first else self.device

    def _can_stay_packed(self, target: str, tensor: GgufTensor) -> bool:
        if not self.keep_packed or len(tensor.shape) != 2 or BLOCKS[tensor.type][1] == 1:
            return False
        try:
            layer = self.module.get_submodule(target.removesuffix(".weight"))
        except AttributeError:
            return False  # `set_weight` then raises an error
        return isinstance(layer, nn.Linear | nn.Embedding)

    def _add_experts(self, name: str, target: str, part: Conversion, tensor: GgufTensor) -> None:
        # Matrices wait until all that are joined, or all of a layer if they stay packed, are there.
        path = target.rpartition(".")[0]
        if self.keep_packed and len(tensor.shape) == 3 and _has_packed_experts(name, self.file):
            waiting = self.waiting[path]
            if part == "gate and up":
                both = list(self._pack_experts(tensor, 2))
                waiting["gate"], waiting["up"] = both[::2], both[1::2]
            else:
                waiting[part] = list(self._pack_experts(tensor))
            if len(waiting) == len(_EXPERT_PARTS):
                _replace_experts(self.module, path, self.waiting.pop(path))
            return
        weight = unpack_floats(tensor).to(self.dtype)
        is_transposed = architectures()[self.file.architecture].transposes_experts
        if is_transposed and weight.ndim == 3:
            weight = weight.mT.contiguous()  # [E, K, N]
        if part in ("gate", "up"):
            waiting = self.waiting[target]
            waiting[part] = weight
            if len(waiting) < 2:
                return
            gate, up = waiting["gate"], waiting["up"]
            weight = torch.cat((gate, up), 1)
            if is_transposed:
                weight = torch.stack((gate, up), -1).flatten(-2)
            del self.waiting[target]
        set_weight(self.module, target, weight)

    def _pack_experts(self, tensor: GgufTensor, parts: int = 1) -> Iterator[PackedLinear]:
        """Pack each expert's matrix; yields `parts` layers per expert, with equally many rows."""
        rows = -(-tensor.shape[1] // parts) or 1
        for expert in tensor.split_rows(1):
            for matrix in GgufTensor(expert.shape[1:], expert.type, expert.data).split_rows(rows):
                yield self._pack(matrix, None, True, self.device)

    def _part_of_joined(self, target: str, tensor: GgufTensor) -> BlockLinear | None:
        """An empty layer for a matrix, whose blocks are part of those of a joined layer.

        To join the layers afterwards would copy them. None if they are not joined in blocks.
        """
        owner, names = same_input_names(target.removesuffix(".weight"))
        parts = [self.tensors.get(f"{owner}.{name}.weight") for name in names]
        kinds = {(part.type, part.shape[1:]) if part else None for part in parts}
        rows = [part.shape[0] for part in parts if part]
        fits = all(BlockLinear.fits(tensor.type, n, *tensor.shape[1:]) for n in rows)
        is_native = self.native is not None and self._place(target) == _CPU
        if not is_native or len(parts) < 2 or len(kinds) > 1 or not fits:
            return None
        if owner not in self.joined:
            self.joined[owner] = BlockLinear.empty(tensor.type, sum(rows), *tensor.shape[1:])
        at, joined = parts.index(tensor), self.joined[owner]
        layer = BlockLinear(joined.blocks[: rows[at]])
        layer.take_rows(joined, sum(rows[:at]))
        return layer

    def _pack(
        self,
        tensor: GgufTensor,
        conversion: Conversion | None,
        may_be_4_bit: bool,
        device: torch.device,
        layer: BlockLinear | None = None,
    ) -> PackedLinear:
        """Make a layer without bias, with the file's bits where allowed and possible, else 8."""

        def undo(x: Tensor) -> Tensor:
            return _undo_conversion(x, conversion, self.values)

        four_bit = int4_class(device)
        head_dim = self.values["linear_value_head_dim"] if conversion == "value columns" else 0
        is_4_bit = may_be_4_bit and tensor.type in FOUR_BIT and head_dim % GROUP == 0
        is_4_bit = is_4_bit and four_bit.fits(*tensor.shape)
        may_be_native = conversion != "value columns" and device == _CPU
        native = self.native if may_be_native else None
        if native is not None and native.can_pack_eight_bits(tensor):
            order = undo(torch.arange(tensor.shape[0])).contiguous()
            if BlockLinear.fits(tensor.type, *tensor.shape):
                return native.pack_blocks(tensor, order, layer)
            return native.pack_eight_bits(tensor, order)
        max_rows = _WEIGHTS_AT_ONCE // tensor.shape[1] // 64 * 64 or 64
        if device != _CPU and tensor.type in BLOCK_LAYOUTS and not head_dim:
            split = [split_blocks(part, device) for part in tensor.split_rows(max_rows)]
            buffers = [torch.cat(parts) for parts in zip(*split, strict=True)]
            if conversion is not None:
                order = undo(torch.arange(tensor.shape[0], device=device))
                buffers = [buffer[order] for buffer in buffers]
            return BlockGpuLinear(*buffers)
        if is_4_bit:
            parts = [tensor] if conversion is not None else tensor.split_rows(max_rows)
            layers = [four_bit.from_nibbles(*map(undo, split_four_bit(part))) for part in parts]
            joined = layers[0] if len(layers) == 1 else four_bit.join_layers(layers)
            return joined.to(device)
        # At once in its place: a copy of a large layer, such as the head, would take much memory.
        q = torch.empty(tensor.shape, dtype=torch.int8)
        scale = torch.empty(len(q), dtype=torch.bfloat16)
        starts = range(0, len(q), max_rows)
        for start, part in zip(starts, tensor.split_rows(max_rows), strict=True):
            rows = slice(start, start + max_rows)
            scale[rows] = quantize_int8(unpack_floats(part), q[rows])[1]
        return Int8Linear(undo(q), undo(scale)).to(device)


def empty_module(values: Mapping[str, Any], dtype: torch.dtype, *, for_hub: bool = False) -> Any:
    """Make a module without weights: a `Decoder` if possible, else one of transformers."""
    if DecoderConfig.can_read(values) and not for_hub:
        return Decoder(DecoderConfig(values), dtype)
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    switch_off_bars()
    config = AutoConfig.for_model(**values)
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def finish_module(module: Any) -> Any:
    """Tie the weights of a module; raises ModelError if a weight was not set."""
    if not isinstance(module.get_input_embeddings(), SharedEmbedding):
        module.tie_weights()
    head = module.get_output_embeddings()
    if isinstance(head, BlockLinear):
        module.set_output_embeddings(BlockHead(head.blocks, head.bias))
    elif isinstance(head, BlockGpuLinear):
        module.set_output_embeddings(BlockGpuHead(*head.buffers(), bias=head.bias))
    elif isinstance(head, Int8Linear):
        module.set_output_embeddings(Int8Head(head.q, head.scale, head.bias))
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ModelError(f"the GGUF file has no {name}", hint="the file may be incomplete")
    return module


def _undo_conversion(
    weight: Tensor, conversion: Conversion | None, values: Mapping[str, Any]
) -> Tensor:
    """Undo the converter's change to a weight, or to other numbers of its rows such as scales."""
    if conversion == "plus one":
        return weight.float() - 1
    if conversion in ("query pairs", "key pairs"):
        heads = values["num_attention_heads"]
        if conversion == "key pairs":
            heads = values.get("num_key_value_heads", heads)
        pairs = weight.view(heads, -1, 2, *weight.shape[1:])  # [H, D / 2, 2, ...]
        return pairs.transpose(1, 2).reshape(weight.shape)
    if conversion == "minus exp":
        return _group_value_heads(weight.neg().log(), values)
    if conversion in ("value rows", "head rows"):
        return _group_value_heads(weight, values)
    if conversion == "qkv values":
        start = 2 * values["linear_num_key_heads"] * values["linear_key_head_dim"]
        return torch.cat((weight[:start], _group_value_heads(weight[start:], values)))
    if conversion == "value columns" and weight.ndim > 1:
        return _group_value_heads(weight.transpose(0, 1), values).transpose(0, 1).contiguous()
    return weight


def _group_value_heads(weight: Tensor, values: Mapping[str, Any]) -> Tensor:
    """Reorder the value heads in `weight` [H D, ...]: those of one key head become neighbours."""
    keys = values["linear_num_key_heads"]
    per_key = values["linear_num_value_heads"] // keys
    heads = weight.reshape(per_key, keys, -1, *weight.shape[1:])
    return heads.transpose(0, 1).reshape(weight.shape)


def _has_packed_experts(name: str, file: GgufFile) -> bool:
    """Whether all experts' matrices in the layer of the tensor `name` are in blocks."""
    layer = name.rpartition(".ffn_")[0]
    names = (f"{layer}.ffn_{part}_exps.weight" for part in (*_EXPERT_PARTS, "gate_up"))
    parts = [file.tensors[name] for name in names if name in file.tensors]
    return all(BLOCKS[part.type][1] > 1 for part in parts)


def _replace_layer(module: Any, name: str, packed: PackedLinear, dtype: torch.dtype) -> None:
    path = name.removesuffix(".weight")
    layer = module.get_submodule(path)
    shape = [packed.out_features, packed.in_features]
    if list(layer.weight.shape) != shape:
        raise ModelError(f"{name} has the shape {shape} in the GGUF file, another one in the model")
    if isinstance(layer, nn.Embedding) and isinstance(packed, RowLinear):
        if layer is module.get_input_embeddings() and module.config.tie_word_embeddings:
            module.set_output_embeddings(packed)
        module.set_submodule(path, SharedEmbedding(layer, packed, dtype))
        return
    packed.bias = layer.bias
    module.set_submodule(path, packed)
    fuse_projections(module, path)


def _replace_experts(
    module: Any, path: str, layers: Mapping[Conversion, list[PackedLinear]]
) -> None:
    experts = module.get_submodule(path)
    down = experts.down_proj
    sizes = down.shape[1:][::-1] if experts.is_transposed else down.shape[1:]  # of down: [N, K]
    shapes = {"gate": sizes[::-1], "up": sizes[::-1], "down": sizes}
    for part, matrices in layers.items():
        first = matrices[0]
        if len(matrices) != len(down) or (first.out_features, first.in_features) != shapes[part]:
            raise ModelError(f"{path} has another shape in the GGUF file than in the model")
    module.set_submodule(path, PackedExperts(experts, layers))


def set_weight(module: nn.Module, name: str, weight: Tensor) -> None:
    """Set a parameter or buffer of a module; raises ModelError if it has none of this shape."""
    path, _, attribute = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
        layer = getattr(owner, attribute)
        shape = layer.shape
    except AttributeError:
        raise ModelError(f"the GGUF file has {name}, but the model does not") from None
    if [n for n in shape if n > 1] == [n for n in weight.shape if n > 1]:
        weight = weight.view(shape)  # the converter leaves out dimensions of 1
    if shape != weight.shape:
        shapes = f"{list(weight.shape)}, must be {list(shape)}"
        raise ModelError(f"the GGUF file's {name} is {shapes}")
    setattr(owner, attribute, nn.Parameter(weight) if isinstance(layer, nn.Parameter) else weight)
