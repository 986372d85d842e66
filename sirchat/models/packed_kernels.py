"""Triton kernels that round rows to whole numbers, and multiply them with packed weights.

A group of 32 columns gets two digits of 8 bits, so that products err by as little as those of
floats. Sums have a fixed order, so that a row's results depend neither on the others nor on
their number.
"""

# triton is untyped, and its functions are no Python: the compiler reads their source.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sirchat.models.packed import GpuWeights

# Rows of weights that a program multiplies: with one row of x, whose result it can also round, or
# with up to four.
_PACKED_ROWS, _PACKED_ROWS_OF_MORE, _ROWS_OF_X = 32, 16, 4
_PACKED_WARPS = 8
_MAX_REGISTERS = 200  # without a limit, some compilers take 128 and keep the rest in memory
_PARTS = 64, 32  # numbers of parts of a row of weights that are multiplied at a time
_ROUNDED_COLUMNS = 1024  # that a program rounds
_UNPACKED_ROWS, _UNPACKED_PARTS = 4, 16  # that a program unpacks

# Adds the products of eight bytes of $1, unsigned or signed, with the signed ones of $2 to $3.
_ADD_BYTES = """{{.reg .b32 a, b, c, d, t; mov.b64 {{a, b}}, $1; mov.b64 {{c, d}}, $2;
dp4a.{0}.s32 t, a, c, $3; dp4a.{0}.s32 $0, b, d, t;}}"""
_ADD_UNSIGNED, _ADD_SIGNED = (tl.constexpr(_ADD_BYTES.format(kind)) for kind in ("u32", "s32"))
_FINE = tl.constexpr(254)  # steps of the second digit in one of the first
_LAST_BIT_IS_ONE = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float of this size is a whole number


@triton.jit
def _add_bytes(w, x, total, code: tl.constexpr, INTERPRETED: tl.constexpr):
    """Add the products of the bytes of int64 `w` and `x` to int32 `total`."""
    if INTERPRETED:
        for i in tl.static_range(0, 64, 8):
            byte = ((w >> i) & 255) if code == _ADD_UNSIGNED else ((w << (56 - i)) >> 56)
            total += (byte * ((x << (56 - i)) >> 56)).to(tl.int32)
        return total
    else:  # noqa: RET505  # the compiler needs it
        return tl.inline_asm_elementwise(code, "=r,l,l,r", [w, x, total], tl.int32, True, 1)


