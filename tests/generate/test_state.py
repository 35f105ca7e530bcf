import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from transformer_xl.inference.generate import (
    State,
    generate,
    load_state,
    save_state,
    write_state,
)
from transformer_xl.model import Memory, TransformerXL
from transformer_xl.model.keys_and_values import KeysAndValues
from transformer_xl.model.pretrained import CHECKSUM_KEY


@pytest.fixture
def weights(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model" / "model.safetensors"


def test_a_memory_comes_back_bit_for_bit(model, weights, tmp_path):
    generation = generate(model, [1, 2, 3], length=9, seed=1)
    list(generation)
    for mems in (generation.mems, generation.mems.reset([0]), generation.mems.last(0)):
        save_state(tmp_path / "state", generate(model, [1], mems=mems), weights)
        again = load_state(tmp_path / "state", weights).mems
        for name, x in mems.state_dict().items():
            y = again.state_dict()[name]
            assert (x is None and y is None) or torch.equal(x, y)


def test_a_file_with_room_is_of_one_size_and_holds_the_same(model, weights, tmp_path):
    sizes = set()
    for length in (0, 1, 3, 9):
        generation = generate(model, [1, 2, 3], length=length, seed=1)
        list(generation)
        mems = generation.mems
        for memory in (mems, mems.reset([0])):
            state = State(memory, 3, generation.random_state, offset=length)
            write_state(tmp_path / "state", state, weights, positions=12)
            again = load_state(tmp_path / "state", weights)
            assert (again.last_token, again.offset, len(again.mems)) == (3, length, len(mems))
            assert torch.equal(again.mems.state_dict()["keys"], mems.state_dict()["keys"])
            assert (again.mems.forgotten is None) == (memory.forgotten is None)
        tensors = load_file(tmp_path / "state")
        sizes.add(sum(tensors[name].nbytes for name in ("keys", "values")))
    assert sizes == {2 * 3 * 12 * 16 * 4}


def saved(path, model, weights):
    """Save a state; return what the file says of it, without the checksum."""
    save_state(path, generate(model, [1, 2], length=4), weights)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    # What is damaged is found without its help, too.
    del about[CHECKSUM_KEY]
    return about


def test_a_state_without_random_numbers_is_read(model, weights, tmp_path):
    path = tmp_path / "state"
    about = saved(path, model, weights)
    tensors = load_file(path)
    del tensors["random"]
    save_file(tensors, path, about)
    assert load_state(path, weights).random is None


def test_a_memory_of_another_model_is_refused(model, weights, tmp_path):
    save_state(tmp_path / "state", generate(model, [1], length=1), weights)
    TransformerXL(model.config).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"was made by another model than .*other"):
        load_state(tmp_path / "state", tmp_path / "other" / "model.safetensors")


def _changed(state, what):
    """Return a state that no text of the model can have left."""
    mems, M = state.mems, len(state.mems)
    both = mems.by_name()
    if what == "fewer layers":
        both = [tensors[1:] for tensors in both]
    if what in (dims := {"wider heads": -1, "more heads": 0, "two texts": 1}):
        both = [[torch.cat([x, x], dims[what]) for x in tensors] for tensors in both]
    mems = KeysAndValues(*both, forgotten=mems.forgotten)
    if what == "hidden states":
        mems = Memory([torch.zeros(1, M, 5)] * 3)
    if what == "all forgotten and more":
        mems = mems.forgetting(torch.tensor([M + 1]))
    changed = {
        "no such token": {"last_token": 31},
        "a negative token": {"last_token": -1},
        "no such tokens before": {"read": torch.tensor([1, 31])},
    }
    return state._replace(mems=mems, **changed.get(what, {}))


CHANGES = [
    "fewer layers",
    "wider heads",
    "more heads",
    "two texts",
    "hidden states",
    "all forgotten and more",
    "no such token",
    "a negative token",
    "no such tokens before",
]


def test_a_state_that_does_not_fit_its_model_is_refused(model, weights, tmp_path):
    for what in CHANGES:
        generation = generate(model, [1, 2, 3], length=4, seed=1)
        list(generation)
        mems = generation.mems
        mems = type(mems).from_state_dict(mems.state_dict())
        state = State(mems, 3, generation.random_state)
        write_state(tmp_path / "state", state, weights)
        assert load_state(tmp_path / "state", weights, model).last_token == 3
        write_state(tmp_path / "state", _changed(state, what), weights)
        with pytest.raises(RuntimeError, match=r"state is damaged"):
            load_state(tmp_path / "state", weights, model)


DAMAGES = [
    "empty",
    "cut",
    "text",
    "no metadata",
    "no number",
    "no values",
    "other tensors",
    "no random",
    "no room",
]


def test_a_damaged_state_is_named(model, weights, tmp_path):
    for damage in DAMAGES:
        path = tmp_path / "state"
        about = saved(path, model, weights)
        tensors, content = load_file(path), path.read_bytes()
        if damage == "no metadata":
            save_file(tensors, path)
        elif damage == "no number":
            save_file(tensors, path, about | {"last_token": "seven"})
        elif damage == "no room":
            save_file(tensors, path, about | {"unused": "-1"})
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
        with pytest.raises(RuntimeError, match=r"state is damaged"):
            load_state(path, weights)


def test_a_newer_state_is_refused_with_its_remedy(model, weights, tmp_path):
    path = tmp_path / "state"
    about = saved(path, model, weights)
    save_file(load_file(path), path, about | {"format_version": "2"})
    with pytest.raises(RuntimeError, match=r"has format 2; .* up to 1: update transformer_xl"):
        load_state(path, weights)
