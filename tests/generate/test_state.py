import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from transformer_xl.generate import generate, load_state, save_state
from transformer_xl.nn import TransformerXL


@pytest.fixture
def weights(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model" / "model.safetensors"


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_p": 0.9}], ids=str)
def test_a_saved_text_goes_on_as_if_it_had_not_stopped(model, weights, tmp_path, settings):
    whole = list(generate(model, [7, 2], length=40, seed=3, **settings))
    first = generate(model, [7, 2], length=15, seed=3, **settings)
    begun = list(first)
    save_state(tmp_path / "state", first, weights)
    state = load_state(tmp_path / "state", weights)
    assert state.last_token == begun[-1]
    rest = generate(
        model, [state.last_token], length=25, mems=state.mems, seed=state.random, **settings
    )
    assert begun + list(rest) == whole


def test_a_memory_comes_back_bit_for_bit(model, weights, tmp_path):
    generation = generate(model, [1, 2, 3], length=9, seed=1)
    list(generation)
    for mems in (generation.mems, generation.mems.reset([0]), generation.mems.last(0)):
        save_state(tmp_path / "state", generate(model, [1], mems=mems), weights)
        again = load_state(tmp_path / "state", weights).mems
        for name, x in mems.state_dict().items():
            y = again.state_dict()[name]
            assert (x is None and y is None) or torch.equal(x, y)


def test_a_text_that_is_not_begun_can_be_saved(model, weights, tmp_path):
    save_state(tmp_path / "state", generate(model, [4, 5], seed=1), weights)
    state = load_state(tmp_path / "state", weights)
    assert (len(state.mems), state.last_token) == (0, 5)


def test_a_state_without_random_numbers_is_read(model, weights, tmp_path):
    path = tmp_path / "state"
    save_state(path, generate(model, [1, 2], length=4), weights)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    del tensors["random"]
    save_file(tensors, path, about)
    assert load_state(path, weights).random is None


def test_a_memory_of_another_model_is_refused(model, weights, tmp_path):
    save_state(tmp_path / "state", generate(model, [1], length=1), weights)
    TransformerXL(model.config).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"was made by another model than .*other"):
        load_state(tmp_path / "state", tmp_path / "other" / "model.safetensors")


@pytest.mark.parametrize(
    "damage",
    ["empty", "cut", "text", "no metadata", "no number", "no values", "other tensors", "no random"],
)
def test_a_damaged_state_is_named(model, weights, tmp_path, damage):
    path = tmp_path / "state"
    save_state(path, generate(model, [1, 2], length=4), weights)
    tensors, content = load_file(path), path.read_bytes()
    with safe_open(path, "pt") as file:
        about = file.metadata()
    if damage == "no metadata":
        save_file(tensors, path)
    elif damage == "no number":
        save_file(tensors, path, about | {"last_token": "seven"})
    elif damage == "no values":
        save_file({"keys": tensors["keys"]}, path, about)
    elif damage == "no random":
        save_file(tensors | {"random": torch.zeros(7, dtype=torch.uint8)}, path, about)
    elif damage == "other tensors":
        save_file({"keys": torch.zeros(3), "values": torch.zeros(3)}, path, about)
    else:
        path.write_bytes(
            {"empty": b"", "cut": content[:-5], "text": json.dumps(about).encode()}[damage]
        )
    with pytest.raises(RuntimeError, match=r"state is damaged or holds no memory"):
        load_state(path, weights)


def test_a_newer_state_is_refused_with_its_remedy(model, weights, tmp_path):
    path = tmp_path / "state"
    save_state(path, generate(model, [1, 2], length=4), weights)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file(load_file(path), path, about | {"format_version": "2"})
    with pytest.raises(RuntimeError, match=r"has format 2; .* up to 1: update transformer_xl"):
        load_state(path, weights)


def test_no_state_is_named(weights, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_state(tmp_path / "nowhere", weights)
