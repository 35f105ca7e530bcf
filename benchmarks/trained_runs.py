"""Run folders as the programs that measure trained models load them, and how they write results."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result_file import write_result_file
from turns import circumstances

from transformer_xl.config.device import pick_device
from transformer_xl.config.files import replace_file
from transformer_xl.config.recipes import recipe_of
from transformer_xl.data import Vocab, load_vocab
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.pretrained import find_model_folder
from transformer_xl.model.segment import SEGMENT_LEN, Lengths
from transformer_xl.studies.compare import RUNS_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A trained model."""

    name: str
    model: LanguageModel
    vocab: Vocab
    lengths: dict[str, int | None]
    """How it is read: ``segment_len``, ``mem_len`` and ``attn_len``; None: as configured, or no
    such length."""
    parameters: int

    @property
    def about(self) -> dict[str, Any]:
        """What a result says about it."""
        used = Lengths.of(self.model.config, **self.lengths)
        return {
            "name": self.name,
            "kind": self.model.config.kind,
            "parameters": self.parameters,
            "segment_len": used.segment_len,
            "mem_len": used.mem_len if self.model.remembers_positions else None,
            "attn_len": used.attn_len,
            "trained": "from scratch",
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what these programs have in common."""
    parser.add_argument(
        "runs",
        nargs="+",
        help="run folders, model folders, names of models,\nor folders of `txl compare --out`",
    )
    parser.add_argument("--segment_len", type=int, help="default: that of the training")
    parser.add_argument(
        "--mem_len",
        type=int,
        help="of models that remember positions, and left out for others; default: as configured,\n"
        "and where that is 0, every token sees as many as the context of the training",
    )
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")


def load_runs(arguments: argparse.Namespace) -> Iterator[Run]:
    """Load the models that were named, one after the other.

    Raises:
        ValueError: There is no such model, it is damaged, or its context is not known.
    """
    found = [each for folder in arguments.runs for each in named(folder)]
    for _, folder in found:
        # Before the first one is measured, which may take hours.
        find_model_folder(folder)
    for name, folder in found:
        say(f"measuring {name}")
        lengths = {"segment_len": arguments.segment_len, "mem_len": arguments.mem_len}
        yield load_run(folder, name, **lengths)


def named(folder: str) -> list[tuple[str, str]]:
    """Return run folders with their names; of a comparison, those of all contestants.

    Raises:
        ValueError: No training of the comparison has ended.
    """
    where = Path(folder)
    if not (where / RUNS_FILE).is_file():
        return [(where.resolve().name, folder)]
    # The model is written when the training has ended.
    ended = sorted(path.parents[1] for path in where.glob("*/seed_*/model/best"))
    if not ended:
        raise ValueError(
            f"{folder} has no contestant whose training has ended: see its {RUNS_FILE}"
        )
    contestants = [path.parent.name for path in ended]
    return [
        (name if contestants.count(name) == 1 else f"{name}/{path.name}", str(path))
        for name, path in zip(contestants, ended, strict=True)
    ]


def load_run(folder: str, name: str, *, segment_len: int | None, mem_len: int | None) -> Run:
    """Load a run folder, model folder or shipped model, with the lengths at which it is read.

    So that one call measures models of all kinds, ``mem_len`` holds for those that remember
    positions. A model that was trained without a memory gets that of its context: every token sees
    as many tokens as the last one of a segment in training, itself among them.

    Raises:
        ValueError: There is no such model, it is damaged, or its context is not known.
    """
    model, recipe = load_model(folder).to(pick_device()), recipe_of(folder)
    trained = recipe.train.segment_len if recipe else SEGMENT_LEN
    attn_len = None
    if not model.remembers_positions:
        mem_len = None
    elif mem_len is None and not model.config.mem_len:
        if recipe is None:
            raise ValueError(
                f"{folder} has mem_len=0 and no recipe, so the context of its training is not "
                "known: give --mem_len, or a run folder"
            )
        mem_len, attn_len = trained - 1, trained if model.config.has_attention else None
    return Run(
        name=name,
        model=model,
        vocab=load_vocab(find_model_folder(folder)),
        lengths={
            "segment_len": segment_len or trained,
            "mem_len": mem_len,
            "attn_len": attn_len,
        },
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
        write_result_file(arguments.json, circumstances() | result)


def say(message: str) -> None:
    """Print progress."""
    print(message, file=sys.stderr, flush=True)
