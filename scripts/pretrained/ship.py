"""Measure a model that was trained for the package, write its card, and put it into the package.

    python scripts/pretrained/ship.py python-code 1

It reads the run runs/pretrained/NAME/run and its corpus, chooses the memory that is best on the
validation text, adds the preface prefaces/NAME.txt where there is one, and rounds the weights to
bfloat16. Of those it measures the loss on the test text, and what measuring.py has for this model.
The card is scripts/pretrained/cards/NAME.md with the figures in their places; between the two lines
of +++ stands the card for programs. shipping.py writes the folder.

Refused are a run that has not ended, one of another recipe than the repository's, one whose loss is
not the measured one, and a checkout with uncommitted changes, but for --dirty.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measuring import MEASURED, Figures  # noqa: E402
from revision import commit  # noqa: E402
from shipping import new_target, put, require_own_package, write_rounded  # noqa: E402

from transformer_xl.config import Config  # noqa: E402
from transformer_xl.config.checks import require  # noqa: E402
from transformer_xl.config.files import checksum  # noqa: E402
from transformer_xl.config.recipes import load_recipe  # noqa: E402
from transformer_xl.config.shipped import CARD_FILE, TEXT_FILE  # noqa: E402
from transformer_xl.data import Corpus, prepare  # noqa: E402
from transformer_xl.inference.evaluate import Result, evaluate_by  # noqa: E402
from transformer_xl.model import LanguageModel, load_model  # noqa: E402
from transformer_xl.train import RunFolder  # noqa: E402
from transformer_xl.train.checkpoint.run_folder import RECIPE_FILE, RESULTS_FILE  # noqa: E402

RECIPES = ROOT / "src" / "transformer_xl" / "config" / "recipes"
CARDS, PREFACES = (Path(__file__).parent / x for x in ("cards", "prefaces"))
SOURCES_FILE = "sources.md"
"""Stands beside the training text of python_code.py; the card has its content."""
MAY_DIFFER = (
    *("eval.", "generate.", "data.path", "data.valid_path", "data.test_path", "data.cache_dir"),
    *("data.workers", "data.verify"),
    # Set from the corpus.
    *("model.vocab_size:", "model.reset_at:"),
)
"""Settings in which the recipe of the run may differ from that of the repository."""
MOST_ROUNDING = 0.002
"""Rounding the weights to bfloat16 changes the loss by less than this share of it: it was 0.00003
for the chorales, and 0.0001 for Shakespeare."""
SAME = ("split", "tokens", "segment_len", "mem_len", "attn_len", "clamp_len", "window")
"""What an evaluation has in common with that of the run, of which it has the loss."""


def require_same_recipe(run: Path, recipe: Path) -> Config:
    """Require that a run was trained by a recipe; return that of the run.

    Raises:
        FileNotFoundError: The run has no recipe.
        ValueError: They differ.
    """
    own = load_recipe(run / RECIPE_FILE, is_stored=True)
    found = [x for x in own.differences(load_recipe(recipe)) if not x.startswith(MAY_DIFFER)]
    require(
        not found,
        f"{run} was trained by another recipe than {recipe} (there, here): {'; '.join(found)}. "
        "Train again, or give the recipe the settings of the run",
    )
    return own


def results_of(run: Path) -> Figures:
    """Return what a run found at its end.

    Raises:
        FileNotFoundError: It has not ended.
    """
    path = run / RESULTS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: the run has not ended. The command of its training goes on with it"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def require_same_loss(found: Figures, results: Figures) -> None:
    """Require that the rounded weights have the loss that the run found at its end.

    Raises:
        ValueError: They have another one, or the evaluations cannot be compared.
    """
    rows = {row["mem_len"]: row for row in results["memory_curve"]}
    stored = rows.get(found["mem_len"], results["test"])
    other = [
        f"{name}={stored.get(name)} there, {found[name]} here"
        for name in SAME
        if stored.get(name) != found[name]
    ]
    require(
        not other,
        f"{RESULTS_FILE} of the run is of another evaluation: {', '.join(other)}. Call `txl train` "
        "on it again with the recipe's settings of evaluation, and the text of its training",
    )
    require(
        abs(found["nll"] - stored["nll"]) <= MOST_ROUNDING * stored["nll"],
        f"the loss is {found['nll']:.4f}, and {stored['nll']:.4f} in {RESULTS_FILE} of the run: "
        f"rounding to bfloat16 changes it by less than {MOST_ROUNDING:.1%}. Is its best model, or "
        "its text, of another training?",
    )


def require_committed() -> None:
    """Require that no tracked file of the checkout has changes.

    Raises:
        ValueError: Some have.
    """
    words = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    changed = [line[3:] for line in done.stdout.splitlines()]
    require(
        not changed,
        f"{', '.join(changed[:5])} {'and others ' if changed[5:] else ''}have uncommitted changes, "
        "so that no revision says what was measured: commit them, or give --dirty",
    )


def origin(about: Figures, today: str, revision: str) -> str:
    """Return the sentence about revision and date: of training, or where unknown of measuring."""
    torch = about["packages"]["torch"]
    if about.get("revision") and about.get("date"):
        return (
            f"Trained with revision {about['revision']} of this repository, on {about['date']}; "
            f"torch {torch}. Measured with revision {revision}, on {today}."
        )
    return f"Measured with revision {revision} of this repository, on {today}; torch {torch}."


def background(name: str, run: Path, recipe: Config) -> Figures:
    """Return what the card says about the training of a run.

    Raises:
        FileNotFoundError: A file of the run or of its text is missing.
    """
    about = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    state = RunFolder(run).last_state()
    found = {x: about[x] for x in ("processor", "threads", "python")} | {
        "origin": origin(about, date.today().isoformat(), commit()),
        "steps": state["step"],
        "hours": state["seconds"] / 3600,
    }
    if name != "chorales":
        found["text_sha256"] = checksum(Path(str(recipe.data.path)))
    if name == "python-code":
        path = Path(str(recipe.data.path)).parent / SOURCES_FILE
        found["sources"] = path.read_text(encoding="utf-8").strip()
    return found


def evaluated(model: LanguageModel, recipe: Config, corpus: Corpus, split: str) -> Result:
    """Evaluate a model on a text of the corpus, as the recipe says."""
    return evaluate_by(
        recipe.eval,
        model,
        corpus.split(split),
        vocab=corpus.vocab,
        n_bytes=corpus.n_bytes(split),
        segment_len=recipe.train.segment_len,
    )


def best_memory(run: Path, recipe: Config, corpus: Corpus) -> int:
    """Return the memory, of those that the recipe compares, that is best on the validation text."""
    model, found = load_model(run), {}
    for mem_len in recipe.eval.mem_lens:
        settings = replace(recipe, eval=replace(recipe.eval, mem_len=mem_len))
        found[mem_len] = evaluated(model, settings, corpus, "valid").nll
        print(f"memory {mem_len}: {found[mem_len]:.4f} nats per token of the validation text")
    return min(found, key=found.__getitem__, default=model.config.mem_len)


def losses(folder: Path, recipe: Config, corpus: Corpus) -> Figures:
    """Evaluate a model on the held-out text, and count its parameters."""
    model, split = load_model(folder), corpus.held_out
    result = asdict(evaluated(model, recipe, corpus, split))
    n_parameters = sum(x.numel() for x in model.parameters())
    n_preface = len(model.preface)
    return {**result, "split": split, "parameters": n_parameters, "n_preface": n_preface}


LOSSES = (
    "nll",
    "ppl",
    "bits_per_token",
    "bpc",
    "bits_per_byte",
    "mem_len",
    "parameters",
    "n_preface",
)
"""Numbers of :func:`losses` that a card may have."""


def card(name: str, found: Figures) -> tuple[str, str]:
    """Return the card for programs and the card for readers, with the figures in their places.

    Raises:
        ValueError: The card has a place for a figure that is not measured.
    """
    path = CARDS / f"{name}.md"
    _, head, text = path.read_text(encoding="utf-8").split("+++\n", 2)
    try:
        return head.strip().format(**found) + "\n", text.strip().format(**found) + "\n"
    except KeyError as error:
        raise ValueError(
            f"{path} has {{{error.args[0]}}}, which is not measured; known are {', '.join(found)}"
        ) from error


def main() -> None:
    """Check, measure, write the card, ship."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*MEASURED])
    parser.add_argument("version", type=int)
    parser.add_argument("--run", type=Path, help="default runs/pretrained/NAME/run")
    parser.add_argument("--dirty", action="store_true", help="also with uncommitted changes")
    given = parser.parse_args()
    try:
        print(shipped(given.name, given.version, given.run, is_dirty=given.dirty))
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


