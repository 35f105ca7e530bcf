"""Measure a model that was trained for the package, write its card, and put it into the package.

    python scripts/pretrained/ship.py python-code 1

It reads the run runs/pretrained/NAME/run and its corpus, rounds the weights to bfloat16, and
measures those: the loss on the test text, what the model writes (benchmarks/writing.py), how it
compresses. The card is scripts/pretrained/cards/NAME.md with the figures in their places; between
the two lines of +++ stands the card for programs. benchmarks/shipping.py writes the folder.
"""

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from revision import commit  # noqa: E402
from shipping import ship, write_rounded  # noqa: E402
from tang_poems import is_in_form  # noqa: E402

from transformer_xl.cli.loading import load  # noqa: E402
from transformer_xl.config.recipes import generation_of, recipe_of  # noqa: E402
from transformer_xl.data import Corpus, prepare  # noqa: E402
from transformer_xl.inference.evaluate.measuring import evaluate_by  # noqa: E402
from transformer_xl.inference.generate import (  # noqa: E402
    for_tokens,
    from_pretrained,
    generate_batch,
)
from transformer_xl.train.checkpoint.checkpoints import read_about  # noqa: E402

Figures = dict[str, Any]

UNSEEN = ("drawing/nx_pylab.py", "utils/backends.py", "algorithms/shortest_paths/weighted.py")
"""Files of the held-out package networkx, of about 100 kB each."""


def _txl(*words: str | Path) -> Any:
    """Run a command, and return the JSON object that it prints."""
    command = [sys.executable, "-m", "transformer_xl", *map(str, words), "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _written(folder: Path, corpus: Corpus, *words: str) -> Figures:
    """Run benchmarks/writing.py; return the figures of the real text and of the model."""
    program = ROOT / "benchmarks" / "writing.py"
    with tempfile.TemporaryDirectory() as temporary:
        paths = {part: Path(temporary) / part for part in ("train", "held_out", "json")}
        for part, split in (("train", "train"), ("held_out", held_out(corpus))):
            text = corpus.vocab.decode(corpus.split(split).tolist())
            paths[part].write_text(text, encoding="utf-8")
        options = {"text": "held_out", "training": "train", "json": "json"}
        given = [x for name, part in options.items() for x in (f"--{name}", str(paths[part]))]
        command = [sys.executable, str(program), str(folder), *given, *words]
        subprocess.run(command, cwd=ROOT, check=True)
        rows = json.loads(paths["json"].read_text(encoding="utf-8"))["rows"]
    real, own = rows.values()
    return {f"real_{name}": x for name, x in real.items()} | own


def held_out(corpus: Corpus) -> str:
    """Return which split is measured: the test text, or without one the validation text."""
    return "test" if corpus.n_tokens("test") else "valid"


def compressed(folder: Path) -> Figures:
    """Compress three files of the held-out package, alone and with what it learns on the way."""
    import networkx

    root = Path(networkx.__file__).parent
    sizes: dict[str, int] = {"xz": 0, "own": 0, "learn": 0, "whole": 0}
    for name in UNSEEN:
        content = (root / name).read_bytes()
        sizes["whole"] += len(content)
        sizes["xz"] += len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
        for kind, words in (("own", []), ("learn", ["--learn"])):
            with tempfile.TemporaryDirectory() as temporary:
                out = Path(temporary) / "file.txl"
                _txl("compress", root / name, out, "--model", folder, *words)
                sizes[kind] += out.stat().st_size
    return {
        "xz_ratio": sizes["own"] / sizes["xz"],
        "xz_ratio_learning": sizes["learn"] / sizes["xz"],
    }


def _poems_in_form(folder: Path, corpus: Corpus) -> Figures:
    """Write 100 poems to titles of the test text; return the share whose lines have one length."""
    text = corpus.vocab.decode(corpus.split("test").tolist())
    titles = [x.partition("\n")[0] + "\n" for x in text.split("\n\n")[:100]]
    model, vocab = load(folder)
    settings = for_tokens(generation_of(folder).sampling, vocab)
    prompts = [vocab.encode("\n\n" + title) for title in titles]
    poems = generate_batch(model, prompts, length=400, seed=1, **settings).decode(vocab, "\n\n")
    return {"in_form": sum(map(is_in_form, poems)) / len(poems)}


def _python(folder: Path, corpus: Corpus) -> Figures:
    return _written(folder, corpus, "--python") | compressed(folder)


MEASURED: dict[str, Callable[[Path, Corpus], Figures]] = {
    "python-code": _python,
    "english": _written,
    "shakespeare": _written,
    "tang-poems": _poems_in_form,
    "chorales": lambda folder, corpus: {},
}


def figures(name: str, folder: Path, run: Path) -> Figures:
    """Return all figures of a model, by the names that its card has."""
    recipe = recipe_of(run)
    assert recipe is not None
    corpus = prepare(recipe.data)
    split = held_out(corpus)
    model, vocab = from_pretrained(folder)
    length = recipe.train.segment_len
    result = evaluate_by(
        recipe.eval,
        model,
        corpus.split(split),
        vocab=vocab,
        n_bytes=corpus.n_bytes(split),
        segment_len=length,
    )
    about = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    state = read_about(max((run / "checkpoints").glob("step_*")))
    found = asdict(result) | {x: about[x] for x in ("processor", "threads", "python")}
    found |= {
        "split": split,
        "parameters": sum(x.numel() for x in model.parameters()),
        "torch": about["packages"]["torch"],
        "steps": state["step"],
        "hours": state["seconds"] / 3600,
        "date": date.today().isoformat(),
        "revision": commit(),
    }
    return found | MEASURED[name](folder, corpus)


def main() -> None:
    """Measure, write the card, ship."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=[*MEASURED])
    parser.add_argument("version", type=int)
    parser.add_argument("--run", type=Path, help="default runs/pretrained/NAME/run")
    given = parser.parse_args()
    run = given.run or ROOT / "runs" / "pretrained" / given.name / "run"
    recipe = ROOT / "src/transformer_xl/config/recipes" / f"{given.name}.toml"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / given.name
        write_rounded(run, folder, recipe)
        found = figures(given.name, folder, run)
        print(json.dumps(found, indent=1))
        head, text = card(given.name, found)
        for file, content in (("model.toml", head), ("card.md", text)):
            (Path(temporary) / file).write_text(content, encoding="utf-8")
        files = Path(temporary) / "card.md", Path(temporary) / "model.toml"
        print(ship(run, given.name, given.version, *files, recipe))


def card(name: str, found: Figures) -> tuple[str, str]:
    """Return the card for programs and the card for readers, with the figures in their places."""
    written = (Path(__file__).parent / "cards" / f"{name}.md").read_text(encoding="utf-8")
    sources = ROOT / "runs" / "pretrained" / name / "text" / "sources.md"
    if sources.is_file():
        found = found | {"sources": sources.read_text(encoding="utf-8").strip()}
    _, head, text = written.split("+++\n", 2)
    return head.strip().format(**found) + "\n", text.strip().format(**found) + "\n"


if __name__ == "__main__":
    main()
