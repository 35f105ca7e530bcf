import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from transformer_xl.config import ModelConfig
from transformer_xl.data.vocab import train_vocab
from transformer_xl.generate import Sampler, generate, load_state, save_state, text_pieces
from transformer_xl.nn import AdaptiveSoftmax, Embedding, Softmax, TransformerXL

BYTES = train_vocab("bytes", [])
PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
DRAWS = 1000


@pytest.fixture
def model(tiny_config):
    return TransformerXL(replace(tiny_config, init_std=0.3)).eval()


@pytest.fixture
def weights(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model" / "model.safetensors"


@torch.no_grad()
def made(kind):
    """A distribution that is PROBS whatever the hidden state is."""
    config = ModelConfig(vocab_size=5, d_model=2, n_head=1)
    if kind == "full":
        softmax = Softmax(config, Embedding(config))
    else:
        config = replace(config, cutoffs=(1, 3))
        softmax = AdaptiveSoftmax(config, Embedding(config))
        softmax.cluster_weight.zero_()
        softmax.cluster_bias.copy_(torch.stack([PROBS[1:3].sum(), PROBS[3:].sum()]).log())
    softmax.weight.zero_()
    softmax.bias.copy_(PROBS.log())
    return softmax


def draws(kind, temperature=1.0, top_k=None, top_p=None, seed=1):
    """Tokens without end."""
    sampler, softmax = Sampler(temperature, top_k, top_p, seed), made(kind)
    with torch.no_grad():
        while True:
            yield sampler(softmax, torch.ones(2))


@pytest.mark.parametrize("kind", ["full", "adaptive"])
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4}, {"top_p": 0.39}],
    ids=str,
)
def test_the_safest_settings_take_the_likeliest_token(settings, kind):
    assert set(islice(draws(kind, **settings), 50)) == {1}


@pytest.mark.parametrize("kind", ["full", "adaptive"])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        ({"temperature": 0.5}, [0.0025, 0.16, 0.01, 0.0625, 0.04]),
        ({"temperature": 2.0}, [0.05**0.5, 0.4**0.5, 0.1**0.5, 0.5, 0.2**0.5]),
        ({"top_k": 3}, [0, 0.4, 0, 0.25, 0.2]),
        ({"top_k": 99}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        ({"top_p": 0.41}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.84}, [0, 0.4, 0, 0.25, 0.2]),
        ({"top_p": 1.0}, [0.05, 0.4, 0.1, 0.25, 0.2]),
        # Of the three likeliest, the first has 0.47 and the first two 0.76.
        ({"top_k": 3, "top_p": 0.7}, [0, 0.4, 0, 0.25, 0]),
        # The temperature comes first: the second token then has 0.24 and not 0.25.
        ({"top_p": 0.65, "temperature": 2.0}, [0, 0.4**0.5, 0, 0.5, 0.2**0.5]),
    ],
    ids=str,
)
def test_tokens_come_as_often_as_their_distribution_says(settings, expected, kind):
    count = Counter(islice(draws(kind, **settings), DRAWS))
    expected = [DRAWS * p / sum(expected) for p in expected]
    possible = [token for token, often in enumerate(expected) if often]
    assert count.keys() <= set(possible)
    chi_square = sum((count[token] - expected[token]) ** 2 / expected[token] for token in possible)
    # With four degrees of freedom one seed in ten thousand is beyond this.
    assert chi_square < 23.5


def test_a_seed_decides_the_text_and_nothing_else_does(model):
    def text(seed):
        torch.rand(3)
        return list(generate(model, [1, 2], length=20, seed=seed))

    before = torch.get_rng_state()
    assert list(generate(model, [1, 2], length=20, seed=4)) == text(4)
    assert text(4) != text(5)
    assert text(None) != text(None)
    torch.set_rng_state(before)
    list(generate(model, [1], length=5))
    assert torch.equal(torch.get_rng_state(), before)


def test_as_many_tokens_come_as_were_asked_for(model):
    assert [len(list(generate(model, [1], length=n))) for n in (0, 1, 7)] == [0, 1, 7]
    assert len(list(islice(generate(model, [1]), 50))) == 50
    assert list(generate(model, torch.tensor([1, 2]), length=5, seed=1)) == list(
        generate(model, [1, 2], length=5, seed=1)
    )


def test_the_memory_has_read_all_but_the_last_token(model):
    generation = generate(model, [1, 2, 3], mem_len=50, seed=1)
    assert (len(generation.mems), generation.last_token) == (0, 3)
    for n, token in enumerate(islice(generation, 4)):
        assert len(generation.mems) == 3 + n
        assert generation.last_token == token


def test_the_memory_given_is_read_and_left_as_it_was(model):
    mems = model(torch.tensor([[4, 5, 6]])).mems
    with torch.no_grad():
        kept = model.keep(mems)
    before = kept.state_dict()["keys"]
    first, second, third = (
        list(generate(model, [1], length=60, mems=given, seed=2)) for given in (mems, kept, kept)
    )
    assert first == second == third
    assert first != list(generate(model, [1], length=60, seed=2))
    assert torch.equal(kept.state_dict()["keys"], before)
    assert len(kept) == len(mems) == 3


