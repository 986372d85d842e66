"""The Triton kernels, on a GPU, and under Triton's interpreter (after `pip install triton`).

The interpreter computes no bfloat16, so there numbers of 16 bits are float16.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product as product_cases
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from captured import draw
from families import build
from gguf_models import random_blocks
from gpu_weights import BLOCKS, KINDS_OF_WEIGHTS, column_count, fill_with_blocks, packed
from sirchat.lab.bench.decode import with_decoder
from sirchat.models import kernels, packed_kernels, packing
from sirchat.models.captured_step import CapturedStep
from sirchat.models.gguf.blocks import split_blocks, unpack_floats
from sirchat.models.llama_step import LlamaStep
from sirchat.models.model import wrap_model
from sirchat.models.packed import (
    BlockGpuLinear,
    GpuWeights,
    Int4GpuLinear,
)

H, G, D, EPSILON = 2, 3, 64, 1e-5
CPU = torch.device("cpu")


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


def normalized(x: Tensor, norm: Tensor) -> Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], norm.double(), EPSILON)


def gated(products: Tensor) -> Tensor:
    gate, up = products.chunk(2, 1)
    return F.silu(gate) * up


@of_a_kernel
@pytest.mark.parametrize(("rows", "columns", "batch"), [(20, 96, 1), (9, 1056, 3)])
def test_products_are_those_of_the_weights(rows: int, columns: int, batch: int) -> None:
    torch.manual_seed(16)
    weight = torch.randn(2 * rows, columns).to(HALF)
    x, norm, values = torch.randn(batch, columns), torch.rand(columns).to(HALF), weight.double()
    bias, added = torch.randn(2 * rows), torch.randn(batch, 2 * rows)
    options: dict[str, Any] = {"norm": norm, "epsilon": EPSILON}
    normed = normalized(x, norm) @ values.T
    y = kernels.multiply_fused(x, weight, bias=bias, added=added, **options)
    assert error(y, normed + bias + added) < 1e-5
    assert error(kernels.multiply_fused(x, weight, gated=True, **options), gated(normed)) < 1e-5
    y = kernels.multiply_fused(x, weight, bias=bias, gated=True, **options)
    assert error(y, gated(normed + bias)) < 1e-5
    assert error(kernels.multiply_fused(x, weight), x.double() @ values.T) < 1e-5


@of_a_kernel
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("columns", [96, 1056])
def test_a_sum_is_normalized_in_each_row_as_if_it_were_alone(
    dtype: torch.dtype, columns: int
) -> None:
    x, y = torch.randn(5, columns).to(dtype), torch.randn(5, columns).to(HALF)
    norm, given = torch.rand(columns).to(HALF), (EPSILON, HALF)
    sums, normed = kernels.add_and_normalize(x, y, norm, *given)
    limit = 1e-3 if torch.float16 == HALF else 8e-3
    assert (sums.dtype, normed.dtype) == (dtype, HALF)
    assert error(sums, x.double() + y.double()) < (1e-6 if dtype == torch.float32 else limit)
    assert error(normed, normalized(sums, norm)) < limit
    same, alone = kernels.add_and_normalize(sums[2:3], None, norm, *given)
    assert torch.equal(same, sums[2:3])
    assert torch.equal(alone, normed[2:3])


@of_a_kernel
def test_halves_of_rows_and_rows_apart_are_gated() -> None:
    both = 3 * torch.randn(1, 4, 2 * 1100).to(HALF)
    y = kernels.gate(*both.chunk(2, -1), dtype=HALF)
    assert y.shape == (1, 4, 1100)
    assert error(y[0], gated(both[0].double())) < (1e-3 if torch.float16 == HALF else 8e-3)
    apart = (part.contiguous() for part in both.chunk(2, -1))
    assert torch.equal(kernels.gate(*apart, dtype=HALF), y)


def digits_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows x [B, K] rounded: both digits, [B, K / 32, 32], and the steps of the first."""
    groups = x.view(len(x), -1, 32)
    step = groups.abs().amax(2, keepdim=True) / 127
    scaled = torch.where(step > 1e-37, groups * (1 / step), 0.0)
    first = scaled.round()
    return first, ((scaled - first) * 254).round(), step


