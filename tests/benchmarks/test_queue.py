import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu"
RECIPES = ("shakespeare-char", "ptb-word", "ptb-char", "wikitext-2", "python-code", "english")
MEASUREMENTS = ("attention", "training", "decoding", "compiled")
IN_ITS_PLACE = """#!/bin/sh
for word; do printf '%s\\0' "$word"; done >>"$RECORD"
printf '\\n' >>"$RECORD"
"""


def _started(item: str, folder: Path) -> dict[int, tuple[int, list[str]]]:
    """Return the seconds and the command of each program that an item starts; start none."""
    folder.mkdir(exist_ok=True)
    (folder / "timeout").write_text(IN_ITS_PLACE)
    (folder / "timeout").chmod(0o755)
    settings = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORD": f"{folder}/record"}
    environment = {key: x for key, x in os.environ.items() if key != "TRY"} | settings
    command = ["sh", str(GPU / "queue.sh"), item]
    subprocess.run(command, env=environment | {"OUT": str(folder)}, capture_output=True)
    # timeout -s INT -k 10 SECONDS PYTHON ...
    lines = (folder / "record").read_text().split("\0\n")[:-1]
    words = [line.split("\0")[4:] for line in lines]
    return {n: (int(seconds), rest) for n, (seconds, _, *rest) in enumerate(words)}


def test_an_unknown_item_is_told_which_there_are() -> None:
    done = subprocess.run(["sh", str(GPU / "queue.sh"), "other"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "kernels|attention|training" in done.stderr


def test_an_item_ends_within_ten_minutes_and_is_explained(tmp_path: Path) -> None:
    for item in ("kernels", *MEASUREMENTS, "blocks", *RECIPES):
        assert f"{item}`" in (GPU / "README.md").read_text(), item
        started = _started(item, tmp_path / item).values()
        assert 0 < sum(seconds for seconds, _ in started) < 590, item


@pytest.mark.parametrize("item", MEASUREMENTS)
def test_the_programs_understand_what_the_queue_asks_for(
    item: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    asked: list[Any] = []

    def remember(*found: Any, **_: Any) -> dict[str, Any]:
        asked.append(found)
        return {"processor": "", "threads": 1, "torch": ""}

    monkeypatch.setattr("contest.run", remember)
    monkeypatch.setattr("attention.measure", remember)
    monkeypatch.setattr("attention.print_row", lambda row: None)
    monkeypatch.setattr("attention.circumstances", remember)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for number, words in _started(item, tmp_path).values():
        monkeypatch.setattr(sys, "argv", words)
        before = len(asked)
        import_module(Path(words[0]).stem).main()
        assert len(asked) > before, number


# The programs of training are run at tiny sizes by the tests of the programs.
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("item", "n_programs"), [("attention", 2), ("decoding", 4)])
def test_an_item_runs_at_tiny_sizes_on_a_processor(
    item: str, n_programs: int, tmp_path: Path
) -> None:
    settings = {"TRY": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        ["sh", str(GPU / "queue.sh"), item],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    files = [*tmp_path.glob("*.json")]
    assert len(files) == n_programs
    assert all(json.loads(file.read_text())["rows"] for file in files)


def test_the_command_line_understands_what_the_queue_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformer_xl.cli import main

    for item in RECIPES:
        ((_, (_, _, *words)),) = _started(item, tmp_path / item).values()
        words[words.index("--data.path") + 1] = str(tmp_path / "nothing")
        words[words.index("--out") + 1] = str(tmp_path / "run")
        # A setting that is not understood would be 2.
        assert main(words) == 1, item
        assert "there is no file or folder" in capsys.readouterr().err, item
