"""Types of the settings of models: choices with their sources, and what settings amount to."""

from typing import Literal, NamedTuple


class Cluster(NamedTuple):
    """A cluster of the adaptive softmax: words of similar frequency with the same width."""

    start: int
    """Its first word."""
    stop: int
    """The first word after it."""
    width: int
    """Width of its embeddings."""
    has_proj: bool
    """Whether its embeddings are projected to the width of the model."""
    ties_proj: bool
    """Whether the softmax shares that projection."""


class Dropouts(NamedTuple):
    """Dropout probabilities of which each has ``dropout`` as its default."""

    input: float
    """Of the input of the first layer: embeddings and positions."""
    feed_forward: float
    """Of the units inside the feed-forward layers."""
    output: float
    """Of the output of the last layer."""


Activation = Literal["relu", "relu_squared", "gelu", "geglu", "swiglu"]
"""The activation of the feed-forward layers.

* ``relu``: the paper's.
* ``relu_squared``: its square (Primer; So et al., 2021).
* ``gelu``: x times the normal distribution function of x (Hendrycks and Gimpel, 2016).
* ``geglu``, ``swiglu``: the GELU, or x sigmoid(x), of one projection times another (Shazeer, 2020).
"""

Quirk = Literal["stored_positions", "swapped_ext_len", "raw_queries", "exact_frequencies"]
"""Deviations of the authors' code from the paper, which converted checkpoints depend on.

* ``stored_positions`` (attn_type 2 and 3): the memory is stored with its positions added, and
  they are added again each time it is read.
* ``swapped_ext_len``: while the memory is shorter than ``ext_len``, it also keeps tokens that will
  be read again.
* ``raw_queries`` (attn_type 2 and 3, pre-norm): keys and values are normalized, queries are not.
* ``exact_frequencies``: the frequencies of the sinusoids are not rounded to float32, as in
  TensorFlow in float64.
"""
