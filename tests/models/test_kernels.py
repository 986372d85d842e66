"""The Triton kernels, on a GPU, and under Triton's interpreter (after `pip install triton`).

The interpreter computes no bfloat16, so there numbers of 16 bits are float16.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from drawing_ids import draw
from sirchat.models import kernels

H, G, D, EPSILON = 2, 3, 64, 1e-5


# Triton decides when it is imported whether it interprets.
is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if is_interpreted else torch.bfloat16


def of_a_kernel(test: Any) -> Any:
    """Under the interpreter a test runs on the CPU, in `test_kernels_under_the_interpreter`."""
    return test if is_interpreted else pytest.mark.gpu(test)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.device("cuda" if request.node.get_closest_marker("gpu") else "cpu"):
        yield


@pytest.mark.skipif(is_interpreted, reason="is running")
def test_kernels_under_the_interpreter() -> None:
    run = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        run, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def packed(bits: int, rows: int, columns: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Weights as the kernel reads them, their scales, and their values in float64."""
    if bits == 16:
        weight = torch.randn(rows, columns).to(HALF)
        return weight, None, weight.double()
    if bits == 8:
        q, scale = torch.randint(-127, 128, (rows, columns)), torch.rand(rows).bfloat16()
        return q.to(torch.int8), scale, q * scale.double()[:, None]
    q = torch.randint(0, 16, (rows, columns // 32, 32))
    scales = torch.rand(rows, columns // 32, 2).bfloat16()
    nibbles = q[..., :16] | q[..., 16:] << 4  # GGUF's order
    values = (q - 8) * scales[..., :1].double() + scales[..., 1:].double()
    return nibbles.to(torch.uint8).view(rows, -1), scales, values.view(rows, columns)


@of_a_kernel
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("rows", "columns", "batch"), [(20, 96, 1), (9, 1056, 3)])
def test_products_are_those_of_the_unpacked_weights(
    bits: int, rows: int, columns: int, batch: int
) -> None:
    torch.manual_seed(bits)
    weight, scales, values = packed(bits, 2 * rows, columns)
    x, norm = torch.randn(batch, columns), torch.rand(columns).to(HALF)
    bias, added = torch.randn(2 * rows), torch.randn(batch, 2 * rows)
    options: dict[str, Any] = {"bits": bits, "norm": norm, "epsilon": EPSILON}

    normed = F.rms_norm(x.double(), (columns,), norm.double(), EPSILON)
    y = kernels.multiply(x, weight, scales, bias=bias, added=added, **options)
    assert error(y, normed @ values.T + bias + added) < 1e-5
    gate, up = (normed @ values.T).chunk(2, 1)
    y = kernels.multiply(x, weight, scales, gated=True, **options)
    assert error(y, F.silu(gate) * up) < 1e-5
    gate, up = (normed @ values.T + bias).chunk(2, 1)
    y = kernels.multiply(x, weight, scales, bias=bias, gated=True, **options)
    assert error(y, F.silu(gate) * up) < 1e-5
    assert error(kernels.multiply(x, weight, scales, bits=bits), x.double() @ values.T) < 1e-5


class Talk:
    """A conversation's pool with n rows in use, and the queries, keys and values of a new token."""

    def __init__(self, length: int, capacity: int, dtype: torch.dtype) -> None:
        self.length = length
        self.pool = torch.randn(2, 3, H, capacity, D).to(dtype)
        self.pool[:, :, :, length:] = torch.nan
        self.rows = torch.randn(H * G + 2 * H, D)
        angle = 6 * torch.rand(D // 2)
        self.cos = torch.cat((angle.cos(), angle.cos()))
        self.sin = torch.cat((-angle.sin(), angle.sin()))

    def copy(self, capacity: int) -> Talk:
        other = Talk(self.length, capacity, self.pool.dtype)
        other.pool[:, :, :, : self.length] = self.pool[:, :, :, : self.length]
        other.rows, other.cos, other.sin = self.rows, self.cos, self.sin
        return other

    def expected(self, norms: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Attention's output, its scores, and the new key and value, in float64, of layer 1."""

        def turned(heads: Tensor, norm: Tensor | None) -> Tensor:
            heads = heads.double()
            if norm is not None:
                heads = F.rms_norm(heads, (D,), norm.double(), EPSILON)
            return heads * self.cos.double() + heads.roll(D // 2, -1) * self.sin.double()

        queries, keys = (
            turned(self.rows[: H * G], norms[0]),
            turned(self.rows[-2 * H : -H], norms[1]),
        )
        values = self.rows[-H:].double()
        before = self.pool[1, :, :, : self.length].double()
        scores = (
            queries.view(H, G, D) @ torch.cat((before[0], keys[:, None]), 1).mT * D**-0.5
        )  # [H, G, n + 1]
        attended = scores.softmax(-1) @ torch.cat((before[2], values[:, None]), 1)
        return attended.view(-1, D), scores.view(H * G, -1), keys, values


def attend(talks: list[Talk], norms: Any, slot_count: int, scores: Any = None) -> Tensor:
    pools = [[talk.pool.data_ptr() for talk in talks], [talk.pool.shape[3] for talk in talks]]
    stacked = (torch.stack([getattr(t, name) for t in talks]) for name in ("rows", "cos", "sin"))
    rows, cos, sin = stacked
    lengths = torch.tensor([talk.length for talk in talks])
    attended: Tensor = kernels.attend(
        rows, norms[0], norms[1], EPSILON, cos, sin, torch.tensor(pools), lengths, slot_count,
        layer=1, kv_heads=H, scale=D**-0.5, dtype=talks[0].pool.dtype, scores=scores,
    )  # fmt: skip
    return attended


@of_a_kernel
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (HALF, 8e-3)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_attention_reads_and_writes_the_pool_of_each_conversation(
    dtype: torch.dtype, limit: float, has_norms: bool
) -> None:
    torch.manual_seed(1)
    norms = (torch.rand(D), torch.rand(D)) if has_norms else (None, None)
    talks = [Talk(257, 300, dtype), Talk(128, 400, dtype), Talk(0, 130, dtype)]
    before = [talk.pool.clone() for talk in talks]
    scores = torch.full((3, H * G, 400), 7.0)
    attended = attend(talks, norms, 400, scores)
    for at, talk in enumerate(talks):
        n = talk.length
        expected, products, keys, values = talk.expected(norms)
        if n:  # the softmax of one score is 1
            assert error(attended[at], expected) < limit
        assert error(scores[at, :, : n + 1], products) < 2 * limit
        assert (scores[at, :, n + 1 :] == -torch.inf).all()
        written = talk.pool[1, :, :, n]
        assert error(written[0], keys) < limit
        assert torch.equal(written[0], written[1])
        assert torch.equal(written[2], values.to(dtype))
        talk.pool[1, :, :, n] = torch.nan
        assert torch.equal(talk.pool.nan_to_num(), before[at].nan_to_num())  # nothing else changed


@of_a_kernel
def test_a_conversation_has_the_same_bits_alone_in_a_batch_and_at_any_place() -> None:
    torch.manual_seed(2)
    talks = [Talk(300, 310, HALF), Talk(5, 200, HALF)]
    elsewhere = [talk.copy(1000) for talk in talks]
    together = attend(talks, (None, None), 400)
    for at, talk in enumerate(elsewhere):
        alone = attend([talk], (None, None), 2500)
        assert torch.equal(alone[0], together[at])


@of_a_kernel
def test_an_id_is_drawn_as_torch_draws_it_or_left_to_the_host() -> None:
    numbers, undecided = np.random.default_rng(0), 0
    for at in range(60):
        size = int(numbers.choice([5, 200, 3000]))
        scores = 3 * torch.tensor(numbers.normal(size=size), dtype=torch.float32)
        top_k = int(numbers.integers(1, 40)) if at % 3 == 0 else 0
        top_p = float(numbers.uniform(0.1, 1)) if at % 2 == 0 else 2.0
        min_p = float(numbers.uniform(0.01, 0.4)) if at % 5 == 0 else 0.0
        number, likeliest = torch.tensor(numbers.random(1)), scores.topk(min(1024, size))
        given = (scores, *likeliest, number, top_k, top_p, min_p, 1e-4)
        (expected, is_right), (found, is_sure) = draw(*given), kernels.draw_token(*given)
        assert bool(is_sure) == bool(is_right)
        assert not is_right or found == expected
        undecided += not is_right
    assert undecided < 20


@of_a_kernel
def test_the_likeliest_id_is_noted_with_its_surprisal() -> None:
    logits = torch.randn(5000)
    logits[[40, 4000]] = 9.0  # of equal ones, the first
    results, slot = torch.zeros(2, 3, dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    numbers, drawn = torch.zeros(5, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    kernels.store_choice(kernels.block_maxima(logits), results, slot, numbers, drawn, reads=True)
    nats = float(-torch.log_softmax(logits, -1)[40])
    assert results[1].tolist() == pytest.approx([40, nats, 1])
    assert numbers[:, 0].tolist() == [40, 1, 1, 0, 0]
    assert drawn == 1
    logits[7] = torch.nan
    kernels.store_choice(kernels.block_maxima(logits), results, slot, numbers, drawn, reads=False)
    assert results[1, 2] == 0
    assert numbers[0] == 0  # an id that the next step can read
    assert numbers[1:, 0].tolist() == [1, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.skipif(is_interpreted, reason="needs the compiler")
@pytest.mark.parametrize("processor", [80, 90])
@pytest.mark.parametrize("size", [64, 128])
def test_kernels_compile_without_a_gpu_and_need_no_local_memory(
    tmp_path: Path, processor: int, size: int
) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    products = [
        ("_multiply", {"K": 4096, "BITS": bits, "NORMED": True, "BIASED": False, "ADDED": False,
                       "GATED": True, "ROWS": config[0], "COLUMNS": config[1],
                       "INTERPRETED": False}, config[2])
        for bits, config in kernels._PRODUCT_CONFIGS.items()
    ]  # fmt: skip
    attention = {"H": 8, "G": 4, "D": size, "KIND": tl.bfloat16, "NORMED": True,
                 "SCORED": False, "QUERIES": 16, "SPLIT": 128,
                 "BLOCK": kernels._ATTENTION_BLOCK}  # fmt: skip
    merging = {"SPLITS": 32, "QUERY_HEADS": 32, "D": size, "SPLIT": 128, "MERGED": 16}
    for name, constants, warps in (*products, ("_attend", attention, 4), ("_merge", merging, 1)):
        kernel = getattr(kernels, name)
        types = {arg: KINDS.get(arg, "*fp32") for arg in kernel.arg_names if arg not in constants}
        types |= PACKED.get(constants.get("BITS", 16), {})
        source = triton.compiler.ASTSource(kernel, types, constants)
        made = triton.compile(source, GPUTarget("cuda", processor, 32), {"num_warps": warps})
        (tmp_path / "kernel.ptx").write_text(made.asm["ptx"])
        said = subprocess.run(
            [ptxas, "-v", f"--gpu-name=sm_{processor}{'a' * (processor == 90)}",
             tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.o"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
        assert re.findall(r"(\d+) bytes spill stores", said) == ["0"], (name, constants, said)


PACKED = {8: {"weight": "*i8", "scales": "*bf16"}, 4: {"weight": "*u8", "scales": "*i32"}}
KINDS = {
    **dict.fromkeys(("weight", "norm", "query_norm", "key_norm"), "*bf16"),
    **dict.fromkeys(("pools", "lengths"), "*i64"),
    **dict.fromkeys(("N", "layer", "slot_count"), "i32"),
    **dict.fromkeys(("scale", "epsilon"), "fp32"),
}