def read_digits(rounded: packed_kernels.Rounded, bits: int, count: int) -> tuple[Tensor, Tensor]:
    """Both digits [B, K / 32, 32] of rounded rows, in the order of the columns."""
    if bits == 8:
        first, rest = rounded.digits.view(2, count, -1, 32)
    else:
        halves = rounded.digits.view(2, 2, count, -1, 16)
        first, rest = torch.cat((halves[0], halves[1]), -1)
    return first, rest


@of_a_kernel
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("norm", [None, torch.linspace(-1, 2, 1120).to(HALF)])
def test_rows_are_rounded_to_two_digits_in_each_group(bits: int, norm: Tensor | None) -> None:
    x = torch.randn(3, 1120)
    x[1, 40] = 90.0  # an outlier, beside which the first digits of the others are zero
    x[2, 64:96] = 0.0
    norm = None if norm is None else norm.to(x.device)
    scaled = x if norm is None else x * norm.float()
    first, rest, step = digits_of(scaled)
    rounded = packed_kernels.round_rows(x, bits, norm)
    found = read_digits(rounded, bits, 3)
    assert torch.equal(found[0], first.to(torch.int8))
    assert torch.equal(found[1], rest.to(torch.int8))
    fine, sums, squares = rounded.numbers.view(3, 3, 35, -1).unbind()  # [B, groups, parts]
    assert torch.equal(fine, (step / 254).expand_as(fine))
    torch.testing.assert_close(sums[..., 0], ((first * 254 + rest) * step / 254).sum(2))
    torch.testing.assert_close(squares.sum(2), x.view(len(x), -1, 32).square().sum(2))
    values = ((first * 254 + rest) * step / 254).flatten(1)
    assert error(values, scaled) < 5e-5


@of_a_kernel
@pytest.mark.parametrize("kind", KINDS_OF_WEIGHTS)
@pytest.mark.parametrize(("rows", "columns", "batch"), [(32, 96, 1), (9, 1120, 3), (16, 4160, 1)])
def test_packed_products_are_those_of_the_rounded_rows(
    kind: str, rows: int, columns: int, batch: int
) -> None:
    torch.manual_seed(rows)
    columns = column_count(kind, columns)
    weights, values = packed(kind, 2 * rows, columns)
    x, norm = torch.randn(batch, columns), torch.rand(columns).to(HALF)
    bias, added = torch.randn(2 * rows), torch.randn(batch, 2 * rows)
    x[0, 5] = 70.0
    first, rest, step = (part.double() for part in digits_of(x * norm.float()))
    factor = (x.double().square().mean(1, keepdim=True) + EPSILON).rsqrt()
    expected = ((first * 254 + rest) * step / 254).flatten(1) @ values.T * factor
    assert error(expected, normalized(x, norm) @ values.T) < 2e-4
    given = packed_kernels.round_rows(x, weights.bits, norm), weights, batch

    def multiply(**options: Any) -> Tensor:
        return packed_kernels.multiply_packed(*given, epsilon=EPSILON, **options)[0]

    assert error(multiply(), expected) < 1e-6
    assert error(multiply(bias=bias, added=added), expected + bias + added) < 1e-6
    assert error(multiply(gated=True), gated(expected)) < 1e-5
    assert error(multiply(bias=bias, gated=True), gated(expected + bias)) < 1e-5
    y, _ = packed_kernels.multiply_packed(packed_kernels.round_rows(x, weights.bits), *given[1:])
    assert error(y, x.double() @ values.T) < 2e-4
    turned = x.T.contiguous().T  # as some layers give it
    assert torch.equal(packed_kernels.multiply_rows(turned, weights), y)


