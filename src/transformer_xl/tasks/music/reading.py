"""MIDI files of any program as steps of voices; what has no place in them is counted."""

import math
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from transformer_xl.config import HIGHEST, REST, MusicConfig, require
from transformer_xl.errors import DataError

DRUMS = 9
"""The MIDI channel without pitches."""
_OFF, _ON, _CONTROL, _BEND = 0x8, 0x9, 0xB, 0xE
"""Events of a channel, by the first half of their status."""
_SUSTAIN = 64
"""The controller of the pedal."""
_SYSEX = 0xF0, 0xF7
_META, _END = 0xFF, 0x2F
_REAL_TIME = range(0xF8, 0xFF)
_SYSTEM = {0xF1: 1, 0xF2: 2, 0xF3: 1, 0xF6: 0} | dict.fromkeys(_REAL_TIME, 0)
"""The number of values of system messages (common and real-time), which belong in no file."""
_OCTAVE = 12
_LEFT_OUT, _CHANGED = "left out", "changed"
_DRUM_NOTES = _LEFT_OUT, "note{s} of the drum channel"
_TOO_HIGH = _LEFT_OUT, f"note{{s}} above {HIGHEST}"
_OF_SYSTEM = _LEFT_OUT, "system message{s} (common or real-time)"
_DOUBLED = _LEFT_OUT, "note{s} that others double"
_MOST_STEPS = 1_000_000
"""Steps that are read from a MIDI file at most; a pause may be of any length there."""
_MOST_BYTES = 1 << 22
"""Bytes of a MIDI file that is read."""

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

    Drums (channel 10, counted from 1) and system messages are left out. Velocities, instruments,
    tempo and signatures are no part of a step.

    Args:
        path: The file, of format 0, 1 or 2, also in the RMID form. The patterns of format 2 follow
            one another.
        settings: The number of voices, the duration of a step, and for a file that counts seconds
            the tempo. None: the defaults.
        say: Called with one line that counts what is left out or changed, if there is anything.
            Default: a warning.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: It is no MIDI file, is damaged or too large, or has no notes.
    """
    path, settings, counts = Path(path), settings or MusicConfig(), Counts()
    file = _file_of(path, counts)
    try:
        played, n_ticks = _played(file, counts)
    except IndexError:
        raise _damaged(path, "a track ends within an event") from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    but = " but those of the drum channel" if _DRUM_NOTES in counts else ""
    require(bool(played), f"{path} has no notes{but}: give a file with notes of pitch")
    per_quarter = _ticks_per_quarter(file.division, settings.tempo)
    require(per_quarter > 0, f"{path} has no ticks in a quarter note: it is damaged, save it again")
    if file.division < 0:
        quarters = f"quarter note{{s}} in place of seconds, {settings.tempo:g} a minute"
        counts[_CHANGED, quarters] = round(n_ticks / per_quarter)
    per_step = per_quarter / settings.steps_per_quarter
    n_steps = round(n_ticks / per_step) + 1
    require(
        n_steps <= _MOST_STEPS,
        f"{path} has {n_steps:,} steps and at most {_MOST_STEPS:,} are read: cut it",
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


class _File(NamedTuple):
    """The header of a MIDI file, and its tracks as they stand there."""

    kind: int
    division: int
    tracks: list[bytes]


def _file_of(path: Path, counts: Counts) -> _File:
    """Read the chunks of a file, also in the RMID form; those of other kinds are passed over.

    Raises:
        DataError: It is no MIDI file, ends early, or is too large.
    """
    content = path.read_bytes()
    require(
        len(content) <= _MOST_BYTES,
        f"{path} has {len(content):,} bytes and at most {_MOST_BYTES:,} are read: cut it",
    )
    if content[:4] == b"RIFF" and content[8:12] == b"RMID":
        inner = (chunk for name, _, chunk in _chunks(content[12:], "<4sI") if name == b"data")
        content = next(inner, b"")
    chunks = [*_chunks(content, ">4sI")]
    name, _, header = chunks[0] if chunks else (b"", 0, b"")
    is_header = name == b"MThd" and len(header) >= 6
    require(is_header, f"{path} is no MIDI file that can be read: it has no header MThd")
    tracks = [(length, chunk) for name, length, chunk in chunks if name == b"MTrk"]
    kind, n_tracks, division = struct.unpack(">HHh", header[:6])
    if len(tracks) < n_tracks or any(len(chunk) < length for length, chunk in tracks):
        raise _damaged(path, f"it ends early, within track {len(tracks)} of {n_tracks}")
    if len(tracks) > n_tracks:
        counts[_CHANGED, f"tracks read where the header says {n_tracks}"] = len(tracks)
    return _File(kind, division, [chunk for _, chunk in tracks])


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} is no MIDI file that can be read: {why}: restore it from a copy, or save it again"
    )


def _chunks(content: bytes, form: str) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield the name of each chunk, the length that it states, and its content."""
    place, head = 0, struct.calcsize(form)
    while place + head <= len(content):
        name, length = struct.unpack_from(form, content, place)
        place += head
        yield name, length, content[place : place + length]
        # Chunks of RIFF are padded to an even length.
        place += length + (length % 2 if form[0] == "<" else 0)


