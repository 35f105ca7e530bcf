"""MIDI files of any program as steps of voices; what has no place in them is counted."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from transformer_xl.config import REST, MusicConfig, require
from transformer_xl.data import optional_package
from transformer_xl.errors import DataError

DRUMS = 9
"""The MIDI channel without pitches."""
_SUSTAIN = 64
"""The controller of the pedal."""
_OCTAVE = 12
_LEFT_OUT, _CHANGED = "left out", "changed"
_DRUM_NOTES = _LEFT_OUT, "note{s} of the drum channel"
_DOUBLED = _LEFT_OUT, "note{s} that others double"
_MOST_STEPS = 1_000_000
"""Steps that are read from a MIDI file at most; a pause may be of any length there."""
_MOST_BYTES = 1 << 22
"""Bytes of a MIDI file that is read."""
_LONG_NUMBER = re.compile(rb"[\x80-\xff]{1000}")
"""What mido would take for a number for hours."""

Counts = Counter[tuple[str, str]]
"""How many of what was left out or changed."""


def read_midi(
    path: Path | str,
    settings: MusicConfig | None = None,
    *,
    say: Callable[[str], object] = warnings.warn,
) -> list[tuple[int, ...]]:
    """Read a piece from a MIDI file of any program.

    A part is what one track plays on one channel. If there is a part for each voice, highest voice
    first, its notes stand in that voice, and those of a chord in voices that are free. Else the
    notes are spread over the voices by pitch. Where more notes sound than there are voices, a note
    that began earlier is cut short; of notes that begin together, inner ones are left out. Notes
    begin and end at the nearest step; a note has at least one; one that is not ended lasts as long
    as its track. A file of `midi` gives the steps that it was made of, unless a voice rests
    throughout.

    Drums (channel 10, counted from 1) are left out. Velocities, instruments, tempo and signatures
    are no part of a step.

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
    path, settings, counts = Path(path), settings or MusicConfig(), Counts()
    file = _file_of(path, counts)
    played, n_ticks = _played(file, counts)
    but = " but those of the drum channel" if _DRUM_NOTES in counts else ""
    require(bool(played), f"{path} has no notes{but}: give a file with notes of pitch")
    per_step = file.ticks_per_beat / settings.steps_per_quarter
    require(
        n_ticks < _MOST_STEPS * per_step,
        f"{path} has more than the {_MOST_STEPS:,} steps that are read: cut it",
    )
    notes = _on_grid(played, per_step, counts)
    n_steps = max(round(n_ticks / per_step), *(note.end for note in notes))
    steps = _steps_of(notes, n_steps, settings.voices, counts)
    if counts:
        lists = []
        for verb in (_LEFT_OUT, _CHANGED):
            each = [(text, n) for (of, text), n in counts.items() if of == verb]
            line = ", ".join(f"{n:,} {text.format(s='s' * (n != 1))}" for text, n in each)
            lists += [f"{verb}: {line}"] if each else []
        say(f"{path}: {'; '.join(lists)}")
    return [tuple(step) for step in steps.tolist()]


class _Played(NamedTuple):
    """A note of a part. Its begin and end are in ticks of the file, or in steps."""

    part: int
    pitch: int
    begin: int
    end: int


def _file_of(path: Path, counts: Counts) -> Any:
    """Return a MIDI file as mido reads it.

    Raises:
        DataError: It is none, is damaged or too large, or counts seconds.
    """
    mido = optional_package("mido", "a MIDI file", "'transformer-xl[music]'")
    content = path.read_bytes()
    require(
        len(content) <= _MOST_BYTES,
        f"{path} has {len(content):,} bytes and at most {_MOST_BYTES:,} are read: cut it",
    )
    if content[:4] == b"RIFF":
        content = content[max(content.find(b"MThd"), 0) :]
    stream = BytesIO(content)
    try:
        require(not _LONG_NUMBER.search(content), "a number of more than 1,000 bytes")
        file = mido.MidiFile(file=stream)
        names = {x.type for track in file.tracks for x in track if not hasattr(x, "channel")}
        # mido takes what follows such a message for another one.
        if other := {x for x in names if x in mido.messages.specs.SPEC_BY_TYPE} - {"sysex"}:
            raise ValueError(f"it has system messages ({min(other)})")
        require(file.ticks_per_beat > 0, "it counts seconds (SMPTE), or no ticks")
    except Exception as error:  # mido raises any kind for what it cannot represent
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{path} is no MIDI file that can be read: {reason}: restore it from a copy, or save "
            "it again, with ticks per quarter note"
        ) from error
    if n_more := stream.read().count(b"MTrk"):
        counts[_LEFT_OUT, "track{s} more than the header says"] = n_more
    return file


