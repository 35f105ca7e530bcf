"""Recipes for a text or a model that stands in place of one, and for settings, text and size."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformer_xl.cli.given import Given, LoadsModels, PrintsResult, Recipe, nothing
from transformer_xl.cli.loading import evaluation_of
from transformer_xl.cli.printing import say
from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
    load_recipe,
    locate,
    locate_here,
    read_small_file,
    recipe_names,
    recipe_of,
)

TEXT_RECIPE = "shakespeare-char-cpu"
"""The recipe with which a text in place of a recipe is trained, byte by byte."""
PASSES = 50
"""How often such a training reads the text at most."""
_LEAST_HELD_OUT, _MOST_HELD_OUT = 200, 100_000
"""Bytes of such a text that are held out, for the validation and again for the test."""
_SHARE = 0.2
"""Its greatest share that is."""
_IN_RECIPE = re.compile(rb"^\s*\[model\]\s*(#.*)?$", re.MULTILINE)

Say = Callable[[str], None]


@dataclass(kw_only=True)
class FittedRecipe(LoadsModels, PrintsResult):
    """A command that takes a recipe, which gives way where it contradicts the command line."""

    recipe: Recipe
    """A recipe by its name or file."""
    model: Given[ModelConfig] = field(default_factory=nothing)
    data: Given[DataConfig] = field(default_factory=nothing)
    train: Given[TrainConfig] = field(default_factory=nothing)
    eval: Given[EvalConfig] = field(default_factory=nothing)
    generate: Given[GenerateConfig] = field(default_factory=nothing)

    def changed(self, config: Config) -> Config:
        """Return a configuration with the settings of the command line."""
        overrides = {x: getattr(self, x) for x in config.__dataclass_fields__}
        overrides["data"] = text_settings(config.data, overrides["data"])
        return config.changed(overrides, self.say)

    def say(self, text: str) -> None:
        """Print a message, unless the command is quiet or another process prints it."""
        from transformer_xl.config import World

        if not getattr(self, "quiet", False) and World.is_first_here():
            say(text)


def is_model(name: str) -> bool:
    """Whether a name in place of a recipe is that of a model.

    Recipes come first, as a run folder is often named after its recipe.
    """
    if name in recipe_names() or name.endswith(".toml"):
        return False
    place = locate_here(name)
    return place is not None and place.path.is_dir()


def fine_tuning_of(name: str, *, keeps_text: bool) -> Config:
    """Return a recipe that fine-tunes a model: its architecture, vocabulary and weights.

    Other settings come from the recipe of its run, if any; with ``keeps_text`` its text, too.
    """
    from transformer_xl.data import is_vocabulary, load_vocab
    from transformer_xl.inference.generate import prompt_for
    from transformer_xl.model import ModelFolder

    folder, recipe = ModelFolder.find(name), recipe_of(name)
    place, model = folder.path, folder.read_config()
    data = DataConfig(vocab="features") if model.n_features else DataConfig()
    base = recipe or Config(model=model, data=data, eval=evaluation_of(name, None))
    # A shipped model may have a longer memory than its training had.
    model = replace(model, mem_len=base.model.mem_len)
    data = base.data
    if not keeps_text or not locate(name).is_path:
        data = replace(data, name="", path=None, valid_path=None, test_path=None, corpus=None)
    if is_vocabulary(place):
        data = replace(data, tokenizer=str(place), vocab_size=None, vocab_from=None)
        if recipe is None:
            base = replace(base, generate=GenerateConfig(prompt=prompt_for(load_vocab(place))))
    return replace(base, model=model, data=data, train=replace(base.train, init_from=str(place)))


def is_text(name: str) -> bool:
    """Whether a name in place of a recipe is the path of a text: a file or folder of it."""
    path = Path(name)
    if name in recipe_names() or path.suffix == ".toml" or not path.exists():
        return False
    if path.is_dir():
        if (place := locate_here(name)) is None or not place.is_path:
            return False
        return not any((place.path / x).exists() for x in ("config.json", "recipe.toml", "model"))
    try:
        return not _IN_RECIPE.search(read_small_file(path))
    except (OSError, ValueError):
        # No recipe is as long; what cannot be read is said where texts are.
        return True


def recipe_of_text(name: str) -> Config:
    """Return a recipe for two CPU cores that suits the size of a text.

    It is :data:`TEXT_RECIPE` by bytes. A short text is read :data:`PASSES` times at most, with
    validations that find the best model on the way; of a long one, little is held out.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: A folder holds no text.
    """
    base, data = load_recipe(TEXT_RECIPE), DataConfig(path=name)
    n_bytes = max(sum(path.stat().st_size for path in _files(data)), 1)
    least, most = _LEAST_HELD_OUT / n_bytes, _MOST_HELD_OUT / n_bytes
    held_out = float(f"{min(max(data.valid_fraction, least), most, _SHARE):.3g}")
    n_steps = PASSES * n_bytes // (base.train.batch_size * base.train.segment_len)
    steps = min(max(n_steps, 100), 1_000_000)
    warmup_steps = min(base.train.warmup_steps, steps // 10)
    eval_every = min(500, steps // 10)
    return replace(
        base,
        data=replace(data, valid_fraction=held_out, test_fraction=held_out),
        train=replace(base.train, steps=steps, warmup_steps=warmup_steps, eval_every=eval_every),
        generate=replace(base.generate, prompt="\n"),
    )


def _files(data: DataConfig) -> tuple[Path, ...]:
    """List the files of a text on this machine."""
    from transformer_xl.data import list_texts

    assert data.path is not None
    return list_texts(data.path, data, lambda _: None).train


def text_settings(recipe: DataConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of the text, with those that a path on the command line implies.

    A path is that of a text of one's own, and so data.name is empty, unless a copy of the recipe's
    corpus is there. Whole files can be held out of three or more.
    """
    settings, path = dict(overrides), overrides.get("path")
    if not path or "://" in path:
        return settings
    if recipe.name and "name" not in overrides and not _is_copy(recipe.name, Path(path)):
        settings["name"] = ""
    data = replace(recipe, path=path, name=settings.get("name", recipe.name))
    is_by_file = data.split_by == "file" and "split_by" not in overrides
    is_held_out = any(overrides.get(x) is not None for x in ("valid_path", "test_path"))
    if is_by_file and not data.name and not is_held_out and len(_files(data)) < 3:
        settings["split_by"] = "fraction"
    return settings