def _ticks_per_quarter(division: int, tempo: float) -> float:
    """Return the ticks of a quarter note; of a file that counts seconds, at this tempo."""
    if division >= 0:
        return division
    # The code of SMPTE time: minus the frames per second, then the ticks of a frame.
    frames, ticks = -(division >> 8), division & 0xFF
    # 29 stands for 29.97 frames.
    return (30_000 / 1001 if frames == 29 else frames) * ticks * 60 / tempo


def _events(track: bytes, counts: Counts) -> tuple[list[tuple[int, int, bytes]], int]:
    """Return the time, status and data of each event of a channel, and the length of the track.

    System messages, which some programs write as they received them, are left out and counted.

    mido is for writing only: it refuses a file for any event that it cannot represent, such as a
    key signature of 8 flats, also where nothing depends on it.

    Raises:
        IndexError: The track ends within an event.
        ValueError: There is no event where one should be.
    """
    events, place, at, running = [], 0, 0, 0
    while place < len(track):
        delta, place = _number(track, place)
        at, first = at + delta, track[place]
        if first in (_META, *_SYSEX):
            kind = track[place + 1]
            length, place = _number(track, place + 1 + (first == _META))
            place += length
            if (first, kind) == (_META, _END):
                break
            continue
        if first in _SYSTEM:
            counts[_OF_SYSTEM] += 1
            place += 1 + _SYSTEM[first]
            continue
        if first >= 0x80:
            running, place = first, place + 1
        require(0x80 <= running < 0xF0, f"byte {place:,} of a track begins no event")
        # A change of the program and the pressure of a channel have one value.
        n_values = 1 if running >> 4 in (0xC, 0xD) else 2
        values = bytearray()
        while len(values) < n_values:
            # Real-time messages may also stand within another message.
            if track[place] in _REAL_TIME:
                counts[_OF_SYSTEM] += 1
            else:
                values.append(track[place])
            place += 1
        events.append((at, running, bytes(values)))
    if place > len(track):
        raise IndexError
    return events, at


def _number(track: bytes, place: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and the place behind it."""
    found = 0
    # The standard has four bytes at most; mido writes more.
    for end in range(place, place + 8):
        found = found << 7 | track[end] & 0x7F
        if track[end] < 0x80:
            return found, end + 1
    raise DataError(f"byte {place:,} of a track begins a number of more than 8 bytes")


def _played(file: _File, counts: Counts) -> tuple[list[_Played], int]:
    """Return the notes of a file, and its length in ticks; count what is left out.

    Raises:
        IndexError, ValueError: A track is damaged.
    """
    notes: list[_Played] = []
    n_ticks = first = 0
    for n, track in enumerate(file.tracks):
        events, length = _events(track, counts)
        begun: dict[tuple[int, int], int] = {}
        for time, status, values in events:
            at, kind, channel = first + time, status >> 4, status & 0xF
            if kind == _BEND and (values[0], values[1]) != (0, 64):
                counts[_LEFT_OUT, "pitch bend{s}"] += 1
            elif kind == _CONTROL and values[0] == _SUSTAIN and values[1] >= 64:
                counts[_LEFT_OUT, "use{s} of the sustain pedal"] += 1
            if kind not in (_ON, _OFF):
                continue
            pitch, is_begin = values[0], kind == _ON and values[1] > 0
            if channel == DRUMS or pitch > HIGHEST:
                if is_begin:
                    counts[_DRUM_NOTES if channel == DRUMS else _TOO_HIGH] += 1
                continue
            key = channel, pitch
            if is_begin and begun.get(key) == at:
                counts[_DOUBLED] += 1
                continue
            if key in begun:
                notes.append(_Played(16 * n + channel, pitch, begun.pop(key), at))
            if is_begin:
                begun[key] = at
        end = first + length
        if begun:
            counts[_CHANGED, "note{s} without an end, held to the end of the track"] += len(begun)
        notes += [_Played(16 * n + key[0], key[1], begin, end) for key, begin in begun.items()]
        n_ticks = max(n_ticks, end)
        if file.kind == 2:
            first = end
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
