import math
from dataclasses import asdict, replace
from inspect import unwrap

import numpy as np
import pytest
import torch

from transformer_xl.data import train_vocab
from transformer_xl.inference.evaluate import (
    Dynamic,
    SlidingWindow,
    WithMemory,
    evaluate,
    score,
    token_bytes_in,
)
from transformer_xl.inference.evaluate.streams import Passage, read_parts
from transformer_xl.model import TransformerXL
from transformer_xl.model.segment import Lengths


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 100])
def test_some_steps_are_the_first_segments_of_each_part(model, text, batch_size, max_steps):
    sizes = {"segment_len": 6, "batch_size": batch_size}
    found = evaluate(model, text, WithMemory(max_steps=max_steps, **sizes), token_bytes=np.ones(31))
    ids, lengths = torch.from_numpy(text), Lengths.of(model.config, segment_len=6)
    passage = Passage.of(ids, model.config)
    with torch.no_grad():
        pieces = [*read_parts(model, passage, lengths, batch_size)][:max_steps]
    n = sum(int((places >= 0).sum()) for _, places in pieces)
    total = sum(float(nll[places >= 0].double().sum()) for nll, places in pieces)
    assert found.tokens == n
    assert found.nll == pytest.approx(total / n, rel=1e-9)
    assert found.bits_per_byte == pytest.approx(found.bits_per_token, rel=1e-9)
    everything = evaluate(model, text, WithMemory(**sizes))
    assert (found.tokens == everything.tokens) == (max_steps * 6 >= -(-59 // batch_size))
    if batch_size == 1:
        how = Dynamic(rule="sgd", lr=0.0, segment_len=6, max_steps=max_steps)
        dynamic = evaluate(model, text, how)
        assert (dynamic.tokens, dynamic.nll) == (n, pytest.approx(found.nll, rel=1e-6))


def test_the_result_says_what_was_measured_and_how(model, text):
    result = evaluate(model, text, WithMemory(segment_len=7, batch_size=3))
    assert result.tokens == 59
    assert result.ppl == pytest.approx(math.exp(result.nll))
    assert result.bits_per_token == pytest.approx(result.nll / math.log(2))
    # What the tokens are, nobody has said.
    assert result.bpc is None
    assert evaluate(model, text, per_character=True).bpc == pytest.approx(
        evaluate(model, text).bits_per_token
    )
    assert result.bits_per_byte is None
    assert (result.segment_len, result.mem_len, result.batch_size) == (7, 5, 3)
    assert (result.attn_len, result.clamp_len) == (None, None)
    assert result.seconds > 0
    assert result.tokens_per_second == pytest.approx(59 / result.seconds)
    assert result.ext_len == 0
    given = {"segment_len": 7, "mem_len": 9, "attn_len": 4, "clamp_len": 3, "batch_size": 2}
    given["ext_len"] = 2
    assert given.items() <= asdict(evaluate(model, text, WithMemory(**given))).items()


@pytest.mark.parametrize("name", ["mem_len", "attn_len", "clamp_len", "ext_len"])
def test_a_length_that_is_not_given_is_that_of_the_model(model, text, name):
    other = TransformerXL(replace(model.config, **{name: 3})).eval()
    other.load_state_dict(model.state_dict())
    result = evaluate(other, text, WithMemory(segment_len=4))
    assert getattr(result, name) == 3
    assert result.nll == evaluate(model, text, WithMemory(segment_len=4, **{name: 3})).nll
    assert result.nll != evaluate(model, text, WithMemory(segment_len=4)).nll


def test_settings_of_the_memory_may_be_given_by_name(model, text):
    settings = {"segment_len": 7, "mem_len": 9, "batch_size": 2}
    expected = evaluate(model, text, WithMemory(**settings)).nll
    assert evaluate(model, text, **settings).nll == expected
    with pytest.raises(TypeError, match="unexpected keyword argument 'segmentlen'"):
        evaluate(model, text, segmentlen=3)
    with pytest.raises(TypeError, match="got how and mem_len: give all of them in how"):
        evaluate(model, text, WithMemory(), mem_len=3)


def test_bits_per_byte_are_bits_over_the_bytes_that_were_predicted(model, text):
    token_bytes = np.arange(1, 32, dtype=np.int32)
    result = evaluate(model, text, token_bytes=token_bytes)
    n_bytes = sum(int(token) + 1 for token in text[1:])
    assert result.bits_per_byte == pytest.approx(result.bits_per_token * 59 / n_bytes)
    one_each = evaluate(model, text, token_bytes=np.ones(31, dtype=np.int32))
    assert one_each.bits_per_byte == pytest.approx(one_each.bits_per_token)


def test_bits_per_byte_are_not_known_where_the_bytes_of_one_token_are_not(model, text):
    token_bytes = np.ones(31, dtype=np.int32)
    token_bytes[text[5]] = 0
    assert evaluate(model, text, token_bytes=token_bytes).bits_per_byte is None


@pytest.mark.parametrize("written", ["abcÀ 漢字ab", "a" * 9, "漢", ""])
def test_the_bytes_of_all_tokens_are_those_of_the_text(written):
    vocab = train_vocab("chars", ["ab "], held_out=["c"])
    ids, n_bytes = vocab.encode(written), len(written.encode())
    sizes = token_bytes_in(vocab, ids, n_bytes)
    assert sum(sizes[token] for token in ids) == pytest.approx(n_bytes)
    assert token_bytes_in(train_vocab("words", ["a b"]), [0, 1], 3) is None


def test_the_text_may_come_as_it_lies_on_the_disk(model, text, tmp_path):
    expected = evaluate(model, text).nll
    for ids in (text.astype(np.uint16), text.astype(np.uint32), torch.from_numpy(text)):
        assert evaluate(model, ids).nll == expected
    text.astype(np.uint16).tofile(tmp_path / "tokens")
    assert evaluate(model, np.memmap(tmp_path / "tokens", np.uint16, "r")).nll == expected


def test_a_perplexity_beyond_all_numbers_is_infinite(model, text):
    with torch.no_grad():
        model.softmax.bias[text] = -2000
    result = evaluate(model, text)
    assert result.nll > 700
    assert result.ppl == math.inf


@pytest.mark.parametrize("n", [0, 1])
def test_a_text_without_anything_to_predict_is_an_error(model, text, n):
    with pytest.raises(ValueError, match=f"a text of {n} tokens: at least 2"):
        evaluate(model, text[:n])


@pytest.mark.parametrize(("place", "wrong"), [(0, 31), (59, -1)])
def test_a_text_of_another_vocabulary_is_an_error(model, text, place, wrong):
    text[place] = wrong
    with pytest.raises(ValueError, match=r"the model knows 0 to 30\): it was made with another"):
        evaluate(model, text)
    with pytest.raises(ValueError, match=f"token {wrong} is outside the vocabulary of 31"):
        list(score(model, text.tolist(), segment_len=8))


@torch.no_grad()
def test_scores_are_the_log_probabilities_given_all_before(model, text):
    ids = text[:20].tolist()
    log_probs = model(torch.tensor([ids])).log_probs[0]
    expected = [float(log_probs[n, token]) for n, token in enumerate(ids[1:])]
    for segment_len in (1, 7, 19, 100):
        first, *scores = score(model, ids, segment_len=segment_len, mem_len=50)
        assert first is None
        assert scores == pytest.approx(expected, abs=1e-5)


def test_a_text_of_one_token_or_none_has_nothing_to_score(model):
    assert list(score(model, [3])) == [None]
    assert list(score(model, [])) == []


WRONG_CALLS = [
    *({"ids": ids} for ids in ([1.0, 2.0], "ab", 3, [[1, 2]], None, torch.ones(4))),
    {"token_bytes": np.ones(30)},
    {"token_bytes": "utf-8"},
    {"how": "rms"},
    {"model": "runs/demo"},
]
WRONG_SETTINGS = [
    *({name: 1.5} for name in ("segment_len", "mem_len", "batch_size", "ext_len", "max_steps")),
    {"segment_len": True},
    {"segment_len": 0},
    {"mem_len": -1},
    {"batch_size": 0},
    {"attn_len": 0},
    {"attn_len": "8"},
    {"clamp_len": -1},
    {"ext_len": -1},
]


def test_a_wrong_call_is_named(model, text, refused):
    for given in WRONG_CALLS:
        (name,) = given
        with refused(name):
            unwrap(evaluate)(**{"model": model, "ids": text, **given})


def test_a_wrong_setting_is_named_where_a_strategy_is_made(refused):
    for settings in WRONG_SETTINGS:
        (name,) = settings
        with refused(name):
            WithMemory(**settings)
    with refused("window=0 must be at least 1"):
        SlidingWindow(window=0)


def test_a_memory_of_zeros_that_cannot_fit_is_named(tiny_config):
    model = TransformerXL(replace(tiny_config, start_memory="zeros"))
    with pytest.raises(ValueError, match=r"mem_len=1000000000000.*would take at least"):
        evaluate(model, [1, 2, 3], WithMemory(mem_len=10**12))
