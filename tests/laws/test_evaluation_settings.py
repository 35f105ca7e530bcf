"""Every setting of an evaluation and of writing: changing it changes what comes, or is refused."""

import json
from dataclasses import fields, replace
from functools import cache

import pytest
import torch

from transformer_xl import cli
from transformer_xl.config import EvalConfig, GenerateConfig
from transformer_xl.data import prepare
from transformer_xl.model import TransformerXL
from transformer_xl.train import RunFolder, finish, loop, report
from transformer_xl.train.beginning import fit_to_corpus

pytestmark = pytest.mark.usefixtures("one_thread")

CHANGED = {
    "split": {"split": "test"},
    "segment_len": {"segment_len": 5},
    "mem_len": {"mem_len": 3},
    "attn_len": {"attn_len": 4},
    "clamp_len": {"clamp_len": 2},
    "ext_len": {"ext_len": 3},
    "batch_size": {"batch_size": 5},
    "max_steps": {"max_steps": 1},
    "mem_lens": {"mem_lens": (0, 3)},
    "window": {"window": 4},
    "dynamic": {"dynamic": "sgd"},
    "dynamic_lr": {"dynamic": "sgd", "dynamic_lr": 0.5},
    "dynamic_decay": {"dynamic": "sgd", "dynamic_decay": 0.5},
    "dynamic_eps": {"dynamic": "rms", "dynamic_tokens": 40, "dynamic_eps": 0.5},
    "dynamic_tokens": {"dynamic": "rms", "dynamic_eps": 0.1, "dynamic_tokens": 40},
    "ngram_cache": {"ngram_cache": "training"},
}
"""For each setting, the last one of its line, what changes it: several where it needs another."""
LENGTHS = ("segment_len", "mem_len", "attn_len", "clamp_len", "ext_len", "batch_size")
DYNAMIC = tuple(name for name in CHANGED if name.startswith("dynamic"))


