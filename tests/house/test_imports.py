"""Importing is quick and does nothing, and goes only downward."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "tokenizers", "safetensors", "matplotlib")

PROBE = """
import json, sys, time
started = time.perf_counter()
__import__(sys.argv[1])
print(json.dumps([time.perf_counter() - started, sorted(sys.modules)]))
"""


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "module", ["transformer_xl", "transformer_xl.config", "transformer_xl.cli"]
)
def test_the_door_opens_without_torch(module: str) -> None:
    result = subprocess.run([sys.executable, "-c", PROBE, module], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    seconds, loaded = json.loads(result.stdout)
    heavy = {*HEAVY} & {*loaded}
    assert not heavy, f"importing {module} loads {heavy}"
    # Loose, for busy machines; benchmarks report the real figure.
    assert seconds < 1, f"importing {module} took {seconds:.2f} s"


def test_training_is_imported_without_what_reads_settings_and_writes_pages() -> None:
    # A borrowed machine with a GPU has torch and little else.
    command = [sys.executable, "-c", PROBE, "transformer_xl.train"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not {"msgspec", "tyro", "tomli_w", "matplotlib"} & {*json.loads(result.stdout)[1]}


def test_packages_import_only_downward() -> None:
    result = _lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_import_upward_is_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    planted = tmp_path / "src" / "transformer_xl" / "model" / "planted.py"
    planted.write_text("from transformer_xl.train import train\n")
    result = _lint_imports(tmp_path)
    assert result.returncode != 0
    assert "transformer_xl.model.planted -> transformer_xl.train" in result.stdout
