"""The limit on loading holds in transformers, too, before a network is built."""

import json

import pytest

from transformer_xl.interop.hf import base
from transformer_xl.model import limits


def by_class(folder, **settings):
    from transformer_xl.hf import TransformerXLForCausalLM

    return TransformerXLForCausalLM.from_pretrained(folder, **settings)


def by_auto_class(folder, **settings):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def by_pipeline(folder, **settings):
    from transformers import pipeline

    return pipeline("text-generation", str(folder), model_kwargs=settings).model


LOADERS = pytest.mark.parametrize("load", [by_class, by_auto_class, by_pipeline])


@pytest.fixture
def small(any_folder):
    return any_folder(n_layer=1)[1]


@LOADERS
def test_more_layers_than_tensors_are_refused_before_they_are_built(small, monkeypatch, load):
    monkeypatch.setattr(base, "build_model", None)
    path = small / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_layer": 50_000}))
    # A pipeline has a ValueError of its own, with the error of each class.
    with pytest.raises((RuntimeError, ValueError), match=r"config.json: n_layer=50000 is more"):
        load(small)


def test_settings_that_replace_those_of_the_folder_count(small, monkeypatch):
    monkeypatch.setattr(base, "build_model", None)
    for name in ("n_layer", "num_hidden_layers"):
        with pytest.raises(RuntimeError, match="n_layer=50000 is more than"):
            by_class(small, **{name: 50_000})


@LOADERS
def test_the_limit_is_that_of_our_own_loader_and_lifted_as_there(small, monkeypatch, load):
    monkeypatch.setattr(limits, "_TENSOR_BYTES", 1 << 60)
    with pytest.raises(ValueError, match=r"would take at least .*TXL_ANY_SIZE=1"):
        load(small)
    with limits.any_size():
        load(small)
    monkeypatch.setenv("TXL_ANY_SIZE", "1")
    load(small)
