"""A corpus tokenized by datatrove's executors has the bytes of one prepared by `prepare`."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data import prepare
from transformer_xl.data import preparing as preparing_module

pytest.importorskip("datatrove", reason="needs pip install datatrove")
pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "examples" / "tokenize_with_datatrove.py"

# The commands of Slurm that the executor calls: jobs of an array, one after another.
SLURM = {
    "sbatch": """
script="${!#}"
count=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
[ -z "$count" ] || for n in $(seq 0 "$count"); do
    RUN_OFFSET=0 SLURM_ARRAY_TASK_ID=$n SLURM_NODELIST=here bash "$script" >&2 || true
done
echo "Submitted batch job 7"
""",
    "srun": 'while [[ "$1" == -* ]]; do [ "$1" != -n ] || shift; shift; done; exec "$@"\n',
    # Its first answer fails, and the job is still running. Then it has ended.
    "squeue": """
[ -e "$0.asked" ] || { touch "$0.asked"; echo "Unable to contact slurm controller" >&2; exit 1; }
""",
    "scontrol": "echo here\n",
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of a text\n" for n in range(3000)))
    return path


@pytest.fixture
def environment(tmp_path):
    """An environment with Slurm's commands, in which parts are small."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in SLURM.items():
        (commands / name).write_text("#!/bin/bash\n" + script)
        (commands / name).chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import transformer_xl.data.preparing as p; p.PART_BYTES = 10_000\n"
    )
    path = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": str(tmp_path)}


def run(text, environment, *arguments):
    command = [sys.executable, PROGRAM, text, "--cache", text.parent / "cache", *arguments]
    command += ["--logs", text.parent / "logs", "--vocab", "words"]
    return subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )


def files(folder):
    (manifest,) = folder.glob("*/manifest.json")
    return {path.name: path.read_bytes() for path in manifest.parent.iterdir()}


@pytest.mark.parametrize("arguments", [(), ("--slurm", "cpu")], ids=["local", "slurm"])
def test_the_corpus_is_that_of_prepare(text, environment, arguments, monkeypatch, tmp_path):
    monkeypatch.setattr(preparing_module, "PART_BYTES", 10_000)
    config = DataConfig(path=str(text), cache_dir=str(tmp_path / "one"), vocab="words")
    prepare(config)
    done = run(text, environment, *arguments)
    assert done.returncode == 0, done.stderr
    expected, found = files(tmp_path / "one"), files(tmp_path / "cache")
    assert len(expected["train.bin"]) > 10_000
    assert {name: found.get(name) for name in expected if name != "verified.json"} == {
        name: content for name, content in expected.items() if name != "verified.json"
    }
    said = []
    prepare(replace(config, cache_dir=str(tmp_path / "cache")), said.append)
    assert not [line for line in said if line.startswith("writing")]


def test_a_job_that_ends_without_its_files_is_an_error_and_a_repeated_call_resumes(
    text, environment, tmp_path
):
    failing = tmp_path / "bin" / "srun"
    working = failing.read_text()
    failing.write_text('#!/bin/bash\n[ "$SLURM_ARRAY_TASK_ID" != 2 ] || exit 1\n' + working)
    first = run(text, environment, "--slurm", "cpu", "--absent-seconds", "1")
    assert first.returncode != 0
    assert "tasks were not completed" in first.stderr
    assert "resume" in first.stderr
    failing.write_text(working)
    second = run(text, environment, "--slurm", "cpu")
    assert second.returncode == 0, second.stderr
    assert "counted before" in second.stdout
