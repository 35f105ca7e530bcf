"""Which shipped model compresses a file best, and which one compressed an archive."""

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
    store,
)
from transformer_xl.apps.compress.header import unpack
from transformer_xl.apps.compress.planning import Settings, TooLargeError
from transformer_xl.apps.compress.predicting import fingerprint
from transformer_xl.config import ShippedModel, newest_models, shipped_models
from transformer_xl.data import Vocab
from transformer_xl.errors import CheckpointError, InputError
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
    bits_per_byte: float
    """The compressed size of a sample; 0 if the model was found by the checksum in an archive."""


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
        RuntimeError: The library for arithmetic coding is missing.
        CheckpointError: No model can be read.
        SettingsError: No model that can represent the data fits into the RAM of the settings.
        InputError: No model is shipped, or the settings say that it learns.
    """
    arithmetic.check_installed()
    settings, tell = settings or Settings(), say or _silent
    if settings.learn:
        raise InputError("learn=True without a model starts an untrained one: use compress")
    stored = store(data, settings.ram)
    if not data:
        return stored, None
    size = len(stored.content)
    how = "with xz" if stored.method == "xz" else "unchanged"
    problems: dict[str, ValueError] = {}
    choices = _by_sample(data, settings, device, tell, problems)
    bits = {choice.shipped.name: choice.bits_per_byte for choice in choices}
    about = ", ".join(f"{name} about {x * len(data) / 8:,.0f}" for name, x in bits.items())
    why = ""
    for choice in choices:
        name = choice.shipped.name
        # Before all of the data are tokenized, which may take long.
        if choice.bits_per_byte * len(data) > _MARGIN * 8 * size:
            why = f"; by a sample, {about}"
            break
        tell(f"{choice.shipped.using}: by a sample, {about} bytes; {how}, {size:,}")
        try:
            result = compress(data, choice.model, choice.vocab, settings, progress)
        except (UnrestorableError, TooLargeError) as error:
            problems[name] = error
            tell(f"{choice.shipped.full_name} is left out: {getattr(error, 'reason', error)}")
            continue
        if len(result.content) < size:
            return replace(result, model=choice.shipped.full_name), choice
        why = f"; {name}: {len(result.content):,}"
        if result.method != "model":
            why = f": it is incompressible with {name}"
        break
    if not why:
        why = f": {_none_fits(problems)}"
    tell(f"stored {how}, {size:,} bytes{why}")
    return stored, None


def _silent(text: str) -> None:
    del text


def _by_sample(
    data: bytes,
    settings: Settings,
    device: torch.device | None,
    say: Say,
    problems: dict[str, ValueError],
) -> list[Choice]:
    """Return the models that can represent a sample, best first; add why others cannot."""
    models, sample, choices = newest_models(), sample_of(data), []
    if not models:
        raise InputError(
            "this installation has no shipped models to choose from: give a model with --model "
            "DIR, or train one while coding with --learn"
        )
    for shipped, model, vocab in _readable(models, device, say):
        # Numbers written as text are no text that such a model was trained on.
        if vocab.kind == "integers":
            continue
        try:
            bits = compress(sample, model, vocab, settings).coded_bits / len(sample)
        except UnrestorableError as error:
            problems[shipped.name] = error
        except TooLargeError as error:
            problems[shipped.name] = error
            say(f"{shipped.full_name} is left out: {error}")
        else:
            choices.append(Choice(shipped, model, vocab, bits))
    return sorted(choices, key=lambda choice: choice.bits_per_byte)


def _none_fits(problems: dict[str, ValueError]) -> UnrestorableError:
    """Return the error of data that no shipped model can represent.

    Raises:
        TooLargeError: One can, and takes too much RAM.
    """
    for error in problems.values():
        if isinstance(error, TooLargeError):
            raise error
    reasons = "; ".join(f"{name}: {getattr(x, 'reason', x)}" for name, x in problems.items())
    return UnrestorableError(
        f"no shipped model can represent it exactly ({reasons or 'none is for text'})",
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
        CheckpointError: None of the models can be read.
        InputError: None of the shipped models compressed it.
    """
    coding = unpack(content)[0].model_coding
    if coding is None:
        raise InputError("it was compressed without a model")
    models = shipped_models()
    for shipped, model, vocab in _readable(models, device, say or _silent):
        if fingerprint(model, vocab.hash) == coding.model:
            return Choice(shipped, model, vocab, 0.0)
    names = ", ".join(shipped.full_name for shipped in models) or "this installation has none"
    raise InputError(
        f"it was compressed with the model of checksum {coding.model.hex()}, which is none of the "
        f"shipped ones ({names}): give that model with --model DIR, or install the version of "
        "transformer-xl that has it"
    )


def _readable(
    models: list[ShippedModel], device: torch.device | None, say: Say
) -> Iterator[tuple[ShippedModel, LanguageModel, Vocab]]:
    """Load models one after another; leave out those that cannot be read, and say so.

    Raises:
        CheckpointError: At the end, if none can be read.
    """
    n_read, problem = 0, None
    for shipped in models:
        try:
            model, vocab = from_pretrained(shipped.folder, device)
        except (OSError, RuntimeError, ValueError) as error:
            problem = error
            say(f"{shipped.full_name} cannot be read, and is left out: {error}")
        else:
            n_read += 1
            yield shipped, model, vocab
    if problem is not None and not n_read:
        raise CheckpointError(
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
