"""Every note of a MIDI file is in the steps that are read from it, or is counted."""

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import mido
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trying
from hypothesis import strategies as st

from transformer_xl.config import MusicConfig
from transformer_xl.errors import DataError
from transformer_xl.tasks.music import read_midi, write_music
from transformer_xl.tasks.music.reading import REST

# Ticks of a step where nothing else is said.
STEP = 120


class Note(NamedTuple):
    """A note of a track on a channel, in ticks."""

    track: int
    channel: int
    pitch: int
    begin: int
    end: int


def chord(*pitches: int, begin: int = 0, steps: int = 1, track: int = 0, channel: int = 0):
    """Notes that sound together; the begin is in steps."""
    end = begin + steps
    return [Note(track, channel, pitch, begin * STEP, end * STEP) for pitch in pitches]


def written(path: Path, notes: Iterable[Note], kind: int = 1, ticks: int = 4 * STEP) -> Path:
    """Write a MIDI file as another program would."""
    file = mido.MidiFile(type=kind, ticks_per_beat=ticks)
    notes = [*notes]
    for n in range(1 + max(note.track for note in notes)):
        own = [note for note in notes if note.track == n]
        # Ends come before begins, as one of the same pitch may follow.
        events = [(x.end, 0, x) for x in own] + [(x.begin, 1, x) for x in own]
        track, at = mido.MidiTrack(), 0
        for time, is_begin, note in sorted(events):
            # An end may be a begin without velocity.
            velocity = 80 if is_begin else 0
            about = {"channel": note.channel, "note": note.pitch, "velocity": velocity}
            track.append(mido.Message("note_on", time=time - at, **about))
            at = time
        file.tracks.append(track)
    file.save(path)
    return path


def of_track(path: Path, track: bytes) -> Path:
    """Write a MIDI file of one track, whose bytes are given."""
    body = struct.pack(">4sI", b"MTrk", len(track)) + track
    path.write_bytes(struct.pack(">4sI3H", b"MThd", 6, 0, 1, 480) + body)
    return path


@pytest.fixture
def read(tmp_path):
    """Reads notes of a file that another program wrote: the steps, and what is said of them."""

    def call(notes: Iterable[Note], voices: int = 4, **about) -> tuple[list, str]:
        said: list[str] = []
        path = written(tmp_path / "a.mid", notes, **about)
        steps = read_midi(path, MusicConfig(voices=voices), say=said.append)
        assert len(said) <= 1
        return steps, said[0].removeprefix(f"{path}: ") if said else ""

    return call


def count(said: str, what: str) -> int:
    """Return how many of something are left out or changed."""
    found = re.search(rf"{what}: ([\d,]+)", said)
    return int(found[1].replace(",", "")) if found else 0


# All of different pitches, so that each is known again; a step is 120 ticks.
NOTES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([0, 1, 9]),
        st.integers(0, 127),
        st.integers(0, 1500),
        st.integers(1, 700),
    ),
    min_size=1,
    max_size=14,
    unique_by=lambda note: note[2],
).map(lambda notes: [Note(*note[:4], note[3] + note[4]) for note in notes])