@of_a_kernel
@pytest.mark.parametrize("kind", ["int4", *BLOCKS])
def test_rows_of_weights_are_unpacked(kind: str) -> None:
    columns = column_count(kind, 576)
    weights, values = packed(kind, 11, columns)
    for rows, dtype in ((slice(None), torch.float32), (slice(3, 20), HALF)):
        found = packed_kernels.unpack_rows(weights, rows, dtype)
        if kind == "int4":  # whose zero is computed first
            torch.testing.assert_close(found, values[rows].to(dtype))
        else:
            assert torch.equal(found, values[rows].float().to(dtype))


@pytest.mark.skipif(not is_interpreted, reason="runs on the CPU")
def test_a_module_uses_the_kernels_if_they_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, x = random_blocks("Q5_1", 32, np.random.default_rng(0)), torch.randn(9, 512)
    layer = BlockGpuLinear(*split_blocks(tensor, CPU))
    module, expected = torch.nn.Sequential(layer), x.double() @ unpack_floats(tensor).double().T
    calls, multiply, unpack = list[str](), packed_kernels.multiply_rows, packed_kernels.unpack_rows

    def fail(*_: object) -> None:
        raise RuntimeError("no such processor")

    def multiplied(some: Tensor, weights: GpuWeights) -> Tensor:
        calls.append("multiply")
        return multiply(some, weights)

    def unpacked(*given: Any) -> Tensor:
        calls.append("unpack")
        return unpack(*given)

    for wrong in (fail, lambda some, _: some.new_zeros(len(some), 32)):
        monkeypatch.setattr(packed_kernels, "multiply_rows", wrong)
        packing.use_gpu_kernels(module)
        assert error(layer(x), expected) < 1e-6
    monkeypatch.setattr(packed_kernels, "multiply_rows", multiplied)
    monkeypatch.setattr(packed_kernels, "unpack_rows", unpacked)
    packing.use_gpu_kernels(module)
    calls.clear()
    assert error(layer(x[:8]), expected[:8]) < 2e-4  # the rows are rounded
    assert error(layer(x), expected) < 1e-6
    assert calls == ["multiply", "unpack"]


@of_a_kernel
@pytest.mark.parametrize("next_bits", [8, 4])
def test_what_a_product_rounds_is_what_is_rounded_after_it(next_bits: int) -> None:
    weights, _ = packed("int4", 64, 128)
    norm, x = torch.rand(64).to(HALF), torch.randn(5, 128)
    options: dict[str, Any] = {"next_bits": next_bits, "next_norm": norm}
    together, rounded = packed_kernels.multiply_packed(
        packed_kernels.round_rows(x, 4), weights, 5, **options
    )
    of_all = packed_kernels.round_rows(together, next_bits, norm)
    assert rounded is not None
    assert torch.equal(rounded.digits, of_all.digits)
    for row, y in zip(x, together, strict=True):  # alone, it has the same bits
        alone, rounded = packed_kernels.multiply_packed(
            packed_kernels.round_rows(row[None], 4), weights, 1, **options
        )
        expected = packed_kernels.round_rows(y[None], next_bits, norm)
        assert torch.equal(alone[0], y)
        assert rounded is not None
        assert torch.equal(rounded.digits, expected.digits)
        torch.testing.assert_close(rounded.numbers, expected.numbers, rtol=1e-6, atol=0)


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}


