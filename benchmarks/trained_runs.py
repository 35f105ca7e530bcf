"""Run folders as the programs that measure trained models load them, and how they write results."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turns import circumstances

from transformer_xl.config.device import pick_device
from transformer_xl.config.files import replace_file
from transformer_xl.config.recipes import recipe_of
from transformer_xl.data import Vocab, load_vocab
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.lengths import SEGMENT_LEN
from transformer_xl.model.pretrained import find_model_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A trained model."""

    name: str
    model: LanguageModel
    vocab: Vocab
    segment_len: int
    """That of its training."""
    parameters: int

    @property
    def about(self) -> dict[str, Any]:
        """What a result says about it."""
        config = self.model.config
        return {
            "name": self.name,
            "kind": config.kind,
            "parameters": self.parameters,
            "segment_len": self.segment_len,
            "mem_len": config.mem_len if self.model.remembers_positions else None,
            "trained": "from scratch",
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what these programs have in common."""
    parser.add_argument("runs", nargs="+", help="run folders, model folders or names of models")
    parser.add_argument("--segment_len", type=int, help="default: that of the training")
    parser.add_argument("--mem_len", type=int, help="default: as configured")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")


def load_run(folder: str, segment_len: int | None) -> Run:
    """Load a run folder, model folder or shipped model.

    Raises:
        ValueError: There is no such model, or it is damaged.
    """
    model, recipe = load_model(folder).to(pick_device()), recipe_of(folder)
    trained = recipe.train.segment_len if recipe else SEGMENT_LEN
    return Run(
        name=Path(folder).resolve().name,
        model=model,
        vocab=load_vocab(find_model_folder(folder)),
        segment_len=segment_len or trained,
        parameters=sum(p.numel() for p in model.parameters()),
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return a Markdown table, whose first two columns are texts, with notes below."""
    lines = [columns, ["---", "---", *["--:"] * (len(columns) - 2)], *rows]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes])


def write_result(arguments: argparse.Namespace, result: dict[str, Any], shown: str) -> None:
    """Print the table; write it and the result to the files that were given."""
    print(shown)
    if arguments.markdown:
        replace_file(arguments.markdown, f"{shown}\n".encode())
    if arguments.json:
        content = json.dumps(circumstances() | result, indent=1)
        replace_file(arguments.json, f"{content}\n".encode())


def say(message: str) -> None:
    """Print progress."""
    print(message, file=sys.stderr, flush=True)
