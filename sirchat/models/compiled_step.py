"""A decode step, compiled in advance by torch's AOTInductor.

The graph accepts a cache of any length, so one program serves every budget. It holds no weights: it
serves every model of the same shape, and uses the weights that the model has loaded.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sirchat.memory.cache import BoundedCache
from sirchat.models import products
from sirchat.models.packed import GROUP

_CACHED = 8  # rows of the cache in the example for making and checking a program
_TOLERANCE = 0.1  # products round to bfloat16, so errors grow; those of a wrong program are near 1


class CompiledStep:
    """A decode step as a compiled program, tested with the embeddings `tokens` [4, d].

    Raises DamagedProgramError if the file is not as `compile_graph` wrote it, WrongProgramError if
    the program computes other logits than `graph`, and any error if it can't be loaded now.
    """

    def __init__(self, path: Path, graph: nn.Module, tokens: Tensor) -> None:
        products.refuse_damaged(path)
        self._program = load_program(path)
        weights = graph.state_dict(prefix="step.")
        # The only other constant is the size of the groups, an argument of the four-bit products.
        self._weights = {
            name: weights.get(original, torch.tensor(GROUP))
            for name, original in self._program.get_constant_names_to_original_fqns().items()
        }
        self._program.update_constant_buffer(self._weights, False, True, True)  # not copied
        self._compare_with_graph(graph, tokens)

    def fits(self, cache: BoundedCache) -> bool:
        """Whether the program can read a token: the cache holds two or more, and has room."""
        return 2 <= cache.length < cache.capacity and cache.layers[0].tensors[0].buffer is not None

    @torch.inference_mode()
    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: BoundedCache
    ) -> tuple[Tensor, Tensor]:
        """Read one token into the cache; returns what `StepGraph.forward` returns."""
        # Says by its length how many tokens are cached: a program takes only tensors.
        held = torch.empty(cache.length, dtype=torch.uint8)
        pairs = [layer.tensors for layer in cache.layers]
        buffers = [pair[at].buffer for at in (0, 1) for pair in pairs]
        logits, states = self._program.run([x, cos, sin, held, *buffers])
        return logits, states

    @torch.inference_mode()
    def _compare_with_graph(self, graph: nn.Module, tokens: Tensor) -> None:
        """Raise WrongProgramError if program and graph disagree after the last of the `tokens`."""
        # Embeddings of real tokens: with random numbers, some models round too differently.
        _, cos, sin, _, keys, values = _example_inputs(graph)
        cos.fill_(1), sin.zero_()
        for buffer in (*keys, *values):
            buffer.zero_()
        step, *before = _Exported(graph), *tokens[:-1]
        for count, x in enumerate(before):
            step(x, cos, sin, torch.empty(count), keys, values)
        held = torch.empty(len(before), dtype=torch.uint8)  # only its length counts
        inputs = tokens[-1], cos, sin, held, keys, values
        x, cos, sin, held, own_keys, own_values = copy.deepcopy(inputs)
        theirs = step(*inputs)
        ours = self._program.run([x, cos, sin, held, *own_keys, *own_values])
        for compiled, plain in zip((*ours, *own_values), (*theirs, *values), strict=True):
            if not plain.numel():  # no states are wanted
                continue
            error = (compiled - plain).norm() / plain.norm()
            if not error < _TOLERANCE:  # NaN, too
                raise products.WrongProgramError(
                    f"the logits of the compiled step and of the model differ by {error:.2g}"
                )


def program_name(graph: nn.Module) -> str:
    """The name of the program's file: a hash of all that the program depends on."""
    weights = [(name, w.dtype, tuple(w.shape)) for name, w in graph.state_dict().items()]
    machine = (torch.__version__, torch.backends.cpu.get_cpu_capability())
    of_classes: list[str] = [inspect.getfile(kind) for kind in (type(graph), CompiledStep)]
    code = [Path(file).read_bytes() for file in (*of_classes, str(products.SOURCE))]
    about = repr((str(graph), weights, machine, code))
    return f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.so"


