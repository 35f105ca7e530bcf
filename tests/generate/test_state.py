import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from transformer_xl.config import ModelConfig
from transformer_xl.inference.generate import Sampling, State, generate
from transformer_xl.model import Memory, TransformerXL, build_model
from transformer_xl.model.keys_and_values import KeysAndValues
from transformer_xl.model.pretrained import CHECKSUM_KEY


@pytest.fixture
def weights(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model" / "model.safetensors"


def test_a_memory_comes_back_bit_for_bit(model, weights, tmp_path):
    generation = generate(model, [1, 2, 3], length=9, seed=1)
    list(generation)
    for mems in (generation.state.mems, generation.state.mems.last(0)):
        generate(model, [1], mems=mems).state.save(tmp_path / "state", weights)
        again = State.load(tmp_path / "state", weights).mems
        for name, x in mems.state_dict().items():
            y = again.state_dict()[name]
            assert (x is None and y is None) or torch.equal(x, y)


def test_a_file_with_room_is_of_one_size_and_holds_the_same(model, weights, tmp_path):
    sizes = set()
    for length in (0, 1, 3, 9):
        generation = generate(model, [1, 2, 3], length=length, seed=1)
        list(generation)
        mems = generation.state.mems
        state = replace(generation.state, offset=length)
        state.save(tmp_path / "state", weights, positions=12)
        again = State.load(tmp_path / "state", weights)
        assert [*again.tokens] == [*state.tokens]
        assert (again.offset, again.n_positions) == (length, len(mems))
        assert torch.equal(again.mems.state_dict()["keys"], mems.state_dict()["keys"])
        assert (again.checksum, again.nbytes) == (state.checksum, state.nbytes)
        tensors = load_file(tmp_path / "state")
        sizes.add(sum(tensors[name].nbytes for name in ("keys", "values")))
    assert sizes == {2 * 3 * 12 * 16 * 4}


def saved(path, model, weights):
    """Save a state; return what the file says of it, without the checksum."""
    generate(model, [1, 2], length=4).state.save(path, weights)
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
    assert State.load(path, weights).random is None


def test_a_memory_of_another_model_is_refused(model, weights, tmp_path):
    generate(model, [1], length=1).state.save(tmp_path / "state", weights)
    TransformerXL(model.config).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"was made by another model than .*other"):
        State.load(tmp_path / "state", tmp_path / "other" / "model.safetensors")


def changed_states(state):
    """States that no text of the model can have left."""
    mems, both = state.mems, state.mems.by_name()

    def with_keys_and_values(change):
        changed = [change(tensors) for tensors in both]
        return replace(state, source=KeysAndValues(*changed, forgotten=mems.forgotten))

    return [
        # Fewer layers, wider heads, more heads, two texts.
        with_keys_and_values(lambda tensors: tensors[1:]),
        *(
            with_keys_and_values(lambda tensors, dim=dim: [torch.cat([x, x], dim) for x in tensors])
            for dim in (-1, 0, 1)
        ),
        replace(state, source=Memory([torch.zeros(1, len(mems), 5)] * 3)),
        replace(state, tokens=np.array([31])),
        replace(state, tokens=np.array([-1])),
        replace(state, tokens=np.array([1, 31, 3])),
    ]


def test_a_state_that_does_not_fit_its_model_is_refused(model, weights, tmp_path):
    generation = generate(model, [1, 2, 3], length=4, seed=1)
    list(generation)
    mems = Memory.from_state_dict(generation.state.mems.state_dict())
    state = State(source=mems, tokens=np.array([3]), random=generation.state.random)
    state.save(tmp_path / "state", weights)
    assert State.load(tmp_path / "state", weights, model).last_token == 3
    for changed in changed_states(state):
        changed.save(tmp_path / "state", weights)
        with pytest.raises(RuntimeError, match=r"state is damaged"):
            State.load(tmp_path / "state", weights, model)


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
            State.load(path, weights)


