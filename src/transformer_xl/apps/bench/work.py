"""What a segment costs at least: operations of the matrix products, and bytes to be read.

Counted is what the definition of the model asks for: products of queries with the keys that they
see, the memory projected anew where the weights move, positions projected once for all streams.
What an implementation computes beyond that, such as scores that it hides afterwards, is not.
"""

from typing import NamedTuple

from transformer_xl.config import ModelConfig


def forward_flops(
    config: ModelConfig, B: int, T: int, M: int, predicted: int, *, is_kept: bool
) -> float:
    """Count the operations of B streams of T tokens with a memory of M, two a multiplication.

    Args:
        config: The model.
        B: Streams.
        T: Tokens of each.
        M: Remembered positions of each.
        predicted: Tokens of each stream that have a target.
        is_kept: The memory is one of keys and values, and the positions are projected already.
    """
    layer = _layer(config, B, T, M, 1)
    outside = B * T * _embedding(config) + B * predicted * _softmax(config, 0)
    return 2 * (config.n_layer * (layer.learning + (not is_kept) * layer.given) + outside)


def training_flops(
    config: ModelConfig, B: int, T: int, M: int, predicted: int, accumulate: int = 1
) -> float:
    """Count the operations of a training step in ``accumulate`` parts; see :func:`forward_flops`.

    The gradients of its two factors make a backward product twice a forward one; but what the
    memory holds and the encodings of positions have no gradient.
    """
    layer = _layer(config, B, T, M, accumulate)
    outside = B * T * _embedding(config) + B * predicted * _softmax(config, config.sample_softmax)
    return 2 * (config.n_layer * (3 * layer.learning + 2 * layer.given) + 3 * outside)


def token_bytes(config: ModelConfig, M: int, bytes_per_number: int) -> int:
    """Count the bytes of weights, keys and values that one token of one stream must read.

    Of an adaptive softmax only the head is read for most tokens.
    """
    D, width, head = config.d_model, config.n_head * config.head_width, config.clusters[0]
    layer = 4 * D * width + (2 + config.is_gated) * D * config.d_inner + 2 * M * width
    layer += _gates(config)
    softmax = head.width * (head.stop + head.has_proj * D)
    return bytes_per_number * (config.n_layer * layer + softmax)


class _Layer(NamedTuple):
    """Multiplications of a layer."""

    learning: int
    """In products of which both factors have a gradient."""
    given: int
    """In projections of the memory and of positions, of which only the weights have one."""


def _layer(config: ModelConfig, B: int, T: int, M: int, n_parts: int) -> _Layer:
    D, width = config.d_model, config.n_head * config.head_width
    n_pairs = sum(min(M + i, config.attn_len or M + i) for i in range(1, T + 1))
    # Relative positions are a third product beside those with the keys and the values.
    attention = (3 if config.attn_type in (0, 1) else 2) * width * n_pairs
    positions = n_parts * (M + T) * D * width if config.attn_type == 0 else 0
    maps = 4 * D * width + (2 + config.is_gated) * D * config.d_inner + _gates(config)
    return _Layer(
        learning=B * (T * maps + attention),
        given=B * 2 * M * D * width + positions,
    )


def _gates(config: ModelConfig) -> int:
    """Multiplications of a token in the two gates of a layer, six matrices each."""
    return 12 * config.d_model**2 if config.gate == "gru" else 0


def _embedding(config: ModelConfig) -> float:
    """Multiplications for a token drawn uniformly."""
    return sum(
        (x.stop - x.start) / config.vocab_size * x.has_proj * x.width * config.d_model
        for x in config.clusters
    )


def _softmax(config: ModelConfig, n_samples: int) -> float:
    """Multiplications for a target drawn uniformly; with a sample, its words and the target."""
    D, (head, *tails) = config.d_model, config.clusters
    n_outputs = n_samples + 1 if n_samples else head.stop + len(tails)
    total: float = head.width * (n_outputs + head.has_proj * D)
    for x in tails:
        n_words = x.stop - x.start
        total += n_words / config.vocab_size * x.width * (n_words + x.has_proj * D)
    return total
