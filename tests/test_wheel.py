"""The wheel works outside the repository, with what it requires and with each extra alone.

Nothing is downloaded: the environments hold links to the packages installed here, of which each
gets only those that the wheel's own metadata asks for.
"""

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from transformer_xl.config.shipped import ShippedModel

ROOT = Path(__file__).parents[1]
RECIPE = """\
# A tiny model of bytes.
[model]
n_layer = 2
n_head = 2
d_model = 16
d_inner = 32
mem_len = 8
[data]
path = "text.txt"
vocab = "bytes"
[train]
steps = 6
batch_size = 2
segment_len = 8
"""
EXTRAS = {
    "": "import transformer_xl as txl; txl.TransformerXL.from_pretrained('run')",
    "compress": "import constriction",
    "onnx": "from transformer_xl.interop.export import export; export('run', 'onnx')",
    "plot": "from transformer_xl.train.figures import rendered; rendered('svg', print)",
    "serve": "import transformer_xl.apps.serve.server",
    "data": "import datasets, zstandard",
    "music": "from transformer_xl.tasks.music import midi; assert midi([(60,)])[:4] == b'MThd'",
    "hf": "import transformers, transformer_xl.hf as hf; hf.TransformerXLConfig()",
    "eval": "import transformer_xl.harness",
}
"""What must run with an extra alone; the first with none."""

pytestmark = pytest.mark.slow


def required(dist: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what a package requires here, with extras of its own."""
    for line in dist.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": x}) for x in (extras or {""}) | {""}):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def closure(dist: Distribution, extra: str) -> set[str]:
    """Return the names of all packages that a package with one extra needs."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [*required(dist, frozenset({extra}))]
    while waiting:
        name, extras = each = waiting.pop()
        if each not in found:
            found.add(each)
            try:
                waiting += required(distribution(name), extras)
            except PackageNotFoundError:
                pytest.fail(f"{name} is required, but not installed here")
    return {name for name, _ in found}


def link(names: set[str], site: Path) -> None:
    """Put links to installed packages into an environment."""
    for name in names:
        dist = distribution(name)
        tops = {file.parts[0] for file in dist.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            target = Path(str(dist.locate_file(top)))
            if not (site / top).exists():
                (site / top).symlink_to(target)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        (source / name).symlink_to(ROOT / name)
    command = ["wheel", ".", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([sys.executable, "-m", "pip", *command], cwd=source, check=True)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes environments with the wheel and an extra; returns their Python."""

    def make(extra: str) -> Path:
        folder = tmp_path / "environment"
        venv.create(folder, with_pip=False)
        python = folder / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--no-input"]
        install = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
        subprocess.run(install, check=True)
        (site,) = (folder / "lib").glob("python*/site-packages")
        (info,) = site.glob("transformer_xl-*.dist-info")
        link(closure(Distribution.at(info), extra), site)
        subprocess.run([*pip, "check"], check=True)
        return python

    return make


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_wheel_works_with_one_extra(
    installed: Callable[[str], Path], tmp_path: Path, extra: str, is_nightly: bool
) -> None:
    if extra not in ("", "compress") and not is_nightly:
        pytest.skip("of the extras one stands for the others, but for pytest --nightly")
    python = installed(extra)
    keep = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str) -> str:
        call = subprocess.run(
            [python, "-I", *command], cwd=tmp_path, env=keep, capture_output=True, text=True
        )
        assert call.returncode == 0, f"{command}: {call.stderr}"
        return call.stdout

    where = run("-c", "import transformer_xl; print(transformer_xl.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "environment")
    assert run("-m", "transformer_xl", "--version").strip()
    known = json.loads(run("-m", "transformer_xl", "models", "--json"))
    assert [*known] == [model.name for model in ShippedModel.newest()]
    (tmp_path / "text.txt").write_text("the cat saw a dog and ran to the sea.\n" * 100)
    (tmp_path / "mine.toml").write_text(RECIPE)
    run("-m", "transformer_xl", "train", "mine.toml", "--out", "run", "--quiet")
    run("-c", EXTRAS[extra])


def test_the_wheel_has_the_shipped_models(wheel: Path) -> None:
    folder = ROOT / "src" / "transformer_xl" / "pretrained"
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    for path in folder.rglob("*"):
        if path.is_file():
            assert found[str(path.relative_to(ROOT / "src"))] == path.read_bytes()
