"""Music that a model of integers writes: its text as notes, MIDI files and piano rolls.

A step holds the pitch of each voice, highest voice first: a MIDI note number (60 is middle C), or
-1 for a rest. A piece is a sequence of steps, and a line of text, in which their pitches stand one
after the other (the corpus ``jsb-chorales``). Equal pitches of a voice in consecutive steps are one
held note: the text does not say where a note is repeated.

In a text with marks, a number from 1000 to 1003 stands before each quarter note, counted in fours
from the start of the piece: the position in the bar, which a model otherwise has to find out. Marks
sound nothing.

MIDI files need ``pip install 'transformer-xl[music]'``, piano rolls ``'transformer-xl[plot]'``.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from itertools import groupby
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from transformer_xl.config import (
    HIGHEST,
    MARKS,
    MIDI_SUFFIXES,
    MUSIC_SUFFIXES,
    PICTURE_SUFFIXES,
    REST,
    MusicConfig,
    replace_file,
    require,
    require_new_file,
)
from transformer_xl.data import Vocab, optional_package
from transformer_xl.errors import InputError
from transformer_xl.tasks.music.reading import DRUMS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Step = Sequence[int]
Steps = Sequence[Step] | Int[np.ndarray, "steps voices"]

_CHORUS = ("soprano", "alto", "tenor", "bass")
_COLORS = ("#c4501b", "#8a5a00", "#0f7b6c", "#2463b8")
_INTEGER = re.compile(r"-1|[0-9]{1,3}")
_LABELED = {0: "C", 4: "E", 7: "G"}
"""Pitches with a label in a piano roll, by semitones above C."""
_TICKS = 120
"""Ticks of a MIDI file in a step."""
_VELOCITY = 80
_OPACITY = 0.85
_BARS, _ROWS = 16, 32
"""Bars in a row of a piano roll at the least, and rows at the most."""


class Note(NamedTuple):
    """A held note. Start and length are in steps."""

    voice: int
    pitch: int
    start: int
    length: int


def require_pitches(vocab: Vocab) -> None:
    """Require that all tokens of a vocabulary are pitches, rests, marks or the ends of pieces.

    Raises:
        ValueError: They are not.
    """
    remedy = "write a text file, or use a model of music, such as one trained on jsb-chorales"
    require(
        vocab.kind == "integers",
        f"music is written with integers, and this model has a vocabulary of {vocab.kind}: "
        f"{remedy}",
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


def notes_of(steps: Steps) -> list[Note]:
    """Return the notes of a piece, voice by voice; equal consecutive pitches are one note.

    Raises:
        ValueError: There is no step, steps have different numbers of voices, or a pitch is none.

    Example:
        >>> [(note.pitch, note.start, note.length) for note in notes_of([(60, 48), (60, 50)])]
        [(60, 0, 2), (48, 0, 1), (50, 1, 1)]
    """
    n_voices = len(steps[0]) if len(steps) else 0
    require(n_voices > 0, "steps is empty: a piece has at least one step of one voice")
    for n, step in enumerate(steps):
        require(
            len(step) == n_voices,
            f"step {n} has {len(step)} voices and the first one {n_voices}: all have the same",
        )
        for pitch in step:
            require(
                REST <= index(pitch) <= HIGHEST,
                f"step {n} has the pitch {pitch}: pitches are 0 to {HIGHEST}, and {REST} is a rest",
            )
    found = []
    for voice in range(n_voices):
        start = 0
        for pitch, group in groupby(index(step[voice]) for step in steps):
            length = sum(1 for _ in group)
            if pitch != REST:
                found.append(Note(voice, pitch, start, length))
            start += length
    return found


def midi(steps: Steps, settings: MusicConfig | None = None) -> bytes:
    """Return a piece as a MIDI file, with a track and a channel for each voice.

    Args:
        steps: The steps; their number of voices is that of the piece.
        settings: Tempo, instrument, and the duration of a step. None: the defaults.

    Raises:
        DataError: mido is not installed.
        ValueError: The steps are not those of a piece (`notes_of`), or have more than 15 voices.
    """
    mido = library_of(".mid")
    settings = settings or MusicConfig()
    notes, n_voices = notes_of(steps), len(steps[0])
    channels = [n for n in range(16) if n != DRUMS]
    require(
        n_voices <= len(channels),
        f"{n_voices} voices: a MIDI file has channels for {len(channels)} at most",
    )
    file = mido.MidiFile(type=1, ticks_per_beat=_TICKS * settings.steps_per_quarter)
    first = mido.MidiTrack()
    first.append(mido.MetaMessage("set_tempo", tempo=mido.bpm2tempo(settings.tempo)))
    first.append(mido.MetaMessage("time_signature", numerator=4, denominator=4))
    file.tracks.append(first)
    for voice, channel in zip(range(n_voices), channels, strict=False):
        track = mido.MidiTrack()
        track.append(mido.MetaMessage("track_name", name=_voice_name(voice, n_voices)))
        track.append(mido.Message("program_change", channel=channel, program=settings.program - 1))
        at = 0
        for note in notes:
            if note.voice != voice:
                continue
            each = {"channel": channel, "note": note.pitch}
            start, length = (note.start - at) * _TICKS, note.length * _TICKS
            track.append(mido.Message("note_on", velocity=_VELOCITY, time=start, **each))
            track.append(mido.Message("note_off", velocity=0, time=length, **each))
            at = note.start + note.length
        # After rests at the end, too.
        track.append(mido.MetaMessage("end_of_track", time=(len(steps) - at) * _TICKS))
        file.tracks.append(track)
    content = BytesIO()
    file.save(file=content)
    return content.getvalue()


def library_of(suffix: str) -> Any:
    """Return the library that writes files with this end of their names.

    Raises:
        DataError: It is not installed.
    """
    if suffix in MIDI_SUFFIXES:
        return optional_package("mido", "a MIDI file", "'transformer-xl[music]'")
    return optional_package("matplotlib", "a piano roll", "'transformer-xl[plot]'")


def piano_roll(steps: Steps, form: str = "png", settings: MusicConfig | None = None) -> bytes:
    """Return a picture of a piece: pitch over time, with a color for each voice, in rows of bars.

    Bars of 4/4 are counted from the first step.

    Args:
        steps: The steps; their number of voices is that of the piece.
        form: ``png`` or ``svg``.
        settings: The duration of a step. None: the default.

    Raises:
        DataError: matplotlib is not installed.
        ValueError: The form is another one, the steps are not those of a piece (`notes_of`), or
            they have more than 20 voices.
    """
    more_colors = library_of(".png").colormaps["tab20"].colors
    from matplotlib.patches import Patch

    from transformer_xl.train import rendered

    require(f".{form}" in PICTURE_SUFFIXES, f"form={form!r} must be png or svg")
    bar = 4 * (settings or MusicConfig()).steps_per_quarter
    notes, n_voices, n_bars = notes_of(steps), len(steps[0]), -(-len(steps) // bar)
    require(
        n_voices <= len(more_colors),
        f"{n_voices} voices: a piano roll has colors for {len(more_colors)} at most",
    )
    per_row = min(n_bars, max(_BARS, -(-n_bars // _ROWS)))
    n_rows = -(-n_bars // per_row)
    colors = _COLORS if n_voices <= len(_COLORS) else more_colors
    pitches = [note.pitch for note in notes] or [60]
    lowest, highest = min(pitches) - 2, max(pitches) + 2
    width = max(5.0, 0.65 * per_row + 1.0)
    height = 0.9 + n_rows * max(1.6, 0.06 * (highest - lowest))

    def draw(figure: "Figure") -> None:
        rows = figure.subplots(n_rows, 1, squeeze=False)[:, 0]
        for row, axes in enumerate(rows):
            start, end = row * per_row * bar, (row + 1) * per_row * bar
            in_row = [x for x in notes if x.start < end and x.start + x.length > start]
            for voice in range(n_voices):
                in_voice = [note for note in in_row if note.voice == voice]
                axes.barh(
                    [note.pitch for note in in_voice],
                    # A gap shows where one note ends and the next of the same pitch begins.
                    [note.length - 0.15 for note in in_voice],
                    left=[note.start for note in in_voice],
                    height=0.9,
                    color=colors[voice],
                    alpha=_OPACITY,
                )
            axes.set(xlim=(start, end), ylim=(lowest, highest))
            bars = range(row * per_row, (row + 1) * per_row, max(1, per_row // _BARS))
            axes.set_xticks([n * bar for n in bars], [str(n + 1) for n in bars], ha="left")
            # Voices are told from one another by color and, where they have names, by the legend.
            labeled = [x for x in range(lowest, highest + 1) if x % 12 in _LABELED]
            axes.set_yticks(labeled, [f"{_LABELED[x % 12]}{x // 12 - 1}" for x in labeled])
        rows[-1].set_xlabel("bar")
        # Of colors, as a voice may rest throughout a row.
        handles = [
            Patch(facecolor=colors[voice], alpha=_OPACITY, label=_voice_name(voice, n_voices))
            for voice in range(n_voices)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=n_voices)

    return rendered(form, draw, (width, height))


def _voice_name(voice: int, n_voices: int) -> str:
    return _CHORUS[voice] if n_voices == len(_CHORUS) else f"voice {voice + 1}"


def write_music(
    path: Path | str, steps: Steps, settings: MusicConfig | None = None, *, force: bool = False
) -> None:
    """Write a piece: to ``.mid`` or ``.midi`` as music, to ``.png`` or ``.svg`` as a piano roll.

    Args:
        path: The file.
        steps: The steps of the piece, each with the pitches of all voices; -1 is a rest.
        settings: Tempo, instrument, and the duration of a step. None: the defaults.
        force: Overwrite an existing file.

    Raises:
        FileExistsError: The file exists.
        DataError: mido or matplotlib is not installed.
        ValueError: The name ends otherwise, the steps are not those of a piece (`notes_of`), or
            have more voices than the file can represent.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    require(suffix in MUSIC_SUFFIXES, f"{path} must end in one of {', '.join(MUSIC_SUFFIXES)}")
    require_new_file(path, force=force)
    is_midi = suffix in MIDI_SUFFIXES
    content = midi(steps, settings) if is_midi else piano_roll(steps, suffix[1:], settings)
    replace_file(path, content)
