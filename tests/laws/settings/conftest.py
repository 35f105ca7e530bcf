"""What the laws of settings share: texts of every kind, and a training without a folder."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from transformer_xl.cli import parse
from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.model import build_model
from transformer_xl.train import step
from transformer_xl.train.beginning import fit_to_corpus, initial_weights, new_state
from transformer_xl.train.runner import Network

CPU = torch.device("cpu")
BASE = Config(
    model=ModelConfig(
        n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=8, dropout=0.0, init_std=0.2
    ),
    data=DataConfig(path="text.txt", vocab="chars"),
    train=TrainConfig(
        steps=4,
        batch_size=4,
        segment_len=8,
        lr=1e-2,
        log_every=2,
        eval_every=2,
        save_every=2,
        precision="float32",
        clip_norm=10.0,
    ),
)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder with texts of every kind, a model, a vocabulary and a prepared corpus."""
    folder = tmp_path_factory.mktemp("texts")
    line = "the cat saw a dog and ran to sea\n"
    (folder / "text.txt").write_text(line * 30 + "a quiz" + line)
    (folder / "windows.txt").write_bytes(b"the cat saw a dog\r\n" * 30)
    (folder / "other.txt").write_text("a dog and a cat ran\n" * 30)
    (folder / "several").mkdir()
    for n in range(10):
        (folder / "several" / f"{n}.txt").write_text((line * 5).replace("cat", f"c{n}t"))
    rows = [{"text": "the cat", "title": "a dog"}] * 30
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = DataConfig(vocab="chars", path=str(folder / "text.txt"), cache_dir=str(folder / "c"))
    prepared = prepare(config)
    (folder / "prepared").symlink_to(prepared.folder)
    (folder / "vocabulary").mkdir()
    prepare(replace(config, vocab="bytes")).vocab.save(folder / "vocabulary")
    torch.manual_seed(9)
    model = build_model(replace(BASE.model, vocab_size=len(prepared.vocab)))
    model.save_pretrained(folder / "model", prepared.vocab)
    return folder


@pytest.fixture
def recipe(texts):
    """Makes recipes on these texts: `recipe(train={"steps": 3})`."""

    def make(**sections):
        config = BASE
        sections = {"data": {}} | sections
        for name, values in sections.items():
            values = dict(values)
            if name == "data":
                values = {"path": "text.txt", "cache_dir": "cache"} | values
                for key in ("path", "valid_path", "test_path", "tokenizer", "corpus", "cache_dir"):
                    if values.get(key) is not None:
                        values[key] = str(texts / values[key])
            if "init_from" in values:
                values["init_from"] = str(texts / values["init_from"])
            config = replace(config, **{name: replace(getattr(config, name), **values)})
        return config

    return make


def _begun(config):
    """Begin a training as `train` does, without a folder."""
    text = prepare(config.data)
    weights = initial_weights(config)
    config = fit_to_corpus(config, text)
    state = new_state(config, text, CPU, World(), weights)
    return config, state, Network(state.model, config.train, state.world)


@cache
def _numbers(config, steps=4):
    """Return losses, and the weights at the end: those that are kept.

    Once for each recipe: most settings are compared with the same one.
    """
    config, state, network = _begun(config)
    state.model.train()
    losses = [step.train_step(config, state, network).loss for _ in range(steps)]
    weights = [weight.detach().flatten() for weight in state.shown.parameters()]
    return torch.cat([torch.stack(losses), *weights])


@pytest.fixture
def begun():
    """Begins the training of a recipe: settings, state and network."""
    return _begun


@pytest.fixture
def numbers():
    """Trains a recipe: returns losses and weights."""
    return _numbers


def _packs(section, kind, table):
    """Put the rows of a section together to few recipes, each of settings that go together."""
    left = [base | {name: value} for name, (base, value, *_) in table.items()]
    while left:
        rows, left, taken = left, [], {}
        for settings in rows:
            together = taken | settings
            try:
                kind(**together)
                agrees = all(taken.get(name, value) == value for name, value in settings.items())
            except ValueError:
                agrees = False
            if agrees:
                taken = together
            else:
                left.append(settings)
        yield taken


def _words(value):
    return [w for x in value for w in _words(x)] if isinstance(value, tuple) else [str(value)]


@pytest.fixture
def handed_on(tmp_path) -> Callable[..., dict]:
    """Gives the settings of a table on the command line; returns what each then is there."""

    def hand_on(section, kind, table):
        # With completions, as some settings of the training have an effect only then.
        completions = {"reset_at": "a", "completion_at": "b"} if section == "train" else {}
        data = DataConfig(**completions)
        # The stages of the table end with this memory.
        model = ModelConfig(mem_len=8) if section == "train" else ModelConfig()
        config = Config(model=model, data=data)
        (tmp_path / "recipe.toml").write_text(config.to_toml())
        found = {}
        for pack in _packs(section, kind, table):
            words = [w for name, x in pack.items() for w in (f"--{section}.{name}", *_words(x))]
            # A model of recordings reads nothing else.
            words += ["--data.vocab", "features"] if "n_features" in pack else []
            command = parse(["train", str(tmp_path / "recipe.toml"), "--out", "nowhere", *words])
            settings = getattr(command.config(), section)
            assert settings == kind(**pack)
            found |= {name: getattr(settings, name) for name in pack if name not in found}
            found |= {name: x for name, x in pack.items() if x == table[name][1]}
        return found

    return hand_on
