"""Music that a model of integers writes: its text as notes, and MIDI files.

A step holds the pitch of each voice, highest voice first: a MIDI note number (60 is middle C), or
-1 for a rest. A piece is a sequence of steps, and a line of text, in which their pitches stand one
after the other (the corpus ``jsb-chorales``). Equal pitches of a voice in consecutive steps are one
held note: the text does not say where a note is repeated.

In a text with marks, a number from 1000 to 1003 stands before each quarter note, counted in fours
from the start of the piece: the position in the bar, which a model otherwise has to find out. Marks
sound nothing.

MIDI files need ``pip install 'transformer-xl[music]'``.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from itertools import groupby
from operator import index
from pathlib import Path

import numpy as np
from jaxtyping import Int

from transformer_xl.config import MusicConfig, replace_file, require_new_file
from transformer_xl.data import Vocab
from transformer_xl.errors import InputError
from transformer_xl.tasks.music.reading import DRUMS, REST, mido_package, read_midi

Step = Sequence[int]
Steps = Sequence[Step] | Int[np.ndarray, "steps voices"]

HIGHEST = 127
"""The highest note number of MIDI."""
MARKS = tuple(range(1000, 1004))
"""The marks of the quarter notes of a bar of 4/4, in turn."""
_CHORUS = ("soprano", "alto", "tenor", "bass")
_INTEGER = re.compile(r"-1|[0-9]{1,3}")
_TICKS = 120
"""Ticks of a MIDI file in a step."""
_VELOCITY = 80


def require_pitches(vocab: Vocab) -> None:
    """Require that all tokens of a vocabulary are pitches, rests, marks or the ends of pieces.

    Raises:
        ValueError: They are not.
    """
    remedy = "write a text file, or use a model of music, such as one trained on jsb-chorales"
    if vocab.kind != "integers":
        raise InputError(
            f"music is written with integers, and this model has a vocabulary of {vocab.kind}: "
            f"{remedy}"
        )
    for symbol in vocab.symbols:
        if symbol != Vocab.EOS and _pitch(symbol) is None and not _is_mark(symbol):
            raise InputError(
                f"the vocabulary has {symbol!r}, which is neither a pitch (0 to {HIGHEST}) nor a "
                f"rest ({REST}): {remedy}"
            )


def pieces_of(
    text: str,
    voices: int = 4,
    say: Callable[[str], object] | None = None,
    *,
    has_ended: bool = False,
) -> list[list[tuple[int, ...]]]:
    """Read the pieces in a text: lines of integers, ``voices`` of them a step; marks are left out.

    A line break or ``<eos>`` ends a piece. A step that it cuts off is left out. Empty pieces are
    left out, too.

    Args:
        text: The text, as a vocabulary of integers decodes it.
        voices: Number of voices.
        say: Called with a message about each step that was left out.
        has_ended: Whether the text is one that ended by itself, for the remedy in an error.

    Raises:
        ValueError: There is something other than pitches and rests, or no whole step.

    Example:
        >>> pieces_of("60 48 60 50 <eos> 62 50", voices=2)
        [[(60, 48), (60, 50)], [(62, 50)]]
    """
    found = []
    for line in text.replace(Vocab.EOS, "\n").split("\n"):
        words = [word for word in line.split() if not _is_mark(word)]
        pitches = [_pitch(word) for word in words]
        if None in pitches:
            n = pitches.index(None)
            raise InputError(
                f"{words[n]!r:.60} at place {n + 1:,} of piece {len(found) + 1} is neither a pitch "
                f"(0 to {HIGHEST}) nor a rest ({REST}): this text is no music"
            )
        n_steps, n_left = divmod(len(words), voices)
        if n_steps:
            each = iter(pitch for pitch in pitches if pitch is not None)
            steps = list(zip(*[each] * voices, strict=False))
            found.append(steps)
        if n_left and say is not None:
            say(
                f"piece {len(found) + (not n_steps)} ends within step {n_steps + 1:,}: left out "
                f"{' '.join(words[-n_left:])}, {n_left} of {voices} voices"
            )
    if not found:
        remedy = f"generate more tokens, at least {voices}"
        if has_ended:
            remedy = "it ended before; generate it with another seed"
        raise InputError(f"the text has no whole step of {voices} voices: {remedy}")
    return found


def text_of(steps: Steps, settings: MusicConfig | None = None, *, marked: bool = False) -> str:
    """Return a piece as text: the pitches of each step, one after the other.

    Args:
        steps: The steps, each with the pitches of all voices.
        settings: The duration of a step. None: the default.
        marked: Whether a mark stands before each quarter note.

    Example:
        >>> text_of([(60, 48), (60, 50)])
        '60 48 60 50'
    """
    quarter = (settings or MusicConfig()).steps_per_quarter
    words: list[str] = []
    for n, step in enumerate(steps):
        if marked and n % quarter == 0:
            words.append(str(MARKS[n // quarter % len(MARKS)]))
        words += map(str, step)
    return " ".join(words)


def midi_prompt(
    path: Path, settings: MusicConfig, vocab: Vocab, say: Callable[[str], object]
) -> str:
    """Return the text of a MIDI file as a model of music reads it, with marks if it has them.

    Raises:
        InputError: The vocabulary is not one of music.
        DataError: It is no MIDI file that can be read.
    """
    require_pitches(vocab)
    return text_of(read_midi(path, settings, say=say), settings, marked=has_marks(vocab))


def has_marks(vocab: Vocab) -> bool:
    """Whether the pieces that a vocabulary was learned from have marks."""
    return any(map(_is_mark, vocab.symbols))


def _is_mark(word: str) -> bool:
    return word.isdecimal() and len(word) == 4 and int(word) in MARKS


def _pitch(word: str) -> int | None:
    """Return the pitch or rest that a word is; None: it is neither."""
    if not _INTEGER.fullmatch(word):
        return None
    number = int(word)
    return number if REST <= number <= HIGHEST else None


def joined(pieces: Iterable[Steps], rest: int = 16) -> list[Step]:
    """Return pieces as one, with ``rest`` steps of silence between them."""
    found: list[Step] = []
    for piece in pieces:
        if found:
            found += [(REST,) * len(found[0])] * rest
        found += piece
    return found


def midi(steps: Steps, settings: MusicConfig | None = None) -> bytes:
    """Return a piece as a MIDI file, with a track and a channel for each voice.

    Args:
        steps: The steps; their number of voices is that of the piece.
        settings: Tempo, instrument, and the duration of a step. None: the defaults.

    Raises:
        DataError: mido is not installed.
        ValueError: There is no step, steps have different numbers of voices, more than 15, or a
            pitch is none.
    """
    mido = mido_package()
    settings = settings or MusicConfig()
    for n, step in enumerate(steps):
        if wrong := [pitch for pitch in step if not REST <= index(pitch) <= HIGHEST]:
            raise InputError(
                f"step {n} has the pitch {wrong[0]}: pitches are 0 to {HIGHEST}, and {REST} is a "
                "rest"
            )
    voices = [*zip(*steps, strict=True)]
    channels = [n for n in range(16) if n != DRUMS]
    if not 0 < len(voices) <= len(channels):
        raise InputError(f"{len(voices)} voices: a piece for a MIDI file has 1 to {len(channels)}")
    file = mido.MidiFile(type=1, ticks_per_beat=_TICKS * settings.steps_per_quarter)
    first = mido.MidiTrack()
    first.append(mido.MetaMessage("set_tempo", tempo=mido.bpm2tempo(settings.tempo)))
    first.append(mido.MetaMessage("time_signature", numerator=4, denominator=4))
    file.tracks.append(first)
    for n, (voice, channel) in enumerate(zip(voices, channels, strict=False)):
        name = _CHORUS[n] if len(voices) == len(_CHORUS) else f"voice {n + 1}"
        track, silence = mido.MidiTrack(), 0
        track.append(mido.MetaMessage("track_name", name=name))
        track.append(mido.Message("program_change", channel=channel, program=settings.program - 1))
        for pitch, held in groupby(map(index, voice)):
            length = _TICKS * sum(1 for _ in held)
            if pitch == REST:
                silence = length
                continue
            note = {"channel": channel, "note": pitch}
            track.append(mido.Message("note_on", velocity=_VELOCITY, time=silence, **note))
            track.append(mido.Message("note_off", velocity=0, time=length, **note))
            silence = 0
        # After rests at the end, too.
        track.append(mido.MetaMessage("end_of_track", time=silence))
        file.tracks.append(track)
    content = BytesIO()
    file.save(file=content)
    return content.getvalue()


def write_pieces(
    text: str,
    paths: Sequence[Path],
    settings: MusicConfig,
    say: Callable[[str], object],
    *,
    has_ended: bool,
    force: bool,
) -> None:
    """Write the pieces in a text, one after the other, to MIDI files.

    Args:
        text: The text, as `pieces_of` reads it.
        paths: The files.
        settings: Voices, tempo, instrument, and the duration of a step.
        say: Called with a message about each step that was left out.
        has_ended: As for `pieces_of`.
        force: Overwrite existing files.

    Raises:
        OSError: A file exists or cannot be written.
        InputError: The text is no music.
    """
    steps = joined(pieces_of(text, settings.voices, say, has_ended=has_ended))
    for path in paths:
        write_music(path, steps, settings, force=force)


def write_music(
    path: Path | str, steps: Steps, settings: MusicConfig | None = None, *, force: bool = False
) -> None:
    """Write a piece to a MIDI file.

    Args:
        path: The file, which ends in ``.mid`` or ``.midi``.
        steps: The steps of the piece, each with the pitches of all voices; -1 is a rest.
        settings: Tempo, instrument, and the duration of a step. None: the defaults.
        force: Overwrite an existing file.

    Raises:
        FileExistsError: The file exists.
        DataError: mido is not installed.
        ValueError: The name ends otherwise, or the steps are not those of a piece (`midi`).
    """
    path = Path(path)
    if not MusicConfig.is_midi(path):
        raise InputError(f"{path} must end in .mid or .midi")
    require_new_file(path, force=force)
    replace_file(path, midi(steps, settings))
