"""The commands recipes, prepare and train."""

import os
import re
import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from transformer_xl.cli.fitting import (
    TEXT_RECIPE,
    FittedRecipe,
    fine_tuning_of,
    fitted_to_text,
    is_model,
    is_text,
    recipe_of_text,
    text_settings,
)
from transformer_xl.cli.given import Given, PrintsResult, Recipe, nothing
from transformer_xl.cli.loading import require_model
from transformer_xl.cli.printing import say, show
from transformer_xl.config import (
    Config,
    DataConfig,
    ShippedModel,
    load_recipe,
    recipe_names,
    recipe_text,
    require,
)
from transformer_xl.errors import SettingsError

_OF_BYTES = (
    '# Any text: the recipe has "chars", the characters of its corpus alone.\nvocab = "bytes"'
)


@dataclass(kw_only=True)
class Recipes(PrintsResult):
    """List the recipes that come with the package, show one, or copy one to change it.

    Examples:
      txl recipes
      txl recipes demo
      txl recipes demo --copy mine.toml
    """

    name: Annotated[str, tyro.conf.Positional] = ""
    """The recipe to show or copy."""
    copy: Path | None = None
    """Write the recipe to this new file, with a vocabulary of bytes in place of characters."""

    def run(self) -> None:
        """Print or copy recipes."""
        if self.copy:
            require(bool(self.name), "--copy needs a name: txl recipes NAME --copy FILE")
            self._copy(self.copy)
        elif self.name and self.json:
            show(asdict(load_recipe(self.name)), as_json=True)
        elif self.name:
            print(recipe_text(self.name), end="")
        else:
            summaries = {name: recipe_text(name).splitlines()[1] for name in recipe_names()}
            show({x: y.removeprefix("# ") for x, y in summaries.items()}, as_json=self.json)

    def _copy(self, path: Path) -> None:
        """Write the recipe to a new file, with a vocabulary of bytes, and say how to train it.

        Raises:
            OSError: The file exists or cannot be written.
        """
        original = recipe_text(self.name)
        text = re.sub(r'^vocab = "chars"$', _OF_BYTES, original, flags=re.MULTILINE)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise type(error)(f"cannot write {path}: {error.strerror}") from error
        if text != original:
            say(f'vocab = "bytes" encodes any text; txl recipes {self.name} prints the original')
        say(f"wrote {path}; train it with: txl train {path} --out runs/mine")
        if self.json:
            show({"file": str(path)}, as_json=True)


@dataclass(kw_only=True)
class Prepare(PrintsResult):
    """Download and tokenize a corpus or the text of a recipe, as txl train does by itself.

    RECIPE is a recipe, or a known corpus with its usual settings: enwik8, text8, wikitext-103,
    wikitext-2, ptb-word, ptb-char, lm1b, tiny-shakespeare, jsb-chorales, python-stdlib, or
    hf:ORG/NAME of Hugging Face datasets, or a file or folder of text. A recipe comes before a
    corpus of the same name. An interrupted command resumes; any number of --data.workers gives the
    same bytes.

    Examples:
      txl prepare demo
      txl prepare wikitext-103
      txl prepare enwik8 --data.vocab authors-bytes --data.path downloads/
      txl prepare shakespeare-char-cpu --data.path input.txt
      txl prepare my.toml --data.vocab bpe --data.path 'texts/*.jsonl.gz'
    """

    recipe: Recipe
    """A recipe by its name or file, a corpus, or a file or folder of text."""
    data: Given[DataConfig] = field(default_factory=nothing)

    def run(self) -> None:
        """Build the corpus of the recipe, or a known one with its usual settings."""
        from transformer_xl.data import KNOWN_CORPORA, prepare

        name = self.recipe
        if is_text(name):
            settings = recipe_of_text(name).data
        elif name.startswith("hf:"):
            settings = DataConfig(name=name)
        elif name in KNOWN_CORPORA and name not in recipe_names():
            settings = replace(KNOWN_CORPORA[name].settings, name=name)
        else:
            settings = load_recipe(name).data
        corpus = prepare(replace(settings, **text_settings(settings, self.data)), say)
        splits = {name: corpus.n_tokens(name) for name in ("train", "valid", "test")}
        about = {"folder": str(corpus.folder), "vocab": len(corpus.vocab), **splits}
        show(about, as_json=self.json)


