import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from transformer_xl.inference.generate import State, generate, load_state, save_state
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
            save_state(tmp_path / "state", state, weights, positions=12)
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


def changed_states(state):
    """States that no text of the model can have left."""
    mems, both = state.mems, state.mems.by_name()

    def with_keys_and_values(change):
        changed = [change(tensors) for tensors in both]
        return state._replace(mems=KeysAndValues(*changed, forgotten=mems.forgotten))

    return [
        # Fewer layers, wider heads, more heads, two texts.
        with_keys_and_values(lambda tensors: tensors[1:]),
        *(
            with_keys_and_values(lambda tensors, dim=dim: [torch.cat([x, x], dim) for x in tensors])
            for dim in (-1, 0, 1)
        ),
        state._replace(mems=Memory([torch.zeros(1, len(mems), 5)] * 3)),
        state._replace(mems=mems.forgetting(torch.tensor([len(mems) + 1]))),
        state._replace(last_token=31),
        state._replace(last_token=-1),
        state._replace(read=torch.tensor([1, 31])),
    ]


def test_a_state_that_does_not_fit_its_model_is_refused(model, weights, tmp_path):
    generation = generate(model, [1, 2, 3], length=4, seed=1)
    list(generation)
    mems = type(generation.mems).from_state_dict(generation.mems.state_dict())
    state = State(mems, 3, generation.random_state)
    save_state(tmp_path / "state", state, weights)
    assert load_state(tmp_path / "state", weights, model).last_token == 3
    for changed in changed_states(state):
        save_state(tmp_path / "state", changed, weights)
        with pytest.raises(RuntimeError, match=r"state is damaged"):
            load_state(tmp_path / "state", weights, model)


def test_a_damaged_state_is_named(model, weights, tmp_path):
    path = tmp_path / "state"
    about = saved(path, model, weights)
    content = path.read_bytes()
    # Copies, as the file is written over.
    tensors = {name: x.clone() for name, x in load_file(path).items()}
    for damage in (
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(content[:-5]),
        lambda: path.write_text(json.dumps(about)),
        lambda: save_file(tensors, path),
        lambda: save_file(tensors, path, about | {"last_token": "seven"}),
        lambda: save_file(tensors, path, about | {"unused": "-1"}),
        lambda: save_file({"keys": tensors["keys"]}, path, about),
        lambda: save_file(tensors | {"random": torch.zeros(7).byte()}, path, about),
        lambda: save_file({"keys": torch.zeros(3), "values": torch.zeros(3)}, path, about),
    ):
        damage()
        with pytest.raises(RuntimeError, match=r"state is damaged"):
            load_state(path, weights)


def test_a_newer_state_is_refused_with_its_remedy(model, weights, tmp_path):
    path = tmp_path / "state"
    about = saved(path, model, weights)
    save_file(load_file(path), path, about | {"format_version": "2"})
    with pytest.raises(RuntimeError, match=r"has format 2; .* up to 1: update transformer_xl"):
        load_state(path, weights)
