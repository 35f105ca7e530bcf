"""Every setting is checked where it is made, wherever its value comes from."""

import json
import math
from dataclasses import fields, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import tomli_w
import torch

from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.cli import main
from transformer_xl.config import (
    Config,
    DataConfig,
    EvalConfig,
    GenerateConfig,
    ModelConfig,
    TrainConfig,
)
from transformer_xl.config.checks import Range, validate_settings
from transformer_xl.config.recipes import parse_recipe
from transformer_xl.model.pretrained import ModelFolder

SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "generate": GenerateConfig,
}
WORKING = {
    "model": {"n_layer": 2},
    "data": {"path": "a.txt"},
    "train": {},
    "eval": {},
    "generate": {},
}
MODEL_FOLDER = {"model_type": "transformer-xl", "format_version": 1}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union; of any other annotation, itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def strange_values(kind: Any) -> list[Any]:
    """Values that no setting of an annotation may have, derived from it alone."""
    kinds = alternatives(kind)
    found: list[Any] = []
    for each in kinds:
        base, rule = get_args(each) if get_origin(each) is Annotated else (each, None)
        if type(rule) is Range:
            limits = rule.ge, rule.gt, rule.le, rule.lt
            below = [x - 1 for x in (rule.ge, rule.gt) if x is not None]
            above = [x + 1 for x in (rule.le, rule.lt) if x is not None]
            assert any(x is not None for x in limits), (kind, rule)
            found += [base(x) for x in (*below, *above)]
        if get_origin(base) is Literal:
            word = get_args(base)[-1]
            found += [f"{word}x"] if isinstance(word, str) else [max(get_args(base)) + 1]
        elif base is int:
            found += ["x", 4.5, True, 2**70]
        elif base is float:
            found += ["x", True, math.inf, math.nan]
        elif base is bool:
            found += ["x", 1]
        elif base is str:
            found += [3, True]
        elif get_origin(base) is tuple:
            # A list of texts can hold any word.
            found += [3, [None]] if str in get_args(base) else [3.5, ["x"], [None]]
    assert found, kind
    return found


CASES = [
    (section, name, value)
    for section, kind in SECTIONS.items()
    for name, rule in get_type_hints(kind, include_extras=True).items()
    for value in strange_values(rule)
]

# One of each setting; any word may be a text there, and a list takes many.
ON_THE_COMMAND_LINE = {x[:2]: x for x in CASES if not isinstance(x[2], list | bool) and x[2] != 3}


def bases(section: str, name: str) -> tuple[Any, ...]:
    """The types that a setting may have, without their limits."""
    kind = get_type_hints(SECTIONS[section], include_extras=True)[name]
    plain = [get_args(x)[0] if get_origin(x) is Annotated else x for x in alternatives(kind)]
    return tuple(get_origin(x) or x for x in plain)


# One of each kind, of whatever section.
OF_EACH_KIND = {bases(*x[:2]): x for x in ON_THE_COMMAND_LINE.values()}


def refusal(function: Any, *given: Any, **named: Any) -> str:
    try:
        function(*given, **named)
    except ValueError as error:
        return str(error)
    pytest.fail(f"{function.__name__} takes {given} {named}")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_value_that_a_setting_cannot_have_is_named_wherever_it_comes_from(tmp_path, section):
    path, kind = tmp_path / "config.json", SECTIONS[section]
    working = kind()
    for name, value in (case[1:] for case in CASES if case[0] == section):
        about = f"{section}.{name}={value!r}"
        message = refusal(kind, **{name: value})
        assert message.partition("=")[0].partition("[")[0] == f"{section}.{name}", about
        assert refusal(replace, working, **{name: value}) == message, about
        # TOML has no word for some.
        if value not in ([None], 2**70):
            values = WORKING | {section: WORKING[section] | {name: value}}
            found = refusal(parse_recipe, tomli_w.dumps(values), "mine.toml")
            assert found == f"mine.toml: {message}", about
        if section in ("model", "eval"):
            own = {name: value} if section == "model" else {"eval": {name: value}}
            path.write_text(json.dumps(MODEL_FOLDER | own))
            folder = ModelFolder(tmp_path)
            load = folder.read_config if section == "model" else folder.read_eval_config
            assert refusal(load) == f"{path}: {message}", about


