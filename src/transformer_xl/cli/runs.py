"""The commands that make models: recipes, prepare, train, convert; and doctor."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from json import loads
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from transformer_xl.cli.given import Given, Recipe, RecipeCommand, nothing
from transformer_xl.cli.loading import continuation_of
from transformer_xl.cli.printing import say, show
from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
)
from transformer_xl.config.recipes import load_recipe, recipe_copy, recipe_names, recipe_text

# Which recipes are for it; of those that are left.
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
    """Write the recipe to this new file, with bytes in place of the characters of one text."""
    json: bool = False
    """Print one JSON object: the summaries of all recipes, or the settings of the named one."""

    def run(self) -> None:
        """Print or copy."""
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
                f"{path} exists already and was left as it is; give --copy another name"
            ) from None
        except OSError as error:
            raise OSError(f"cannot write {path}: {error.strerror}") from error
        if text != recipe_text(self.name):
            say(
                'vocab = "bytes" reads any text; the recipe itself has the characters of its '
                f"corpus (txl recipes {self.name} prints it)"
            )
        say(f"wrote {path}; train it with: txl train {path} --out runs/mine")
        if self.json:
            show({"file": str(path)}, as_json=True)


@dataclass(kw_only=True)
class Prepare:
    """Fetch a corpus or the text of a recipe, and cut it into tokens; training does so by itself.

    RECIPE is a recipe, or a corpus with its common settings: enwik8, text8, wikitext-103,
    wikitext-2, ptb-word, ptb-char, lm1b, tiny-shakespeare, jsb-chorales, python-stdlib, or
    hf:ORG/NAME of Hugging Face datasets. Where both have the name, it is the recipe. What was
    stopped goes on; any number of --data.workers writes the same bytes.
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
        """The text of the recipe, or the settings with which a corpus is commonly used."""
        from transformer_xl.data.catalogue import KNOWN_CORPORA, common_settings

        name = self.recipe
        is_corpus = name in KNOWN_CORPORA or name.startswith("hf:")
        is_recipe = name in recipe_names() or not is_corpus
        return replace(load_recipe(name).data if is_recipe else common_settings(name), **self.data)

    def has_saved(self) -> bool:
        """Say that what was fetched and counted is kept for the next time."""
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
    """Train a model by a recipe; the same command goes on with a run that was stopped.

    Any setting of the recipe can be changed here. Ctrl-C saves and stops. In place of a recipe, a
    model or run folder gives its network, its vocabulary and the weights to begin with, for
    another text.
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
    """The run folder: made when it is new, resumed when it holds a run of the same recipe."""
    quiet: bool = False
    """Say nothing but the result."""
    eval: Given[EvalConfig] = field(default_factory=nothing)
    generate: Given[GenerateConfig] = field(default_factory=nothing)

    def config(self) -> Config:
        """Return the recipe, or what goes on from a model, with the settings that are given."""
        # A run folder often has the name of its recipe.
        is_model = self.recipe not in recipe_names() and Path(self.recipe).is_dir()
        begun = continuation_of(Path(self.recipe)) if is_model else load_recipe(self.recipe)
        return self.changed(begun)

    def has_saved(self) -> bool:
        """Say whether there is a checkpoint to go on from."""
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
            # Threads may wait for the lost process for as long as it hangs.
            sys.stderr.flush()
            os._exit(1)
        if not is_first_process():
            return
        flat = results["test"] | {k: x for k, x in results.items() if k.endswith("per_byte")}
        if not self.quiet:
            say(f"now try: txl generate {self.out} --prompt 'some text to continue'")
        # The result is the last line, also where both streams go to the same place.
        show(flat, as_json=self.json)


@dataclass(kw_only=True)
class Convert:
    """Turn an old checkpoint into a model folder, or a model into an old checkpoint.

    SOURCE is a model.pt or state dict of the authors, a TensorFlow checkpoint, a checkpoint of
    NVIDIA's, a Hugging Face folder, or a model folder. Nothing in it is executed.
    """

    examples: ClassVar = (
        "txl convert LM-TFM-wt103/model.pt models/wt103",
        "txl convert transfo-xl-wt103 models/wt103",
        "txl convert tf_wt103/model models/wt103 --mem_len 384 --same_length True",
        "txl convert models/wt103 wt103-hf --to huggingface",
    )

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """What is converted."""
    folder: Annotated[Path, tyro.conf.Positional]
    """Where the result goes: a new folder."""
    to: Literal["txl", "authors", "huggingface"] = "txl"
    """A model folder; a state dict for the authors' code; a folder for transformers up to 4.37."""
    vocab: Path | None = None
    """The vocabulary, where it does not lie beside the checkpoint."""
    n_head: int | None = None
    """What the checkpoint does not say of itself: attention heads."""
    mem_len: int | None = None
    """How many positions each layer remembers."""
    tgt_len: int | None = None
    """Tokens of a segment."""
    ext_len: int | None = None
    """Tokens before each segment that are read again with it."""
    clamp_len: int | None = None
    """Largest distance; 0 or less: no limit."""
    same_length: bool | None = None
    """Each token sees equally many others."""
    pre_lnorm: bool | None = None
    """The layers normalize what they read instead of what they write."""
    cutoffs: tuple[int, ...] | None = None
    """Where each further cluster of the vocabulary begins."""
    layer_norm_epsilon: float | None = None
    """Constant of the layer normalization."""
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
    """Say what this machine offers and what would be used of it, and why; or verify files.

    Given a model folder, a run folder, a weights file or a state file, it verifies checksums,
    shapes, types and values, and ends with 1 if anything is damaged or cannot be read.
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
