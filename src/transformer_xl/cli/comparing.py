"""The command compare, which trains models of several kinds at equal cost."""

import time
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer_xl.cli.fitting import text_settings
from transformer_xl.cli.given import Given, LoadsModels, PrintsResult, nothing
from transformer_xl.cli.printing import say, show
from transformer_xl.cli.tables import can_plot, write_results
from transformer_xl.config import DataConfig, load_recipe, recipe_names

if TYPE_CHECKING:
    from transformer_xl.data import Corpus

_BASELINE_SECONDS = {
    "uniform": 0.1,
    "unigram": 0.1,
    "bzip2 -9": 0.5,
    "gzip -9": 1.0,
    "zstd -19": 3.0,
    "xz -9e": 5.0,
    "PPMd": 8.0,
    "n-gram": 8.0,
}
"""Seconds that a baseline takes for a million bytes of text on one core, about."""


@dataclass(kw_only=True)
class Compare(LoadsModels, PrintsResult):
    """Train models of several kinds on a text at equal cost, and say which is best.

    Each contestant is a recipe of about the same size. Its learning rate is searched with runs of a
    quarter of the time, then it is trained with each seed. Compared are the losses at equal time,
    tokens and FLOPs, by context, and what writing costs; beside them stand compressors and an
    n-gram model, which need no gradient. The same command resumes after an interruption.

    Examples:
      txl compare mine.txt --models txl gpt mamba2 --minutes 20 --out runs/compare
      txl compare ptb-char-cpu --models txl lstm mine.toml --seeds 1 2 3 --jobs 2
    """

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """A file or folder of text, or a recipe, whose text and vocabulary are taken."""
    models: tuple[str, ...] = ("modern-xl", "txl", "gpt", "gpt-cache", "lstm")
    """Contestants, separated by spaces or commas: modern-xl, those that `txl recipes` lists as
    compare-NAME, other recipes, or recipe files. mamba2, rwkv, xlnet and xlstm require the extra
    hf."""
    minutes: float = 20.0
    """Training time of each run: as many steps as take so long, by their pace measured in turns."""
    seeds: tuple[int, ...] = (1,)
    """Seeds; each contestant is trained once with each, and learning rates are searched with the
    first."""
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Factors of the recipes' learning rates to search, and up to three beyond them while the
    lowest or highest is the best; a single one is taken without a search."""
    search_minutes: float | None = None
    """Training time of a run of the search; None: a quarter of the minutes."""
    jobs: int = 1
    """Runs at the same time, each with its share of the threads."""
    tokens: int | None = None
    """Evaluate on this many tokens from the start of each split; None: on all, or on as many as
    take a quarter of the search's time."""
    baselines: bool = True
    """Also measure compressors and n-grams, for as long as a run takes at most; PPMd and zstd
    require the extra compare."""
    out: Path = Path("runs/compare")
    """Folder of the runs and of comparison.json, comparison.md and comparison.svg."""
    data: Given[DataConfig] = field(default_factory=nothing)

    def run(self) -> None:
        """Search, train, measure, print."""
        from transformer_xl.config import prepare_process
        from transformer_xl.studies import compare as study
        from transformer_xl.studies import standings

        prepare_process()
        names = [x for words in self.models for x in words.split(",") if x]
        plan = study.Plan(
            data=self._data(),
            models=study.load_contestants(names),
            minutes=self.minutes,
            seeds=self.seeds,
            factors=self.rates,
            search_minutes=self.search_minutes,
            jobs=self.jobs,
            eval_tokens=self.tokens,
            has_short_evaluations=True,
        )
        has_plot = can_plot()
        needed = {"PPMd": "pyppmd", "zstd -19": "zstandard"}
        lacking = [x for x, package in needed.items() if self.baselines and not find_spec(package)]
        if lacking:
            remedy = "pip install 'transformer-xl[compare]'"
            say(f"without {' and '.join(lacking)}: they require {remedy}")
        searched, trained = plan.n_runs
        say(
            f"{searched} runs of {plan.searched_minutes:g} minutes to find rates, and {trained} of "
            f"{plan.minutes:g}; Ctrl-C stops, and the same command goes on"
        )
        comparison = study.Comparison(plan, self.out, say)
        comparison.go()
        runs = comparison.planned()
        result: dict[str, Any] = standings.standings(runs) | {"baselines": []}
        # Written before the baselines, too, which take their time.
        write_results(self.out / "comparison", result, standings.markdown(result))
        if self.baselines:
            result["baselines"] = self._baselines(comparison.corpus, result["unit"], lacking)
        table = standings.markdown(result, result["baselines"])
        write_results(self.out / "comparison", result, table)
        (say if self.json else print)(table)
        if not result["models"]:
            raise RuntimeError("no contestant could be trained: see above why")
        if has_plot:
            standings.draw(self.out / "comparison.svg", runs)
            say(f"wrote {self.out / 'comparison.svg'}")
        (say if self.json else print)(standings.verdict(result))
        if self.json:
            show(result, as_json=True)

    def _data(self) -> DataConfig:
        """Return the text and the vocabulary."""
        path = Path(self.corpus)
        is_recipe = path.suffix == ".toml" or (self.corpus in recipe_names() and not path.exists())
        is_place = not {":", "*", "?"} & set(self.corpus)
        if not is_recipe and is_place and not path.exists():
            raise FileNotFoundError(f"there is no file or folder {self.corpus}")
        data = load_recipe(self.corpus).data if is_recipe else DataConfig(path=self.corpus)
        return replace(data, **text_settings(data, self.data))

    def _baselines(self, corpus: "Corpus", unit: str, lacking: list[str]) -> list[dict[str, Any]]:
        """Return the rows of compressors and n-grams, as far as there is time for them."""
        from transformer_xl.studies.baselines import BASELINES, baselines
        from transformer_xl.train import held_out

        split, began = held_out(corpus), time.monotonic()
        million = (corpus.n_bytes("train") + corpus.n_bytes(split)) / 1e6
        rows, late = [], []
        for name in sorted({*BASELINES} - {*lacking}, key=_BASELINE_SECONDS.__getitem__):
            taken = time.monotonic() - began + million * _BASELINE_SECONDS[name]
            if taken > 60 * self.minutes:
                late.append(name)
            else:
                rows += [asdict(row) for row in baselines(corpus, split, names=(name,))]
        if late:
            say(f"without {', '.join(late)}: they would take longer than a run; raise --minutes")
        unit = unit.replace(" ", "_")
        return [row | {"bits": row[unit]} for row in rows if row[unit] is not None]
