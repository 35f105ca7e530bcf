"""The command compare, which trains models of several kinds at equal cost."""

from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from transformer_xl.cli.fitting import text_settings
from transformer_xl.cli.given import (
    Given,
    LoadsModels,
    PrintsResult,
    nothing,
    refuse_others,
)
from transformer_xl.cli.printing import say, show
from transformer_xl.cli.tables import can_plot, write_results
from transformer_xl.config import (
    DataConfig,
    ModelConfig,
    TrainConfig,
    load_recipe,
    recipe_names,
)

_OF_THE_PLAN = {"steps", "minutes", "seed", "eval_every"}
"""Settings of the training that a comparison chooses."""


@dataclass(kw_only=True)
class Compare(LoadsModels, PrintsResult):
    """Train models of several kinds on a text at equal cost, and compare their losses.

    Each contestant is a recipe of about the same size. Its learning rate is searched with runs of a
    quarter of the time, then it is trained with each seed. Compared are the losses at equal time,
    tokens and FLOPs; beside them stand compressors and an n-gram model, which need no gradient. The
    same command resumes after an interruption.

    Examples:
      txl compare mine.txt --models txl gpt lstm --minutes 20 --out runs/compare
      txl compare ptb-char-cpu --models txl lstm mine.toml --seeds 1 2 3
      txl compare words.txt --data.vocab words --model.dropout 0.2 --train.weight_decay 0.1
    """

    corpus: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS")]
    """A file or folder of text, or a recipe, whose text and vocabulary are taken."""
    models: tuple[str, ...] = ("modern-xl", "txl", "gpt-modern", "gpt", "lstm")
    """Contestants, separated by spaces or commas: modern-xl, those that `txl recipes` lists as
    compare-NAME, other recipes, or recipe files."""
    minutes: float = 20.0
    """Training time of each run: as many steps as take so long, by their pace measured in turns."""
    seeds: tuple[int, ...] = (1,)
    """Seeds; each contestant is trained once with each, and learning rates are searched with the
    first."""
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    """Factors of the recipes' learning rates to search, and beyond them while the lowest or highest
    is the best; a single one is taken without a search."""
    search_minutes: float | None = None
    """Training time of a run of the search; None: a quarter of the minutes."""
    tokens: int | None = None
    """Evaluate on this many tokens from the start of each split; None: on all."""
    baselines: bool = True
    """Also measure compressors and n-grams; PPMd requires the extra compare."""
    out: Path = Path("runs/compare")
    """Folder of the runs and of comparison.json, comparison.md and comparison.svg."""
    data: Given[DataConfig] = field(default_factory=nothing)
    model: Given[ModelConfig] = field(default_factory=nothing)
    """Settings of all contestants, in place of their own."""
    train: Given[TrainConfig] = field(default_factory=nothing)
    """The same for those of the training. A warmup is at most a tenth of the steps."""

    def run(self) -> None:
        """Search, train, measure, print."""
        from transformer_xl.config import prepare_process
        from transformer_xl.studies import compare as study
        from transformer_xl.studies import standings
        from transformer_xl.studies.baselines import baselines

        prepare_process()
        why = "--minutes and --seeds hold for all, and each is evaluated at its end"
        refuse_others(self.train, "train.", tuple(self.train.keys() - _OF_THE_PLAN), why)
        others = tuple(self.model.keys() - {"kind"})
        refuse_others(self.model, "model.", others, "--models names the contestants")
        names = [x for words in self.models for x in words.split(",") if x]
        changes = {"model": self.model, "train": self.train}
        plan = study.Plan(
            data=self._data(),
            models=study.load_contestants(names, changes, say),
            minutes=self.minutes,
            seeds=self.seeds,
            factors=self.rates,
            search_minutes=self.search_minutes,
            eval_tokens=self.tokens,
        )
        has_plot = can_plot()
        if self.baselines and not find_spec("pyppmd"):
            say("without PPMd: it requires pip install 'transformer-xl[compare]'")
        comparison = study.Comparison(plan, self.out, say)
        comparison.go()
        runs = comparison.planned()
        result: dict[str, Any] = standings.standings(runs) | {"baselines": []}
        # Written before the baselines, too, which take their time.
        write_results(self.out / "comparison", result, standings.markdown(result))
        if self.baselines:
            corpus, unit = comparison.corpus, result["unit"].replace(" ", "_")
            rows = [asdict(row) for row in baselines(corpus, corpus.held_out)]
            result["baselines"] = [x | {"bits": x[unit]} for x in rows if x[unit] is not None]
        table = standings.markdown(result, result["baselines"])
        write_results(self.out / "comparison", result, table)
        (say if self.json else print)(table)
        if not result["models"]:
            raise RuntimeError("no contestant could be trained: see above why")
        if has_plot:
            standings.draw(self.out / "comparison.svg", runs)
            say(f"wrote {self.out / 'comparison.svg'}")
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
