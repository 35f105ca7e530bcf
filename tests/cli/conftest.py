"""A trained run, and `txl` as a function."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from transformer_xl.cli import main

TEXT = "the cat saw a dog.\nthe dog ran to sea.\n" * 5


class Ended(NamedTuple):
    """What a command line left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout; an error when there is anything else."""
        (line,) = self.out.splitlines()
        return json.loads(line)


@pytest.fixture
def txl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command line in this process."""

    def run(*words: object) -> Ended:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that holds TEXT."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Set what the standard input holds."""

    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


@pytest.fixture(scope="session")
def toy_toml(tmp_path_factory: pytest.TempPathFactory, toy_recipe: Callable) -> Path:
    """A recipe file that trains in half a second."""
    path = tmp_path_factory.mktemp("recipes") / "toy.toml"
    path.write_text(toy_recipe(generate={"prompt": "the ", "length": 20}).to_toml())
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, toy_toml: Path) -> Path:
    """The folder of a finished run."""
    import torch

    folder = tmp_path_factory.mktemp("runs") / "toy"
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(["train", str(toy_toml), "--out", str(folder), "--quiet"]) == 0
    torch.set_num_threads(n_threads)
    return folder
