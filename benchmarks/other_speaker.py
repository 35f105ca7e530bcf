"""Spoken digits of another speaker: trained on one of the two training speakers, without the test.

    python benchmarks/other_speaker.py ../shared/data/spoken-digits --shrinkage 1 0.25
    python benchmarks/other_speaker.py ../shared/data/spoken-digits --copies 75 --recipe mine.toml
    python benchmarks/other_speaker.py ../shared/data/spoken-digits --shares 0.6 0.8

The settings of docs/tasks/digits.md were chosen so. The measure is the accuracy on all recordings
of the other speaker in the training archive, in percent, the mean of both directions and of all
seeds. With --shrinkage 1, the correlations between bands stay. With --shares, the model is adapted
to the other speaker without labels, as the task digits-adapted does; with none after it, by the
frequencies of the digits only.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from result_file import write_result_file
from turns import circumstances

from transformer_xl.tasks.digits import speech
from transformer_xl.tasks.digits import task as spoken_digits
from transformer_xl.tasks.digits.task import AdaptedDigits, Named, SpokenDigits, recordings_of
from transformer_xl.tasks.run import run_task


class OtherSpeaker(SpokenDigits):
    """The task with one speaker to train on, and the other one for the test."""

    name = "other-speaker"


def adapted_to_other(given: Sequence[float]) -> AdaptedDigits:
    """Return the same with the model adapted to the other speaker without labels."""

    class AdaptedToOther(AdaptedDigits):
        name = "other-speaker-adapted"
        shares = (*given,)
        n_trainings = 1 + len(given)
        models = {"txl": ("digits",) * n_trainings}  # noqa: RUF012

    return AdaptedToOther()


def divided(source: Path, speaker: str) -> dict[str, list[Named]]:
    """Return recordings of the training archive: of a speaker, and as the test all others."""
    found = recordings_of(source)
    parts = {
        split: [x for x in found[split] if x[0].split("_")[1] == speaker]
        for split in ("train", "valid")
    }
    both = found["train"] + found["valid"]
    return parts | {"test": [x for x in both if x[0].split("_")[1] != speaker]}


def measured(arguments: argparse.Namespace, shrinkage: float) -> dict[str, float]:
    """Return the accuracy by the speaker who was trained on."""
    speech.SHRINKAGE = shrinkage
    task = OtherSpeaker() if arguments.shares is None else adapted_to_other(arguments.shares)
    task.copies = arguments.copies
    names = {name.split("_")[1] for name, _ in recordings_of(arguments.source)["train"]}
    model = arguments.recipe or "txl"
    found = {}
    for speaker in sorted(names):
        spoken_digits.recordings_of = lambda source, who=speaker: divided(source, who)
        try:
            settings = f"{speaker}-{shrinkage:g}-{arguments.copies}-{Path(model).stem}"
            shares = "".join(f"-{share:g}" for share in arguments.shares or ())
            out = arguments.out / f"{task.name}-{settings}{shares}"
            how: Any = {"models": (model,), "seeds": arguments.seeds, "splits": ("test",)}
            result = run_task(task, arguments.source, out, **how)
        finally:
            spoken_digits.recordings_of = recordings_of
        by_seed = result["models"][model]["test"]["seeds"]
        found[speaker] = statistics.fmean(x["accuracy"] for x in by_seed)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure each shrinkage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--shrinkage", type=float, nargs="+", default=[speech.SHRINKAGE])
    parser.add_argument("--copies", type=int, default=SpokenDigits.copies)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--recipe", help="a recipe file in the place of digits")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="*",
        help="adapt the model to the other speaker, without labels",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/other-speaker"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    if any(not 0 < share <= 1 for share in arguments.shares or ()):
        parser.error(f"--shares {arguments.shares}: give shares above 0, and at most 1")
    rows: list[dict[str, Any]] = []
    for shrinkage in arguments.shrinkage:
        by_speaker = measured(arguments, shrinkage)
        mean = statistics.fmean(by_speaker.values())
        row = {"shrinkage": shrinkage, "shares": arguments.shares, "accuracy": mean}
        rows.append({**row, "trained_on": by_speaker})
        print(f"shrinkage {shrinkage:g}: {mean:.2f} % ({by_speaker})", flush=True)
        if arguments.json:
            write_result_file(arguments.json, {**circumstances(), "rows": rows})


if __name__ == "__main__":
    main()
