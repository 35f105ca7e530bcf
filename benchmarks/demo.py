"""The demo: trains it, measures what it writes, and puts the figures into README and documents.

    python benchmarks/demo.py                      # train, measure, write README.md and docs/
    python benchmarks/demo.py --run runs/demo      # the same with a run that is there
    python benchmarks/demo.py --samples            # only the text of a shipped model, in README.md

Three parts of README.md and docs/results.md stand between `<!-- NAME -->` and `<!-- /NAME -->`, and
are replaced: what a shipped model writes, what the demo prints, and the table of its figures. The
picture of the report is drawn anew. All figures of one call are of one machine, which is named.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from marked_tables import row, table
from revision import ROOT
from writing_rows import writing_rows

from transformer_xl.config.files import replace_file
from transformer_xl.config.recipes import recipe_of
from transformer_xl.data import prepare
from transformer_xl.studies.contestant import tokens_read
from transformer_xl.train import RunFolder
from transformer_xl.train.figures import SIZE, draw_loss, draw_memory, rendered
from transformer_xl.train.report import Run

README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
SAMPLE = ("generate", "shakespeare", "--prompt", "ROMEO:", "--length", "320")
LOG = "printed.txt"
"""What a training of this program printed, in its run folder."""
KEPT = re.compile(r"(\d[\d,]* parameters on|memory +\d+:|gzip:|evaluating the best)")
"""Lines of the demo that the README shows, beside the first of training."""


def replace_part(path: Path, name: str, content: str) -> None:
    """Replace a part of a document.

    Raises:
        ValueError: The document has no such part.
    """
    text = path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path} has no part between {begin.strip()} and {end.strip()}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    replace_file(path, f"{before}{begin}{content.strip()}\n{end}{after}".encode())


def run_txl(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command, keep what it prints, and pass on what it says beside."""
    command = [sys.executable, "-m", "transformer_xl", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    sys.stderr.write(done.stderr)
    done.check_returncode()
    return done


def printed(log: str) -> str:
    """Return the lines of a demo that the README shows.

    Raises:
        ValueError: It has none of a training.
    """
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", log)]
    first = next((line for line in lines if re.match(r"training +\d+/", line)), None)
    kept = [line for line in lines if KEPT.match(line)]
    if first is None or not kept:
        raise ValueError(f"{LOG} has no line of a training: delete the run, to train it again")
    return "\n".join(["```", kept[0], first, "...", *kept[1:], "```"])


def with_counts(result: dict[str, Any]) -> str:
    """Return the bits per byte with the counts of an n-gram cache, if they were measured."""
    bits = result.get("bits_per_byte_with_cache")
    return "" if bits is None else f"{bits:.4f}"


def figures(run: Path) -> str:
    """Return the section of docs/results.md: machine, losses by memory length, what it writes."""
    about = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    found = json.loads((run / "results.json").read_text(encoding="utf-8"))
    state = RunFolder(run).last_state()
    recipe = recipe_of(run)
    assert recipe is not None
    precision = re.search(r" on \w+ in (\w+)", (run / LOG).read_text(encoding="utf-8"))
    curve = {x["mem_len"]: x for x in [*found["memory_curve"], found["test"]]}
    real, own = writing_rows(run, prepare(recipe.data), "--python")
    about_run = (
        f"{state['seconds'] / 60:.1f} minutes of training, {state['step']:,} steps, "
        f"{tokens_read(state) / 1e6:.1f} M tokens; {about['processor']}, "
        f"{about['threads']} threads, {precision[1] if precision else ''}, torch "
        f"{about['packages']['torch']}, revision {about['revision']}. "
        "Source code of the standard library of Python "
        f"{about['python']}; the test text is whole files that were held out."
    )
    losses = [
        row(n, f"{x['nll']:.4f}", f"{x['bits_per_byte']:.4f}", with_counts(x))
        for n, x in sorted(curve.items())
    ]
    for name in ("gzip -9", "xz -9e"):
        bits = f"{found[f'{name.split()[0]}_bits_per_byte']:.4f}"
        losses.append(row(f"`{name}`", "", bits, ""))
    written = [
        row(name, *(f"{x[y]:.1%}" for y in ("repeated_4grams", "adjacent_equal")),
            f"{x['longest_repeat']:.0f}", f"{x['parses']:.0%}")
        for name, x in (("test text", real), ("demo", own))
    ]  # fmt: skip
    figures_of = "|repeated 4-grams|adjacent equal tokens|longest repeat, tokens|parses"
    return "\n\n".join(
        [
            about_run,
            table("memory|nats per token|bits per byte|with counts", losses, n_texts=4),
            "What it writes: 20 prompts from the test text, 2,000 tokens each.",
            table(figures_of, written, n_texts=5),
        ]
    )


def main() -> None:
    """Train if need be, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "demo")
    parser.add_argument("--samples", action="store_true", help="only the shipped model's text")
    given = parser.parse_args()
    log = given.run / LOG
    if not given.samples and given.run.exists() and not log.is_file():
        parser.exit(
            1,
            f"{given.run} has no {LOG}, as it was not trained by this program: give another --run, "
            "which may be new, and is trained then\n",
        )
    if not given.samples and not log.is_file():
        # First, while no file is changed that the revision would call uncommitted.
        done = run_txl("train", "demo", "--out", str(given.run))
        replace_file(log, (done.stderr + done.stdout).encode())
    sample = run_txl(*SAMPLE).stdout.rstrip()
    command = f"txl {shlex.join(SAMPLE)}"
    replace_part(README, "sample", f"```\n$ {command}\n{sample}\n```")
    if given.samples:
        return
    replace_part(README, "demo", printed(log.read_text(encoding="utf-8")))
    replace_part(RESULTS, "demo", figures(given.run))
    run = Run(given.run)

    def draw(figure: Any) -> None:
        left, right = figure.subfigures(1, 2)
        draw_loss(left, run.train, run.valid)
        draw_memory(right, run.curve, run.baselines, run.trained_mem_len)

    picture = rendered("png", draw, (2 * SIZE[0], SIZE[1]))
    replace_file(ROOT / "docs" / "images" / "demo.png", picture)


if __name__ == "__main__":
    main()
