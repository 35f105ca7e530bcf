"""MIDI files of any program as steps of voices; what has no place in them is counted."""

import re
import warnings
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from transformer_xl.config import MusicConfig
from transformer_xl.data import optional_package
from transformer_xl.errors import DataError

if TYPE_CHECKING:
    from mido import MidiFile

REST = -1
DRUMS = 9
"""The MIDI channel without pitches."""
_REPEATED = "repeated notes held"
_DRUM_NOTES = "notes of the drum channel left out"
_MOST_STEPS = 1_000_000
"""Steps that are read from a MIDI file at most; a pause may be of any length there."""
_MOST_BYTES = 1 << 22
"""Bytes of a MIDI file that is read."""
_LONG_NUMBER = re.compile(rb"[\x80-\xff]{1000}")
"""What mido would take for a number for hours."""


def mido_package() -> Any:
    """Return the library that reads and writes MIDI files.

    Raises:
        DataError: It is not installed.
    """
    return optional_package("mido", "a MIDI file", "'transformer-xl[music]'")


def read_midi(
    path: Path | str,
    settings: MusicConfig | None = None,
    *,
    say: Callable[[str], object] = warnings.warn,
) -> list[tuple[int, ...]]:
    """Read a piece from a MIDI file of any program.

    A part is what one track plays on one channel. If there is a part for each voice, highest voice
    first, none with chords, its notes stand in that voice. Else the notes of each step are spread
    over the voices by pitch; where more sound than there are voices, inner ones are left out. Notes
    begin and end at the nearest step; a note has at least one; one that is not ended lasts as long
    as its track. A file of `midi` gives the steps that it was made of, unless a voice rests
    throughout.

    Drums (channel 10, counted from 1) are left out. Velocities, instruments, tempo, signatures,
    pitch bends and pedals are no part of a step.

    Args:
        path: The file, of format 0, 1 or 2, also in the RMID form. The patterns of format 2 follow
            one another.
        settings: The number of voices, and the duration of a step. None: the defaults.
        say: Called with one line that counts what is left out or changed, if there is anything.
            Default: a warning.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: It is no MIDI file that mido reads, is damaged or too large, or has no notes; or
            mido is not installed.
    """
    path, settings, counts = Path(path), settings or MusicConfig(), Counter[str]()
    file = _file_of(path, counts)
    part_notes, n_ticks = _read_notes(file, counts)
    but = " but those of the drum channel" if _DRUM_NOTES in counts else ""
    if not part_notes:
        raise DataError(f"{path} has no notes{but}: give a file with notes of pitch")
    per_step = file.ticks_per_beat / settings.steps_per_quarter
    if n_ticks >= _MOST_STEPS * per_step:
        raise DataError(f"{path} has more than the {_MOST_STEPS:,} steps that are read: cut it")
    notes = []
    for note in sorted(part_notes, key=lambda note: note.begin):
        begin, end = round(note.begin / per_step), round(note.end / per_step)
        notes.append(note._replace(begin=begin, end=max(end, begin + 1)))
    n_steps = max(round(n_ticks / per_step), *(note.end for note in notes))
    steps = _steps_by_part(notes, n_steps, settings.voices, counts)
    if steps is None:
        if settings.voices > 1:
            n_parts = len({note.part for note in notes})
            counts[f"parts spread over {settings.voices} voices by pitch"] = n_parts
        steps = _steps_by_pitch(notes, n_steps, settings.voices, counts)
    if counts:
        say(f"{path}: {'; '.join(f'{what}: {n:,}' for what, n in counts.items())}")
    return [tuple(step) for step in steps.tolist()]


class _PartNote(NamedTuple):
    """A note of a part. Its begin and end are in ticks of the file, or in steps."""

    part: int
    pitch: int
    begin: int
    end: int


def _file_of(path: Path, counts: Counter[str]) -> "MidiFile":
    """Return a MIDI file as mido reads it.

    Raises:
        DataError: It is none, is damaged or too large, or counts seconds.
    """
    mido = mido_package()
    content = path.read_bytes()
    if len(content) > _MOST_BYTES:
        raise DataError(
            f"{path} has {len(content):,} bytes and at most {_MOST_BYTES:,} are read: cut it"
        )
    if content[:4] == b"RIFF":
        content = content[max(content.find(b"MThd"), 0) :]
    stream = BytesIO(content)
    try:
        if _LONG_NUMBER.search(content):
            raise ValueError("a number of more than 1,000 bytes")
        file = mido.MidiFile(file=stream)
        names = {x.type for track in file.tracks for x in track if not hasattr(x, "channel")}
        # mido takes what follows such a message for another one.
        if other := {x for x in names if x in mido.messages.specs.SPEC_BY_TYPE} - {"sysex"}:
            raise ValueError(f"it has system messages ({min(other)})")
        if file.ticks_per_beat <= 0:
            raise ValueError("it counts seconds (SMPTE), or no ticks")
    except Exception as error:  # mido raises any kind for what it cannot represent
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{path} is no MIDI file that can be read: {reason}: restore it from a copy, or save "
            "it again, with ticks per quarter note"
        ) from error
    if n_more := stream.read().count(b"MTrk"):
        counts["tracks more than the header says left out"] = n_more
    return file