def _played(file: Any, counts: Counts) -> tuple[list[_Played], int]:
    """Return the notes of a file, and its length in ticks; count what is left out."""
    notes: list[_Played] = []
    n_ticks = first = 0
    for n, track in enumerate(file.tracks):
        begun: dict[tuple[int, int], int] = {}
        at = first
        for message in track:
            at += message.time
            if message.type == "pitchwheel" and message.pitch:
                counts[_LEFT_OUT, "pitch bend{s}"] += 1
            elif message.is_cc(_SUSTAIN) and message.value >= 64:
                counts[_LEFT_OUT, "use{s} of the sustain pedal"] += 1
            if message.type not in ("note_on", "note_off"):
                continue
            key = message.channel, message.note
            is_begin = message.type == "note_on" and message.velocity > 0
            if message.channel == DRUMS:
                counts.update([_DRUM_NOTES] * is_begin)
                continue
            if is_begin and begun.get(key) == at:
                counts[_DOUBLED] += 1
                continue
            if key in begun:
                notes.append(_Played(16 * n + key[0], key[1], begun.pop(key), at))
            if is_begin:
                begun[key] = at
        if begun:
            counts[_CHANGED, "note{s} without an end, held to the end of the track"] += len(begun)
        notes += [_Played(16 * n + key[0], key[1], begin, at) for key, begin in begun.items()]
        n_ticks = max(n_ticks, at)
        if file.type == 2:
            first = at
    return notes, n_ticks


def _on_grid(played: list[_Played], per_step: float, counts: Counts) -> list[_Played]:
    """Return notes with times in steps and parts counted from 0, by their begin.

    A note that is shorter than a step gives way to the next one of its part in the same step: they
    are no chord.
    """
    parts = {part: n for n, part in enumerate(sorted({note.part for note in played}))}
    last: dict[tuple[int, int], int] = {}
    for note in played:
        place = note.part, round(note.begin / per_step)
        last[place] = max(note.begin, last.get(place, 0))
    notes = []
    for note in played:
        begin, end = round(note.begin / per_step), round(note.end / per_step)
        if begin == end and note.begin < last[note.part, begin] >= note.end:
            counts[_LEFT_OUT, "note{s} shorter than a step"] += 1
        else:
            notes.append(_Played(parts[note.part], note.pitch, begin, max(end, begin + 1)))
    return sorted(notes, key=lambda note: (note.begin, -note.pitch, note.part))


def _steps_of(
    notes: list[_Played], n_steps: int, n_voices: int, counts: Counts
) -> Int[np.ndarray, "steps voices"]:
    """Return the steps of notes that are in the order of their begin; count what has no voice."""
    steps = np.full((n_steps, n_voices), REST)
    n_parts = len({note.part for note in notes})
    has_voices = n_parts == n_voices
    if not has_voices and n_voices > 1:
        counts[_CHANGED, f"part{{s}} spread over {n_voices} voices by pitch"] = n_parts
    # The last note of each voice.
    heard = [_Played(-1, REST, -1, 0)] * n_voices

    def place(note: _Played, voice: int) -> None:
        if note.begin and steps[note.begin - 1, voice] == note.pitch:
            counts[_CHANGED, "repeated note{s} held"] += 1
        steps[note.begin : note.end, voice] = note.pitch
        heard[voice] = note

    for begin, group in groupby(notes, key=lambda note: note.begin):
        waiting = []
        for note in group:
            if has_voices and heard[note.part].end <= begin:
                place(note, note.part)
            else:
                waiting.append(note)
        free = [voice for voice, note in enumerate(heard) if note.end <= begin]
        if len(waiting) > len(free):
            sounding = {note.pitch for note in heard if note.end > begin}
            first = {note.pitch: note for note in reversed(waiting) if note.pitch not in sounding}
            if n_doubled := len(waiting) - len(first):
                counts[_DOUBLED] += n_doubled
            waiting = [note for note in waiting if first.get(note.pitch) is note]
        while len(waiting) > len(free):
            held = [voice for voice, note in enumerate(heard) if note.begin < begin < note.end]
            if not held:
                break
            pitches = [note.pitch for note in (*heard, *waiting) if note.end > begin]
            outer = {min(pitches), max(pitches)}
            voice = min(held, key=lambda voice: (heard[voice].pitch in outer, heard[voice].end))
            steps[begin : heard[voice].end, voice] = REST
            heard[voice] = heard[voice]._replace(end=begin)
            counts[_CHANGED, "note{s} cut short by later ones"] += 1
            free = sorted([*free, voice])
        if n_left := max(0, len(waiting) - len(free)):
            beyond = f"note{{s}} beyond {n_voices} voice{'s' * (n_voices > 1)}"
            counts[_LEFT_OUT, beyond] += n_left
            # The outer ones are kept.
            lowest = waiting[-1:] if len(free) > 1 else []
            waiting = waiting[: len(free) - len(lowest)] + lowest
        for note, voice in zip(waiting, _voices_for(waiting, free, heard, begin), strict=True):
            place(note, voice)
    return steps


def _voices_for(
    notes: list[_Played], free: list[int], heard: list[_Played], begin: int
) -> tuple[int, ...]:
    """Return a free voice for each note, from high to low, such that voices move little."""

    def cost(n: int, voice: int) -> float:
        pitch, before = notes[n].pitch, heard[voice].pitch
        # A voice that has not been heard is a leap of an octave away; outer ones come first.
        moved = abs(pitch - before) if before != REST else _OCTAVE
        n_crossed = sum(
            other.end > begin and (other.pitch < pitch) == (k < voice) and other.pitch != pitch
            for k, other in enumerate(heard)
        )
        outer = abs(voice - n * (len(heard) - 1) / max(1, len(notes) - 1))
        return moved + 2 * _OCTAVE * n_crossed + outer / len(heard)

    # By the number of free voices that are considered.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (len(free) + 1)
    for n in range(len(notes)):
        found: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
        for k, voice in enumerate(free):
            total, voices = best[k]
            found.append(min(found[-1], (total + cost(n, voice), (*voices, voice))))
        best = found
    return best[-1][1]
