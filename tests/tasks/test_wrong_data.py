"""Data that are not those of a task: an error that names the file, and nothing is left behind."""

import gzip
import io
import json
import re
import tarfile
import wave

import numpy as np
import pytest

from transformer_xl.cli import main

CHORALES = {split: [[[70, 60, 52, 40]] * 8] for split in ("train", "valid", "test")}
POEM = "春日\n風起。\n\n"
REVIEW = '{"label": 1, "text": "good"}\n'
DIGITS = ("0_a_5", "0_a_20")


def packed(text, encoding="utf-8"):
    return gzip.compress(text.encode(encoding))


def wav(n=2_000, rate=8_000):
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.random.default_rng(0).integers(-99, 99, n).astype("<i2").tobytes())
    return content.getvalue()


def digits(names=DIGITS, **more):
    """A folder of archives; ``more`` are further files of the training archive."""
    files = {}
    for part, own in (("train", names), ("test", ("0_a_0",))):
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            added = dict.fromkeys(own, wav()) | (more if part == "train" else {})
            for name, data in added.items():
                about = tarfile.TarInfo(f"{part}/{name}.wav")
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
        files[f"{part}.tar.gz"] = content.getvalue()
    return files


def music(**changed):
    content = {split: x for split, x in (CHORALES | changed).items() if x is not None}
    return {"Jsb16thSeparated.json": json.dumps(content).encode()}


def poems(**changed):
    texts = dict.fromkeys(("train", "valid", "test"), (POEM * 4).encode()) | changed
    return {f"{split}.txt": text for split, text in texts.items()}


def captions(**changed):
    parts = ("train", "val", "test_2016_flickr")
    files = {f"{part}.{x}.gz": packed("Ein Hund.\n" * 9) for part in parts for x in ("de", "en")}
    return files | {name.replace("_", ".") + ".gz": x for name, x in changed.items()}


def reviews(**changed):
    texts = dict.fromkeys(("train", "valid", "test"), REVIEW) | changed
    return {f"{split}.jsonl.gz": packed(text) for split, text in texts.items()}


def polarity(text):
    return reviews() | {"polarity/reviews.jsonl.gz": packed(text)}


def fold(n):
    return f'{{"label": 1, "text": "good", "fold": {n}}}\n'


PIECE = CHORALES["test"][0]
WRONG = {
    "another name": ("digits", digits(hello=wav()), r"train.tar.gz: hello.wav is not named DIGIT"),
    "no gzip": (
        "digits",
        digits() | {"train.tar.gz": b"text"},
        r"train.tar.gz is damaged: Not a gzipped",
    ),
    "no tar": (
        "digits",
        digits() | {"test.tar.gz": packed("text")},
        r"test.tar.gz is no tar archive",
    ),
    "half an archive": (
        "digits",
        digits() | {"train.tar.gz": digits()["train.tar.gz"][:-500]},
        r"train.tar.gz is damaged: Compressed file ended",
    ),
    "another rate": (
        "digits",
        digits(**{"1_a_5": wav(rate=16_000)}),
        r"train.tar.gz, train/1_a_5.wav: a WAV file of .* 16000 Hz",
    ),
    "no WAV": ("digits", digits(**{"1_a_5": b"text"}), r"train/1_a_5.wav: no WAV file"),
    "no samples": ("digits", digits(**{"1_a_5": wav(0)}), r"train/1_a_5.wav: .* without samples"),
    "nothing held out": ("digits", digits(DIGITS[:1]), r"no recording for the split valid: .* 20 "),
    "nothing else": ("digits", digits(DIGITS[1:]), r"no recording for the split train"),
    "few samples": (
        "digits-raw",
        digits(**{"1_a_5": wav(10)}),
        r"train.tar.gz: 1_a_5.wav has 10 samples: 400 \(50 ms\) are needed",
    ),
    "no such split": ("music", music(valid=None), r"Jsb.*json has no pieces for the split valid"),
    "an empty split": ("music", music(test=[]), r"Jsb.*json has no pieces for the split test"),
    "no object": ("music", {"Jsb16thSeparated.json": b"[1]"}, r"has no pieces for the split train"),
    "no JSON": ("music", {"Jsb16thSeparated.json": b"{"}, r"Jsb16thSeparated.json is no JSON"),
    "a number": ("music", music(valid=[PIECE, 7]), r"Jsb.*json, valid: piece 2 has 7; a piece is"),
    "an empty piece": ("music", music(valid=[[]]), r"valid: piece 1 has \[\]; a piece is"),
    "3 voices": (
        "music",
        music(test=[[*PIECE, [70, 60, 52]]]),
        r"test: piece 1 has \[70, 60, 52\]; .* a frame has 4 pitches from 0 to 127, or -1",
    ),
    "a fraction": (
        "music",
        music(test=[[[70, 60, 52, 40.5]]]),
        r"test: piece 1 has \[70, 60, 52, 4",
    ),
    "too high": (
        "music",
        music(test=[[[70, 60, 52, 1000]]]),
        r"test: piece 1 has \[70, 60, 52, 10",
    ),
    "no poems": ("poems", poems(test=b""), r"test.txt has no text in it"),
    "one character": (
        "poems",
        poems(test="春".encode()),
        r"test.txt has one character: give poems",
    ),
    "GB18030": (
        "poems",
        poems(valid=POEM.encode("gb18030")),
        r"valid.txt is not UTF-8 text: byte 0 is 0xb4. Convert the file to UTF-8",
    ),
    "half a file": (
        "translation-de-en",
        captions(val_en=packed("A dog.\n" * 9)[:-9]),
        r"val.en.gz is damaged: Compressed file ended",
    ),
    "Latin-1": (
        "translation-de-en",
        captions(val_en=packed("K\xe4se.\n", "latin-1")),
        r"val.en.gz is not UTF-8 text: byte 1 is 0xe4",
    ),
    "no captions": (
        "translation-de-en",
        captions(val_en=packed("")),
        r"val.en.gz has no text in it",
    ),
    "a text of null": (
        "sentiment",
        reviews(valid=REVIEW + '{"label": 1, "text": null}\n'),
        r"valid.jsonl.gz: line 2 is no review with a text and a label, 0 or 1",
    ),
    "a label of -1": (
        "sentiment",
        reviews(valid=REVIEW.replace("1", "-1")),
        r"valid.jsonl.gz: line 1 is no review",
    ),
    "no JSON lines": (
        "sentiment",
        reviews(test=REVIEW + "good"),
        r"test.jsonl.gz: line 2 is no JS",
    ),
    "no reviews": ("sentiment", reviews(train=""), r"train.jsonl.gz has no review in it"),
    "no fold": ("polarity", polarity(REVIEW), r"line 1 is no review with .*, and a fold, 1 to 10"),
    "fold 11": ("polarity", polarity(fold(11)), r"reviews.jsonl.gz: line 1 is no review with"),
    "no fold 2": ("polarity", polarity(fold(1)), r"reviews.jsonl.gz has no review of fold 2"),
}


@pytest.mark.slow
def test_wrong_data_are_named(tmp_path, capsys):
    for n, (case, (task, files, error)) in enumerate(WRONG.items()):
        given, out = tmp_path / f"given-{n}", tmp_path / f"out-{n}"
        for name, content in files.items():
            path = given / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        # No model: what follows the preparation is not what is tested.
        assert main(["task", task, str(given), "--out", str(out), "--models"]) == 2, case
        message = capsys.readouterr().err.partition("txl: ")[2]
        assert str(given) in message, case
        assert re.search(error, message), (case, message)
        assert not (out / "data").exists(), case