def _is_copy(name: str, path: Path) -> bool:
    """Whether a path has the files of a known corpus, by their names."""
    from transformer_xl.data import KNOWN_CORPORA

    if name == "python-stdlib":
        return (path / "os.py").is_file()
    if name not in KNOWN_CORPORA:
        return False
    names = [x for file in KNOWN_CORPORA[name].files.values() for x in (file.name, *file.also)]
    files = path.rglob("*") if path.is_dir() else (path,)
    return not {Path(x).name for x in names}.isdisjoint(file.name for file in files)


def fitted_to_text(
    config: Config, overrides: Mapping[str, Mapping[str, object]], tell: Say
) -> Config:
    """Return a recipe whose own prompt and batch suit the text, which is prepared.

    A prompt that the vocabulary cannot encode is replaced, and a batch that is larger than the
    training text is made smaller. What is on the command line stays as it is.
    """
    from transformer_xl.data import prepare
    from transformer_xl.inference.generate import prompt_for

    corpus = prepare(config.data, tell)
    prompt = config.generate.prompt
    if "prompt" not in overrides.get("generate", {}):
        try:
            is_encoded = bool(corpus.vocab.encode(prompt))
        except ValueError:
            is_encoded = False
        if not is_encoded:
            known = prompt_for(corpus.vocab)
            tell(
                f"note: the prompt of the recipe, {prompt!r}, is not in the vocabulary of "
                f"this text; the sample at the end begins with {known!r}. --generate.prompt TEXT "
                "gives another"
            )
            config = replace(config, generate=replace(config.generate, prompt=known))
    n_tokens, train = corpus.n_tokens("train"), config.train
    fitted = _fitted_batch(train, overrides.get("train", {}), n_tokens)
    if fitted != train:
        tell(
            f"note: the training text has {n_tokens:,} tokens; train.batch_size="
            f"{fitted.batch_size} and train.segment_len={fitted.segment_len} are taken, not the "
            f"recipe's {train.batch_size} and {train.segment_len}"
        )
    return replace(config, train=fitted)


def _fitted_batch(
    train: TrainConfig, overrides: Mapping[str, object], n_tokens: int
) -> TrainConfig:
    """Return the settings with a batch that a text of so many tokens fills, if there is one."""
    batch_size = train.batch_size
    segment_len = max([train.segment_len, *(x for _, x, _ in train.stages)])
    if n_tokens >= batch_size * segment_len or "stages" in overrides:
        return train
    if "batch_size" not in overrides:
        batch_size = min(batch_size, max(n_tokens // segment_len, 1))
    if "segment_len" not in overrides:
        segment_len = min(segment_len, max(n_tokens // batch_size, 1))
    accumulate = train.accumulate if batch_size % train.accumulate == 0 else 1
    if "accumulate" in overrides and accumulate != train.accumulate:
        return train
    stages = train.stages and train.fitted_stages(segment_len)
    sizes = {"batch_size": batch_size, "segment_len": segment_len, "accumulate": accumulate}
    return replace(train, stages=stages, **sizes)
