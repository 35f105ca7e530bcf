"""One name, one meaning: the figures that commands print and files hold are those of the table."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.train.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

DOCUMENT = Path(__file__).parents[2] / "docs" / "glossary.md"
SETTINGS = {"dynamic_lr", "dynamic_decay", "dynamic_eps", "temperature", "threshold", "top"}
"""Numbers that somebody has chosen: nothing that was measured."""


def table() -> dict[str, str]:
    """Where each figure is, as the document says."""
    _, section = DOCUMENT.read_text("utf-8").split("\n## Figures\n")
    rows = re.findall(r"^\| (`.*?`) \|.*\| (.*) \|$", section.split("\n## ")[0], re.M)
    return {name: where for names, where in rows for name in re.findall(r"`(\w+)`", names)}


def figures(found: Any, name: str = "") -> Iterator[str]:
    """The names of all numbers with a fraction, at any depth."""
    if isinstance(found, dict):
        if name in ("init", "best"):
            yield name
            return
        for key, value in found.items():
            if key not in ("settings", "recipe", "model", "train", "environment"):
                yield from figures(value, key)
    elif isinstance(found, list):
        for value in found:
            yield from figures(value, name)
    elif isinstance(found, float):
        yield name


def outputs(
    trained: Path, text: Path, txl: Callable, folder: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the commands print, and what files hold, under the name that the table has for it."""

    def found(*words: object) -> Any:
        ended = txl(*words, "--json")
        assert ended.code == 0, ended.err
        return json.loads(ended.out.splitlines()[-1])

    yield "txl eval", found("eval", trained, "--eval.mem_lens", 0, 3)
    learning = ("--eval.dynamic", "rms", "--eval.dynamic_tokens", 100)
    yield "txl eval", found("eval", trained, "--file", text, *learning)
    yield "txl train", found("train", trained / "recipe.toml", "--out", trained, "--quiet")
    yield "txl train", json.loads((trained / "results.json").read_text())
    yield "metrics.jsonl", {"all": read_metrics(trained / "metrics.jsonl")}
    yield "txl score", found("score", trained, text)
    yield "txl score", found("score", trained, text, "--by", "line")
    small = ("--recl.step", 4, "--recl.longest", 12, "--recl.tokens", 20)
    yield "txl recl", found("recl", trained, *small)
    yield "txl compress", found("compress", text, folder / "text.txl", "--model", trained)


def test_every_figure_that_is_printed_or_stored_is_in_the_table(
    trained: Path, text: Path, txl: Callable, tmp_path: Path
) -> None:
    where = table()
    for place, found in outputs(trained, text, txl, tmp_path):
        names = set(figures(found)) - SETTINGS
        assert names
        assert names <= set(where), place
        assert not {name for name in names if place not in where[name]}, place
