"""Which shipped model compresses a file best, and which one compressed an archive."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from transformer_xl.apps.compress.contents import (
    UnrestorableError,
    compress,
    learning_of,
    to_tokens,
)
from transformer_xl.apps.compress.header import unpack
from transformer_xl.apps.compress.planning import Settings, TooLargeError, plan
from transformer_xl.apps.compress.predicting import fingerprint
from transformer_xl.config.checks import require
from transformer_xl.config.shipped import ShippedModel, newest_models, shipped_models
from transformer_xl.data import Vocab
from transformer_xl.inference.generate import from_pretrained
from transformer_xl.model import LanguageModel

Say = Callable[[str], object]

PART_BYTES = 4096
"""Bytes of the sample from the beginning, the middle and the end of a file, each."""


class Choice(NamedTuple):
    """A shipped model, loaded."""

    shipped: ShippedModel
    model: LanguageModel
    vocab: Vocab
    bits_per_byte: dict[str, float]
    """The compressed size of the sample, by the models that can represent it, best first. Empty if
    the model was found by the checksum in an archive."""


def choose(
    data: bytes,
    settings: Settings | None = None,
    device: torch.device | None = None,
    *,
    say: Say | None = None,
) -> Choice:
    """Choose the shipped model that compresses a sample of some data best.

    Args:
        data: The data.
        settings: Settings of the compression.
        device: Device of the models. None: the CPU.
        say: Called with a message about each model that cannot be read or takes too much RAM, and
            is left out.

    Raises:
        RuntimeError: None of the models can be read.
        TooLargeError: None that can represent the data fits into the RAM of the settings.
        UnrestorableError: None can represent the data exactly.
        ValueError: No model is shipped.
    """
    settings = Settings() if settings is None else settings
    models = newest_models()
    require(
        bool(models),
        "this installation has no shipped models to choose from: give a model with --model DIR, or "
        "train one while coding with --learn",
    )
    sample = sample_of(data)
    sizes: dict[ShippedModel, float] = {}
    loaded: dict[ShippedModel, tuple[LanguageModel, Vocab]] = {}
    problems = []
    too_large: TooLargeError | None = None
    for shipped, model, vocab in _readable(models, device, say):
        # Numbers written as text are no text that such a model was trained on.
        if vocab.kind == "integers":
            continue
        try:
            sizes[shipped] = compress(sample, model, vocab, settings).coded_bits
        except UnrestorableError as error:
            problems.append(f"{shipped.name}: {error.reason}")
        except TooLargeError as error:
            too_large = _left_out(shipped, error, say)
        else:
            loaded[shipped] = model, vocab
    order = sorted(sizes, key=lambda shipped: sizes[shipped])
    bits = {each.name: sizes[each] / max(len(sample), 1) for each in order}
    for shipped in order:
        model, vocab = loaded[shipped]
        try:
            n_tokens = len(to_tokens(data, vocab))
            if n_tokens:
                # The sample may fit where all of it does not.
                plan(model, vocab.hash, n_tokens, settings, learning_of(settings, model))
        except UnrestorableError as error:
            problems.append(f"{shipped.name}: {error.reason}")
        except TooLargeError as error:
            too_large = _left_out(shipped, error, say)
        else:
            return Choice(shipped, model, vocab, bits)
    if too_large is not None:
        raise too_large
    raise UnrestorableError(
        f"no shipped model can represent it exactly ({'; '.join(problems) or 'none is for text'})",
        "give another model with --model DIR, or train one of bytes while coding with --learn",
    )


def find(content: bytes, device: torch.device | None = None, *, say: Say | None = None) -> Choice:
    """Find the shipped model with which an archive was compressed, by the checksum in it.

    Args:
        content: The archive; it needs a model.
        device: Device of the model. None: the CPU.
        say: Called with a message about each model that cannot be read, and is left out.

    Raises:
        ArchiveError: It is not an archive, has another version, or is damaged.
        RuntimeError: None of the models can be read.
        ValueError: None of the shipped models compressed it.
    """
    coding = unpack(content)[0].coding
    require(coding is not None, "it was compressed without a model")
    assert coding is not None
    models = shipped_models()
    for shipped, model, vocab in _readable(models, device, say):
        if fingerprint(model, vocab.hash) == coding.model:
            return Choice(shipped, model, vocab, {})
    names = ", ".join(shipped.full_name for shipped in models) or "this installation has none"
    raise ValueError(
        f"it was compressed with the model of checksum {coding.model.hex()}, which is none of the "
        f"shipped ones ({names}): give that model with --model DIR, or install the version of "
        "transformer-xl that has it"
    )


def _left_out(shipped: ShippedModel, error: TooLargeError, say: Say | None) -> TooLargeError:
    """Say that a model takes too much RAM; return the error."""
    if say is not None:
        say(f"{shipped.full_name} is left out: {error}")
    return error


def _readable(
    models: list[ShippedModel], device: torch.device | None, say: Say | None
) -> Iterator[tuple[ShippedModel, LanguageModel, Vocab]]:
    """Load models one after another; leave out those that cannot be read, and say so.

    Raises:
        RuntimeError: At the end, if none can be read.
    """
    n_read, problem = 0, None
    for shipped in models:
        try:
            model, vocab = from_pretrained(shipped.folder, device)
        except (OSError, RuntimeError, ValueError) as error:
            problem = error
            if say is not None:
                say(f"{shipped.full_name} cannot be read, and is left out: {error}")
        else:
            n_read += 1
            yield shipped, model, vocab
    if problem is not None and not n_read:
        raise RuntimeError(
            f"none of the shipped models can be read: install transformer-xl again ({problem})"
        ) from problem


def sample_of(data: bytes) -> bytes:
    """Return the beginning, the middle and the end of some data, or all of it if it is short.

    If it is UTF-8, so is the sample.
    """
    if len(data) <= 3 * PART_BYTES:
        return data
    middle = (len(data) - PART_BYTES) // 2
    return b"".join(
        data[_start(data, place) : _start(data, place + PART_BYTES)]
        for place in (0, middle, len(data) - PART_BYTES)
    )


def _start(data: bytes, place: int) -> int:
    """Return the next place at which a character of UTF-8 starts."""
    # A character has at most three bytes after its first.
    for start in range(place, min(place + 4, len(data))):
        if data[start] & 0xC0 != 0x80:
            return start
    return min(place, len(data))