def pickle_without_weights(graph: nn.Module) -> bytes:
    """Pickle a graph for `compile_graph`: its weights have shapes, but no values."""
    return pickle.dumps(without_weights(graph))


def without_weights(graph: nn.Module) -> nn.Module:
    """A copy of a graph whose weights have shapes, but no values."""
    tensors = [*graph.parameters(), *graph.buffers()]
    memo: dict[int, Any] = {id(tensor): _on_meta_device(tensor) for tensor in tensors}
    return copy.deepcopy(graph, memo)


def compile_graph(pickled: bytes, path: Path) -> None:
    """Compile the graph in `pickled` into the file `path`: a shared library, then its SHA-256.

    Takes about a minute. Unpickling can run code, so `pickled` must be made by
    `pickle_without_weights`.
    """
    graph: nn.Module = pickle.loads(pickled)
    functions = products.declarations()
    graph = _with_parameters_only(graph.to_empty(device="cpu")).requires_grad_(False)
    open_length = {3: torch.export.Dim.DYNAMIC}
    inputs = _example_inputs(graph)
    program = torch.export.export(
        _Exported(graph),
        inputs,
        dynamic_shapes=(
            *(None, None, None),
            {0: torch.export.Dim.DYNAMIC},
            [open_length] * len(inputs[4]),
            [open_length] * len(inputs[5]),
        ),
        strict=False,
    )
    options = {
        "aot_inductor.package_constants_in_so": False,
        "always_keep_tensor_constants": True,
        "aot_inductor.precompile_headers": False,  # no other program could use such headers
        "cpp.dynamic_threads": True,  # as many as the process has when the program runs
        "aot_inductor.custom_ops_to_c_shims": functions,
    }
    package = path.with_suffix(".pt2")
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(package), inductor_configs=options
    )
    with zipfile.ZipFile(package) as files:
        (library,) = (name for name in files.namelist() if name.endswith(".so"))
        code = files.read(library)
    path.write_bytes(code)
    products.sign(path)


def load_program(path: Path) -> Any:
    """Load a program without weights; it may crash the process."""
    # Unlike `aoti_load_package`, this needs no temporary files.
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)


def _with_parameters_only(graph: nn.Module) -> nn.Module:
    # While torch compiles, it copies the memory of buffers, but not that of parameters.
    for module in graph.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            delattr(module, name)
            setattr(module, name, nn.Parameter(buffer, requires_grad=False))
    return graph


class _Exported(nn.Module):
    """A decode step that torch can export: the KV cache is passed as plain tensors."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.step = graph  # `graph` means something else to torch.export

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        held: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Read a token into the layers' buffers [2, 1, H, C, D] and [1, 1, H, C, D].

        Only the length of `held` counts: the number of tokens before.
        """
        count = held.shape[0]

        def update(at: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            for buffer, row in ((keys[at], key), (values[at], value)):
                buffer.narrow(3, count, 1).copy_(row)
            return keys[at][0].narrow(2, 0, count + 1), values[at][0].narrow(2, 0, count + 1)

        logits, states = self.step(x, cos, sin, update)
        return logits, states


def _example_inputs(graph: Any) -> tuple[Any, ...]:
    """Arguments for `_Exported.forward`, of the right shapes only: a cache with five tokens."""
    layer = graph.layers[0]
    size = layer.size
    heads = (layer.queries_keys_values.rows // size - layer.heads) // 2

    def buffers(copies: int) -> list[Tensor]:
        shape = (copies, 1, heads, _CACHED, size)
        return [torch.empty(shape, dtype=layer.dtype) for _ in graph.layers]

    x, turn = torch.empty(len(graph.norm.weight)), (graph.kinds, 1, size)
    held = torch.empty(_CACHED - 3, dtype=torch.uint8)
    return x, torch.empty(turn), torch.empty(turn), held, buffers(2), buffers(1)


def _on_meta_device(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=False)
    return empty