@dataclass(kw_only=True)
class Train(FittedRecipe):
    """Train a model by a recipe, or fine-tune one; the same command resumes an interrupted run.

    Any setting of the recipe can be changed here. Ctrl-C saves a checkpoint and stops. A file or
    folder of text in place of a recipe is trained on byte by byte, for three minutes at most, by a
    recipe for two CPU cores that suits its size. A model or run folder in place of a recipe is
    fine-tuned: its architecture, vocabulary and weights are used, and --data.path gives the text;
    without it, a run is trained on with its own. So is a model by its name; a recipe of the same
    name comes first, and python-code-2, with the version, is always the model.

    Examples:
      txl train mine.txt
      txl train demo --out runs/demo
      txl train shakespeare-char-cpu --out runs/bard --train.seed 2
      txl train mine.toml --out runs/mine --model.mem_len 256 --data.path corpus/
      txl train models/wt103 --out runs/mine --data.path corpus/ --train.steps 2000
      txl train python-code-2 --out runs/mine --data.path project/ --train.steps 200
    """

    recipe: Recipe
    """A file or folder of text, a recipe by its name or file, or a model: a folder, or its name
    (txl models)."""
    out: Path | None = None
    """The run folder: created if new, resumed if it holds a run of the same recipe; None: runs/ and
    the name of the text or the recipe."""
    quiet: bool = False
    """Print only the result."""

    @property
    def folder(self) -> Path:
        """The run folder.

        Raises:
            SettingsError: It must be given.
        """
        if self.out is not None:
            return self.out
        path = Path(self.recipe)
        require(
            not path.is_dir() or is_text(self.recipe),
            f"{self.recipe} is a model: give the run folder of the new training with --out",
        )
        return Path("runs") / (path.stem if path.is_file() else path.resolve().name)

    def config(self) -> Config:
        """Return the recipe with the settings of the command line."""
        return self.changed(self._recipe())

    def _recipe(self) -> Config:
        """Return the recipe of that name, that of a text, or that of fine-tuning a model.

        Raises:
            SettingsError: The recipe is a text, and the options give another one.
        """
        text_options = [x for x in ("name", "path", "corpus") if self.data.get(x)]
        if is_text(self.recipe):
            for name in text_options:
                raise SettingsError(
                    f"{self.recipe} and --data.{name} {self.data[name]} are two texts: leave "
                    "out one of them, or give a recipe in place of the first"
                )
            return recipe_of_text(self.recipe)
        if is_model(self.recipe):
            return fine_tuning_of(self.recipe, keeps_text=not text_options)
        return load_recipe(self.recipe)

    def run(self) -> None:
        """Train, evaluate, report."""
        from transformer_xl.config import Stalled, World, prepare_process
        from transformer_xl.train import RunFolder, train

        prepare_process()
        models = [self.recipe] if is_model(self.recipe) else []
        if (model := self.train.get("init_from")) is not None:
            models.append(model)
        for name in models if World.is_first_here() else ():
            require_model(name)
        folder = self.folder
        RunFolder(folder).require_writable()
        try:
            recipe = self._recipe()
            if not RunFolder(folder).checkpoints:
                self.say(self._beginning(recipe))
            config = self.changed(recipe)
            has_text = config.data.vocab != "features"
            if (self.data or is_text(self.recipe)) and has_text:
                overrides = {"train": self.train, "generate": self.generate}
                config = fitted_to_text(config, overrides, self.say)
            results = train(config, folder, quiet=self.quiet)
        except Stalled as error:
            say(f"txl: {error}")
            # Not sys.exit: threads may still wait for the process that hangs.
            sys.stderr.flush()
            os._exit(1)
        if not World.is_first_here():
            return
        after = f"generate {folder} --prompt 'some text to continue'"
        self.say(f"next: txl {after if has_text else f'eval {folder}'}")
        # Last, so that the result is the last line where stdout and stderr go to one file. Where
        # the training is shown, it has ended with its figures.
        if self.quiet or self.json:
            flat = results["test"] | {k: x for k, x in results.items() if k.endswith("per_byte")}
            show(flat, as_json=self.json)

    def _beginning(self, recipe: Config) -> str:
        """Say which weights the training begins with, and how to begin with others."""
        if (model := self.train.get("init_from", recipe.train.init_from)) is not None:
            return f"from the weights of {model}"
        is_of_text = is_text(self.recipe)
        shipped = ShippedModel.find("english" if is_of_text else self.recipe)
        model = shipped.full_name if shipped else "MODEL"
        how = f"byte by byte, as {TEXT_RECIPE}" if is_of_text else f"by the recipe {self.recipe}"
        text = self.recipe if is_of_text else self.data.get("path") or "TEXT"
        return f"from random weights, {how}; from those of a model: " + shlex.join(
            ["txl", "train", model, "--data.path", text]
        )
