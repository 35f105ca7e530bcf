"""What ships is tried: every recipe file is a valid, complete recipe."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from transformer_xl.config import Config
from transformer_xl.config.recipes import load_recipe, recipe_names

FOLDER = Path(__file__).parents[2] / "src" / "transformer_xl" / "config" / "recipes"
FILES = sorted(FOLDER.glob("*.toml"))


def test_every_recipe_file_has_a_name() -> None:
    assert recipe_names() == sorted(path.stem for path in FILES)


def test_every_recipe_is_a_config_and_says_at_its_head_what_it_is() -> None:
    for path in FILES:
        assert isinstance(load_recipe(path.stem), Config)
        text = path.read_text("utf-8")
        assert text.startswith(f"# {path.name}\n# "), f"begin with `# {path.name}`, then why"
        assert {"model", "data", "train"} <= tomllib.loads(text).keys(), path.name


"""Kinds with the layers of transformers."""


def _write_recordings(config: Config, folder: Path) -> None:
    import numpy as np

    from transformer_xl.data.recordings import Recordings, write_recordings

    draw, n = np.random.default_rng(0), 60
    inputs = draw.normal(size=(n, config.model.n_features)).astype(np.float32)
    targets = inputs[:, 0] if config.model.n_mixtures else draw.integers(0, 2, n)
    for split in ("train", "valid", "test"):
        write_recordings(folder, split, Recordings(inputs, targets, np.arange(n) % 20 == 0))


def _tiny(config: Config, folder: Path) -> Config:
    """The same options on little text, with small widths and lengths."""
    folder.mkdir()
    if config.data.vocab == "features":
        _write_recordings(config, folder)
    rest = "7 5 3" if config.data.vocab == "integers" else "it is said, {} times."
    if config.data.completion_at:
        rest += f" {config.data.completion_at} it is."
    for number in range(8):
        text = f"{config.generate.prompt} {rest.format(number)}\n"
        (folder / f"{number}.txt").write_text(text * 60)
    model, train = config.model, config.train
    own = {setting.name for setting in fields(model)}
    length = 6

    def at_most_length(value: int | None) -> int | None:
        return None if value is None else min(value, length)

    return Config(
        model=replace(
            model,
            n_layer=2,
            # Wide enough for the narrowest of four clusters.
            d_model=8 * model.n_head,
            d_head=model.d_head and 3,
            d_embed=model.d_embed and 6,
            d_inner=10 if "d_inner" in own else model.d_inner,
            cutoffs=(3, 6, 9)[: len(model.cutoffs)],
            mem_len=min(model.mem_len, length),
            ext_len=min(model.ext_len, length),
            attn_len=at_most_length(model.attn_len),
            layer_attn_lens=tuple(x // 64 for x in model.layer_attn_lens[:2]),
            clamp_len=at_most_length(model.clamp_len),
        ),
        data=replace(
            config.data,
            name="",
            path=str(folder),
            test_path=None,
            valid_path=None,
            # A vocabulary that a task makes is one of characters.
            tokenizer=None,
            vocab="chars" if config.data.tokenizer else config.data.vocab,
        ),
        train=replace(
            train,
            steps=2,
            batch_size=2 * train.accumulate,
            segment_len=length,
            stages=tuple((start, length, min(M, length)) for start, _, M in train.stages),
            random_mem_len=train.random_mem_len and length // 2,
            warmup_steps=min(train.warmup_steps, 1),
            # A minute for each recipe; tests of compiled code are in tests/nn.
            compile=False,
        ),
        eval=replace(
            config.eval,
            segment_len=config.eval.segment_len and 64,
            mem_len=at_most_length(config.eval.mem_len),
            attn_len=at_most_length(config.eval.attn_len),
            clamp_len=at_most_length(config.eval.clamp_len),
            batch_size=min(config.eval.batch_size, 4),
            mem_lens=config.eval.mem_lens and (0, 2 * length),
        ),
        generate=replace(
            config.generate, **({} if config.data.vocab == "features" else {"length": 5})
        ),
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_trains_two_steps(path: Path, tmp_path: Path) -> None:
    from transformer_xl.train import train

    config = load_recipe(path.stem)
    results = train(_tiny(config, tmp_path / "text"), tmp_path / "run", quiet=True)
    assert 0 < results["test"]["nll"] < 10
    assert load_recipe(tmp_path / "run" / "recipe.toml").train.steps == 2