def _read_notes(file: "MidiFile", counts: Counter[str]) -> tuple[list[_PartNote], int]:
    """Return the notes of a file, with begin and end in ticks, and the length of the file in ticks.

    A part is a channel of a track. A note that begins while the same one sounds ends that one; a
    note without an end lasts as long as its track. The tracks of format 2 follow one another, those
    of other formats begin together.

    Args:
        file: The file, as mido reads it.
        counts: How many of what is left out or changed; these are added.
    """
    notes: list[_PartNote] = []
    n_ticks = track_start = 0
    for n, track in enumerate(file.tracks):
        sounding: dict[tuple[int, int], int] = {}  # begin by channel and pitch
        now = track_start
        for message in track:
            now += message.time
            if message.type not in ("note_on", "note_off"):
                continue
            key = message.channel, message.note
            # A velocity of 0 ends a note.
            is_begin = message.type == "note_on" and message.velocity > 0
            if message.channel == DRUMS:
                counts.update([_DRUM_NOTES] * is_begin)
            elif is_begin and sounding.get(key) == now:
                counts["notes that others double left out"] += 1
            else:
                if key in sounding:
                    part = 16 * n + message.channel
                    notes.append(_PartNote(part, message.note, sounding.pop(key), now))
                if is_begin:
                    sounding[key] = now
        counts.update(["notes without an end held to the end of the track"] * len(sounding))
        for (channel, pitch), begin in sounding.items():
            notes.append(_PartNote(16 * n + channel, pitch, begin, now))
        n_ticks = max(n_ticks, now)
        if file.type == 2:
            track_start = now
    return notes, n_ticks


def _steps_by_part(
    notes: list[_PartNote], n_steps: int, n_voices: int, counts: Counter[str]
) -> Int[np.ndarray, "steps voices"] | None:
    """Return the steps of notes that have a part for each voice; None: they have not, or chords."""
    parts = sorted({note.part for note in notes})
    if len(parts) != n_voices:
        return None
    steps, n_repeated = np.full((n_steps, n_voices), REST), 0
    for note in notes:
        voice = parts.index(note.part)
        if (steps[note.begin : note.end, voice] != REST).any():
            return None
        n_repeated += bool(note.begin and steps[note.begin - 1, voice] == note.pitch)
        steps[note.begin : note.end, voice] = note.pitch
    counts.update([_REPEATED] * n_repeated)
    return steps


def _steps_by_pitch(
    notes: list[_PartNote], n_steps: int, n_voices: int, counts: Counter[str]
) -> Int[np.ndarray, "steps voices"]:
    """Return the steps of notes that are spread over the voices; count what has no voice."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for note in notes:
        begins.setdefault(note.begin, []).append(note.pitch)
        ends.setdefault(note.end, []).append(note.pitch)
    steps, sounding = np.full((n_steps, n_voices), REST), Counter[int]()
    heard, waiting = set[int](), set[int]()
    for start, stop in pairwise([*sorted(begins.keys() | ends.keys()), n_steps]):
        new, before = begins.get(start, []), {pitch for pitch, n in sounding.items() if n}
        sounding.subtract(ends.get(start, []))
        # Begun, and ended without a voice.
        lost = {pitch for pitch in waiting if not sounding[pitch]}
        counts.update([f"notes beyond {n_voices} voices left out"] * len(lost))
        counts.update([_REPEATED] * len({*new} & before))
        sounding.update(new)
        pitches = sorted((pitch for pitch, n in sounding.items() if n), reverse=True)
        if len(pitches) > n_voices:
            # The outer ones are kept.
            lowest = pitches[-1:] if n_voices > 1 else []
            pitches = pitches[: n_voices - len(lowest)] + lowest
        cut = {pitch for pitch in heard if sounding[pitch]} - {*pitches}
        counts.update(["notes cut short by others"] * len(cut))
        waiting = ((waiting - lost) | {*new}) - {*pitches}
        heard = {*pitches}
        voices = np.linspace(0, n_voices - 1, len(pitches)).round().astype(int)
        steps[start:stop, voices] = pitches
    return steps
