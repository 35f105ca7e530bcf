"""Integers that a model writes are notes, and a MIDI file holds exactly them."""

import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import mido
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trying
from hypothesis import strategies as st

from transformer_xl.config import MusicConfig
from transformer_xl.data import train_vocab
from transformer_xl.tasks.music import (
    has_marks,
    midi,
    pieces_of,
    read_midi,
    require_pitches,
    text_of,
    write_music,
)
from transformer_xl.tasks.music.writing import MARKS, REST

PITCHES = st.integers(-1, 127)
PIECES = st.integers(1, 15).flatmap(
    lambda voices: st.lists(st.tuples(*[PITCHES] * voices), min_size=1, max_size=12)
)

# A machine that is busy is no fault.
FEW = trying(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def read(content: bytes) -> mido.MidiFile:
    return mido.MidiFile(file=BytesIO(content))


def steps_in(content: bytes, settings: MusicConfig) -> list[tuple[int, ...]]:
    """The steps of a MIDI file, a voice a track, by what sounds at each step."""
    file = read(content)
    step = file.ticks_per_beat // settings.steps_per_quarter
    voices = []
    for track in file.tracks[1:]:
        voice: list[int] = []
        sounding = REST
        for message in track:
            assert message.time % step == 0
            voice += [sounding] * (message.time // step)
            if message.type == "note_on":
                assert sounding == REST
                sounding = message.note
            elif message.type == "note_off":
                assert sounding == message.note
                sounding = REST
        voices.append(voice)
    return list(zip(*voices, strict=True))


@FEW
@given(PIECES, st.integers(1, 8))
def test_a_midi_file_holds_the_steps(steps, steps_per_quarter):
    settings = MusicConfig(steps_per_quarter=steps_per_quarter)
    assert steps_in(midi(steps, settings), settings) == steps


@FEW
@given(PIECES, st.integers(1, 8))
def test_reading_a_midi_file_gives_the_steps_that_were_written(steps, steps_per_quarter):
    # A voice that rests throughout has no notes, and is no part of a file.
    steps = [*steps, (60,) * len(steps[0])]
    settings = MusicConfig(steps_per_quarter=steps_per_quarter, voices=len(steps[0]))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.mid"
        write_music(path, steps, settings)
        assert read_midi(path, settings) == steps


def test_a_midi_file_with_an_endless_pause_is_refused(tmp_path):
    write_music(tmp_path / "a.mid", [(60,)], MusicConfig(voices=1))
    file = mido.MidiFile(tmp_path / "a.mid")
    file.tracks[1][-1].time = 2**27
    file.tracks[1].append(mido.MetaMessage("end_of_track", time=2**27))
    file.save(tmp_path / "a.mid")
    with pytest.raises(ValueError, match="more than the 1,000,000 steps that are read: cut it"):
        read_midi(tmp_path / "a.mid", MusicConfig(voices=1))


@FEW
@given(PIECES, st.booleans(), st.integers(1, 8))
def test_marks_say_the_quarter_and_sound_nothing(steps, marked, quarter):
    text = text_of(steps, MusicConfig(steps_per_quarter=quarter), marked=marked)
    marks = [int(word) for word in text.split() if int(word) in MARKS]
    n_quarters = -(-len(steps) // quarter)
    assert marks == [1000 + n % 4 for n in range(n_quarters) if marked]
    assert pieces_of(text, len(steps[0])) == [steps]
    vocab = train_vocab("integers", [text])
    assert has_marks(vocab) == marked
    require_pitches(vocab)


def test_a_file_has_a_track_and_a_channel_for_each_voice():
    file = read(midi([tuple(range(60, 75))] * 2, MusicConfig(program=53, tempo=100)))
    assert file.ticks_per_beat % 4 == 0
    assert [x.tempo for x in file.tracks[0] if x.type == "set_tempo"] == [600_000]
    started = [x for track in file.tracks[1:] for x in track if x.type == "program_change"]
    assert {x.program for x in started} == {52}
    channels = [x.channel for x in started]
    # Channel 10, counted from 1, is for percussion.
    assert len({*channels} - {9}) == 15
    assert read(midi([(60,) * 4] * 16, MusicConfig(tempo=120))).length == pytest.approx(2)
    names = [track.name for track in read(midi([(72, 67, 64, 48)])).tracks[1:]]
    assert names == ["soprano", "alto", "tenor", "bass"]


def test_pieces_end_at_line_ends_and_steps_that_are_cut_off_are_left_out():
    told = []
    text = "\n60 59 58 57 60 59\n<eos>\n70 69 68 67 70 69 68 67\n50"
    pieces = pieces_of(text, say=told.append)
    assert pieces == [[(60, 59, 58, 57)], [(70, 69, 68, 67)] * 2]
    assert [line.split(":")[0] for line in told] == [
        "piece 1 ends within step 2",
        "piece 3 ends within step 1",
    ]
    assert "60 59, 2 of 4 voices" in told[0]


def test_what_is_no_music_is_said():
    for text, reason in (
        ("", "no whole step of 4 voices"),
        ("60 60 60\n60", "no whole step"),
        ("60 60 60 128", "'128' at place 4 of piece 1 is neither a pitch"),
        ("60 60 60 60\n60 -2 60 60", "'-2' at place 2 of piece 2"),
        ("60 60 the 60", "'the' at place 3"),
        ("60 60 60 6_0", "'6_0' at place 4 of piece 1 is neither a pitch"),
        ("60 60 60 +60", r"'\+60' at place 4 of piece 1 is neither a pitch"),
        ("60 60 60 \u0666\u0660", "at place 4 of piece 1 is neither a pitch"),
        ("60 60 60 " + "9" * 5000, "is neither a pitch"),
    ):
        with pytest.raises(ValueError, match=reason):
            pieces_of(text)


def test_steps_that_are_none_are_refused():
    for steps, reason in (
        ([], "0 voices"),
        ([()], "0 voices"),
        ([(60, 60), (60,)], "shorter"),
        ([(60, 60), (60, 200)], "step 1 has the pitch 200"),
        ([(60, -2)], "step 0 has the pitch -2"),
        ([(60,) * 16], "16 voices"),
    ):
        with pytest.raises(ValueError, match=reason):
            midi(steps)
    with pytest.raises(TypeError, match="integer"):
        midi([(60.5,)])


def test_only_a_vocabulary_of_pitches_is_music():
    require_pitches(train_vocab("integers", ["-1 60 127\n"]))
    for text in ("60 128\n", "60 -2\n"):
        with pytest.raises(ValueError, match="neither a pitch"):
            require_pitches(train_vocab("integers", [text]))
    with pytest.raises(ValueError, match="vocabulary of chars"):
        require_pitches(train_vocab("chars", ["60 62\n"]))


def test_an_existing_file_is_overwritten_only_by_force(tmp_path: Path):
    for name in ("a.mid", "a.MIDI"):
        path = tmp_path / name
        path.write_text("mine")
        with pytest.raises(FileExistsError, match=f"{name} exists"):
            write_music(path, [(60, 48)])
        assert path.read_text() == "mine", name
        write_music(path, [(60, 48)], force=True)
        assert path.read_bytes()[:4] == b"MThd", name


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mido", None)
    with pytest.raises(ValueError, match=r"mido.*transformer-xl\[music\]"):
        write_music(tmp_path / "a.mid", [(60,)])
    assert not (tmp_path / "a.mid").exists()
