"""Text generation, at a constant cost per token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from torch import Tensor

from transformer_xl.config.knn import KnnConfig
from transformer_xl.inference.generate.batch import (
    Generation,
    GenerationBatch,
    random_numbers,
    seed_of,
)
from transformer_xl.inference.generate.beams import Hypothesis, Searching, beam_search
from transformer_xl.inference.generate.history import History
from transformer_xl.inference.generate.sampler import Sampler, breaker_tokens, for_tokens
from transformer_xl.inference.generate.sampling import Sampling, with_deprecated
from transformer_xl.inference.generate.session import (
    Mark,
    Session,
    from_pretrained,
    open_folder,
)
from transformer_xl.inference.generate.state import (
    State,
    largest_state,
    load_state,
    pack_state,
    save_state,
    unpack_state,
    write_state,
)
from transformer_xl.inference.generate.text_writer import TextWriter, text_pieces
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.arguments import require_model, shown

__all__ = [
    "Generation",
    "GenerationBatch",
    "History",
    "Hypothesis",
    "Mark",
    "Sampler",
    "Sampling",
    "Searching",
    "Session",
    "State",
    "TextWriter",
    "beam_search",
    "breaker_tokens",
    "for_tokens",
    "from_pretrained",
    "generate",
    "generate_batch",
    "largest_state",
    "load_state",
    "open_folder",
    "pack_state",
    "random_numbers",
    "save_state",
    "seed_of",
    "text_pieces",
    "unpack_state",
    "write_state",
]


def generate(
    model: LanguageModel,
    ids: Sequence[int] | Int[Tensor, " length"],
    sampling: Sampling | None = None,
    *,
    length: int | None = None,
    mems: Memory | None = None,
    seed: int | UInt8[Tensor, " bytes"] | None = None,
    mem_len: int | None = None,
    history: Sequence[int] | Int[np.ndarray, " n"] | Int[Tensor, " n"] = (),
    knn: KnnConfig | None = None,
    **deprecated: Any,
) -> Generation:
    """Continue a prompt, token by token.

    Time and memory per token are constant. Settings of a recipe are not used: the defaults sample
    from the distribution of the model. `txl generate` and `txl serve` generate the same text for
    the same settings and seed.

    Args:
        model: The model. It reads in evaluation mode; its mode is restored after each token.
        ids: The prompt in tokens, at least one.
        sampling: How a token is drawn. None: from the distribution of the model.
        length: Number of tokens to generate. None: without end.
        mems: The memory to start with, of one stream. None: start of a text.
        seed: Random seed, or the ``random_state`` of a generation to continue. None: a different
            one each time.
        mem_len: Memory length. None: as configured.
        history: The last tokens in ``mems``, which penalties see, too, and which complete a
            character that they begin.
        knn: Mix the distribution with that of the nearest past positions (kNN-LM), before anything
            else is applied to it. The past begins with the prompt; with ``mems`` too, which do not
            hold it. None: do not.
        deprecated: Settings of sampling, which belong into ``sampling``.

    Returns:
        An iterator over the new tokens, with the memory in its ``mems``; its ``decode(vocab)``
        returns them as text.

    Raises:
        ValueError: The prompt is empty or has a token outside the vocabulary, a setting is of a
            wrong type or out of range, or the memory does not fit the model.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> greedy = Sampling(temperature=0)
        >>> generation = generate(model, vocab.encode("ROMEO:"), greedy, length=10)
        >>> len(list(generation)), len(generation.mems) > 0
        (10, True)
    """
    if isinstance(mems, Memory) and mems.batch_size != 1:
        raise ValueError(f"mems holds {mems.batch_size} streams; select one: mems.select([0])")
    vocab_size = require_model(model).config.vocab_size
    sampling = with_deprecated(Sampling, sampling, deprecated, "generate", "sampling")
    sampler = Sampler(sampling, vocab_size)
    generators = [random_numbers(seed)]
    return Generation(
        GenerationBatch(model, [ids], length, mems, sampler, generators, mem_len, history, knn)
    )


def generate_batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Int[Tensor, " length"]],
    sampling: Sampling | None = None,
    *,
    length: int | None = None,
    mems: Memory | None = None,
    seed: int | None = None,
    mem_len: int | None = None,
    knn: KnnConfig | None = None,
    **deprecated: Any,
) -> GenerationBatch:
    """Continue several prompts as a batch, each as :func:`generate` does, up to rounding.

    Args:
        model: As for :func:`generate`.
        prompts: The prompts in tokens, of any lengths; identical prompts are read once.
        sampling: As for :func:`generate`. Penalties see the prompt and what was generated.
        length: Number of tokens to generate for each. None: without end.
        mems: The memory to start with: of one stream, for all, or of one stream for each prompt.
            None: start of a text.
        seed: Text n is sampled with ``seed + n``. None: a different one each time.
        mem_len: As for :func:`generate`.
        knn: As for :func:`generate`; each text has its own past.
        deprecated: As for :func:`generate`.

    Returns:
        An iterator over the new tokens of each step, by the index of their text; ``end`` stops a
        text early, and ``decode(vocab)`` returns all of them as text.

    Raises:
        ValueError: There is no prompt, one is empty or has a token outside the vocabulary, a
            setting is of a wrong type or out of range, or the memory does not fit the model.

    Example:
        >>> from transformer_xl import from_pretrained
        >>> model, vocab = from_pretrained("shakespeare")
        >>> prompts = [vocab.encode("ROMEO:"), vocab.encode("JULIET:")]
        >>> len(generate_batch(model, prompts, length=5, seed=1).decode(vocab))
        2
    """
    vocab_size = require_model(model).config.vocab_size
    sampling = with_deprecated(Sampling, sampling, deprecated, "generate_batch", "sampling")
    sampler = Sampler(sampling, vocab_size)
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(f"prompts={shown(prompts)}: give a list of prompts, one at least")
    seeds = [None if seed is None else seed_of(seed, n) for n in range(len(prompts))]
    generators = [random_numbers(each) for each in seeds]
    return GenerationBatch(model, prompts, length, mems, sampler, generators, mem_len, knn=knn)