def test_a_newer_state_is_refused_with_its_remedy(model, weights, tmp_path):
    path = tmp_path / "state"
    about = saved(path, model, weights)
    save_file(load_file(path), path, about | {"format_version": "2"})
    with pytest.raises(RuntimeError, match=r"has format 2; .* up to 1: update transformer_xl"):
        State.load(path, weights)


@pytest.mark.parametrize("options", [{}, {"key_offset": True, "norm_first": True}], ids=str)
def test_a_rewound_text_goes_on_as_one_that_was_not_written_further(tiny_config, options):
    model = TransformerXL(replace(tiny_config, init_std=0.3, **options)).eval()
    for length in (2, 30):
        text = generate(model, [1, 2, 3], length=length, seed=1, rewindable=9)
        tokens, state = list(text), text.state
        # To its beginning, or as far as what a token sees is there.
        assert state.rewindable == (4 if length == 2 else 9)
        for n in (0, 1, state.rewindable):
            earlier, read = state.rewind(n), [1, 2, 3, *tokens][: 3 + length - n]
            assert (earlier.n_tokens, earlier.tokens.tolist()) == (len(read), read)
            drawn = len(read[3:])
            short = generate(model, read[:3], length=drawn, seed=1, rewindable=9)
            assert list(short) == read[3:]
            going_on = {"sampling": Sampling(temperature=0.7), "length": 20, "seed": 5}
            expected = list(generate(model, state=short.state, **going_on))
            for _ in range(2):
                assert list(generate(model, state=earlier, **going_on)) == expected
        with pytest.raises(ValueError, match=rf"n={n + 1} must be at most rewindable={n}"):
            state.rewind(n + 1)


def test_a_state_does_not_change_when_texts_go_on_from_it(model):
    text = generate(model, [1, 2, 3], seed=1, rewindable=9)
    tokens = [next(text) for _ in range(20)]
    state = text.state
    checksum, greedy = state.checksum, Sampling(temperature=0)
    first = list(generate(model, [7], greedy, state=state, length=12))
    tokens += [next(text) for _ in range(20)]
    assert list(generate(model, [7], greedy, state=state, length=12)) == first
    assert state.checksum == checksum
    assert tokens == list(generate(model, [1, 2, 3], seed=1, length=40, rewindable=9))


def test_a_model_that_depends_on_segments_is_not_rewound(tiny_config):
    absolute = TransformerXL(replace(tiny_config, attn_type=2)).eval()
    lstm = ModelConfig(kind="lstm", vocab_size=31, n_layer=2, d_model=12)
    for model in (absolute, build_model(lstm)):
        text = generate(model.eval(), [1, 2, 3], length=5, rewindable=9)
        list(text)
        assert text.state.rewindable == 0
        with pytest.raises(ValueError, match=r"n=1 must be at most rewindable=0"):
            text.state.rewind(1)


def test_a_file_in_8_bits_is_a_quarter_as_large_and_nearly_as_good(tiny_config, tmp_path):
    model = TransformerXL(replace(tiny_config, d_model=64, n_head=1, mem_len=60)).eval()
    model.save_pretrained(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    text = generate(model, [1, 2, 3], length=80, seed=1)
    list(text)
    sizes = []
    for int8 in (False, True):
        text.state.save(tmp_path / "state", weights, int8=int8)
        mems = State.load(tmp_path / "state", weights, model).mems
        names = ("keys", "values", "keys_scales", "values_scales")
        tensors = load_file(tmp_path / "state")
        sizes.append(sum(tensors[name].nbytes for name in names if name in tensors))
        exact = text.state.mems.tensors
        for x, y in zip(mems.tensors, exact, strict=True):
            assert (x - y).abs().max() <= int8 * y.abs().max() / 254
    assert sizes[1] == pytest.approx(sizes[0] * (1 + 4 / 64) / 4)


def test_what_cannot_be_continued_is_named(model, refused):
    text = generate(model, [1], length=2)
    with refused("must be the state of a text"):
        generate(model, state=text.state.mems)
    with pytest.raises(ValueError, match="mems is for a text without"):
        generate(model, state=text.state, mems=text.state.mems)
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(model)