@triton.jit
def store_rounded(
    x, norm, digits, numbers, start, b, B, K,
    BITS: tl.constexpr, NORMED: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Round x [COUNT], the columns of row `b` from `start` on, as `Rounded` says."""
    GROUPS: tl.constexpr = COUNT // 32
    parts = K // (128 // BITS)
    group, column = tl.arange(0, GROUPS), tl.arange(0, 32)
    k = start + group[:, None] * 32 + column[None, :]
    inside = k < K
    x = tl.where(inside, tl.reshape(x, [GROUPS, 32]), 0.0)
    squares = tl.sum(x * x, 1) / (BITS // 4)
    if NORMED:
        x *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
    # As whole numbers, so that what is no number is larger than all that are.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    step = tl.div_rn(largest, tl.full([GROUPS], 127.0, tl.float32))
    divisor = tl.where(step > 1e-37, step, float("inf"))
    x *= tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), divisor)[:, None]
    first = x + _LAST_BIT_IS_ONE - _LAST_BIT_IS_ONE
    rest = (x - first) * _FINE + _LAST_BIT_IS_ONE - _LAST_BIT_IS_ONE
    to, plane = digits + b * (parts * 16) + k, B * (parts * 16)
    if BITS == 4:  # a byte's low and high four bits belong to columns that lie 16 apart
        to += (column // 16 * 2)[None, :] * plane + column[None, :] % 16 - k + k // 32 * 16
    tl.store(to, first.to(tl.int32).to(tl.int8), mask=inside)
    tl.store(to + plane, rest.to(tl.int32).to(tl.int8), mask=inside)
    fine = step / _FINE
    sums = tl.sum(first * _FINE + rest, 1) * fine
    for i in tl.static_range(BITS // 4):
        part = (start // 32 + group) * (BITS // 4) + i
        at = numbers + b * parts + part
        tl.store(at, fine, mask=part < parts)
        tl.store(at + B * parts, sums, mask=part < parts)
        tl.store(at + 2 * B * parts, squares, mask=part < parts)


@triton.jit
def _round(
    x, norm, digits, numbers, K,
    BITS: tl.constexpr, NORMED: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    start, b = tl.program_id(0) * COUNT, tl.program_id(1)
    k = start + tl.arange(0, COUNT)
    row = tl.load(x + b * K + k, mask=k < K, other=0.0)
    count = tl.num_programs(1)
    store_rounded(row, norm, digits, numbers, start, b, count, K, BITS, NORMED, COUNT)


@triton.jit
def _half(word):
    """The float16 in the lower half of an int32, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_scales(
    scales, factors, row, part, mask,
    COUNT: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, HAS_MINIMA: tl.constexpr
):  # fmt: skip
    """The scales of both halves of parts, and what is added to a weight: [ROWS, PARTS] each."""
    # The alignments make each thread load the numbers of its own words.
    if SCALES == "codes":  # of two bytes, times the floats of 256 columns
        code = tl.multiple_of(scales + row * COUNT + part, [2, 2])
        code = tl.load(code, mask=mask, other=0).to(tl.int32)
        # Without being told that neighbours follow one another, the compiler would give a warp's
        # threads other rows here than everywhere else; of so few bytes it joins no loads.
        factor = tl.max_contiguous(factors + row * (COUNT // 8) + part // 8, [1, 2])
        if HAS_MINIMA:
            pair = tl.load(tl.multiple_of(factor, [4, 4]), mask=mask, other=0)
            scale = _half(pair) * (code & 255).to(tl.float32)
            zero = -_half(pair >> 16) * (code >> 8 & 255).to(tl.float32)
            upper_scale = scale
        else:
            zero = tl.load(tl.multiple_of(factor, [2, 2]), mask=mask, other=0.0).to(tl.float32)
            scale = zero * (code << 24 >> 24).to(tl.float32)
            upper_scale = zero * (code >> 8).to(tl.float32)
    elif HAS_MINIMA:
        pair = tl.multiple_of(scales + row * COUNT + part, [4, 4])
        pair = tl.load(pair, mask=mask, other=0)
        if SCALES == "bfloat16":  # scale and zero: a weight is (q - 8) * scale + zero
            scale = (pair << 16).to(tl.float32, bitcast=True)
            zero = tl.fma(scale, -8.0, (pair & -65536).to(tl.float32, bitcast=True))
        else:
            scale, zero = _half(pair), _half(pair >> 16)
        upper_scale = scale
    else:
        group = part if BITS == 4 else part // 2
        half = tl.multiple_of(scales + row * (COUNT * 4 // BITS) + group, [2, 2])
        scale = tl.load(half, mask=mask, other=0.0).to(tl.float32)
        upper_scale, zero = scale, scale
    return scale, upper_scale, zero


@triton.jit
def _split_words(words, high, row, part, start, mask, COUNT: tl.constexpr, HIGH: tl.constexpr,
    SHIFT: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The bytes of both halves of parts [ROWS, PARTS, 2], times 2^SHIFT.

    `high` has the bits above the lowest four: bytes of four columns each, in which the bits of
    columns that lie four apart follow one another.
    """
    NIBBLES: tl.constexpr = -0x0F0F0F0F0F0F0F10 if SHIFT == 4 else 0x0F0F0F0F0F0F0F0F << SHIFT
    lower, upper = (words << SHIFT) & NIBBLES, (words >> (4 - SHIFT)) & NIBBLES
    if HIGH:
        at = part if HIGH == 1 else start * 2 + tl.arange(0, PARTS * 2)[None, :]
        inside = mask & (at < COUNT * HIGH)
        bits = tl.multiple_of(high + row * (COUNT * HIGH) + at, [4 * HIGH, 4 * HIGH])
        bits = tl.load(bits, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
        bits |= (bits >> HIGH) << 32
        bits = tl.reshape(bits, [ROWS, PARTS, HIGH])
        if HIGH == 1:
            bits = bits >> (tl.arange(0, 2) * 2)[None, None, :]
        HIGHEST: tl.constexpr = -0x3F3F3F3F3F3F3F40 if HIGH == 2 else -0x7F7F7F7F7F7F7F80
        FIFTH: tl.constexpr = 0x3030303030303030 if HIGH == 2 else 0x1010101010101010
        ONES: tl.constexpr = HIGHEST if SHIFT else FIFTH
        lower |= (bits << (4 + SHIFT)) & ONES
        upper |= (bits >> 4 << (4 + SHIFT)) & ONES
    return lower, upper


@triton.jit
def _add_digit(
    total, x, mask, words, code: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr
):
    digits = tl.reshape(tl.load(x, mask=mask, other=0), [1, PARTS, 2])
    return _add_bytes(words, digits, total, code, INTERPRETED)


@triton.jit
def _dot(
    digits, numbers, weight, high, scales, factors, n, inside, b, B,
    K: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    HAS_MINIMA: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr,
    INTERPRETED: tl.constexpr
):  # fmt: skip
    """The products [ROWS] of M rounded rows, from `b` on, with the rows `n` of `weight`.

    A part is two words of weights: a group of four bits, or half of one of eight.
    """
    COUNT: tl.constexpr = K * BITS // 128
    # Without minima, weights are signed bytes: times 16, 8 or 4, minus 128.
    SHIFT: tl.constexpr = 0 if HAS_MINIMA else 8 - BITS - HIGH
    CODE: tl.constexpr = _ADD_UNSIGNED if HAS_MINIMA else _ADD_SIGNED
    row, plane = n[:, None], B * (COUNT * 2)  # words of 2^31 * 8 weights have a number
    totals = (tl.zeros([ROWS, PARTS], tl.float32),) * M
    for start in range(0, COUNT, PARTS):
        part = start + tl.arange(0, PARTS)[None, :]
        word = start * 2 + tl.arange(0, PARTS * 2)[None, :]
        mask = word < COUNT * 2
        has_part = inside[:, None] & (part < COUNT)
        words = tl.load(weight + row * (COUNT * 2) + word, mask=inside[:, None] & mask, other=0)
        lower = tl.reshape(words, [ROWS, PARTS, 2])
        upper = lower
        if BITS == 4:
            lower, upper = _split_words(
                lower, high, row, part, start, inside[:, None], COUNT, HIGH, SHIFT, ROWS, PARTS
            )
            if not HAS_MINIMA:
                lower ^= -0x7F7F7F7F7F7F7F80
                upper ^= -0x7F7F7F7F7F7F7F80
        if SCALES != "rows":
            scale, upper_scale, zero = _load_scales(
                scales, factors, row, part, has_part, COUNT, BITS, SCALES, HAS_MINIMA
            )
        sums = ()
        for m in tl.static_range(M):
            at = tl.minimum(b + m, B - 1)
            x = digits + at * (COUNT * 2) + word
            fine = tl.multiple_of(numbers + at * COUNT + part, [4, 4])
            step = tl.load(fine, mask=part < COUNT, other=0.0)
            first, rest = tl.zeros([ROWS, PARTS, 2], tl.int32), tl.zeros([ROWS, PARTS, 2], tl.int32)
            one = totals[m]
            if BITS == 4:
                first = _add_digit(first, x + 2 * plane, mask, upper, CODE, PARTS, INTERPRETED)
                rest = _add_digit(rest, x + 3 * plane, mask, upper, CODE, PARTS, INTERPRETED)
                if HIGH == 2:  # each half has a scale
                    dot = tl.sum(first * _FINE + rest, 2).to(tl.float32)
                    one = tl.fma(dot, upper_scale * (step / 4), one)
                    first, rest = tl.zeros_like(first), tl.zeros_like(first)
            first = _add_digit(first, x, mask, lower, CODE, PARTS, INTERPRETED)
            rest = _add_digit(rest, x + plane, mask, lower, CODE, PARTS, INTERPRETED)
            dot = tl.sum(first * _FINE + rest, 2).to(tl.float32)
            if SCALES == "rows":
                one = tl.fma(dot, step, one)
            elif HAS_MINIMA:
                sum_pointer = tl.multiple_of(fine + B * COUNT, [4, 4])
                sum_of_x = tl.load(sum_pointer, mask=part < COUNT, other=0.0)
                one = tl.fma(zero, sum_of_x, tl.fma(dot, scale * step, one))
            else:
                one = tl.fma(dot, scale * (step * (1.0 / (1 << SHIFT))), one)
            sums = sums + (one,)  # type: ignore[assignment]  # noqa: RUF005
        totals = sums
    products = ()
    for m in tl.static_range(M):
        product = tl.sum(totals[m], 1)
        if SCALES == "rows":
            product *= tl.load(scales + n, mask=inside, other=0.0).to(tl.float32)
        # One row a thread: else each would compute what follows for all rows that it has parts of.
        product = tl.gather(product, tl.arange(0, ROWS), 0)
        products = products + (product,)  # type: ignore[assignment]  # noqa: RUF005
    return products


@triton.jit
def _multiply_packed(
    digits, numbers, weight, high, scales, factors, bias, added, out, next_norm, next_digits,
    next_numbers, N, B, epsilon,
    K: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    HAS_MINIMA: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, GATED: tl.constexpr, NEXT_BITS: tl.constexpr,
    NEXT_NORMED: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr,
    INTERPRETED: tl.constexpr
):  # fmt: skip
    """Do what `_multiply` does for M rounded rows; with `NEXT_BITS`, also round the results."""
    COUNT: tl.constexpr = K * BITS // 128
    b = tl.program_id(1) * M
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < N
    ys = _dot(
        digits, numbers, weight, high, scales, factors, n, inside, b, B, K, BITS, HIGH, SCALES,
        HAS_MINIMA, ROWS, PARTS, M, INTERPRETED
    )  # fmt: skip
    ups = ys
    if GATED:
        ups = _dot(
            digits, numbers, weight, high, scales, factors, n + N, inside, b, B, K, BITS, HIGH,
            SCALES, HAS_MINIMA, ROWS, PARTS, M, INTERPRETED
        )  # fmt: skip
    for m in tl.static_range(M):
        y, up = ys[m], ups[m]
        if NORMED:
            squares = tl.zeros([PARTS], tl.float32)
            for start in range(0, COUNT, PARTS):
                part = start + tl.arange(0, PARTS)
                of_part = numbers + (2 * B + tl.minimum(b + m, B - 1)) * COUNT + part
                squares += tl.load(of_part, mask=part < COUNT, other=0.0)
            factor = tl.rsqrt(tl.sum(squares) / K + epsilon)
            y *= factor
            up *= factor
        if BIASED:
            y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            if BIASED:
                up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
            y = y / (1.0 + tl.exp(-y)) * up
        at = (b + m) * N + n
        mask = n < tl.where(b + m < B, N, 0)
        if ADDED:
            y += tl.load(added + at, mask=mask, other=0.0)
        tl.store(out + at, y, mask=mask)
        if NEXT_BITS:
            store_rounded(
                y, next_norm, next_digits, next_numbers, tl.program_id(0) * ROWS, b + m, B, N,
                NEXT_BITS, NEXT_NORMED, ROWS
            )  # fmt: skip


@triton.jit
def _unpack(
    weight, high, scales, factors, out, first, count,
    K: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, SCALES: tl.constexpr,
    HAS_MINIMA: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Write `count` rows of weights, from `first` on, to `out` [count, K]."""
    COUNT: tl.constexpr = K * BITS // 128
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    start = tl.program_id(1) * PARTS
    part, row = start + tl.arange(0, PARTS)[None, :], (first + n).to(tl.int64)
    word = start * 2 + tl.arange(0, PARTS * 2)[None, :]
    mask, inside = (n < count) & (part < COUNT), n < count
    words = tl.load(weight + row * (COUNT * 2) + word, mask=inside & (word < COUNT * 2), other=0)
    lower = tl.reshape(words, [ROWS, PARTS, 2])
    upper = lower
    if BITS == 4:
        lower, upper = _split_words(
            lower, high, row, part, start, inside, COUNT, HIGH, 0, ROWS, PARTS
        )
    scale, upper_scale, zero = _load_scales(
        scales, factors, row, part, mask, COUNT, BITS, SCALES, HAS_MINIMA
    )
    byte = tl.arange(0, 8)[None, None, None, :]
    at = (
        tl.arange(0, 2)[None, None, :, None] * 8
        + byte
        + (n * K + part * (128 // BITS))[:, :, None, None]
    )
    for half in tl.static_range(8 // BITS):
        q = ((upper if half else lower)[:, :, :, None] >> byte * 8 & 255).to(tl.int32)
        if BITS == 8:
            q = (q ^ 128) - 128
        elif not HAS_MINIMA:
            q -= 1 << (BITS + HIGH - 1)
        weights = q.to(tl.float32) * (upper_scale if half else scale)[:, :, None, None]
        if HAS_MINIMA:
            weights += zero[:, :, None, None]
        tl.store(out + at + half * 16, weights, mask=mask[:, :, None, None])


class Rounded(NamedTuple):
    """Rows x [B, K], rounded for products with weights of 4 or 8 bits.

    Each group of 32 columns is (254 first + rest) * step, with digits of 8 bits.
    """

    digits: Tensor  # int8 [2, B, K]; for four bits [2 halves of the groups, 2, B, K / 2]
    numbers: Tensor  # float32 [3, B, K / 32]: step, sum, sum of squares; for eight bits K / 16

    @classmethod
    def empty(cls, like: Tensor, count: int, columns: int, bits: int) -> Rounded:
        return cls(
            like.new_empty(2 * count * columns, dtype=torch.int8),
            like.new_empty(3 * count * columns * bits // 128, dtype=torch.float32),
        )


def round_rows(x: Tensor, bits: int, norm: Tensor | None = None) -> Rounded:
    """Round x [B, K] times `norm` [K], for products with weights of `bits` bits."""
    count, columns = x.shape
    rounded = Rounded.empty(x, count, columns, bits)
    _round[(triton.cdiv(columns, _ROUNDED_COLUMNS), count)](
        x, norm, *rounded, columns,
        BITS=bits, NORMED=norm is not None, COUNT=_ROUNDED_COLUMNS, num_warps=4,
        enable_fp_fusion=False
    )  # fmt: skip
    return rounded


def multiply_packed(
    x: Rounded,
    weights: GpuWeights,
    count: int,
    *,
    epsilon: float | None = None,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    gated: bool = False,
    next_bits: int = 0,
    next_norm: Tensor | None = None,
) -> tuple[Tensor, Rounded | None]:
    """Do what `multiply` does for `count` rows x, with packed weights.

    With `epsilon`, x was multiplied with an RMSNorm's weights before it was rounded. With
    `next_bits`, the result times `next_norm` is rounded, too.
    """
    words, bits = weights.words, weights.bits
    columns = words.shape[1] * 8 // bits
    rows = len(words) // 2 if gated else len(words)
    is_one = count == 1
    row_block = _PACKED_ROWS if is_one else _PACKED_ROWS_OF_MORE
    rows_of_x = min(triton.next_power_of_2(count), _ROWS_OF_X)
    parts = columns * bits // 128
    sizes = _PARTS[bool(weights.high_bits) :]  # more bits take more registers
    part_block = min(sizes, key=lambda size: -(-parts // size) * size)
    out = x.numbers.new_empty((count, rows))
    rounds = bool(next_bits) and is_one
    rounded = Rounded.empty(out, 1, rows, next_bits) if rounds else None
    _multiply_packed[(triton.cdiv(rows, row_block), triton.cdiv(count, rows_of_x))](
        x.digits.view(torch.int64), x.numbers, words.view(torch.int64), weights.high,
        weights.scales, weights.factors, bias, added, out, next_norm, *(rounded or (None, None)),
        rows, count, epsilon or 0.0,
        K=columns, BITS=bits, HIGH=weights.high_bits, SCALES=weights.scale_kind,
        HAS_MINIMA=weights.has_minima, NORMED=epsilon is not None, BIASED=bias is not None,
        ADDED=added is not None, GATED=gated, NEXT_BITS=next_bits if rounds else 0,
        NEXT_NORMED=next_norm is not None, ROWS=row_block, PARTS=part_block, M=rows_of_x,
        INTERPRETED=triton.knobs.runtime.interpret, num_warps=_PACKED_WARPS,
        maxnreg=_MAX_REGISTERS, enable_fp_fusion=False
    )  # fmt: skip
    if next_bits and not rounds:
        rounded = round_rows(out, next_bits, next_norm)
    return out, rounded


def unpack_rows(weights: GpuWeights, rows: slice, dtype: torch.dtype) -> Tensor:
    """Unpack rows of weights with scales for groups of columns to `dtype`; returns [n, K]."""
    start, stop, _ = rows.indices(len(weights.words))
    columns = weights.words.shape[1] * 8 // weights.bits
    out = weights.words.new_empty((stop - start, columns), dtype=dtype)
    parts = columns * weights.bits // 128
    grid = triton.cdiv(len(out), _UNPACKED_ROWS), triton.cdiv(parts, _UNPACKED_PARTS)
    _unpack[grid](
        weights.words.view(torch.int64), weights.high, weights.scales, weights.factors, out, start,
        len(out), K=columns, BITS=weights.bits, HIGH=weights.high_bits, SCALES=weights.scale_kind,
        HAS_MINIMA=weights.has_minima, ROWS=_UNPACKED_ROWS, PARTS=_UNPACKED_PARTS, num_warps=4,
        enable_fp_fusion=False
    )  # fmt: skip
    return out


def multiply_rows(x: Tensor, weights: GpuWeights) -> Tensor:
    """Multiply rows x [m, K] with packed weights [N, K]: float32 [m, N]."""
    return multiply_packed(round_rows(x.float().contiguous(), weights.bits), weights, len(x))[0]
