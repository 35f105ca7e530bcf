"""The Triton kernel of a decoding step: one query of each stream, and a ring of keys and values.

This module needs Triton; :mod:`transformer_xl.ops.triton` imports it on first use.
"""

from importlib import import_module
from typing import Any, no_type_check

from transformer_xl.ops.triton_forward import LOG2_E

# Dynamic import, as Triton may be missing when types are checked.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")


@triton.jit
@no_type_check
def load_slots(
    keys, values, slot, start, seen, capacity, columns, is_column,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load a block of keys and values, the nearest first; zeros where none is seen."""
    distance = start + tl.arange(0, BLOCK)
    place = slot - distance
    place = tl.where(place < 0, place + capacity, place)
    is_there = (distance < seen)[:, None] & is_column[None, :]
    row = place[:, None] * K + columns[None, :]
    key = tl.load(keys + row, mask=is_there, other=0.0, eviction_policy="evict_first")
    value = tl.load(values + row, mask=is_there, other=0.0, eviction_policy="evict_first")
    return key, value


@triton.jit
@no_type_check
def step_kernel(
    q, k, v, keys, values, r, content_bias, position_bias, distance_bias, newest, n_seen, out,
    q_stream, q_head, k_stream, k_head, v_stream, v_head, H, B, capacity, r_row, r_head, scale,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCORES: tl.constexpr, IS_AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the key and value of one head of one stream into its ring, and attend to it.

    The slots are read from the newest to the farthest that the stream sees, a block at a time. Each
    place of a block has a softmax of its own, so that threads do not wait for each other; they are
    combined at the end. With ``HAS_SCORES``, ``r`` is the position term itself, (H, B, capacity),
    before it is scaled. With ``IS_AHEAD`` each block is loaded before the one before it is read.
    """
    stream, head = tl.program_id(0) % B, tl.program_id(0) // B
    columns = tl.arange(0, WIDTH)
    is_column = columns < K
    query = tl.load(q + stream * q_stream + head * q_head + columns, mask=is_column, other=0.0)
    by_content = tl.load(content_bias + head * K + columns, mask=is_column, other=0.0)
    by_position = tl.load(position_bias + head * K + columns, mask=is_column, other=0.0)
    by_content = (query.to(tl.float32) + by_content.to(tl.float32)) * (scale * LOG2_E)
    by_position = (query.to(tl.float32) + by_position.to(tl.float32)) * (scale * LOG2_E)
    ring = (head.to(tl.int64) * B + stream) * capacity
    keys += ring * K
    values += ring * K
    slot = tl.load(newest).to(tl.int32)
    new_key = tl.load(k + stream * k_stream + head * k_head + columns, mask=is_column, other=0.0)
    new_value = tl.load(v + stream * v_stream + head * v_head + columns, mask=is_column, other=0.0)
    tl.store(keys + slot * K + columns, new_key.to(keys.dtype.element_ty), mask=is_column)
    tl.store(values + slot * K + columns, new_value.to(values.dtype.element_ty), mask=is_column)
    # All threads see what one of them stored.
    tl.debug_barrier()

    seen = tl.load(n_seen + stream).to(tl.int32)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    attended = tl.zeros((BLOCK, WIDTH), tl.float32)
    if IS_AHEAD:
        next_key, next_value = load_slots(
            keys, values, slot, 0, seen, capacity, columns, is_column, K, BLOCK
        )
    for start in range(0, seen, BLOCK):
        if IS_AHEAD:
            key, value = next_key, next_value
            next_key, next_value = load_slots(
                keys, values, slot, start + BLOCK, seen, capacity, columns, is_column, K, BLOCK
            )
        else:
            key, value = load_slots(
                keys, values, slot, start, seen, capacity, columns, is_column, K, BLOCK
            )
        distance = start + tl.arange(0, BLOCK)
        is_seen = distance < seen
        terms = key.to(tl.float32) * by_content[None, :]
        nearness = capacity - 1 - distance
        if not HAS_SCORES:
            is_there = is_seen[:, None] & is_column[None, :]
            of_r = nearness[:, None] * r_row + head * r_head + columns[None, :]
            position = tl.load(r + of_r, mask=is_there, other=0.0)
            terms += position.to(tl.float32) * by_position[None, :]
        score = tl.sum(terms, 1)
        if HAS_SCORES:
            position = tl.load(r + ring + nearness, mask=is_seen, other=0.0)
            score += position.to(tl.float32) * (scale * LOG2_E)
        if HAS_BIAS:
            bias = distance_bias + nearness * H + head
            score += tl.load(bias, mask=is_seen, other=0.0).to(tl.float32) * (scale * LOG2_E)
        score = tl.where(is_seen, score, float("-inf"))
        higher = tl.maximum(highest, score)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - level)
        faded = tl.exp2(highest - level)
        attended = attended * faded[:, None] + weight[:, None] * value.to(tl.float32)
        total = total * faded + weight
        highest = higher
    share = tl.exp2(highest - tl.max(highest, 0))
    result = tl.sum(attended * share[:, None], 0) / tl.sum(total * share, 0)
    own = out + (stream * H + head) * K + columns
    tl.store(own, result.to(out.dtype.element_ty), mask=is_column)
