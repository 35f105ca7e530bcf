r"""The forward Triton kernel of relative attention, and functions shared with the backward pass.

A tile is the scores of a block of queries for a block of keys. Its position term lies on a band of
distances: query ``t0 + i`` and key ``s0 + j`` need row ``n + j + shift[i]`` of ``r``, where
``n = s0 + T - t0 - BLOCK_T`` and ``shift[i] = BLOCK_T - 1 - i``. So the band is two chunks of
``BLOCK_S`` rows, and what one tile needs of the second chunk is what the next tile to the right
needs of its first. Each chunk is multiplied once, for a tile of four queries and four keys::

    near   ahead         merged            turned by shift[i]
    ...a   bcd.          bcda              abcd
    ..ab   cd..    ->    cdab       ->     abcd
    .abc   d...          dabc              abcd
    abcd   ....          abcd              abcd

Merging selects columns, turning a row is a gather within it; the backward pass turns the gradient
of the scores the other way. No scores are written to memory, and the position term costs one matrix
product, like the content term.

This module needs Triton; :mod:`transformer_xl.ops.triton` imports it on first use.
"""

from importlib import import_module
from typing import Any, no_type_check

# Dynamic import, as Triton may be missing when types are checked.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
@no_type_check
def load_rows(
    base, start, stride, first, end, ROWS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr
):
    """Load rows of K values; zero outside of ``first`` to ``end`` and beyond K."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_there = ((start + rows >= first) & (start + rows < end))[:, None] & (columns < K)[None, :]
    # Offsets within a large batch exceed 2^31. The part that does not depend on the start of the
    # block is computed once for all blocks.
    apart = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    begin = (tl.zeros((), tl.int64) + start) * stride
    return tl.load(base + begin + apart, mask=is_there, other=0.0)


@triton.jit
@no_type_check
def store_rows(base, rows, stride, end, values, K: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows of K values, up to row ``end``."""
    columns = tl.arange(0, WIDTH)
    is_there = ((rows >= 0) & (rows < end))[:, None] & (columns < K)[None, :]
    place = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=is_there)


