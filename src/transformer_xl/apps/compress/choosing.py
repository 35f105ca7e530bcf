"""Which shipped model compresses a file best, and which one compressed an archive."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from transformer_xl.apps.compress.arithmetic import coder_library
from transformer_xl.apps.compress.coding import Progress
from transformer_xl.apps.compress.contents import Compressed, UnrestorableError, compress, store
from transformer_xl.apps.compress.header import unpack
from transformer_xl.apps.compress.planning import Settings, TooLargeError
from transformer_xl.apps.compress.predicting import fingerprint
from transformer_xl.apps.compress.transforms import applied
from transformer_xl.config import ShippedModel
from transformer_xl.data import Vocab
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.inference.generate import from_pretrained
from transformer_xl.model import LanguageModel

Say = Callable[[str], object]

PARTS, PART_BYTES = 12, 2048
"""Parts of a sample, from places all over a file, and the bytes of each."""

_MARGIN = 1.25
"""A model may still be better if its estimate is this much larger than what xz makes: the parts of
a sample begin without their past."""


class Choice(NamedTuple):
    """A shipped model, loaded."""

    shipped: ShippedModel
    model: LanguageModel
    vocab: Vocab


def compress_best(
    data: bytes,
    settings: Settings | None = None,
    device: torch.device | None = None,
    *,
    say: Say = lambda text: None,
    progress: Progress | None = None,
) -> tuple[Compressed, Choice | None]:
    """Compress data with a shipped model, or without one where that is smaller.

    xz packs all of the data, and each model a sample. If the best model may be better by its
    sample, it compresses the data, and the smaller result is returned.

    Args:
        data: The data.
        settings: Settings of the compression.
        device: Device of the models. None: the CPU.
        say: Called with messages: which models are left out, and what is chosen.
        progress: Called while the model compresses.

    Returns:
        The archive, and the model that made it; None: it needs none.

    Raises:
        RuntimeError: The library for arithmetic coding is missing.
        InputError: No model is shipped, or the settings say that it learns.
    """
    coder_library()
    settings = settings or Settings()
    if settings.learn:
        raise InputError("learn=True without a model starts an untrained one: use compress")
    models = ShippedModel.newest()
    if not models:
        raise InputError("this installation has no shipped models: give a model with --model DIR")
    stored, is_short = store(data, settings.ram), len(data) <= PARTS * PART_BYTES
    # Of the changed text: a part that begins within an indentation could not be changed.
    changed = data if is_short else applied(data)[0]
    sample = sample_of(changed)
    choices: list[tuple[Compressed, Choice]] = []
    for shipped in models if data else ():
        choice = _loaded(shipped, device, say)
        # Numbers written as text are no text that such a model was trained on.
        if choice is None or choice.vocab.kind == "integers":
            continue
        if result := _compressed(sample, choice, settings, say):
            choices.append((result, choice))
    scale = 1 if is_short else len(changed) / len(sample) / _MARGIN
    for result, choice in sorted(choices, key=lambda each: len(each[0].content)):
        if scale * len(result.content) >= len(stored.content):
            break
        if is_short or (result := _compressed(data, choice, settings, say, progress)):
            if len(result.content) >= len(stored.content):
                break
            say(choice.shipped.using)
            return result, choice
    say(f"{stored.method}: no shipped model is better")
    return stored, None


def _compressed(
    data: bytes, choice: Choice, settings: Settings, say: Say, progress: Progress | None = None
) -> Compressed | None:
    """Compress data with a model; None, and a message, if it cannot represent them or the RAM."""
    name = choice.shipped.full_name
    try:
        result = compress(data, choice.model, choice.vocab, settings, progress)
    except (UnrestorableError, TooLargeError) as error:
        say(f"{name} is left out: {error}")
        return None
    return replace(result, model=name)


def find(
    content: bytes, device: torch.device | None = None, say: Say = lambda text: None
) -> Choice:
    """Find the shipped model with which an archive was compressed, by the checksum in it.

    Args:
        content: The archive; it needs a model.
        device: Device of the model. None: the CPU.
        say: Called with messages: which models are left out.

    Raises:
        ArchiveError: It is not an archive, has another version, or is damaged.
        InputError: None of the shipped models that can be read compressed it.
    """
    coding = unpack(content)[0].model_coding
    if coding is None:
        raise InputError("it was compressed without a model")
    for shipped in ShippedModel.all():
        choice = _loaded(shipped, device, say)
        if choice and fingerprint(choice.model, choice.vocab.hash) == coding.model:
            return choice
    names = ", ".join(shipped.full_name for shipped in ShippedModel.all())
    raise InputError(
        f"it was compressed with the model of checksum {coding.model.hex()}, which is none of the "
        f"shipped ones ({names}): give that model with --model DIR, or install the version of "
        "transformer-xl that has it"
    )


def _loaded(shipped: ShippedModel, device: torch.device | None, say: Say) -> Choice | None:
    """Load a shipped model; None, and a message, if it is damaged."""
    try:
        return Choice(shipped, *from_pretrained(shipped.folder, device))
    except CheckpointError as error:
        say(f"{shipped.full_name} is left out, install transformer-xl again: {error}")
        return None


def sample_of(data: bytes) -> bytes:
    """Return parts of some data at equal distances, the first and the last bytes among them.

    All of it if it is short. If it is UTF-8, so is the sample.
    """
    if len(data) <= PARTS * PART_BYTES:
        return data
    places = [n * (len(data) - PART_BYTES) // (PARTS - 1) for n in range(PARTS)]
    parts = [data[place : place + PART_BYTES] for place in places]
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return b"".join(parts)
    # Without the characters that are cut.
    return "".join(part.decode("utf-8", "ignore") for part in parts).encode()
