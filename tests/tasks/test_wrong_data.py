"""Data that are not those of a task: an error that names the file, and nothing is left behind."""

import gzip
import io
import json
import re
import tarfile
import wave

import numpy as np

from transformer_xl.cli import main

CHORALES = {split: [[[70, 60, 52, 40]] * 8] for split in ("train", "valid", "test")}
DIGITS = ("0_a_5", "0_a_20")


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
        digits() | {"test.tar.gz": gzip.compress(b"text")},
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
    "half a sample": (
        "digits",
        digits(**{"1_a_5": wav()[:-1]}),
        r"train.tar.gz, train/1_a_5.wav: a WAV file that ends within a sample",
    ),
    "no samples": ("digits", digits(**{"1_a_5": wav(0)}), r"1_a_5.wav has 0 samples"),
    "nothing held out": ("digits", digits(DIGITS[:1]), r"the split valid is empty: .* 20 "),
    "nothing else": ("digits", digits(DIGITS[1:]), r"the split train is empty"),
    "few samples": (
        "digits",
        digits(**{"1_a_5": wav(10)}),
        r"train.tar.gz: 1_a_5.wav has 10 samples: a recording needs at least 400 \(50 ms\)",
    ),
    "no such split": ("music", music(valid=None), r"Jsb.*json: .* missing required field `valid`"),
    "an empty split": ("music", music(test=[]), r"length >= 1 - at `\$.test`; under train, valid"),
    "no object": ("music", {"Jsb16thSeparated.json": b"[1]"}, r"Jsb.*Expected `object`, got `arr"),
    "no JSON": ("music", {"Jsb16thSeparated.json": b"{"}, r"Jsb16thSeparated.json: Input data was"),
    "a number": (
        "music",
        music(valid=[PIECE, 7]),
        r"Jsb.*json: .* got `int` - at `\$.valid",
    ),
    "an empty piece": ("music", music(valid=[[]]), r"length >= 1 - at `\$.valid"),
    "3 voices": (
        "music",
        music(test=[[*PIECE, [70, 60, 52]]]),
        r"of length 4.* at `\$.test.*; .* frames of 4 pitches from 0 to 127, or -1",
    ),
    "a fraction": ("music", music(test=[[[70, 60, 52, 40.5]]]), r"got `float` - at `\$.test"),
    "too high": ("music", music(test=[[[70, 60, 52, 1000]]]), r"`int` <= 127 - at `\$.test"),
}


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
