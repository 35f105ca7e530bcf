"""The commands recipes, prepare, train, convert and doctor."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from json import loads
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from transformer_xl.cli.given import Given, Recipe, RecipeCommand, nothing
from transformer_xl.cli.loading import fine_tuning_of
from transformer_xl.cli.printing import say, show
from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
)
from transformer_xl.config.recipes import load_recipe, recipe_copy, recipe_names, recipe_text

# Groups of recipes; each takes those that the groups before it left.
_MACHINES: dict[str, Callable[[str], bool]] = {
    "for two CPU cores": lambda name: name == "demo" or name.endswith("-cpu"),
    "for a GPU": lambda name: not name.startswith("paper-"),
    "the paper's": lambda name: True,
}


@dataclass(kw_only=True)
class Recipes:
    """List the recipes that come with the package, show one, or copy one to change it."""

    examples: ClassVar = ("txl recipes", "txl recipes demo", "txl recipes demo --copy mine.toml")

    name: Annotated[str, tyro.conf.Positional] = ""
    """The recipe to show or copy."""
    copy: Path | None = None
    """Write the recipe to this new file, with a vocabulary of bytes in place of characters."""
    json: bool = False
    """Print one JSON object: the summaries of all recipes, or the settings of the named one."""

    def run(self) -> None:
        """Print or copy recipes."""
        if self.copy:
            if not self.name:
                raise ValueError("--copy needs the name of a recipe: txl recipes NAME --copy FILE")
            self._copy(self.copy)
        elif self.name and self.json:
            show(asdict(load_recipe(self.name)), as_json=True)
        elif self.name:
            print(recipe_text(self.name), end="")
        else:
            summaries = {
                name: recipe_text(name).splitlines()[1].removeprefix("# ")
                for name in recipe_names()
            }
            if self.json:
                show(summaries, as_json=True)
                return
            for title, is_one in _MACHINES.items():
                print(title)
                names = [name for name in summaries if is_one(name)]
                show({f"  {name}": summaries.pop(name) for name in names}, as_json=False)

    def _copy(self, path: Path) -> None:
        text = recipe_copy(self.name)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise FileExistsError(
                f"{path} exists and was not changed; give --copy another name"
            ) from None
        except OSError as error:
            raise OSError(f"cannot write {path}: {error.strerror}") from error
        if text != recipe_text(self.name):
            say(
                'vocab = "bytes" encodes any text; the original recipe has the characters of its '
                f"corpus (txl recipes {self.name} prints it)"
            )
        say(f"wrote {path}; train it with: txl train {path} --out runs/mine")
        if self.json:
            show({"file": str(path)}, as_json=True)


@dataclass(kw_only=True)
class Prepare:
    """Download and tokenize a corpus or the text of a recipe, as txl train does by itself.

    RECIPE is a recipe, or a known corpus with its usual settings: enwik8, text8, wikitext-103,
    wikitext-2, ptb-word, ptb-char, lm1b, tiny-shakespeare, jsb-chorales, python-stdlib, or
    hf:ORG/NAME of Hugging Face datasets. A recipe comes before a corpus of the same name. An
    interrupted command resumes; any number of --data.workers gives the same bytes.
    """

    examples: ClassVar = (
        "txl prepare demo",
        "txl prepare wikitext-103",
        "txl prepare enwik8 --data.vocab authors-bytes --data.path downloads/",
        "txl prepare shakespeare-char-cpu --data.path input.txt",
        "txl prepare my.toml --data.vocab bpe --data.path 'texts/*.jsonl.gz'",
    )

    recipe: Recipe
    """A recipe by its name or file, or a corpus."""
    json: bool = False
    """Print the result as one JSON object on the last line."""
    data: Given[DataConfig] = field(default_factory=nothing)

    @property
    def settings(self) -> DataConfig:
        """The data settings of the recipe, or the usual ones of a known corpus."""
        from transformer_xl.data.catalogue import KNOWN_CORPORA, common_settings

        name = self.recipe
        is_corpus = name in KNOWN_CORPORA or name.startswith("hf:")
        is_recipe = name in recipe_names() or not is_corpus
        return replace(load_recipe(name).data if is_recipe else common_settings(name), **self.data)

    def has_saved(self) -> bool:
        """Return True: downloads and counts are kept for the next run."""
        return True

    def run(self) -> None:
        """Build the corpus."""
        from transformer_xl.data import prepare

        corpus = prepare(self.settings, say)
        splits = {name: corpus.n_tokens(name) for name in ("train", "valid", "test")}
        about = {"folder": str(corpus.folder), "vocab": len(corpus.vocab), **splits}
        show(about, as_json=self.json)


@dataclass(kw_only=True)
class Train(RecipeCommand):
    """Train a model by a recipe, or fine-tune one; the same command resumes an interrupted run.

    Any setting of the recipe can be changed here. Ctrl-C saves a checkpoint and stops. A model or
    run folder in place of a recipe is fine-tuned: its architecture, vocabulary and weights are
    used, and --data.path gives the text.
    """

    examples: ClassVar = (
        "txl train demo --out runs/demo",
        "txl train shakespeare-char-cpu --out runs/bard --train.seed 2",
        "txl train mine.toml --out runs/mine --model.mem_len 256 --data.path corpus/",
        "txl train models/wt103 --out runs/mine --data.path corpus/ --train.steps 2000",
    )

    recipe: Recipe
    """A recipe by its name or file, or a model or run folder."""
    out: Path
    """The run folder: created if new, resumed if it holds a run of the same recipe."""
    quiet: bool = False
    """Print only the result."""
    eval: Given[EvalConfig] = field(default_factory=nothing)
    generate: Given[GenerateConfig] = field(default_factory=nothing)

    def config(self) -> Config:
        """Return the recipe, or that of fine-tuning a model, with the given settings."""
        # A run folder is often named after its recipe.
        is_model = self.recipe not in recipe_names() and Path(self.recipe).is_dir()
        begun = fine_tuning_of(Path(self.recipe)) if is_model else load_recipe(self.recipe)
        return self.changed(begun)

    def has_saved(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        from transformer_xl.train.checkpoint import CHECKPOINTS

        return any((self.out / CHECKPOINTS).glob("step_*"))

    def run(self) -> None:
        """Train, evaluate, report."""
        from transformer_xl.config.device import keep_freed_memory
        from transformer_xl.config.distributed import Stalled, is_first_process
        from transformer_xl.train import train

        keep_freed_memory()
        try:
            results = train(self.config(), self.out, quiet=self.quiet)
        except Stalled as error:
            say(f"txl: {error}")
            # Not sys.exit: threads may still wait for the process that hangs.
            sys.stderr.flush()
            os._exit(1)
        if not is_first_process():
            return
        flat = results["test"] | {k: x for k, x in results.items() if k.endswith("per_byte")}
        if not self.quiet:
            say(f"next: txl generate {self.out} --prompt 'some text to continue'")
        # Last, so that the result is the last line where stdout and stderr go to one file.
        show(flat, as_json=self.json)


@dataclass(kw_only=True)
class Convert:
    """Convert an old checkpoint to a model folder, or a model to an old checkpoint.

    SOURCE is a model.pt or state dict of the authors' code, a TensorFlow checkpoint, an NVIDIA
    checkpoint, a Hugging Face folder, or a model folder. No code in it is executed.
    """

    examples: ClassVar = (
        "txl convert LM-TFM-wt103/model.pt models/wt103",
        "txl convert transfo-xl-wt103 models/wt103",
        "txl convert tf_wt103/model models/wt103 --mem_len 384 --same_length True",
        "txl convert models/wt103 wt103-hf --to huggingface",
    )

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """The checkpoint or folder to convert."""
    folder: Annotated[Path, tyro.conf.Positional]
    """The output: a new folder."""
    to: Literal["txl", "authors", "huggingface"] = "txl"
    """Output format: a model folder, a state dict for the authors' code, or a folder for
    transformers up to 4.37."""
    vocab: Path | None = None
    """The vocabulary file, if it is not beside the checkpoint."""
    n_head: int | None = None
    """Number of attention heads. This and the next settings: if the checkpoint lacks them."""
    mem_len: int | None = None
    """Memory length."""
    tgt_len: int | None = None
    """Segment length."""
    ext_len: int | None = None
    """Extended context length: tokens before each segment that are read again with it."""
    clamp_len: int | None = None
    """Relative distances above it count as it; 0 or less: no limit."""
    same_length: bool | None = None
    """Whether every token attends to the same number of tokens."""
    pre_lnorm: bool | None = None
    """Whether layer normalization comes before each sublayer (pre-norm) instead of after it."""
    cutoffs: tuple[int, ...] | None = None
    """First token ID of each further cluster of the adaptive softmax."""
    layer_norm_epsilon: float | None = None
    """Epsilon of the layer normalization."""
    json: bool = False
    """Print the settings of the converted model as one JSON object."""

    def run(self) -> None:
        """Convert."""
        from transformer_xl.interop.convert import SETTABLE, convert

        settings = {name: getattr(self, name) for name in SETTABLE}
        folder = convert(
            self.source,
            self.folder,
            to=self.to,
            settings={name: x for name, x in settings.items() if x is not None},
            vocab=self.vocab,
            say=say,
        )
        if self.json:
            show(loads((folder / "config.json").read_text(encoding="utf-8")), as_json=True)


@dataclass(kw_only=True)
class Doctor:
    """Show what this machine offers and which implementations are used on it; or verify files.

    For a model folder, run folder, weights file or state file, verifies checksums, shapes, dtypes
    and values; the exit code is 1 if anything is damaged or cannot be read.
    """

    examples: ClassVar = ("txl doctor", "txl doctor runs/demo", "txl doctor --json")

    path: Annotated[Path | None, tyro.conf.Positional] = None
    """A folder or a file to verify."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Print the diagnosis."""
        from transformer_xl.apps.doctor import diagnose, verify

        if self.path is None:
            show(diagnose(), as_json=self.json)
            return 0
        found = verify(self.path)
        show(found, as_json=self.json)
        return int(any(each.startswith(("damaged", "not readable")) for each in found.values()))
