"""The commands recl and ablate, which compare models as the paper does."""

import sys
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from annotated_types import Interval

from transformer_xl.cli.fitting import FittedRecipe, is_text, recipe_of_text
from transformer_xl.cli.given import (
    LoadsModels,
    PrintsResult,
    Value,
    refuse_others,
)
from transformer_xl.cli.loading import corpus_of, evaluation_of, read_text, require_model
from transformer_xl.cli.printing import say, show
from transformer_xl.cli.tables import write_results
from transformer_xl.config import (
    Config,
    Count,
    EvalConfig,
    check,
    load_recipe,
    recipe_of,
    require,
)
from transformer_xl.errors import InputError

if TYPE_CHECKING:
    from transformer_xl.data import Vocab
    from transformer_xl.model import LanguageModel, Lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class ReclConfig:
    """How the effective context length is measured (Appendix C of the paper)."""

    step: Count = 100
    """The shortest context, and the increment of its length, in tokens."""
    longest: Count = 1000
    """The longest context; a model that still gains there is reported as at least this."""
    tokens: Count = 2000
    """Number of tokens of the text that are predicted."""
    top: tuple[Annotated[float, Interval(gt=0, le=1)], ...] = (0.1, 0.5, 1.0)
    """Fractions r: only the r hardest of these tokens are compared."""

    def __post_init__(self) -> None:
        check(self, "recl")
        require(
            len(self.contexts) > 1,
            f"recl.longest={self.longest} must be at least two steps of step={self.step}",
        )

    @property
    def contexts(self) -> range:
        """The context lengths."""
        return range(self.step, self.longest + 1, self.step)


