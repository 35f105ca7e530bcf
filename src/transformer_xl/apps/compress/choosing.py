"""Which shipped model compresses a file best, and which one compressed an archive."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from transformer_xl.apps.compress import arithmetic
from transformer_xl.apps.compress.coding import Progress
from transformer_xl.apps.compress.contents import (
    Compressed,
    UnrestorableError,
    compress,
    learning_of,
    store,
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

PARTS, PART_BYTES = 12, 2048
"""Parts of a sample, from places all over a file, and the bytes of each."""

_MARGIN = 1.05
"""A model may still be better if its estimate is this much larger than what xz makes: the parts of
a sample begin without their past."""


class Choice(NamedTuple):
    """A shipped model, loaded."""

    shipped: ShippedModel
    model: LanguageModel
    vocab: Vocab
    bits_per_byte: dict[str, float]
    """The compressed size of the sample, by the models that can represent it, best first. Empty if
    the model was found by the checksum in an archive."""


def compress_best(
    data: bytes,
    settings: Settings | None = None,
    device: torch.device | None = None,
    *,
    say: Say | None = None,
    progress: Progress | None = None,
) -> tuple[Compressed, Choice | None]:
    """Compress data with a shipped model, or without one where that is smaller.

    xz packs all of the data, and each model a sample. If a model may be better by its estimate, it
    compresses the data, and the smaller result is returned.

    Args:
        data: The data.
        settings: Settings of the compression.
        device: Device of the models. None: the CPU.
        say: Called with messages: which models are left out, the sizes, and what is chosen.
        progress: Called while the model compresses.

    Returns:
        The archive, and the model that made it; None: it needs none.

    Raises:
        RuntimeError: The library for arithmetic coding is missing; no model can be read.
        TooLargeError: No model that can represent the data fits into the RAM of the settings.
        ValueError: No model is shipped, or the settings say that it learns.
    """
    arithmetic.check_installed()
    settings = Settings() if settings is None else settings
    require(not settings.learn, "learn=True without a model starts an untrained one: use compress")
    tell = say or (lambda message: None)
    stored = store(data, settings.ram)
    if not data:
        return stored, None
    size = len(stored.content)
    how = "with xz" if stored.method == "xz" else "unchanged"
    kept = f"stored {how}, {size:,} bytes"
    try:
        choice = _choose(data, settings, device, say, at_most=_MARGIN * 8 * size)
    except UnrestorableError as error:
        tell(f"{kept}: {error}")
        return stored, None
    if isinstance(choice, dict):
        tell(f"{kept}; by a sample, {_about(choice, len(data))}")
        return stored, None
    about = _about(choice.bits_per_byte, len(data))
    tell(f"{choice.shipped.using}: by a sample, {about} bytes; {how}, {size:,}")
    found = compress(data, choice.model, choice.vocab, settings, progress)
    if found.method != "model":
        tell(f"{kept}: it is incompressible with {choice.shipped.name}")
        return stored, None
    if size <= len(found.content):
        tell(f"{kept}; {choice.shipped.name}: {len(found.content):,}")
        return stored, None
    return replace(found, model=choice.shipped.full_name), choice


def _about(bits_per_byte: dict[str, float], size: int) -> str:
    """Name the estimated sizes of all data in bytes."""
    return ", ".join(f"{name} about {x * size / 8:,.0f}" for name, x in bits_per_byte.items())


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
    choice = _choose(data, Settings() if settings is None else settings, device, say)
    assert isinstance(choice, Choice)
    return choice


def _choose(
    data: bytes,
    settings: Settings,
    device: torch.device | None,
    say: Say | None,
    at_most: float = math.inf,
) -> Choice | dict[str, float]:
    """Choose a model; if all need more bits than ``at_most``, return those of a byte instead."""
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
            too_large = error
            _left_out(shipped, error, say)
        else:
            loaded[shipped] = model, vocab
    order = sorted(sizes, key=lambda shipped: sizes[shipped])
    bits = {each.name: sizes[each] / max(len(sample), 1) for each in order}
    for shipped in order:
        if bits[shipped.name] * len(data) > at_most:
            # Before all of the data are tokenized, which may take long.
            return bits
        model, vocab = loaded[shipped]
        try:
            n_tokens = len(to_tokens(data, vocab))
            if n_tokens:
                # The sample may fit where all of it does not.
                plan(model, vocab.hash, n_tokens, settings, learning_of(settings, model))
        except UnrestorableError as error:
            problems.append(f"{shipped.name}: {error.reason}")
            _left_out(shipped, error.reason, say)
        except TooLargeError as error:
            too_large = error
            _left_out(shipped, error, say)
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
    coding = unpack(content)[0].model_coding
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


def _left_out(shipped: ShippedModel, why: object, say: Say | None) -> None:
    """Say why a model is not used."""
    if say is not None:
        say(f"{shipped.full_name} is left out: {why}")


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
    """Return parts of some data at equal distances, the first and the last bytes among them.

    All of it if it is short. If it is UTF-8, so is the sample.
    """
    if len(data) <= PARTS * PART_BYTES:
        return data
    places = [n * (len(data) - PART_BYTES) // (PARTS - 1) for n in range(PARTS)]
    return b"".join(
        data[_start(data, place) : _start(data, place + PART_BYTES)] for place in places
    )


def _start(data: bytes, place: int) -> int:
    """Return the next place at which a character of UTF-8 starts."""
    # A character has at most three bytes after its first.
    for start in range(place, min(place + 4, len(data))):
        if data[start] & 0xC0 != 0x80:
            return start
    return min(place, len(data))
