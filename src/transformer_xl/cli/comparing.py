"""The command compare, which trains models of several kinds at equal cost."""

from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer_xl.cli.given import Given, LoadsModels, nothing
from transformer_xl.cli.printing import say, show
from transformer_xl.config import DataConfig
from transformer_xl.config.recipes import load_recipe, recipe_names

if TYPE_CHECKING:
    from transformer_xl.data import Corpus


@dataclass(kw_only=True)
class Compare(LoadsModels):
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
    """Evaluate on this many tokens from the start of each split; None: on all."""
    baselines: bool = True
    """Also measure compressors and n-grams; PPMd and zstd require the extra compare."""
    out: Path = Path("runs/compare")
    """Folder of the runs and of comparison.json, comparison.md and comparison.svg."""
    json: bool = False
    """Print the result as one JSON object on the last line."""
    data: Given[DataConfig] = field(default_factory=nothing)

    def has_saved(self) -> bool:
        """Return whether a run has a checkpoint to resume from, or has ended."""
        from transformer_xl.studies.compare import RUNS_FILE
        from transformer_xl.train.checkpoint import CHECKPOINTS

        is_begun = any(self.out.glob(f"*/*/{CHECKPOINTS}/step_*"))
        return is_begun or (self.out / RUNS_FILE).exists()

    def run(self) -> None:
        """Search, train, measure, print."""
        from transformer_xl.config.device import prepare_process
        from transformer_xl.studies import compare as study
        from transformer_xl.studies import standings

        prepare_process()
        names = [x for given in self.models for x in given.split(",") if x]
        plan = study.Plan(
            data=self._data(),
            models=study.load_contestants(names),
            minutes=self.minutes,
            seeds=self.seeds,
            factors=self.rates,
            search_minutes=self.search_minutes,
            jobs=self.jobs,
            eval_tokens=self.tokens,
        )
        comparison = study.Comparison(plan, self.out, say)
        comparison.go()
        runs = comparison.planned()
        result = standings.standings(runs)
        # Written before the baselines, too, which take their time.
        self._write(result | {"baselines": []})
        result["baselines"] = self._baselines(comparison.corpus, result["unit"])
        table = self._write(result)
        (say if self.json else print)(table)
        if not result["models"]:
            raise RuntimeError("no contestant could be trained: see above why")
        if find_spec("matplotlib"):
            standings.draw(self.out / "comparison.svg", runs)
            say(f"wrote {self.out / 'comparison.svg'}")
        else:
            say("no plot: it requires pip install 'transformer-xl[plot]'")
        if self.json:
            show(result, as_json=True)

    def _write(self, result: dict[str, Any]) -> str:
        """Write the result and its tables, which are returned."""
        from transformer_xl.config.files import replace_file
        from transformer_xl.studies import standings

        table = standings.markdown(result, result["baselines"])
        replace_file(self.out / "comparison.json", (dumps(result, indent=2) + "\n").encode())
        replace_file(self.out / "comparison.md", table.encode())
        return table

    def _data(self) -> DataConfig:
        """Return the text and the vocabulary."""
        path = Path(self.corpus)
        is_recipe = path.suffix == ".toml" or (self.corpus in recipe_names() and not path.exists())
        data = load_recipe(self.corpus).data if is_recipe else DataConfig(path=self.corpus)
        return replace(data, **self.data)

    def _baselines(self, corpus: "Corpus", unit: str) -> list[dict[str, Any]]:
        """Return the rows of compressors and n-grams, for which their packages are there."""
        if not self.baselines:
            return []
        from transformer_xl.inference.baselines import BASELINES, baselines
        from transformer_xl.train.finish import held_out

        needed = {"PPMd": "pyppmd", "zstd -19": "zstandard"}
        lacking = [name for name, package in needed.items() if not find_spec(package)]
        if lacking:
            say(
                f"without {' and '.join(lacking)}: they require "
                "pip install 'transformer-xl[compare]'"
            )
        names = tuple(name for name in BASELINES if name not in lacking)
        found = baselines(corpus, held_out(corpus), names=names)
        rows = [asdict(row) | {"bits": getattr(row, unit.replace(" ", "_"))} for row in found]
        return [row for row in rows if row["bits"] is not None]
