"""The three backward Triton kernels of relative attention.

Each kernel recomputes the scores of its tiles and owns its output: one iterates over blocks of
queries, one over blocks of keys, one over blocks of distances. So there are no atomic additions,
and results are deterministic. The query kernel runs first; it stores the softmax term (the dot
product of output and gradient of each query) for the others.

:mod:`transformer_xl.ops.triton_forward` explains the position term of a tile.
"""

from importlib import import_module
from typing import Any, no_type_check

from transformer_xl.ops.triton_forward import (
    LOG2_E,
    add_bias,
    is_kept,
    is_near,
    is_seen,
    load_rows,
    position_chunk,
    product,
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
def load_norms(norms, stream_head, queries, T):
    """Load the softmax statistics of each query: its highest score and the inverse of its sum."""
    place = norms + stream_head.to(tl.int64) * 2 * T + queries
    is_there = queries < T
    return tl.load(place, mask=is_there, other=0.0), tl.load(place + T, mask=is_there, other=0.0)


@triton.jit
@no_type_check
def load_queries(
    q, d_out, norms, back, stream_head, t0, q_row, d_row, T,
    BLOCK_T: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load a block of queries with their gradients and softmax statistics."""
    queries = t0 + tl.arange(0, BLOCK_T)
    query = load_rows(q, t0, q_row, 0, T, BLOCK_T, K, WIDTH)
    d_attended = load_rows(d_out, t0, d_row, 0, T, BLOCK_T, K, WIDTH)
    highest, inverse = load_norms(norms, stream_head, queries, T)
    place = back + stream_head.to(tl.int64) * T + queries
    through = tl.load(place, mask=queries < T, other=0.0)
    return query, d_attended, highest, inverse, through


@triton.jit
@no_type_check
def score_gradient(
    score, d_weight, kept, highest, inverse, through, exponent_scale, kept_scale,
    DROPS: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile after dropout, and the gradient of its scores.

    The score of a key that is not seen is minus infinity; its weight's gradient is any number.
    """
    # Normalized as in the forward pass.
    weight = tl.exp2(score * exponent_scale - highest[:, None]) * inverse[:, None]
    dropped = weight
    if DROPS:
        d_weight = tl.where(kept, d_weight * kept_scale, 0.0)
        dropped = tl.where(kept, weight * kept_scale, 0.0)
    return dropped, weight * (d_weight - through[:, None])


@triton.jit
@no_type_check
def query_kernel(
    q, k, v, r, content_bias, position_bias, distance_bias, first_key, seed, out, d_out, norms,
    back, dq, d_biases,
    q_stream, q_row, q_head, k_stream, k_row, k_head, v_stream, v_row, v_head, r_row, r_head,
    d_stream, d_row, d_head, first_stream, first_row,
    T, S, H, attn_len, scale, dropped_of_65536, kept_scale,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of queries, and its share of those of the biases."""
    n_blocks = tl.cdiv(T, BLOCK_T)
    stream_head = tl.program_id(0) // n_blocks
    block = n_blocks - 1 - tl.program_id(0) % n_blocks
    t0 = block * BLOCK_T
    stream, head = (stream_head // H).to(tl.int64), (stream_head % H).to(tl.int64)
    queries = t0 + tl.arange(0, BLOCK_T)
    query = load_rows(q + stream * q_stream + head * q_head, t0, q_row, 0, T, BLOCK_T, K, WIDTH)
    q_content = add_bias(query, content_bias, head, K, WIDTH)
    q_position = add_bias(query, position_bias, head, K, WIDTH)
    k += stream * k_stream + head * k_head
    v += stream * v_stream + head * v_head
    r += head * r_head
    own = (stream * T * H + head) * K
    d_attended = load_rows(
        d_out + stream * d_stream + head * d_head, t0, d_row, 0, T, BLOCK_T, K, WIDTH
    )
    attended = load_rows(out + own, t0, H * K, 0, T, BLOCK_T, K, WIDTH)
    through = tl.sum(attended.to(tl.float32) * d_attended.to(tl.float32), 1)
    place = stream_head.to(tl.int64) * T + queries
    tl.store(back + place, through, mask=queries < T)
    highest, inverse = load_norms(norms, stream_head, queries, T)
    first, n_seen, any_start, all_start, all_end = seen_keys(
        t0, first_key, stream, first_stream, first_row, T, S, attn_len, BLOCK_T, HAS_FIRST
    )
    if DROPS:
        seed = tl.load(seed)

    start = any_start // BLOCK_S * BLOCK_S
    end = tl.minimum(S, S - T + t0 + BLOCK_T)
    takes_near = is_near(BLOCK_T, BLOCK_S)
    d_content = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    d_position = tl.zeros((BLOCK_T, WIDTH), tl.float32)
    for s0 in range(start, end, BLOCK_S):
        n0 = s0 + T - t0 - BLOCK_T
        r_near = load_rows(r, n0, r_row, 0, S, BLOCK_S, K, WIDTH)
        near = position_chunk(
            q_position, r_near, n0, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
        )
        n0 += BLOCK_S
        r_ahead = load_rows(r, n0, r_row, 0, S, BLOCK_S, K, WIDTH)
        ahead = position_chunk(
            q_position, r_ahead, n0, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
        )
        score = turn_to_keys(tl.where(takes_near, near, ahead), BLOCK_T, BLOCK_S)
        k_rows = load_rows(k, s0, k_row, any_start, S, BLOCK_S, K, WIDTH)
        v_rows = load_rows(v, s0, v_row, any_start, S, BLOCK_S, K, WIDTH)
        score += product(q_content, tl.trans(k_rows), PRECISION, UPCAST)
        d_weight = product(d_attended, tl.trans(v_rows), PRECISION, UPCAST)
        if (s0 < all_start) | (s0 + BLOCK_S > all_end):
            seen = is_seen(s0 + tl.arange(0, BLOCK_S)[None, :], first, n_seen)
            score = tl.where(seen, score, float("-inf"))
        kept = takes_near
        if DROPS:
            kept = is_kept(seed, stream_head, queries, s0, S, dropped_of_65536, BLOCK_T, BLOCK_S)
        _, d_score = score_gradient(
            score, d_weight, kept, highest, inverse, through, scale * LOG2_E, kept_scale, DROPS
        )
        d_content += product(d_score.to(k_rows.dtype), k_rows, PRECISION, UPCAST)
        d_merged = turn_to_distances(d_score, BLOCK_T, BLOCK_S)
        d_near = tl.where(takes_near, d_merged, 0.0)
        d_position += product(d_near.to(r_near.dtype), r_near, PRECISION, UPCAST)
        d_ahead = tl.where(takes_near, 0.0, d_merged)
        d_position += product(d_ahead.to(r_near.dtype), r_ahead, PRECISION, UPCAST)

    store_rows(dq + own, queries, H * K, T, (d_content + d_position) * scale, K, WIDTH)
    columns = tl.arange(0, WIDTH)
    share = d_biases + ((stream * n_blocks + block) * 2 * H + head) * K + columns
    tl.store(share, tl.sum(d_content, 0) * scale, mask=columns < K)
    tl.store(share + H * K, tl.sum(d_position, 0) * scale, mask=columns < K)


@triton.jit
@no_type_check
def key_kernel(
    q, k, v, r, content_bias, position_bias, distance_bias, first_key, seed, d_out, norms,
    back, dk, dv,
    q_stream, q_row, q_head, k_stream, k_row, k_head, v_stream, v_row, v_head, r_row, r_head,
    d_stream, d_row, d_head, first_stream, first_row,
    T, S, H, attn_len, scale, dropped_of_65536, kept_scale,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys and values."""
    n_blocks = tl.cdiv(S, BLOCK_S)
    stream_head = tl.program_id(0) // n_blocks
    # The memory is seen by the most queries, so it starts first.
    s0 = (tl.program_id(0) % n_blocks) * BLOCK_S
    stream, head = (stream_head // H).to(tl.int64), (stream_head % H).to(tl.int64)
    keys = s0 + tl.arange(0, BLOCK_S)
    q += stream * q_stream + head * q_head
    r += head * r_head
    d_out += stream * d_stream + head * d_head
    if DROPS:
        seed = tl.load(seed)
    k_rows = load_rows(k + stream * k_stream + head * k_head, s0, k_row, 0, S, BLOCK_S, K, WIDTH)
    v_rows = load_rows(v + stream * v_stream + head * v_head, s0, v_row, 0, S, BLOCK_S, K, WIDTH)

    start = tl.maximum(s0 - (S - T), 0) // BLOCK_T * BLOCK_T
    end = tl.minimum(T, s0 + BLOCK_S - 1 + attn_len - (S - T))
    takes_near = is_near(BLOCK_T, BLOCK_S)
    d_key = tl.zeros((BLOCK_S, WIDTH), tl.float32)
    d_value = tl.zeros((BLOCK_S, WIDTH), tl.float32)
    for t0 in range(start, end, BLOCK_T):
        query, d_attended, highest, inverse, through = load_queries(
            q, d_out, norms, back, stream_head, t0, q_row, d_row, T, BLOCK_T, K, WIDTH
        )
        first, n_seen, _, all_start, all_end = seen_keys(
            t0, first_key, stream, first_stream, first_row, T, S, attn_len, BLOCK_T, HAS_FIRST
        )
        q_position = add_bias(query, position_bias, head, K, WIDTH)
        n0 = s0 + T - t0 - BLOCK_T
        r_rows = load_rows(r, n0, r_row, 0, S, BLOCK_S, K, WIDTH)
        near = position_chunk(
            q_position, r_rows, n0, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
        )
        n0 += BLOCK_S
        r_rows = load_rows(r, n0, r_row, 0, S, BLOCK_S, K, WIDTH)
        ahead = position_chunk(
            q_position, r_rows, n0, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
        )
        score = turn_to_keys(tl.where(takes_near, near, ahead), BLOCK_T, BLOCK_S)
        q_content = add_bias(query, content_bias, head, K, WIDTH)
        score += product(q_content, tl.trans(k_rows), PRECISION, UPCAST)
        d_weight = product(d_attended, tl.trans(v_rows), PRECISION, UPCAST)
        if (s0 < all_start) | (s0 + BLOCK_S > all_end):
            seen = is_seen(keys[None, :], first, n_seen)
            score = tl.where(seen, score, float("-inf"))
            # Keys that no query sees may hold anything.
            d_weight = tl.where(seen, d_weight, 0.0)
        kept = takes_near
        if DROPS:
            queries = t0 + tl.arange(0, BLOCK_T)
            kept = is_kept(seed, stream_head, queries, s0, S, dropped_of_65536, BLOCK_T, BLOCK_S)
        dropped, d_score = score_gradient(
            score, d_weight, kept, highest, inverse, through, scale * LOG2_E, kept_scale, DROPS
        )
        d_value += product(tl.trans(dropped.to(d_attended.dtype)), d_attended, PRECISION, UPCAST)
        d_key += product(tl.trans(d_score.to(query.dtype)), q_content, PRECISION, UPCAST)

    own = (stream * S * H + head) * K
    store_rows(dk + own, keys, H * K, S, d_key * scale, K, WIDTH)
    store_rows(dv + own, keys, H * K, S, d_value, K, WIDTH)


@triton.jit
@no_type_check
def distance_kernel(
    q, k, v, r, content_bias, position_bias, distance_bias, first_key, seed, d_out, norms,
    back, dr, d_distance_bias,
    q_stream, q_row, q_head, k_stream, k_row, k_head, v_stream, v_row, v_head, r_row, r_head,
    d_stream, d_row, d_head, first_stream, first_row,
    B, T, S, H, attn_len, scale, dropped_of_65536, kept_scale, group_size,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FIRST: tl.constexpr, DROPS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one chunk of distances, summed over a group of streams.

    A block of queries meets the distances of the chunk in two tiles side by side. In both together
    each query has ``BLOCK_S`` keys at these distances; they are computed as one tile, whose
    columns come from the right tile first and then from the left.
    """
    head = tl.program_id(1).to(tl.int64)
    group = tl.program_id(2)
    # Chunks begin where those of the tiles begin: keys are then counted in whole blocks of queries.
    n0 = tl.program_id(0) * BLOCK_S - (tl.cdiv(T, BLOCK_T) * BLOCK_T - T)
    rows = n0 + tl.arange(0, BLOCK_S)
    r_rows = load_rows(r + head * r_head, n0, r_row, 0, S, BLOCK_S, K, WIDTH)
    if DROPS:
        seed = tl.load(seed)
    shift = BLOCK_T - 1 - tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_S)
    is_right = columns[None, :] < BLOCK_S - shift[:, None]
    d_rows = tl.zeros((BLOCK_S, WIDTH), tl.float32)
    d_row_bias = tl.zeros((BLOCK_S,), tl.float32)
    for stream_number in range(group * group_size, tl.minimum(B, (group + 1) * group_size)):
        stream = tl.zeros((), tl.int64) + stream_number
        stream_head = stream_number * H + tl.program_id(1)
        q_base = q + stream * q_stream + head * q_head
        k_base = k + stream * k_stream + head * k_head
        v_base = v + stream * v_stream + head * v_head
        d_base = d_out + stream * d_stream + head * d_head
        # The chunk's nearest distance reaches back to the first key from this query on.
        start = tl.maximum(T - n0 - BLOCK_S, 0) // BLOCK_T * BLOCK_T
        end = tl.where(n0 + BLOCK_S > S - attn_len, T, 0)
        for t0 in range(start, end, BLOCK_T):
            query, d_attended, highest, inverse, through = load_queries(
                q_base, d_base, norms, back, stream_head, t0, q_row, d_row, T, BLOCK_T, K, WIDTH
            )
            first, n_seen, _, all_start, _ = seen_keys(
                t0, first_key, stream, first_stream, first_row, T, S, attn_len, BLOCK_T, HAS_FIRST
            )
            s_right = n0 - T + t0 + BLOCK_T
            s_left = s_right - BLOCK_S
            q_content = add_bias(query, content_bias, head, K, WIDTH)
            k_rows = load_rows(k_base, s_right, k_row, 0, S, BLOCK_S, K, WIDTH)
            right = product(q_content, tl.trans(k_rows), PRECISION, UPCAST)
            k_rows = load_rows(k_base, s_left, k_row, 0, S, BLOCK_S, K, WIDTH)
            left = product(q_content, tl.trans(k_rows), PRECISION, UPCAST)
            score = tl.where(is_right, right, left)
            q_position = add_bias(query, position_bias, head, K, WIDTH)
            chunk = position_chunk(
                q_position, r_rows, n0, distance_bias, head, S, H, HAS_BIAS, PRECISION, UPCAST
            )
            score += turn_to_keys(chunk, BLOCK_T, BLOCK_S)
            v_rows = load_rows(v_base, s_right, v_row, 0, S, BLOCK_S, K, WIDTH)
            right = product(d_attended, tl.trans(v_rows), PRECISION, UPCAST)
            v_rows = load_rows(v_base, s_left, v_row, 0, S, BLOCK_S, K, WIDTH)
            left = product(d_attended, tl.trans(v_rows), PRECISION, UPCAST)
            d_weight = tl.where(is_right, right, left)
            # Each query has the key that lies at the chunk's first distance, and those after it.
            is_whole = (n0 + t0 + 1 - T >= all_start) & (n0 + BLOCK_S <= S) & (t0 + BLOCK_T <= T)
            if (n0 < S - attn_len) | ~is_whole:
                keys = tl.where(is_right, s_right, s_left) + columns[None, :]
                seen = is_seen(keys, first, n_seen)
                score = tl.where(seen, score, float("-inf"))
                # Keys that no query sees may hold anything.
                d_weight = tl.where(seen, d_weight, 0.0)
            kept = is_right
            if DROPS:
                queries = t0 + tl.arange(0, BLOCK_T)
                kept_right = is_kept(
                    seed, stream_head, queries, s_right, S, dropped_of_65536, BLOCK_T, BLOCK_S
                )
                kept_left = is_kept(
                    seed, stream_head, queries, s_left, S, dropped_of_65536, BLOCK_T, BLOCK_S
                )
                kept = (is_right & kept_right) | (~is_right & kept_left)
            _, d_score = score_gradient(
                score, d_weight, kept, highest, inverse, through, scale * LOG2_E, kept_scale, DROPS
            )
            d_chunk = turn_to_distances(d_score, BLOCK_T, BLOCK_S)
            d_rows += product(tl.trans(d_chunk.to(query.dtype)), q_position, PRECISION, UPCAST)
            d_row_bias += tl.sum(d_chunk, 0)

    own = (group.to(tl.int64) * S * H + head) * K
    store_rows(dr + own, rows, H * K, S, d_rows * scale, K, WIDTH)
    if HAS_BIAS:
        place = (group.to(tl.int64) * S + rows) * H + head
        tl.store(d_distance_bias + place, d_row_bias * scale, mask=(rows >= 0) & (rows < S))
