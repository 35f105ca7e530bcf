"""Runs `writing.py` on a model and the text that was held out of its corpus."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from revision import ROOT

from transformer_xl.data import Corpus

Row = dict[str, float]


def writing_rows(
    model: Path, corpus: Corpus, *words: str, with_training: bool = False
) -> tuple[Row, Row]:
    """Return the figures of the held-out text and of the model.

    Args:
        model: Its folder.
        corpus: Its corpus.
        words: Further options of writing.py.
        with_training: Look for copies of the training text, too.
    """
    splits = {"text": corpus.held_out} | ({"training": "train"} if with_training else {})
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "found.json"
        command = [str(ROOT / "benchmarks" / "writing.py"), str(model), "--json", str(out), *words]
        for option, split in splits.items():
            path = Path(temporary) / split
            path.write_bytes(corpus.raw(split))
            command += [f"--{option}", str(path)]
        subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
        real, own = json.loads(out.read_text(encoding="utf-8"))["rows"].values()
    return real, own