@dataclass(kw_only=True)
class Recl(LoadsModels, PrintsResult):
    """Measure the relative effective context length (RECL) of a group of models.

    All models predict the same tokens, each given exactly c tokens of context (Appendix C and
    Table 8 of the paper). They must share one vocabulary.

    Examples:
      txl recl runs/xl runs/lstm --recl.step 100 --recl.tokens 2000
      txl recl runs/xl runs/none runs/lstm --json
      txl recl models/a models/b --file wiki.test.tokens --recl.longest 2000
    """

    dirs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Run folders, model folders, or names of models (txl models)."""
    file: Path | None = None
    """Use this text instead of the corpus of the first run; - is the standard input."""
    recl: Annotated[ReclConfig, Value] = field(default_factory=ReclConfig)

    def run(self) -> None:
        """Measure and print."""
        require(bool(self.dirs), "give at least one run folder or model folder: txl recl DIR ...")
        for name in self.dirs:
            require_model(name)
        import numpy as np

        from transformer_xl.config import pick_device
        from transformer_xl.model import load_model
        from transformer_xl.studies import markdown_table, recl

        settings, contexts, names = self.recl, self.recl.contexts, _names(self.dirs)
        ids = self._tokens(_shared_vocabulary(self.dirs))
        places = recl.target_places(len(ids), contexts, settings.tokens)
        each = []
        for folder in self.dirs:
            # In float32: rounding errors of half precision could count as a gain.
            model = load_model(folder).to(pick_device())
            lengths, window = self._reading(folder, model)
            say(f"measuring {folder}" + f", which reads at most {window} tokens" * bool(window))
            each.append(recl.context_losses(model, ids, places, contexts, lengths, window))
        losses = np.stack(each)
        by_top = {
            top: recl.relative_effective_context_length(losses, contexts, top=top)
            for top in settings.top
        }
        of_models = dict(zip(names, zip(*by_top.values(), strict=True), strict=True))
        rows = [
            [name, *(f"{'at least ' * x.is_bound}{x.length:,}" for x in results)]
            for name, results in of_models.items()
        ]
        table = markdown_table(["model", *(f"r = {top:g}" for top in by_top)], rows)
        (say if self.json else print)(table)
        if self.json:
            tops = [f"{top:g}" for top in by_top]
            models = [
                {"name": name, "nll": nll, "recl": dict(zip(tops, map(asdict, x), strict=True))}
                for (name, x), nll in zip(of_models.items(), losses.mean(2).tolist(), strict=True)
            ]
            about = {"settings": asdict(settings), "contexts": list(contexts), "models": models}
            show(_environment() | about, as_json=True)

    def _tokens(self, vocab: "Vocab") -> Any:

        recipe = recipe_of(self.dirs[0])
        if self.file:
            is_raw = recipe is not None and recipe.data.raw
            return vocab.encode_lines(read_text(self.file, vocab, is_raw=is_raw))
        if recipe is None:
            raise InputError(
                f"{self.dirs[0]} is a model folder without a recipe, so its corpus is unknown: "
                "give a text with --file"
            )
        corpus = corpus_of(recipe.data, vocab, self.dirs[0], "a text with --file")
        return corpus.split(corpus.held_out)

    def _reading(self, folder: str, model: "LanguageModel") -> tuple["Lengths", int | None]:
        """Return the lengths of a model, and its longest input if it has no memory."""
        from transformer_xl.model import SEGMENT_LEN, Lengths

        recipe = recipe_of(folder)
        evaluation = evaluation_of(folder, recipe)
        trained = recipe.train.segment_len if recipe else SEGMENT_LEN
        lengths = Lengths.of(model.config, **evaluation.lengths_after(trained))
        if evaluation.window:
            return lengths._replace(mem_len=0), evaluation.window
        if lengths.mem_len or not model.remembers_positions:
            return lengths, None
        require(
            recipe is not None,
            f"{folder} is a model folder without memory and without a recipe: the longest input is "
            "not known; give its run folder",
        )
        return lengths, trained


@dataclass(kw_only=True)
class Ablate(FittedRecipe):
    """Repeat the paper's ablations at any size: recurrence, relative encoding, full loss.

    Each row of Table 6 (or 7, or 10) is trained with each seed, for the same steps or minutes, as
    a separate run below --out; it is evaluated with the attention length of its training and with
    the best one. The same command resumes after an interruption.

    Examples:
      txl ablate ptb-char --out runs/ablation --seeds 1 2 3 --minutes 5
      txl ablate mine.toml --out runs/table10 --table 10 --steps 2000
      txl ablate mine.toml --out runs/two --rows recurrence-ours-full none-ours-full
    """

    out: Path
    """Folder of the runs, ablation.json and ablation.md."""
    table: int = 6
    """The paper's table: 6, 7 or 10 (longer segments instead of a memory, for the same GPU
    memory)."""
    rows: tuple[str, ...] = ()
    """Only these rows, by name."""
    seeds: tuple[int, ...] = (1,)
    """Seeds; each row is trained once with each."""
    steps: int | None = None
    """Steps of every run; None: as the recipe says."""
    minutes: float | None = None
    """Minutes of every run; None: as the recipe says."""
    attn_lens: tuple[int, ...] = ()
    """Attention lengths to try; default: from half to three times that of training."""
    split: Literal["valid", "test"] = "valid"
    """Split on which all rows are evaluated."""
    tokens: int | None = None
    """Evaluate on this many tokens from the start of the split; None: on all."""

    def config(self) -> Config:
        """Return the recipe with the given settings, without the lengths of its evaluation."""
        name = self.recipe
        recipe = recipe_of_text(name) if is_text(name) else load_recipe(name)
        evaluation = EvalConfig(batch_size=recipe.eval.batch_size)
        if self.steps is not None or self.minutes is not None:
            # Steps are in place of the time limit of the recipe.
            steps = {} if self.steps is None else {"steps": self.steps}
            self.train.update(steps, minutes=self.minutes)
        return self.changed(replace(recipe, eval=evaluation))

    def run(self) -> None:
        """Train, measure, print."""
        why = "an ablation searches for the best lengths; see --attn_lens, --split, --tokens"
        refuse_others(self.eval, "eval.", ("batch_size",), why)
        from msgspec import to_builtins

        from transformer_xl.config import prepare_process
        from transformer_xl.studies import ablate as study

        prepare_process()
        names = ("seeds", "attn_lens", "split", "tokens")
        options = {name: getattr(self, name) for name in names}
        chosen = tuple(study.rows_of(self.table, self.rows))
        plan = study.Plan(recipe=self.config(), rows=chosen, **options)
        measured = study.ablate(plan, self.out, say)
        rows = study.summary(measured, self.table)
        table, result = study.markdown(rows), {"table": self.table, "rows": to_builtins(rows)}
        write_results(self.out / "ablation", result | {"runs": to_builtins(measured)}, table)
        (say if self.json else print)(table)
        if self.json:
            show(result, as_json=True)


def _names(folders: tuple[str, ...]) -> list[str]:
    """Name models by their folders, by full paths where names are equal."""
    names = [Path(folder).resolve().name for folder in folders]
    paths = [str(Path(folder)) for folder in folders]
    for path in paths:
        require(paths.count(path) == 1, f"{path} is given twice")
    return [x if names.count(x) == 1 else path for x, path in zip(names, paths, strict=True)]


def _shared_vocabulary(folders: tuple[str, ...]) -> "Vocab":
    from transformer_xl.data import load_vocab
    from transformer_xl.model import ModelFolder

    first = load_vocab(ModelFolder.find(folders[0]).path)
    for folder in folders[1:]:
        vocab = load_vocab(ModelFolder.find(folder).path)
        require(
            vocab.hash == first.hash,
            f"{folders[0]} and {folder} have different vocabularies ({len(first):,} {first.kind}, "
            f"{len(vocab):,} {vocab.kind}): losses can only be compared token by token, so train "
            "both on the same corpus",
        )
    return first


def _environment() -> dict[str, Any]:
    from transformer_xl.config import describe_machine

    machine = describe_machine()
    about = {name: machine[name] for name in ("processor", "gpu", "threads")}
    return {"command": " ".join(("txl", *sys.argv[1:])), **about, "torch": version("torch")}