@pytest.mark.skipif(not is_interpreted, reason="runs on the CPU")
@pytest.mark.parametrize("kind", ["int8", "int4", "Q5_0", "Q8_0", "Q4_0, Q5_0", "plain"])
def test_a_step_reads_as_the_model_alone_and_in_a_batch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "int4_class", lambda _: Int4GpuLinear)
    is_plain = kind == "plain"
    family, dtype = ("qwen2", HALF) if is_plain else ("qwen3", torch.float32)
    module = build(family, {**SIZES, "tie_word_embeddings": False}, dtype)
    if is_plain:
        set_biases(module)
    elif "Q" in kind:
        fill_with_blocks(module, kind)
    else:
        packing.pack_module(module, int(kind[-1]))
    model = wrap_model(family, module, None)
    model = model if is_plain else replace(model, cache_type="float32")
    body = LlamaStep(module, "triton", (2,))
    step = CapturedStep(body, model.device, captures=False, encoder=model.encoder)
    ids = range(5, 12)
    caches, tokens, expected = [model.new_cache(9) for _ in range(2)], [], []
    for at, cache in enumerate(caches):
        model._module_logits(ids[at:], cache)
        cache.commit(len(ids) - at)
        other = model.new_cache(9)
        model._module_logits(ids[at:], other)
        other.commit(len(ids) - at)
        expected.append(model._module_logits([at], other)[0])
        tokens.append((at, cache.length, cache))
    monkeypatch.setattr(F, "rms_norm", None)  # which is part of the kernels
    together, states = step.read_together(tokens)
    assert states.shape == (2, 64)
    assert error(together, torch.stack(expected)) < 0.01  # torch rounds products to bfloat16
    alone = step.read(*tokens[1])[0][0]
    if is_plain:  # torch rounds what it multiplies
        assert error(alone, together[1]) < 0.01
    else:
        torch.testing.assert_close(alone, together[1])


@pytest.mark.skipif(not is_interpreted, reason="runs on the CPU")
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_decoder_reads_by_kernels_what_it_reads_without_unless_they_fail(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = build(kind, SIZES, HALF)
    set_biases(hub)
    model = with_decoder(wrap_model(kind, hub, None))
    module, ids, caches = model.module, list(range(5, 17)), [model.new_cache(12) for _ in "ab"]
    expected = [model._module_logits(ids[:5], caches[0])]
    caches[0].commit(5)
    expected.append(model._module_logits(ids[5:], caches[0]))
    body = LlamaStep(module, "torch")  # joins weights
    step = CapturedStep(body, model.device, captures=False, encoder=model.encoder)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash(last=False))
    model.try_kernels(step)
    assert module.model.kernels is None
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash(last=True))
    model.try_kernels(step)
    assert module.model.kernels is kernels
    for part, wanted in zip((ids[:5], ids[5:]), expected, strict=True):
        assert error(model._module_logits(part, caches[1]), wanted) < 0.01
        caches[1].commit(len(part))


def set_biases(module: Any) -> None:
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()


def flash(*, last: bool) -> Any:
    """In place of torch's kernel, which masks from the last key on; or a wrong one."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> tuple[Tensor]:
        assert is_causal
        count, length = q.shape[2], k.shape[2]
        mask = torch.ones(count, length, dtype=torch.bool).tril((length - count) * last)
        how: dict[str, Any] = {"attn_mask": mask, "scale": scale, "enable_gqa": True}
        return (F.scaled_dot_product_attention(q, k, v, **how),)

    return attend


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
    attended, _ = kernels.attend(
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


def constants_of(kind: str) -> dict[str, Any]:
    """The constants by which the kernel for packed weights is compiled for a kind of them."""
    weights, _ = packed(kind, 2, 512)
    return {
        "BITS": weights.bits,
        "HIGH": weights.high_bits,
        "SCALES": weights.scale_kind,
        "HAS_MINIMA": weights.has_minima,
    }


def kernels_with_constants(size: int) -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Kernels as Llama 3 8B runs them, with heads of `size` numbers, and their warps."""
    import triton.language as tl

    product = {"K": 4096, "NORMED": True, "BIASED": False, "ADDED": False, "GATED": True}
    plain = {"ROWS": kernels._HALVES_ROWS, "COLUMNS": kernels._HALVES_COLUMNS}
    yield kernels._multiply, product | plain, 4
    for kind, (rows, of_x) in product_cases(KINDS_OF_WEIGHTS, ((32, 1), (16, 4))):
        options = constants_of(kind) | {"ROWS": rows, "M": of_x, "INTERPRETED": False}
        options["PARTS"] = packed_kernels._PARTS[bool(options["HIGH"])]
        options |= {"NEXT_BITS": options["BITS"] * (of_x == 1), "NEXT_NORMED": True}
        yield packed_kernels._multiply_packed, product | options, packed_kernels._PACKED_WARPS
    for kind in KINDS_OF_WEIGHTS[1:]:
        size_of = {"ROWS": packed_kernels._UNPACKED_ROWS, "PARTS": packed_kernels._UNPACKED_PARTS}
        yield packed_kernels._unpack, {"K": 4096, **constants_of(kind), **size_of}, 4
    of_row = {"K": 4096, "ADDED": True, "COLUMNS": 4096}
    yield kernels._add_and_normalize, of_row, kernels._MAX_WARPS
    yield kernels._gate, {"BLOCK": kernels._GATE_BLOCK}, 4
    yield packed_kernels._round, {"BITS": 4, "NORMED": True, "COUNT": 1024}, 4
    attention = {"H": 8, "G": 4, "D": size, "KIND": tl.bfloat16, "NORMED": True, "SCORED": False}
    blocks = {"QUERIES": 16, "SPLIT": kernels.SPLIT, "BLOCK": kernels._ATTENTION_BLOCK}
    yield kernels._attend, attention | blocks, 4
    merged = {"SPLITS": 32, "QUERY_HEADS": 32, "D": size, "SPLIT": kernels.SPLIT, "MERGED": 16}
    yield kernels._merge, merged | {"NEXT_BITS": 4}, 1 if size < 128 else 2