# Each takes a tenth of a second.
@pytest.mark.parametrize(
    "cases",
    [OF_EACH_KIND, pytest.param(ON_THE_COMMAND_LINE, marks=pytest.mark.slow)],
    ids=["kinds", "settings"],
)
def test_a_value_that_a_setting_cannot_have_is_named_on_the_command_line(capsys, cases):
    for section, name, value in cases.values():
        words = ["train", "demo", "--out", "nowhere", f"--{section}.{name}={value}"]
        assert main(words) == 2, words
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert f"{section}.{name}" in said, words
        assert str(value) in said, words


ERRORS = [
    (
        lambda: TrainConfig(schedule="cos"),
        "train.schedule='cos' must be 'cosine', 'inverse_sqrt' or 'constant_cooldown'; "
        "did you mean 'cosine'?",
    ),
    (
        lambda: TrainConfig(optimizer="adamw2"),
        "train.optimizer='adamw2' must be 'adamw', 'muon', 'lamb' or 'sgd'; did you mean 'adamw'?",
    ),
    (lambda: ModelConfig(norm="batch"), "model.norm='batch' must be 'layer' or 'rms'"),
    (lambda: TrainConfig(lr=math.nan), "train.lr=nan must be a finite number"),
    (
        lambda: ModelConfig(quirks=["raw_query"]),
        "model.quirks[0]='raw_query' must be 'stored_positions', 'swapped_ext_len', 'raw_queries' "
        "or 'exact_frequencies'; did you mean 'raw_queries'?",
    ),
    (
        lambda: ModelConfig(n_layer=10**5000),
        "model.n_layer=a number of thousands of digits must be below 2**64",
    ),
    (lambda: ModelConfig(cutoffs=range(2000)), None),
    (
        lambda: ModelConfig(cutoffs=[*range(2000)]),
        None,
    ),
    (lambda: EvalConfig(mem_lens={1, 2}), None),
    (lambda: Config(model={}, data=DataConfig()), "model={} must be ModelConfig"),
]


def test_an_error_names_the_setting_the_value_what_is_allowed_and_what_is_near():
    for made, message in ERRORS:
        said = refusal(made)
        assert "=" in said
        assert message is None or said == message


def test_numbers_of_numpy_and_torch_and_lists_become_what_files_can_hold():
    train = TrainConfig(
        steps=np.int64(40), lr=np.float32(0.5), seed=torch.tensor(3), stages=[[0, 128, 8]]
    )
    assert (train.steps, train.lr, train.seed, train.stages) == (40, 0.5, 3, ((0.0, 128, 8),))
    model = ModelConfig(cutoffs=torch.tensor([4, 5]), norm_first=np.True_, mem_len=8)
    assert (model.cutoffs, model.norm_first) == ((4, 5), True)
    config = Config(model=model, data=DataConfig(path="a.txt"), train=train)
    assert parse_recipe(config.to_toml(), "") == config
    plain = {int, float, bool, tuple}
    assert {type(x) for x in (train.steps, train.lr, model.norm_first, model.cutoffs)} == plain


def test_a_server_is_checked_like_a_recipe_and_its_key_is_not_shown():
    assert refusal(ServeSettings, port=70_000) == "port=70000 must be at most 65535"
    assert refusal(ServeSettings, max_batch=2.5) == "max_batch=2.5 must be an integer"
    with pytest.raises(ValueError, match="api_key must be") as caught:
        ServeSettings(api_key=b"secret")
    assert "secret" not in str(caught.value)
    hidden = [x.name for x in fields(ServeSettings) if x.metadata]
    assert hidden == ["api_key"]
    assert str(ServeSettings(sessions="here").sessions) == "here"


def test_values_of_unknown_names_are_not_dropped():
    assert validate_settings(ModelConfig, {"n_layer": np.int64(2)}) == {"n_layer": 2}
    for values, section, message in (
        ({"n_layr": 2}, "model", "model.n_layr: no such setting; did you mean n_layer?"),
        ({"xyzzy": 1}, "", "xyzzy: no such setting; there are "),
    ):
        refused = refusal(validate_settings, ModelConfig, values, section)
        assert refused.startswith(message)