def shipped(name: str, version: int, run: Path | None = None, *, is_dirty: bool = False) -> Path:
    """Ship the model of a run, by default runs/pretrained/NAME/run; return its folder.

    Raises:
        OSError: This version is there already, or the run or its text is incomplete.
        ValueError: Something is wrong; nothing was written.
    """
    require_own_package()
    target = new_target(name, version)
    run = run or ROOT / "runs" / "pretrained" / name / "run"
    recipe = RECIPES / f"{name}.toml"
    settings = require_same_recipe(run, recipe)
    results = results_of(run)
    if not is_dirty:
        require_committed()
    measurement, corpus = MEASURED[name], prepare(settings.data)
    preface = PREFACES / f"{name}.txt"
    text = preface.read_text(encoding="utf-8") if preface.is_file() else ""
    known: dict[str, Any] = {"version": version, **background(name, run, settings)}
    # So that a mistake in the card is found before anything is measured.
    card(name, known | dict.fromkeys((*LOSSES, *measurement.names), 0))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / target.name
        write_rounded(run, folder, recipe, best_memory(run, settings, corpus), text)
        found = known | losses(folder, settings, corpus)
        require_same_loss(found, results)
        found |= measurement.measure(folder, corpus)
        print(json.dumps(found, indent=1))
        for file, content in zip((CARD_FILE, TEXT_FILE), card(name, found), strict=True):
            (folder / file).write_text(content, encoding="utf-8")
        put(folder, target)
    return target


if __name__ == "__main__":
    main()