@pytest.fixture(scope="module")
def config(toy_recipe, toy_text, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(toy_text.read_text()[:1000])
    data = {"path": str(path), "valid_fraction": 0.06, "test_fraction": 0.06}
    recipe = toy_recipe(generate={"prompt": "the ", "length": 20}, data=data)
    recipe = replace(recipe, eval=EvalConfig(batch_size=4, segment_len=8))
    return fit_to_corpus(recipe, prepare(recipe.data))


@pytest.fixture(scope="module")
def corpus(config):
    return prepare(config.data)


@pytest.fixture(scope="module")
def model(config):
    """Weights far from zero, which no two ways to read agree on."""

    torch.manual_seed(0)
    return TransformerXL(replace(config.model, init_std=0.3)).eval()


@pytest.fixture(scope="module")
def run(config, corpus, model, tmp_path_factory):
    """The folder of a run that has not ended yet."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    RunFolder(folder).save_model(
        "best", replace(config, model=model.config), model.named_weights(), corpus.vocab
    )
    (folder / "recipe.toml").write_text(config.to_toml())
    return folder


def measured(found):
    """Leave out of results what no two readings have in common."""
    if isinstance(found, dict):
        left_out = ("seconds", "tokens_per_second", "settings")
        return {name: measured(x) for name, x in found.items() if name not in left_out}
    return [measured(x) for x in found] if isinstance(found, list) else found


def validation(config, corpus, run, model, monkeypatch):
    found = loop._validate(config, corpus, model)
    return measured({"nll": found.nll, "batch_size": found.batch_size, "window": found.window})


def final_table(config, corpus, run, model, monkeypatch):
    monkeypatch.setattr(finish, "_sample", lambda *given: {"prompt": "", "text": ""})
    monkeypatch.setattr(report, "write_report", lambda folder: folder)
    found = finish.finish(config, RunFolder(run), corpus, model.device, str, quiet=True)
    return measured(found)


PATHS = {
    # For each what has nothing to say there, as the docstring of EvalConfig tells.
    validation: ("split", "mem_lens", "ngram_cache", *DYNAMIC),
    final_table: ("split", *DYNAMIC),
}


def test_no_setting_is_forgotten_here():
    assert set(CHANGED) == {field.name for field in fields(EvalConfig)}


def changing(found):
    """The settings that change what is found; each reading is made once."""
    once = cache(lambda settings: found(dict(settings)))
    assert once(()) == found({})
    for name, settings in CHANGED.items():
        others = tuple((key, x) for key, x in settings.items() if key != name)
        if once((*others, (name, settings[name]))) != once(others):
            yield name


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_each_setting_changes_what_a_training_measures(
    path, config, corpus, run, model, monkeypatch
):
    def found(settings):
        asked = replace(config, eval=replace(config.eval, **settings))
        return path(asked, corpus, run, model, monkeypatch)

    assert {*changing(found)} == CHANGED.keys() - {*PATHS[path]}


parsed = cache(lambda words: cli.parse([*words]))


@pytest.fixture
def txl(capsys, monkeypatch):
    """Runs a command with settings; its words are parsed once, which takes longer than the rest."""

    def run(*words, **settings):
        capsys.readouterr()
        words = tuple(str(word) for word in words)
        command = replace(parsed(words), **settings)
        with monkeypatch.context() as patch:
            patch.setattr(cli, "parse", lambda argv: command)
            code = cli.main([*words])
        return code, *capsys.readouterr()

    return run


def flags(settings, section=""):
    """Write settings as on a command line."""
    return [
        str(word)
        for name, value in settings.items()
        for word in (f"--{section}{name}", *(value if isinstance(value, tuple) else (value,)))
    ]


def test_the_command_line_hands_every_setting_on(run):
    asked = {name: settings[name] for name, settings in CHANGED.items()}
    assert cli.parse(["eval", str(run), *flags(asked, "eval.")]).eval == asked
    asked = {name: value for name, (_, value) in DRAWN.items()}
    assert cli.parse(["generate", str(run), *flags(asked)]).given == asked


def result(ended):
    code, out, err = ended
    assert code == 0, err
    return measured(json.loads(out.splitlines()[-1]))


def test_each_setting_changes_what_eval_says(run, txl):
    def found(settings):
        return result(txl("eval", run, "--json", eval=settings))

    assert {*changing(found)} == CHANGED.keys()


DRAWN = {
    # Beside which others, and another value.
    "prompt": ({}, "a cat"),
    "length": ({}, 7),
    "temperature": ({}, 0.2),
    "top_k": ({}, 1),
    "top_p": ({}, 0.05),
    "min_p": ({}, 0.9),
    "repetition_penalty": ({}, 20.0),
    "dry_multiplier": ({"length": 60, "top_k": 2}, 5.0),
    "dry_allowed_length": ({"length": 60, "top_k": 2, "dry_multiplier": 5.0}, 1),
    "on_loop": ({"length": 250, "top_k": 1}, "break"),
    "loop_min_length": ({"length": 99, "top_k": 1, "on_loop": "break", "loop_min_length": 80}, 60),
    "stop": ({}, ("e",)),
    "seed": ({}, 2),
}


@pytest.mark.slow
def test_each_setting_of_writing_changes_the_text(run, config, corpus, model, txl):
    assert [*DRAWN] == [field.name for field in fields(GenerateConfig)]

    def sample(**settings):
        asked = replace(config, generate=replace(config.generate, **settings))
        found = finish._sample(asked, corpus, model)
        return found["prompt"], found["text"]

    def written(**settings):
        code, out, _ = txl("generate", run, "--json", given=settings)
        assert code == 0
        found = json.loads(out)
        return found["prompt"], found["text"]

    for write in (sample, written):
        before = cache(lambda beside, write=write: write(**dict(beside)))
        assert before(()) == write()
        for name, (beside, value) in DRAWN.items():
            usual = before(tuple(beside.items()))
            assert write(**beside | {name: value}) != usual, name