def test_time_and_memory_for_a_token_do_not_grow(model):
    generation = generate(model, [1] * 30, seed=1)
    largest = []
    for _ in range(10):
        sizes = []
        for _ in islice(generation, model.config.mem_len):
            mems = generation.mems
            positions = [r for table in mems.positions.values() for r in table]
            storages = [x.untyped_storage() for x in (*mems.keys, *mems.values, *positions)]
            sizes.append(sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
            assert len(mems) <= model.config.mem_len
        largest.append(max(sizes))
    # The prompt was longer than the memory; what it needed is given back.
    assert largest[0] > largest[2]
    assert len(set(largest[2:])) == 1


def test_writing_makes_no_graph(model):
    generation = generate(model, [1], length=3)
    list(generation)
    assert torch.is_grad_enabled()
    assert not any(x.requires_grad for x in (*generation.mems.keys, *generation.mems.values))


@pytest.mark.parametrize(
    ("ids", "settings", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 31], {}, "token 31 of the prompt is outside the vocabulary of 31"),
        ([-1], {}, "token -1 of the prompt is outside the vocabulary"),
        ([1], {"temperature": -0.1}, "temperature=-0.1 must be at least 0"),
        ([1], {"top_k": 0}, "top_k=0 must be at least 1"),
        ([1], {"top_p": 0.0}, r"top_p=0.0 must be above 0 and at most 1"),
        ([1], {"top_p": 1.1}, r"top_p=1.1 must be above 0 and at most 1"),
        ([1], {"length": -1}, "length=-1 must be at least 0"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(model, ids, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(model, ids, **settings)


def test_a_memory_of_several_streams_is_named_with_the_remedy(model):
    with pytest.raises(ValueError, match=r"mems holds 2 streams; select one: mems.select\(\[0\]\)"):
        generate(model, [1], mems=model.start_memory(2))


TEXT = "naïve — 漢字 🙂 end"


def test_pieces_are_whole_characters_as_soon_as_they_are_known():
    read = []

    def tokens():
        for token in TEXT.encode():
            read.append(token)
            yield token

    written = ""
    for piece in text_pieces(tokens(), BYTES):
        written += piece
        assert TEXT.startswith(written)
        assert written.encode() == bytes(read)
    assert written == TEXT


def test_an_unfinished_character_ends_as_a_replacement():
    assert "".join(text_pieces(iter("é".encode()[:1]), BYTES)) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("stop here", ["stop"], ""),
        ("aaab", ["aab"], "a"),
        ("to be continued", ["continued."], "to be continued"),
        ("x END y STOP", ["STOP", "END"], "x "),
        ("漢字🙂漢", ["🙂"], "漢字"),
        ("abc", [], "abc"),
    ],
)
def test_the_text_ends_before_a_stop_string(text, stop, expected):
    assert "".join(text_pieces(iter(text.encode()), BYTES, stop)) == expected


def test_a_stop_string_may_begin_and_end_inside_of_tokens():
    vocab = train_vocab("bpe", ["hello wonderful world. " * 50], 300)
    ids = vocab.encode("hello wonderful world. hello")
    assert len(ids) < 12
    assert "".join(text_pieces(iter(ids), vocab, ["ful wor"])) == "hello wonder"


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_written_is_what_stands_before_the_first_stop(text, stop):
    expected = text
    for end in range(len(text) + 1):
        if places := [text[:end].index(s) for s in stop if s in text[:end]]:
            expected = text[: min(places)]
            break
    written, read = "", 0

    def tokens():
        nonlocal read
        for read, token in enumerate(text.encode(), 1):
            # What is not written yet could be the beginning of a stop string.
            held = text[len(written) : read - 1]
            assert not held or any(s.startswith(held) for s in stop)
            yield token

    for piece in text_pieces(tokens(), BYTES, stop):
        written += piece
        assert expected.startswith(written)
    assert written == expected


def test_the_prompt_decides_what_stands_before_the_first_word():
    vocab = train_vocab("words", ["one two three\n"])
    two_three = vocab.encode("two three")
    for prompt, expected in (("", "two three"), ("one", " two three"), ("one\n", "two three")):
        pieces = text_pieces(iter(two_three), vocab, prompt=vocab.encode(prompt))
        assert "".join(pieces) == expected


def test_a_saved_text_goes_on_as_if_it_had_not_stopped(model, weights, tmp_path):
    whole = list(generate(model, [7, 2], length=40, temperature=0))
    first = generate(model, [7, 2], length=15, temperature=0)
    begun = list(first)
    save_state(tmp_path / "state", first, weights)
    mems, last_token = load_state(tmp_path / "state", weights)
    assert last_token == begun[-1]
    assert begun + list(generate(model, [last_token], length=25, mems=mems, temperature=0)) == whole


def test_a_memory_comes_back_bit_for_bit(model, weights, tmp_path):
    generation = generate(model, [1, 2, 3], length=9, seed=1)
    list(generation)
    for mems in (generation.mems, generation.mems.reset([0]), generation.mems.last(0)):
        generation.mems = mems
        save_state(tmp_path / "state", generation, weights)
        again, _ = load_state(tmp_path / "state", weights)
        for name, x in mems.state_dict().items():
            y = again.state_dict()[name]
            assert (x is None and y is None) or torch.equal(x, y)


def test_a_text_that_is_not_begun_can_be_saved(model, weights, tmp_path):
    save_state(tmp_path / "state", generate(model, [4, 5], seed=1), weights)
    mems, last_token = load_state(tmp_path / "state", weights)
    assert (len(mems), last_token) == (0, 5)


def test_a_memory_of_another_model_is_refused(model, weights, tmp_path):
    save_state(tmp_path / "state", generate(model, [1], length=1), weights)
    TransformerXL(model.config).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"was made by another model than .*other"):
        load_state(tmp_path / "state", tmp_path / "other" / "model.safetensors")


@pytest.mark.parametrize(
    "damage", ["empty", "cut", "text", "no metadata", "no number", "no values", "other tensors"]
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
