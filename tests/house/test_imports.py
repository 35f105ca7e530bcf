"""Importing is quick and does nothing, and goes only downward."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
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


def _past_doors(source: Path) -> Iterator[str]:
    """Name the imports from another package that are not names of its ``__all__``.

    Of the programs (apps, interop, studies, tasks), and of inference's evaluate and generate, each
    file or folder is a package of its own.
    """
    nested = ("apps", "interop", "studies", "tasks")
    for file in sorted(source.rglob("*.py")):
        own = file.relative_to(source).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            module = getattr(node, "module", None) or ""
            if not (isinstance(node, ast.ImportFrom) and module.startswith("transformer_xl.")):
                continue
            _, package, *inside = module.split(".")
            if package in (own, "errors"):
                continue
            is_nested = package in nested or inside[:1] in (["evaluate"], ["generate"])
            door = import_module(module)
            unknown = {x.name for x in node.names} - {*getattr(door, "__all__", dir(door))}
            if len(inside) > is_nested or (unknown and not is_nested):
                yield f"{file.relative_to(source)}:{node.lineno}: {module}"


def test_packages_are_imported_through_their_doors(tmp_path: Path) -> None:
    assert not [*_past_doors(ROOT / "src" / "transformer_xl")]
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "new.py").write_text(
        "from transformer_xl.model import Memory\nfrom transformer_xl.model.memory import Memory\n"
        "from transformer_xl.inference.generate.batch import generate\n"
        "from transformer_xl.data import half_of_it\n"
    )
    assert [x.split(":")[1] for x in _past_doors(tmp_path)] == ["2", "3", "4"]


def test_an_import_upward_is_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    planted = tmp_path / "src" / "transformer_xl" / "model" / "planted.py"
    planted.write_text("from transformer_xl.train import train\n")
    result = _lint_imports(tmp_path)
    assert result.returncode != 0
    assert "transformer_xl.model.planted -> transformer_xl.train" in result.stdout
