"""Writing text: one token at a time, at a cost that does not grow."""

from collections.abc import Sequence

from jaxtyping import Int, UInt8
from torch import Tensor

from transformer_xl.inference.generate.batch import (
    Generation,
    GenerationBatch,
    Sampler,
    random_numbers,
    seed_of,
)
from transformer_xl.inference.generate.folder import open_folder
from transformer_xl.inference.generate.session import (
    Mark,
    Session,
    State,
    load_state,
    save_state,
    write_state,
)
from transformer_xl.inference.generate.text_writer import TextWriter, batch_texts, text_pieces
from transformer_xl.model import LanguageModel, Memory
from transformer_xl.model.arguments import require_model, shown
from transformer_xl.model.needs import require_mem_len

__all__ = [
    "Generation",
    "GenerationBatch",
    "Mark",
    "Sampler",
    "Session",
    "State",
    "TextWriter",
    "batch_texts",
    "generate",
    "generate_batch",
    "load_state",
    "open_folder",
    "random_numbers",
    "save_state",
    "seed_of",
    "text_pieces",
    "write_state",
]


def generate(
    model: LanguageModel,
    ids: Sequence[int] | Int[Tensor, " length"],
    *,
    length: int | None = None,
    mems: Memory | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | UInt8[Tensor, " bytes"] | None = None,
    mem_len: int | None = None,
) -> Generation:
    """Continue a text, token by token.

    Time and memory for each token stay the same for as long as one goes on. A recipe is not asked
    for settings: without arguments, tokens are drawn as they are distributed. `txl generate` and
    `txl serve` write the same text with the same settings and seed.

    Args:
        model: The model. It reads as in evaluation mode; its mode is restored after each token.
        ids: The prompt in tokens, at least one.
        length: How many tokens to draw. None: without end.
        mems: The memory of one stream to begin with. None: as at the start of a text.
        temperature: Below 1 safer, above 1 wilder; 0 takes the likeliest token.
        top_k: Draw from the ``top_k`` likeliest tokens only. None: from all.
        top_p: Draw from the fewest likeliest tokens that have this probability together. None, or
            1: from all.
        seed: Seed of the draw, or the ``random_state`` of another that this one goes on from.
            None: a different one each time.
        mem_len: Remembered positions. None: as the model is configured.

    Returns:
        An iterator over the new tokens, with the memory in its ``mems``.

    Raises:
        ValueError: The prompt is empty or has unknown tokens, a setting is of a wrong type or out
            of range, or the memory is that of another model.
    """
    if isinstance(mems, Memory) and mems.batch_size != 1:
        raise ValueError(f"mems holds {mems.batch_size} streams; select one: mems.select([0])")
    sampler = Sampler(temperature, top_k, top_p, require_model(model).config.vocab_size)
    require_mem_len(model, mem_len)
    generators = [random_numbers(seed)]
    return Generation(GenerationBatch(model, [ids], length, mems, sampler, generators, mem_len))


def generate_batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Int[Tensor, " length"]],
    *,
    length: int | None = None,
    mems: Memory | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    mem_len: int | None = None,
) -> GenerationBatch:
    """Continue several texts side by side, each, up to rounding, as it would be alone.

    For each step the weights are read once for all of them.

    Args:
        model: The model. It reads as in evaluation mode; its mode is restored after each token.
        prompts: The prompts in tokens, of any lengths; the same one several times is read once.
        length: How many tokens to draw for each. None: without end.
        mems: A memory of one stream, with which all begin, or of a stream for each. None: as at
            the start of a text.
        temperature: As for :func:`generate`, like ``top_k``, ``top_p`` and ``mem_len``.
        top_k: See there.
        top_p: See there.
        seed: Text n is drawn with the seed ``seed + n``. None: a different one each time.
        mem_len: See there.

    Returns:
        An iterator over the new tokens by the number of their text; its ``end`` ends one early.

    Raises:
        ValueError: There is no prompt, one is empty or has unknown tokens, a setting is of a wrong
            type or out of range, or the memory is that of another model.
    """
    sampler = Sampler(temperature, top_k, top_p, require_model(model).config.vocab_size)
    require_mem_len(model, mem_len)
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(f"prompts={shown(prompts)}: give a list of prompts, one at least")
    seeds = [None if seed is None else seed_of(seed, n) for n in range(len(prompts))]
    generators = [random_numbers(each) for each in seeds]
    return GenerationBatch(model, prompts, length, mems, sampler, generators, mem_len)