@pytest.mark.slow
@pytest.mark.skipif(is_interpreted, reason="needs the compiler")
@pytest.mark.parametrize("processor", [80, 90, 120])
@pytest.mark.parametrize("size", [64, 128])
def test_kernels_compile_without_a_gpu_and_need_no_local_memory(
    tmp_path: Path, processor: int, size: int
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    programs = Path(triton.__file__).parent / "backends/nvidia/bin"
    for kernel, constants, warps in kernels_with_constants(size):
        types = {arg: KINDS.get(arg, "*fp32") for arg in kernel.arg_names if arg not in constants}
        if "SCALES" in constants:
            types |= {"weight": "*i64", "high": "*i32"}
            types |= {"digits": "*i64"} if "digits" in types else {"out": "*bf16"}
            is_pair = constants["HAS_MINIMA"]
            types["factors"] = "*i32" if is_pair else "*fp16"
            scales = {"rows": "*bf16", "codes": "*i16"}
            types["scales"] = scales.get(constants["SCALES"], types["factors"])
        aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names)
                   if types.get(arg, "").startswith("*")}  # fmt: skip
        source = triton.compiler.ASTSource(kernel, types, constants, aligned)
        fuses = kernel.fn.__name__ in ("_multiply", "_attend", "_add_and_normalize", "_gate")
        options = {"num_warps": warps, "enable_fp_fusion": fuses}
        if kernel is packed_kernels._multiply_packed:
            options["maxnreg"] = packed_kernels._MAX_REGISTERS
        made = triton.compile(source, GPUTarget("cuda", processor, 32), options)
        (tmp_path / "kernel.cubin").write_bytes(made.asm["cubin"])
        code = subprocess.run(
            [programs / "cuobjdump", "-sass", tmp_path / "kernel.cubin"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert " EXIT" in code
        local = re.findall(r"\b(?:LDL|STL)\b.*", code)
        assert not local, (kernel, constants, local)


KINDS = {
    **dict.fromkeys(("weight", "norm", "query_norm", "key_norm", "next_norm"), "*bf16"),
    **dict.fromkeys(("digits", "next_digits"), "*i8"),
    **dict.fromkeys(("y", "gate", "up"), "*bf16"),
    **dict.fromkeys(("pools", "lengths"), "*i64"),
    **dict.fromkeys(("N", "B", "K", "layer", "slot_count", "first", "count", "stride"), "i32"),
    **dict.fromkeys(("scale", "epsilon"), "fp32"),
}
