"""The backward Triton kernel of relative attention.

It recomputes the scores and writes the attention weights and the gradients of the scores, of which
matrix products outside of the kernel make all gradients. For the position term the gradients of the
scores are written a second time, ordered by distance: what belongs to a chunk of distances (see
:mod:`transformer_xl.ops.triton_forward`) is the nearer part of one tile and the farther part of the
tile to the left. There are no atomic additions, so results are deterministic.
"""

from importlib import import_module
from typing import Any, no_type_check

from transformer_xl.ops.triton_forward import (
    LOG2_E,
    is_kept,
    is_near,
    is_seen,
    load_rows,
    product,
    score_distances,
    seen_keys,
    store_rows,
    turn_to_distances,
    turn_to_keys,
)

# Dynamic import, as Triton may be missing when types are checked.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")


@triton.jit
@no_type_check
def store_tile(base, queries, row, columns, is_there, tile):
    """Store a tile of a matrix that has a row for each query."""
    place = base + queries.to(tl.int64)[:, None] * row + columns
    tl.store(place, tile.to(base.dtype.element_ty), mask=is_there)


@triton.jit
@no_type_check
def gradient_kernel(
    by_content, by_position, k, v, r, distance_bias, first_key, seed, out, d_out, norms,
    d_by_head, weights, d_scores, d_turned,
    k_stream, k_row, k_head, v_stream, v_row, v_head, r_row, r_head,
    d_out_stream, d_out_row, d_out_head, first_stream, first_row,
    B, T, S, H, matrix_row, attn_len, scale, dropped_of_65536, kept_scale,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the rows of the three matrices that belong to one block of queries."""
    n_blocks = tl.cdiv(T, BLOCK_T)
    stream_head = tl.program_id(0) // n_blocks
    t0 = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_T
    stream, head = (stream_head // H).to(tl.int64), (stream_head % H).to(tl.int64)
    queries = t0 + tl.arange(0, BLOCK_T)
    # By streams first, or by heads first, as positions are common to all streams.
    by_stream, by_head = (stream * H + head) * T, (head * B + stream) * T
    q_content = load_rows(by_content + by_stream * K, t0, K, 0, T, BLOCK_T, K, WIDTH)
    q_position = load_rows(by_position + by_head * K, t0, K, 0, T, BLOCK_T, K, WIDTH)
    k += stream * k_stream + head * k_head
    v += stream * v_stream + head * v_head
    r += head * r_head
    d_attended = load_rows(
        d_out + stream * d_out_stream + head * d_out_head, t0, d_out_row, 0, T, BLOCK_T, K, WIDTH
    )
    attended = load_rows(out + (stream * T * H + head) * K, t0, H * K, 0, T, BLOCK_T, K, WIDTH)
    through = tl.sum(attended.to(tl.float32) * d_attended.to(tl.float32), 1)
    is_query = queries < T
    place = norms + stream_head.to(tl.int64) * 2 * T + queries
    highest = tl.load(place, mask=is_query, other=0.0)
    inverse = tl.load(place + T, mask=is_query, other=0.0)
    first, n_seen, any_start, all_start, all_end = seen_keys(
        t0, first_key, stream, first_stream, first_row, T, S, attn_len, BLOCK_T, HAS_FIRST
    )
    if DROPS:
        seed = tl.load(seed)
    store_rows(d_by_head + by_stream * K, queries, K, T, d_attended, K, WIDTH)
    weights += by_stream * matrix_row
    d_scores += by_stream * matrix_row
    d_turned += by_head * matrix_row

    start = any_start // BLOCK_S * BLOCK_S
    end = tl.minimum(S, S - T + t0 + BLOCK_T)
    columns = tl.arange(0, BLOCK_S)[None, :]
    is_row = is_query[:, None]
    nothing = tl.zeros((BLOCK_T, BLOCK_S), weights.dtype.element_ty)
    # The row of r at which the chunk for key 0 begins.
    r0 = T - t0 - BLOCK_T
    stop = start + tl.cdiv(end - start, BLOCK_S) * BLOCK_S
    for s0 in range(0, start, BLOCK_S):
        store_tile(weights, queries, matrix_row, s0 + columns, is_row, nothing)
        store_tile(d_scores, queries, matrix_row, s0 + columns, is_row, nothing)
    for s0 in range(stop, S, BLOCK_S):
        is_there = is_row & (s0 + columns < S)
        store_tile(weights, queries, matrix_row, s0 + columns, is_there, nothing)
        store_tile(d_scores, queries, matrix_row, s0 + columns, is_there, nothing)
    for s0 in range(-tl.cdiv(tl.maximum(r0, 0), BLOCK_S) * BLOCK_S, start, BLOCK_S):
        rows = r0 + s0 + columns
        is_there = is_row & (rows >= 0) & (rows < S)
        store_tile(d_turned, queries, matrix_row, rows, is_there, nothing)

    r_rows = load_rows(r, r0 + start, r_row, 0, S, BLOCK_S, K, WIDTH)
    near = score_distances(
        q_position, r_rows, r0 + start, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
    )
    takes_near = is_near(BLOCK_T, BLOCK_S)
    d_before = nothing
    for s0 in range(start, end, BLOCK_S):
        n0 = r0 + s0 + BLOCK_S
        r_rows = load_rows(r, n0, r_row, 0, S, BLOCK_S, K, WIDTH)
        ahead = score_distances(
            q_position, r_rows, n0, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
        )
        score = turn_to_keys(tl.where(takes_near, near, ahead), BLOCK_T, BLOCK_S)
        near = ahead
        k_rows = load_rows(k, s0, k_row, any_start, S, BLOCK_S, K, WIDTH)
        v_rows = load_rows(v, s0, v_row, any_start, S, BLOCK_S, K, WIDTH)
        score += product(q_content, tl.trans(k_rows), PRECISION, UPCAST)
        d_weight = product(d_attended, tl.trans(v_rows), PRECISION, UPCAST)
        if (s0 < all_start) | (s0 + BLOCK_S > all_end):
            seen = is_seen(s0 + tl.arange(0, BLOCK_S)[None, :], first, n_seen)
            score = tl.where(seen, score, float("-inf"))
        # Normalized as in the forward pass; 0 where a key is not seen.
        weight = tl.exp2(score * (scale * LOG2_E) - highest[:, None]) * inverse[:, None]
        dropped = weight
        if DROPS:
            kept = is_kept(seed, stream_head, queries, s0, S, dropped_of_65536, BLOCK_T, BLOCK_S)
            d_weight = tl.where(kept, d_weight * kept_scale, 0.0)
            dropped = tl.where(kept, weight * kept_scale, 0.0)
        is_there = is_row & (s0 + columns < S)
        store_tile(weights, queries, matrix_row, s0 + columns, is_there, dropped)
        d_score = weight * (d_weight - through[:, None]) * scale
        store_tile(d_scores, queries, matrix_row, s0 + columns, is_there, d_score)
        d_merged = turn_to_distances(d_score, BLOCK_T, BLOCK_S).to(nothing.dtype)
        d_chunk = tl.where(takes_near, d_merged, d_before)
        d_before = d_merged
        rows = r0 + s0 + columns
        is_there = is_row & (rows >= 0) & (rows < S)
        store_tile(d_turned, queries, matrix_row, rows, is_there, d_chunk)
    # The farther part of the last tile.
    rows = r0 + stop + columns
    is_there = is_row & (rows >= 0) & (rows < S)
    d_chunk = tl.where(takes_near, nothing, d_before)
    store_tile(d_turned, queries, matrix_row, rows, is_there, d_chunk)
