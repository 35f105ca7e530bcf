"""What `txl generate --out` writes: text and MIDI files."""

import json
from pathlib import Path

import mido
import pytest

from transformer_xl.cli.out_files import files_of, write_texts
from transformer_xl.config import ModelConfig, MusicConfig
from transformer_xl.data import train_vocab
from transformer_xl.model import TransformerXL
from transformer_xl.tasks.music import pieces_of, read_midi, write_music

pytestmark = pytest.mark.usefixtures("one_thread")


def _folder(path: Path, kind: str, text: str) -> Path:
    path.mkdir()
    vocab = train_vocab(kind, [text])
    vocab.save(path)
    sizes = {"n_layer": 1, "n_head": 1, "d_model": 8, "d_inner": 8, "mem_len": 4}
    TransformerXL(ModelConfig(vocab_size=len(vocab), **sizes)).save_pretrained(path)
    return path


@pytest.fixture
def of_music(tmp_path: Path) -> Path:
    """A model of music, which writes notes at random."""
    return _folder(tmp_path / "music", "integers", "-1 60 62 64 65 67 69 71 72\n")


@pytest.fixture
def generated(txl, of_music: Path):
    """Runs `txl generate` with a prompt of two steps."""

    def run(*words):
        return txl("generate", of_music, "--prompt", "72 67 64 60 72 69 65 60", *words)

    return run


def test_a_file_holds_what_the_terminal_would_show(generated, tmp_path):
    words = ["--length", 30, "--seed", 3]
    shown = generated(*words)
    ended = generated(*words, "--out", tmp_path / "a.txt")
    assert (ended.code, ended.out) == (0, "")
    assert (tmp_path / "a.txt").read_text() == shown.out
    assert f"wrote {tmp_path / 'a.txt'}" in ended.err


def test_music_is_prompt_and_piece_up_to_its_end(generated, tmp_path):
    words = ["--length", 150, "--seed", 3, "--json"]
    text = generated(*words).json["text"]
    files = [tmp_path / "a.mid"]
    ended = generated(*words, "--out", *files, "--music.tempo", 100)
    assert ended.code == 0
    piece = text[: text.index("\n")]
    assert ended.json["text"] == piece
    assert ended.json["files"] == [str(path) for path in files]
    (steps,) = pieces_of(ended.json["prompt"] + piece)
    assert steps[:2] == [(72, 67, 64, 60), (72, 69, 65, 60)]
    file = mido.MidiFile(files[0])
    assert len(file.tracks) == 1 + 4
    assert file.length == pytest.approx(len(steps) / 4 * 60 / 100, rel=1e-3)
    assert "had not ended" not in ended.err


def test_each_of_several_texts_has_its_own_file(generated, tmp_path):
    words = ["--samples", 2, "--length", 20, "--out", tmp_path / "a.mid", tmp_path / "a.txt"]
    ended = generated(*words, "--json")
    assert ended.code == 0
    names = ["a-1.txt", "a-1.mid", "a-2.txt", "a-2.mid"]
    assert [Path(name).name for name in ended.json["files"]] == names
    texts = [text["prompt"] + text["text"] + "\n" for text in ended.json["texts"]]
    assert [(tmp_path / name).read_text() for name in names[::2]] == texts
    # Nothing is generated when one of them exists.
    (tmp_path / "a-1.mid").unlink()
    ended = generated(*words)
    assert ended.code == 1
    assert "a-1.txt exists; --force overwrites it" in ended.err
    assert not (tmp_path / "a-1.mid").exists()
    assert generated(*words, "--force").code == 0


def test_what_has_no_effect_or_cannot_be_written_is_refused(generated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("mine.mid").write_text("mine")
    for words, reason in [
        (["--out", "a.mid", "--length", 0], "--out needs a --length above 0"),
        (["--out", "b.mid", "sub/../b.mid"], "b.mid: a file is named twice"),
        (["--out", "-"], "--out - is no file"),
        (["--out", "folder"], "folder is a folder"),
        (["--out", "mine.mid"], "mine.mid exists; --force overwrites it"),
        (["--out", "b", "--state", "sub/../b"], "--state sub/../b is a file of --out, too"),
        (["--out", "a.mid", "--state", "s"], "--state and --out exclude each other"),
        (["--music.voices", 3], "--music.voices 3 has no effect here: it is for --out FILE"),
        (["--out", "a.png"], "--out a.png: piano rolls are gone"),
        (["--out", "a.mid", "--music.program", 129], "music.program=129 must be at most 128"),
    ]:
        ended = generated(*words)
        assert ended.code in (1, 2), words
        assert reason in ended.err, words
        assert "sampling" not in ended.err, words
        assert Path("mine.mid").read_text() == "mine", words
        assert not Path("a.mid").exists(), words


def test_an_empty_piece_keeps_no_other_from_being_written(tmp_path, capsys):
    files = files_of([tmp_path / "a.mid"], 3, force=False)
    texts = [{"prompt": "", "text": x} for x in ("60 55 52", "60 55 52 48", "60 55")]
    with pytest.raises(
        ValueError, match=r"a-1\.mid not written.*; .*a-3\.mid not written"
    ) as found:
        write_texts(files, texts, MusicConfig(), length=3, force=False)
    first, last = str(found.value).split("; /")
    assert "generate more tokens, at least 4" in first
    assert "it ended before; generate it with another seed" in last
    assert [path.name for path in tmp_path.iterdir()] == ["a-2.mid"]
    assert f"wrote {tmp_path / 'a-2.mid'}" in capsys.readouterr().err


def test_only_a_model_of_music_writes_music(txl, trained, tmp_path):
    ended = txl("generate", trained, "--out", tmp_path / "a.mid")
    assert ended.code == 2
    assert "this model has a vocabulary of chars" in ended.err
    assert "sampling" not in ended.err
    ended = txl("generate", trained, "--out", tmp_path / "a.txt", "--json")
    assert json.loads(ended.out)["files"] == [str(tmp_path / "a.txt")]


def test_a_midi_file_is_continued(txl, of_music, tmp_path):
    begun, words = tmp_path / "begun.mid", ["--length", 12, "--seed", 3]
    write_music(begun, [(72, 67, 64, 60), (72, 69, 65, 60)])
    ended = txl("generate", of_music, "--midi", begun, *words, "--json")
    assert ended.json["prompt"] == "72 67 64 60 72 69 65 60"
    # Read in other steps and voices, also where no music is written.
    halves = ["--music.steps_per_quarter", 8]
    for out in ([], ["--out", tmp_path / "a.txt"]):
        ended = txl("generate", of_music, "--midi", begun, *halves, *out, *words, "--json")
        assert ended.json["prompt"] == "72 67 64 60 72 67 64 60 72 69 65 60 72 69 65 60"
    ended = txl("generate", of_music, "--midi", begun, "--music.voices", 3, *words)
    assert ended.code == 0
    assert "notes beyond 3 voices left out: 2" in ended.err
    ended = txl("generate", of_music, "--midi", begun, "--music.tempo", 90, *words)
    assert "--music.tempo 90.0 has no effect here: it is for --out FILE.mid or" in ended.err
    ended = txl("generate", of_music, "--midi", begun, "--out", tmp_path / "a.mid", *words)
    assert ended.code == 0
    assert read_midi(tmp_path / "a.mid")[:2] == read_midi(begun)
