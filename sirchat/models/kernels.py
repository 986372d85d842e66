"""Triton kernels for a GPU: products of 16 bits and what is around them, attention, the next token.

Sums have a fixed order, whatever the capacity and the address of a cache and the rest of the batch.
So a conversation's numbers depend only on that conversation.
"""

# triton is untyped, and its functions are no Python: the compiler reads their source.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sirchat.models.packed_kernels import Rounded, store_rounded

SPLIT = 128  # cached rows that one program attends to
_ATTENTION_BLOCK = 128  # of these at a time
_MERGE_BLOCK = 16  # splits that are merged at a time
_LOGITS_BLOCK = 2048
_DRAW_BLOCK = 32  # candidates whose weights are added at a time
_MIN_DOT_ROWS = 16  # of a product of matrices


@triton.jit
def _dot_halves(
    x, norm, weight, n, inside,
    K: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The products [ROWS] of the rows `n` of `weight`, of 16 bits, with x [K]; the sum of x^2."""
    row = n.to(tl.int64)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, K, COLUMNS):
        k = start + tl.arange(0, COLUMNS)
        in_range = k < K
        h = tl.load(x + k, mask=in_range, other=0.0)
        if NORMED:
            squares += h * h
            h *= tl.load(norm + k, mask=in_range, other=0.0).to(tl.float32)
        mask = inside[:, None] & in_range[None, :]
        w = tl.load(weight + row * K + k[None, :], mask=mask, other=0)
        total += w.to(tl.float32) * h[None, :]
    return tl.sum(total, 1), tl.sum(squares)


@triton.jit
def _multiply(
    x, norm, weight, bias, added, out, N, epsilon,
    K: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    ADDED: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Multiply a matrix with one of B rows x [K]; with `GATED`: silu(first half) * second half."""
    b = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < N
    x += b * K
    y, squares = _dot_halves(x, norm, weight, n, inside, K, NORMED, ROWS, COLUMNS)
    factor = 1.0
    if NORMED:
        factor = tl.rsqrt(squares / K + epsilon)
        y *= factor
    if BIASED:
        y += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up, _ = _dot_halves(x, norm, weight, n + N, inside, K, NORMED, ROWS, COLUMNS)
        if NORMED:
            up *= factor
        if BIASED:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * up
    if ADDED:
        y += tl.load(added + b * N + n, mask=inside, other=0.0)
    tl.store(out + b * N + n, y, mask=inside)


@triton.jit
def _rotated(head, norm, cos, sin, d, inside, epsilon, D: tl.constexpr, NORMED: tl.constexpr):
    """Heads [R, D] at the pointers `head` [R, 1], normalized (Qwen 3) and rotated (RoPE)."""
    swapped = (d + D // 2) % D
    x = tl.load(head + d[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(head + swapped[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
        x *= factor * tl.load(norm + d)[None, :].to(tl.float32)
        y *= factor * tl.load(norm + swapped)[None, :].to(tl.float32)
    return x * tl.load(cos + d)[None, :] + y * tl.load(sin + d)[None, :]


@triton.jit
def _attend(
    rows, query_norm, key_norm, cos, sin, pools, lengths, parts, tops, scores, layer, scale,
    epsilon, slot_count,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr,
    SCORED: tl.constexpr, QUERIES: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One split of the slots in one key head; the split with the new row also writes it."""
    h, s, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(lengths + b)  # the new row's slot
    first = s * SPLIT
    g, d = tl.arange(0, QUERIES), tl.arange(0, D)
    queries = b * H * G + h * G + g  # their numbers in the batch
    if SCORED and first > n:
        for i in range(0, SPLIT, BLOCK):
            slot = first + i + tl.arange(0, BLOCK)
            to = scores + queries[:, None] * slot_count + slot[None, :]
            minus_infinity = tl.full([QUERIES, BLOCK], -float("inf"), tl.float32)
            tl.store(to, minus_infinity, mask=(g < G)[:, None] & (slot < slot_count)[None, :])
    if first <= n:
        pool = tl.load(pools + b).to(tl.pointer_type(KIND))
        size = tl.load(pools + tl.num_programs(2) + b) * D  # of one head
        as_read = pool + ((layer * 3) * H + h) * size
        as_written, values = as_read + H * size, as_read + 2 * H * size
        begin = rows + b * (G + 2) * H * D
        is_query = (g < G)[:, None]
        q = _rotated(
            begin + (h * G + g)[:, None] * D, query_norm, cos + b * D, sin + b * D, d, is_query,
            epsilon, D, NORMED
        )  # fmt: skip
        q = (q * scale).to(KIND)  # [QUERIES, D]
        top = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        out = tl.zeros([QUERIES, D], tl.float32)
        for i in range(0, SPLIT, BLOCK):
            slot = first + i + tl.arange(0, BLOCK)
            is_held = slot < n
            offset = slot[:, None] * D + d[None, :]
            key_pointer, value_pointer = as_read + offset, values + offset
            k = tl.load(tl.multiple_of(key_pointer, [16, 16]), mask=is_held[:, None], other=0.0)
            v = tl.load(tl.multiple_of(value_pointer, [16, 16]), mask=is_held[:, None], other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")  # [QUERIES, BLOCK]
            score = tl.where(is_held[None, :], score, -float("inf"))
            if SCORED:
                to = scores + queries[:, None] * slot_count + slot[None, :]
                is_other = (slot < slot_count) & (slot != n)
                tl.store(to, score, mask=is_query & is_other[None, :])
            above = tl.maximum(top, tl.max(score, 1))
            base = tl.where(above == -float("inf"), 0.0, above)
            p = tl.exp(score - base[:, None])
            kept = tl.exp(top - base)
            total = total * kept + tl.sum(p, 1)
            out = out * kept[:, None] + tl.dot(p.to(KIND), v, input_precision="ieee")
            top = above
        if n < first + SPLIT:
            one = tl.arange(0, 1)
            new = _rotated(
                begin + (H * G + h + one)[:, None] * D, key_norm, cos + b * D, sin + b * D, d,
                one[:, None] == 0, epsilon, D, NORMED
            ).to(KIND)  # fmt: skip
            value = tl.load(begin + (H * G + H + h + one)[:, None] * D + d[None, :]).to(KIND)
            to = one[:, None] + n * D + d[None, :]
            tl.store(as_read + to, new)
            tl.store(as_written + to, new)
            tl.store(values + to, value)
            score = tl.sum(q.to(tl.float32) * new.to(tl.float32), 1)
            if SCORED:
                tl.store(scores + queries * slot_count + n, score, mask=g < G)
            above = tl.maximum(top, score)
            p = tl.exp(score - above)
            kept = tl.exp(top - above)
            total = total * kept + p
            out = out * kept[:, None] + p[:, None] * value.to(tl.float32)
            top = above
        splits = tl.num_programs(1)
        part = queries * splits + s
        tl.store(parts + part[:, None] * D + d[None, :], out, mask=is_query)
        tl.store(tops + part * 2, top, mask=g < G)
        tl.store(tops + part * 2 + 1, total, mask=g < G)


@triton.jit
def _merge(
    parts, tops, lengths, out, digits, numbers, SPLITS: tl.constexpr,
    QUERY_HEADS: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr, MERGED: tl.constexpr,
    NEXT_BITS: tl.constexpr
):  # fmt: skip
    query = tl.program_id(0)
    n = tl.load(lengths + query // QUERY_HEADS) + 1
    d, s = tl.arange(0, D), tl.arange(0, MERGED)
    top = -float("inf")
    total = 0.0
    y = tl.zeros([D], tl.float32)
    for start in range(0, SPLITS, MERGED):
        if start * SPLIT < n:
            here = (start + s) * SPLIT < n
            part = query * SPLITS + start + s
            tops_here = tl.load(tops + part * 2, mask=here, other=-float("inf"))
            sums = tl.load(tops + part * 2 + 1, mask=here, other=0.0)
            x = tl.load(parts + part[:, None] * D + d[None, :], mask=here[:, None], other=0.0)
            above = tl.maximum(top, tl.max(tops_here, 0))
            share = tl.exp(tops_here - above)
            kept = tl.exp(top - above)
            total = total * kept + tl.sum(sums * share, 0)
            y = y * kept + tl.sum(x * share[:, None], 0)
            top = above
    y /= total
    tl.store(out + query * D + d, y)
    if NEXT_BITS:
        b, head = query // QUERY_HEADS, query % QUERY_HEADS
        count = tl.num_programs(0) // QUERY_HEADS
        store_rounded(
            y, y, digits, numbers, head * D, b, count, QUERY_HEADS * D, NEXT_BITS, False, D
        )


@triton.jit
def _add_and_normalize(
    x, y, norm, sums, out, epsilon, K: tl.constexpr, ADDED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """RMSNorm of one row [K] of x, to which y is added first."""
    k = tl.arange(0, COLUMNS)
    at, inside = tl.program_id(0) * K + k, k < K
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        row += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(sums + at, row, mask=inside)
        row = row.to(sums.dtype.element_ty).to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row) / K + epsilon)
    row *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, row, mask=inside)


@triton.jit
def _gate(gate, up, out, N, stride, BLOCK: tl.constexpr):
    """silu(gate) * up, of a part of one row of each."""
    b, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = b * stride + n, n < N
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + b * N + n, x / (1.0 + tl.exp(-x)) * y, mask=inside)


@triton.jit
def _block_maxima(logits, tops, ids, V, BLOCK: tl.constexpr):
    """One block's largest logit, its id, and the sum of e^(logit - largest)."""
    i = tl.program_id(0)
    at = i * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < V, other=-float("inf"))
    top = tl.max(x, 0)
    tl.store(tops + 2 * i, top)
    tl.store(tops + 2 * i + 1, tl.sum(tl.exp(x - top), 0))
    tl.store(ids + i, tl.min(tl.where(x == top, at, V), 0))


@triton.jit
def _store_choice(
    tops, ids, surprisals, is_valid, results, slot, numbers, numbers_used, count,
    BLOCKS: tl.constexpr, READS: tl.constexpr
):  # fmt: skip
    if BLOCKS:
        i = tl.arange(0, BLOCKS)
        top = tl.load(tops + 2 * i, mask=i < count, other=-float("inf"))
        total = tl.load(tops + 2 * i + 1, mask=i < count, other=0.0)
        top_of_all = tl.max(top, 0)
        found = tl.load(ids + i, mask=i < count, other=2147483647)
        chosen = tl.min(tl.where(top == top_of_all, found, 2147483647), 0).to(tl.int64)
        nats = tl.log(tl.sum(total * tl.exp(top - top_of_all), 0))
        valid = nats == nats
    else:
        chosen, nats = tl.load(ids), tl.load(surprisals)
        valid = (tl.load(is_valid) != 0) & (nats == nats)  # NaN is no surprisal
    to = results + 3 * tl.load(slot)
    tl.store(to, chosen.to(tl.float64))
    tl.store(to + 1, nats.to(tl.float64))
    tl.store(to + 2, valid.to(tl.float64))
    tl.store(numbers, tl.where(valid, chosen, 0))  # the next step may read it: it must be one
    if READS:
        tl.store(numbers + 1, tl.load(numbers + 1) + 1)
        tl.store(numbers + 2, tl.load(numbers + 2) + 1)
    tl.store(numbers_used, tl.load(numbers_used) + 1)


@triton.jit
def _draw_token(
    values, ids, tops, number, chosen, is_valid, V, count, blocks, top_k, top_p, min_p, margin,
    N: tl.constexpr, BLOCKS: tl.constexpr, HAS_TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, N)
    value = tl.load(values + i, mask=i < count, other=-float("inf"))
    token = tl.load(ids + i, mask=i < count, other=V)
    top = tl.load(values)
    weight = tl.exp((value - top).to(tl.float64))
    part = tl.arange(0, BLOCKS)
    above = tl.load(tops + 2 * part, mask=part < blocks, other=-float("inf"))
    sums = tl.load(tops + 2 * part + 1, mask=part < blocks, other=0.0)
    total = tl.sum(sums * tl.exp(above - top), 0).to(tl.float64)
    kept_at_least = count
    if HAS_TOP_K:
        least = tl.sum(tl.where(i == tl.minimum(top_k, count) - 1, value, 0.0), 0)
        kept_at_least = tl.sum((value >= least).to(tl.int32), 0)
        total = tl.sum(tl.where(i < kept_at_least, weight, 0.0), 0)
    kept_at_most = kept_at_least
    likelier = (tl.cumsum(weight, 0) - weight) / total
    at_least = tl.sum((likelier < top_p - margin).to(tl.int32), 0)
    at_most = tl.sum((likelier < top_p + margin).to(tl.int32), 0)
    kept_at_least = tl.minimum(kept_at_least, at_least)
    kept_at_most = tl.minimum(kept_at_most, at_most)
    at_least = tl.sum((weight >= min_p * (1 + margin)).to(tl.int32), 0)
    at_most = tl.sum((weight >= min_p * (1 - margin)).to(tl.int32), 0)
    kept_at_least = tl.minimum(kept_at_least, at_least)
    kept_at_most = tl.minimum(kept_at_most, at_most)
    last = tl.sum(tl.where(i == kept_at_least - 1, value, 0.0), 0)
    after = tl.sum(tl.where(i == kept_at_least, value, 0.0), 0)
    keeps_all = (kept_at_least == count) & (count == V)
    is_end_known = ((kept_at_least < count) & (after < last)) | keeps_all
    is_kept = i < kept_at_least
    cumulative = tl.zeros([N], tl.float64)  # weights of all ids up to each
    for start in range(0, N, BLOCK):
        if start < kept_at_least:
            j = start + tl.arange(0, BLOCK)
            other_value = tl.load(values + j, mask=j < kept_at_least, other=-float("inf"))
            other_weight = tl.exp((other_value - top).to(tl.float64))
            other_ids = tl.load(ids + j, mask=j < kept_at_least, other=V)
            is_before = other_ids[None, :] <= token[:, None]
            cumulative += tl.sum(tl.where(is_before, other_weight[None, :], 0.0), 1)
    limit = tl.load(number) * tl.sum(tl.where(is_kept, weight, 0.0), 0)
    drawn = tl.min(tl.where(is_kept & (cumulative > limit), token, V), 0)
    tl.store(chosen, tl.minimum(drawn, V - 1))
    is_certain = (kept_at_least == kept_at_most) & (kept_at_least > 0) & is_end_known
    tl.store(is_valid, is_certain & (drawn < V))


_HALVES_ROWS, _HALVES_COLUMNS = 2, 1024  # that a program multiplies at a time, of 16 bits
# Columns that a program gates; columns in a warp, and warps, of one that normalizes a row
_GATE_BLOCK, _COLUMNS_PER_WARP, _MAX_WARPS = 1024, 256, 16
_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def multiply_fused(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Multiply rows x, float32 [B, K], with a matrix of 16 bits; returns float32 [B, N].

    With `norm`, x is normalized first (RMSNorm). `added` [B, N] is added. With `gated`, the matrix
    has 2 N rows, for A and B, and the result is silu(x A^T) * (x B^T).
    """
    count, columns = x.shape
    rows = len(weight) // 2 if gated else len(weight)
    out = x.new_empty((count, rows))
    _multiply[(triton.cdiv(rows, _HALVES_ROWS), count)](
        x, norm, weight, bias, added, out, rows, epsilon,
        K=columns, NORMED=norm is not None, BIASED=bias is not None, ADDED=added is not None,
        GATED=gated, ROWS=_HALVES_ROWS, COLUMNS=_HALVES_COLUMNS, num_warps=4
    )  # fmt: skip
    return out


def attend(
    rows: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
    cos: Tensor,
    sin: Tensor,
    pools: Tensor,
    lengths: Tensor,
    slot_count: int,
    *,
    layer: int,
    kv_heads: int,
    scale: float,
    dtype: torch.dtype,
    scores: Tensor | None = None,
    next_bits: int = 0,
) -> tuple[Tensor, Rounded | None]:
    """Attention of one new token in each of B conversations: [B, H_q, D] in the type of `rows`.

    `rows` [B, H_q + 2 H, D]: queries, keys and values, not yet rotated. `pools`, int64 [2, B]:
    address and capacity of each cache's pool [L, 3, H, capacity, D] of `dtype`. `lengths` [B]: the
    slots for the new rows. `slot_count`: at least the largest capacity. `scores`, float32 [B, H_q,
    slot_count]: gets the scaled products, or -inf. With `next_bits`, the result is rounded, too.
    """
    count, head_count, size = rows.shape
    group = (head_count - 2 * kv_heads) // kv_heads
    splits = triton.cdiv(slot_count, SPLIT)
    parts = rows.new_empty((count * kv_heads * group, splits, size), dtype=torch.float32)
    tops = rows.new_empty((count * kv_heads * group, splits, 2), dtype=torch.float32)
    _attend[(kv_heads, splits, count)](
        rows, query_norm, key_norm, cos, sin, pools, lengths, parts, tops, scores, layer, scale,
        epsilon, slot_count,
        H=kv_heads, G=group, D=size, KIND=_TRITON_TYPES[dtype], NORMED=query_norm is not None,
        SCORED=scores is not None, QUERIES=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        SPLIT=SPLIT, BLOCK=_ATTENTION_BLOCK, num_warps=4
    )  # fmt: skip
    out = rows.new_empty((count, kv_heads * group, size))
    rounds = next_bits and size % 32 == 0
    rounded = Rounded.empty(out, count, kv_heads * group * size, next_bits) if rounds else None
    _merge[(count * kv_heads * group,)](
        parts, tops, lengths, out, *(rounded or (None, None)),
        SPLITS=splits, QUERY_HEADS=kv_heads * group, D=size, SPLIT=SPLIT, MERGED=_MERGE_BLOCK,
        NEXT_BITS=next_bits if rounds else 0, num_warps=1 if size < 128 else 2,
        enable_fp_fusion=False
    )  # fmt: skip
    return out, rounded


def add_and_normalize(
    x: Tensor, y: Tensor | None, norm: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + y [..., K] in the type of x, or just x; and its RMSNorm times `norm` [K] in `dtype`."""
    columns, block = x.shape[-1], triton.next_power_of_2(x.shape[-1])
    sums, out = x if y is None else torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    _add_and_normalize[(x.numel() // columns,)](
        x, y, norm, sums, out, epsilon, K=columns, ADDED=y is not None, COLUMNS=block,
        num_warps=min(_MAX_WARPS, max(1, block // _COLUMNS_PER_WARP))
    )  # fmt: skip
    return sums, out


def gate(gate: Tensor, up: Tensor, *, dtype: torch.dtype) -> Tensor:
    """silu(gate) * up in `dtype`, of rows [..., N]; both may be halves of the same rows."""
    columns = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    _gate[(gate.numel() // columns, triton.cdiv(columns, _GATE_BLOCK))](
        gate, up, out, columns, gate.stride(-2), BLOCK=_GATE_BLOCK, num_warps=4
    )  # fmt: skip
    return out


def block_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest of the logits [V] in each of n blocks, as `store_choice` needs them.

    Returns float32 [n, 2] (the maximum, and the sum of e^(logit - maximum)) and the ids, int32 [n].
    """
    count = triton.cdiv(len(logits), _LOGITS_BLOCK)
    tops = logits.new_empty((count, 2))
    ids = logits.new_empty((count,), dtype=torch.int32)
    _block_maxima[(count,)](logits, tops, ids, len(logits), BLOCK=_LOGITS_BLOCK, num_warps=8)
    return tops, ids


def store_choice(
    chosen: Sequence[Tensor],
    results: Tensor,
    slot: Tensor,
    numbers: Tensor,
    numbers_used: Tensor,
    *,
    reads: bool,
) -> None:
    """Store a chosen token, and prepare the inputs of the next step.

    `chosen` is `block_maxima`'s result, or an id int64 [1] with its surprisal and validity. These
    go to `results` [slots, 3], the id to `numbers` [5, 1]. Adds 1 to `numbers_used` and, with
    `reads`, to the length and position in `numbers`.
    """
    is_likeliest = len(chosen) == 2
    tops, ids = chosen if is_likeliest else (None, chosen[0])
    surprisals, is_valid = (None, None) if is_likeliest else chosen[1:]
    blocks = triton.next_power_of_2(len(ids)) if is_likeliest else 0
    _store_choice[(1,)](
        tops, ids, surprisals, is_valid, results, slot, numbers, numbers_used, len(ids),
        BLOCKS=blocks, READS=reads, num_warps=4
    )  # fmt: skip


def draw_token(
    scores: Tensor,
    values: Tensor,
    ids: Tensor,
    number: Tensor,
    top_k: int,
    top_p: float,
    min_p: float,
    margin: float,
) -> tuple[Tensor, Tensor]:
    """Draw an id from scores [V]; `values` [n] are the largest scores, `ids` [n] their ids.

    `number`, float64 [1], is random. A `top_k` of 0, `top_p` of 2 and `min_p` of 0 exclude no id.
    Returns the id, int64 [1], and its validity, bool [1]: whether the limits leave the same ids if
    `margin` is added or subtracted.
    """
    tops, _ = block_maxima(scores)
    chosen, is_valid = ids.new_empty(1), ids.new_empty(1, dtype=torch.bool)
    _draw_token[(1,)](
        values, ids, tops, number, chosen, is_valid, len(scores), len(ids), len(tops), top_k, top_p,
        min_p, margin,
        N=triton.next_power_of_2(len(ids)), BLOCKS=triton.next_power_of_2(len(tops)),
        HAS_TOP_K=top_k > 0, BLOCK=_DRAW_BLOCK, num_warps=8
    )  # fmt: skip
    return chosen, is_valid