@trying(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(NOTES, st.integers(1, 6))
def test_every_note_is_in_the_steps_or_counted(read, notes, voices):
    heard = [note for note in notes if note.channel != 9]
    if not heard:
        with pytest.raises(ValueError, match="no notes but those of the drum channel"):
            read(notes, voices)
        return
    steps, said = read(notes, voices)
    n_lost = 0
    for note in heard:
        begin, end = round(note.begin / STEP), round(note.end / STEP)
        found = {n for n, step in enumerate(steps) if note.pitch in step}
        n_lost += not found
        assert found <= {*range(begin, max(end, begin + 1))}
        # What sounds is heard while there are voices for it.
        for n in {*range(begin, max(end, begin + 1))} - found:
            assert REST not in steps[n]
    assert {pitch for step in steps for pitch in step} <= {REST, *(x.pitch for x in heard)}
    assert count(said, "notes beyond . voices left out") == n_lost
    assert count(said, "notes of the drum channel left out") == len(notes) - len(heard)


def test_a_chord_of_one_part_is_spread_over_the_voices(read):
    steps, said = read(chord(72, 48, 64, 67) + chord(74, 50, 65, 69, begin=1))
    assert steps == [(72, 67, 64, 48), (74, 69, 65, 50)]
    assert said == "parts spread over 4 voices by pitch: 1"


def test_voices_that_are_spread_do_not_cross(read):
    held = chord(72, steps=3) + chord(48, steps=3)
    moving = chord(67, 60) + chord(65, begin=1) + chord(64, 62, begin=2)
    steps, _ = read(held + moving)
    assert steps == [(72, 67, 60, 48), (72, REST, 65, 48), (72, 64, 62, 48)]
    # Two hands, of which each plays chords.
    right, left = chord(72, 67), chord(55, 48, track=1, channel=1)
    assert read(right + left)[0] == [(72, 67, 55, 48)]


def test_a_part_for_each_voice_stays_in_it_also_where_voices_cross(read):
    notes = [note for n, x in enumerate((60, 67, 64, 70)) for note in chord(x, track=n)]
    assert read(notes) == ([(60, 67, 64, 70)], "")


def test_what_has_no_voice_is_counted_and_outer_notes_are_kept(read):
    steps, said = read(chord(72, 70, 67, 64, 60, 48))
    assert steps == [(72, 70, 67, 48)]
    assert count(said, "notes beyond 4 voices left out") == 2
    # A higher one takes the voice.
    steps, said = read(chord(60, steps=3) + chord(64, begin=1), voices=1)
    assert steps == [(60,), (64,), (60,)]
    assert said == "notes cut short by others: 1"
    # An inner one, if there is one.
    steps, said = read(chord(72, 64, 48, steps=2) + chord(67, begin=1), voices=3)
    assert steps == [(72, 64, 48), (72, 67, 48)]


def test_drums_are_left_out_and_counted(read):
    notes = chord(60, 64) + chord(36, 38, 42, track=1, channel=9)
    steps, said = read(notes, voices=2)
    assert steps == [(64, 60)]
    assert said.startswith("notes of the drum channel left out: 3; parts spread")


def test_a_warning_counts_where_nothing_is_called(tmp_path):
    path = written(tmp_path / "a.mid", chord(60, 64))
    with pytest.warns(UserWarning, match=r"a\.mid: notes beyond 1 voices left out: 1"):
        assert read_midi(path, MusicConfig(voices=1)) == [(64,)]


def test_a_note_has_a_step_at_least(read):
    assert read([Note(0, 0, 60, 0, 10), Note(0, 0, 62, 120, 130)], 1) == ([(60,), (62,)], "")


def test_repeated_notes_and_notes_without_an_end_are_counted(tmp_path):
    track = mido.MidiTrack()
    # The second begins before the first has ended.
    for kind, time in (("note_on", 0), ("note_on", 240), ("note_off", 240)):
        track.append(mido.Message(kind, note=60, velocity=80, time=time))
    track.append(mido.Message("note_on", note=64, velocity=80, time=0))
    track.append(mido.MetaMessage("end_of_track", time=240))
    mido.MidiFile(tracks=[track], ticks_per_beat=480).save(tmp_path / "a.mid")
    said: list[str] = []
    steps = read_midi(tmp_path / "a.mid", MusicConfig(voices=1), say=said.append)
    assert steps == [(60,)] * 4 + [(64,)] * 2
    assert count(said[0], "repeated notes held") == 1
    assert count(said[0], "notes without an end held to the end of the track") == 1


def test_patterns_of_format_2_follow_one_another(read):
    notes = chord(60, steps=2) + chord(62, steps=2, track=1)
    assert read(notes, 1, kind=2)[0] == [(60,), (60,), (62,), (62,)]
    assert read(notes, 2, kind=1) == ([(60, 62)] * 2, "")


@pytest.mark.parametrize("form", ["rmid", "longer header"])
def test_other_forms_of_the_file_are_read(tmp_path, form):
    path = tmp_path / "a.mid"
    write_music(path, [(60, 48), (62, 50)])
    content = path.read_bytes()
    riff = b"RIFF\0\0\0\0RMIDDISP\3\0\0\0abc\0data" + struct.pack("<I", len(content))
    longer = b"MThd\0\0\0\x08" + content[8:14] + b"ab" + content[14:]
    path.write_bytes(riff + content if form == "rmid" else longer)
    said: list[str] = []
    assert read_midi(path, MusicConfig(voices=2), say=said.append) == [(60, 48), (62, 50)]
    assert not said


def test_tracks_beyond_those_of_the_header_are_counted(tmp_path):
    path = tmp_path / "a.mid"
    write_music(path, [(60, 48), (62, 50)])
    content = path.read_bytes()
    path.write_bytes(content[:10] + b"\0\2" + content[12:])
    with pytest.warns(UserWarning, match="tracks more than the header says left out: 1"):
        assert read_midi(path, MusicConfig(voices=1)) == [(60,), (62,)]


def test_what_is_damaged_is_refused_wherever_it_ends(tmp_path):
    path = tmp_path / "a.mid"
    write_music(path, [(60, 48)])
    content = path.read_bytes()
    others = [b"no MIDI", b"RIFF\0\0\0\0RMID", b"RIFF\0\0\0\0WAVEdata"]
    for damaged in [*(content[:length] for length in range(len(content))), *others]:
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a\.mid is no MIDI file that can be read: "):
            read_midi(path, MusicConfig(voices=2))


EVENT, CLOCK = b"\0\x90\x3c\x40", bytes(mido.Message("clock").bytes())


@pytest.mark.parametrize(
    ("track", "reason"),
    [
        (b"\x00\x90\x3c", "EOFError"),
        (b"\x00\x3c\x40", "running status"),
        (b"\x00\xf4", "undefined status byte 0xf4"),
        (b"\xff" * 2000 + b"\x00", "a number of more than 1,000 bytes"),
        (b"\0\x90\x80\x40", "data byte must be in range"),
        (EVENT + b"\0\xff\x59\x02\xf8\x00", "Could not decode key"),
        (b"\0" + CLOCK + EVENT, r"it has system messages \(clock\)"),
        # Its running status is that of the clock, for mido.
        (EVENT + b"\0" + CLOCK + b"\x78\x3c\0", ""),
    ],
)
def test_a_track_that_is_damaged_is_refused(tmp_path, track, reason):
    path = of_track(tmp_path / "a.mid", track)
    with pytest.raises(DataError, match=rf"read: {reason}.*: restore it from a copy, or save"):
        read_midi(path)


def test_a_file_that_counts_seconds_is_refused(tmp_path):
    path = written(tmp_path / "a.mid", chord(60), ticks=-25 * 256 + 40)
    with pytest.raises(DataError, match=r"it counts seconds .* with ticks per quarter note"):
        read_midi(path)


def test_a_file_without_notes_or_of_too_many_bytes_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.mid"
    write_music(path, [(REST,)])
    with pytest.raises(ValueError, match=r"a\.mid has no notes: give a file with notes"):
        read_midi(path)
    monkeypatch.setattr("transformer_xl.tasks.music.reading._MOST_BYTES", 10)
    with pytest.raises(ValueError, match=r"a\.mid has \d+ bytes and at most 10 are read: cut it"):
        read_midi(path)