@triton.jit
@no_type_check
def product(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Multiply matrices and accumulate in float32."""
    # The interpreter multiplies the bit patterns of bfloat16.
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def score_distances(
    query, r_rows, start, distance_bias, head, S, H,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return the position scores of a block of queries for a chunk of consecutive distances.

    Column c belongs to row ``start + c`` of ``r``; :func:`turn_to_keys` orders columns by key.

    Args:
        query: Queries plus the bias v, of shape (BLOCK_T, WIDTH).
        r_rows: Rows of ``r`` from ``start`` on, of shape (BLOCK_S, WIDTH); zero where ``r`` has no
            such row.
        start: Row of ``r``, (S, H, K), at which the chunk begins; may be negative.
        distance_bias: Pointer to the contiguous biases by distance and head, (S, H).
        head: Index of the head.
        S: Number of distances.
        H: Number of heads.
        HAS_BIAS: Whether there is a ``distance_bias``; otherwise it is not read.
        PRECISION: Precision of the product of float32 matrices, for Triton.
        UPCAST: Whether to multiply in float32.

    Returns:
        Scores in float32, of shape (BLOCK_T, BLOCK_S), before scaling.
    """
    scores = product(query, tl.trans(r_rows), PRECISION, UPCAST)
    if HAS_BIAS:
        rows = start + tl.arange(0, r_rows.shape[0])
        is_in_range = (rows >= 0) & (rows < S)
        bias = tl.load(distance_bias + rows * H + head, mask=is_in_range, other=0.0)
        scores += bias.to(tl.float32)[None, :]
    return scores


@triton.jit
@no_type_check
def is_near(BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Mark the columns of merged chunks that come from the nearer one."""
    shift = BLOCK_T - 1 - tl.arange(0, BLOCK_T)
    return tl.arange(0, BLOCK_S)[None, :] >= shift[:, None]


@triton.jit
@no_type_check
def turn(tile, by, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Rotate each row of a tile to the left, by its own number of columns."""
    # By halves: threads that hold one value of a row each exchange it in one step, not in two.
    HALF: tl.constexpr = BLOCK_S // 2
    low, high = tl.split(tl.permute(tl.reshape(tile, (BLOCK_T, 2, HALF)), (0, 2, 1)))
    column = tl.arange(0, HALF)[None, :] + by[:, None]
    low = tl.gather(low, column & (HALF - 1), 1)
    high = tl.gather(high, column & (HALF - 1), 1)
    swaps = (column & HALF) != 0
    halves = tl.join(tl.where(swaps, high, low), tl.where(swaps, low, high))
    return tl.reshape(tl.permute(halves, (0, 2, 1)), (BLOCK_T, BLOCK_S))


@triton.jit
@no_type_check
def turn_to_keys(merged, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Turn each row of merged chunks until its columns stand for keys."""
    return turn(merged, BLOCK_T - 1 - tl.arange(0, BLOCK_T), BLOCK_T, BLOCK_S)


@triton.jit
@no_type_check
def turn_to_distances(tile, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Undo :func:`turn_to_keys`."""
    return turn(tile, tl.arange(0, BLOCK_T) + (1 - BLOCK_T), BLOCK_T, BLOCK_S)


@triton.jit
@no_type_check
def seen_keys(
    t0, first_key, stream, first_stream, first_row, T, S, attn_len,
    BLOCK_T: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return the range of keys that a block of queries sees; padding queries see none.

    Returns:
        For each query the first key that it sees, and how many; the first key that any of them
        sees; the first and the end of the keys that all of them see.
    """
    queries = t0 + tl.arange(0, BLOCK_T)
    own = S - T + queries
    first = tl.maximum(own + 1 - attn_len, 0)
    any_start = tl.maximum(S - T + t0 + 1 - attn_len, 0)
    all_start = tl.maximum(S - T + t0 + BLOCK_T - attn_len, 0)
    if HAS_FIRST:
        place = first_key + stream * first_stream + queries * first_row
        given = tl.load(place, mask=queries < T, other=S).to(tl.int32)
        first = tl.maximum(first, given)
        any_start, all_start = tl.min(first, 0), tl.max(first, 0)
    all_end = tl.where(t0 + BLOCK_T <= T, S - T + t0 + 1, 0)
    n_seen = tl.where(queries < T, tl.maximum(own + 1 - first, 0), 0)
    return first, n_seen, any_start, all_start, all_end


@triton.jit
@no_type_check
def is_seen(keys, first, n_seen):
    """Return the mask of the keys that each query sees."""
    # One comparison: as unsigned integers, negative differences are very large.
    return (keys - first[:, None]).to(tl.uint32) < n_seen[:, None].to(tl.uint32)


@triton.jit
@no_type_check
def is_kept(
    seed, stream_head, queries, first_key, S, dropped_of_65536,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Draw the dropout mask of a tile, as a function of the position of each weight.

    One draw makes eight numbers, so ``first_key``, where the tile begins, is a multiple of eight.
    """
    group = first_key // 8 + tl.arange(0, BLOCK_S // 8)
    place = queries[:, None] * tl.cdiv(S, 8) + group[None, :]
    zero = place * 0
    # Seven rounds are the fewest that pass all tests of BigCrush (Salmon et al., 2011).
    a, b, c, d = tl.philox(seed, place, zero + stream_head, zero, zero, n_rounds=7)
    bits = tl.join(tl.join(a, b), tl.join(c, d))
    bits = tl.reshape(tl.join(bits & 0xFFFF, bits >> 16), (BLOCK_T, BLOCK_S))
    return bits.to(tl.int32) >= dropped_of_65536


@triton.jit
@no_type_check
def attention_kernel(
    by_content, by_position, k, v, r, distance_bias, first_key, seed, out, norms,
    k_stream, k_row, k_head, v_stream, v_row, v_head, r_row, r_head,
    first_stream, first_row, B, T, S, H, attn_len, scale, dropped_of_65536, kept_scale,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend from one block of queries of one head of one stream."""
    n_blocks = tl.cdiv(T, BLOCK_T)
    stream_head = tl.program_id(0) // n_blocks
    # The last queries see the most keys, so they start first.
    t0 = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_T
    stream, head = (stream_head // H).to(tl.int64), (stream_head % H).to(tl.int64)
    queries = t0 + tl.arange(0, BLOCK_T)
    by_content += (stream * H + head) * T * K
    by_position += (head * B + stream) * T * K
    q_content = load_rows(by_content, t0, K, 0, T, BLOCK_T, K, WIDTH)
    q_position = load_rows(by_position, t0, K, 0, T, BLOCK_T, K, WIDTH)
    k += stream * k_stream + head * k_head
    v += stream * v_stream + head * v_head
    r += head * r_head
    first, n_seen, any_start, all_start, all_end = seen_keys(
        t0, first_key, stream, first_stream, first_row, T, S, attn_len, BLOCK_T, HAS_FIRST
    )
    if DROPS:
        seed = tl.load(seed)

    start = any_start // BLOCK_S * BLOCK_S
    end = tl.minimum(S, S - T + t0 + BLOCK_T)
    # The row of r at which the chunk for key 0 begins.
    r0 = T - t0 - BLOCK_T
    r_rows = load_rows(r, r0 + start, r_row, 0, S, BLOCK_S, K, WIDTH)
    near = score_distances(
        q_position, r_rows, r0 + start, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
    )
    takes_near = is_near(BLOCK_T, BLOCK_S)
    highest = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    attended = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    for s0 in range(start, end, BLOCK_S):
        n0 = r0 + s0 + BLOCK_S
        r_rows = load_rows(r, n0, r_row, 0, S, BLOCK_S, K, WIDTH)
        ahead = score_distances(
            q_position, r_rows, n0, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
        )
        score = turn_to_keys(tl.where(takes_near, near, ahead), BLOCK_T, BLOCK_S)
        near = ahead
        k_rows = load_rows(k, s0, k_row, any_start, S, BLOCK_S, K, WIDTH)
        score += product(q_content, tl.trans(k_rows), PRECISION, UPCAST)
        if (s0 < all_start) | (s0 + BLOCK_S > all_end):
            seen = is_seen(s0 + tl.arange(0, BLOCK_S)[None, :], first, n_seen)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1) * (scale * LOG2_E))
        # Avoids infinity minus infinity for a query that has seen no key yet.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * (scale * LOG2_E) - level[:, None])
        faded = tl.exp2(highest - level)
        total = total * faded + tl.sum(weight, 1)
        if DROPS:
            kept = is_kept(seed, stream_head, queries, s0, S, dropped_of_65536, BLOCK_T, BLOCK_S)
            weight = tl.where(kept, weight, 0.0)
        v_rows = load_rows(v, s0, v_row, any_start, S, BLOCK_S, K, WIDTH)
        values = product(weight.to(v_rows.dtype), v_rows, PRECISION, UPCAST)
        attended = attended * faded[:, None] + values
        highest = higher

    # Padding queries have seen no key.
    total = tl.where(total > 0, total, 1.0)
    attended = attended * (kept_scale / total)[:, None]
    base = out + (stream * T * H + head) * K
    store_rows(base, queries, H * K, T, attended, K, WIDTH)
    # Two values and not the log-sum-exp, whose rounding error would affect all weights.
    place = stream_head.to(tl.int64) * 2 * T + queries
    tl.store(norms + place, highest, mask=queries < T)
    tl.store(norms + place + T, 1 / total, mask=queries < T)
