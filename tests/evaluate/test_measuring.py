import json
import math
from dataclasses import asdict, replace
from inspect import unwrap

import numpy as np
import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.config.knn import KnnConfig
from transformer_xl.data import train_vocab
from transformer_xl.inference.evaluate import (
    Dynamic,
    WithMemory,
    WithNeighbours,
    evaluate,
    score,
    token_bytes_in,
)
from transformer_xl.inference.evaluate.streams import read_parts
from transformer_xl.model import TransformerXL
from transformer_xl.model.segment import Lengths


def with_topics(n, seed):
    """A text whose every third token is its topic, for a while: what was long ago tells."""
    draw = np.random.default_rng(seed)
    begins = np.where(draw.random(n) < 1 / 60, np.arange(n), 0)
    topics = draw.integers(0, 4, n)[np.maximum.accumulate(begins)]
    return np.where(draw.random(n) < 0.3, topics, draw.integers(4, 12, n))


def trained_on_topics():
    """Make a model that has learned to use its memory."""
    widths = {"n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 32, "mem_len": 24}
    model = TransformerXL(ModelConfig(vocab_size=12, dropout=0.0, **widths))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    streams = torch.from_numpy(with_topics(16 * 2401, seed=1)).view(16, -1)
    mems = None
    for start in range(0, 2400, 16):
        segment = streams[:, start : start + 17]
        out = model(segment[:, :-1], mems, segment[:, 1:])
        mems = out.mems
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.slow
def test_streams_are_warmed_by_the_text_before_them():
    """Several streams say what one says, but for a small part of what a cold start costs.

    Measured here: 0.0004 nats of the 0.041 that a cold start costs (seeds 0 to 2: at most 0.0011
    of 0.027 to 0.048). Measured with the model that shakespeare-char-cpu trains, memory 128, on the
    first 20,000 characters of its validation text, 1.5466 nats in one stream: 4, 16 and 64 streams
    differ by +0.00004, -0.00024 and +0.00021, cold ones by 0.0004, 0.0057 and 0.0263. On all of it,
    111,540 characters and 1.6058 nats, 8 and 32 streams differ by -0.00013 and -0.00014. The
    difference is zero where the memory holds n_layer * (attn_len - 1) positions; that is a law.
    """
    model, text = trained_on_topics(), with_topics(1001, seed=2)
    one, several = (evaluate(model, text, WithMemory(batch_size=B)).nll for B in (1, 20))
    parts = [text[start : start + 51] for start in range(0, 1000, 50)]
    cold = sum(evaluate(model, part).nll for part in parts) / 20
    assert cold - one > 0.01
    assert abs(several - one) < 0.1 * (cold - one)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 100])
def test_some_steps_are_the_first_segments_of_each_part(model, text, batch_size, max_steps):
    sizes = {"segment_len": 6, "batch_size": batch_size}
    found = evaluate(model, text, WithMemory(max_steps=max_steps, **sizes), token_bytes=np.ones(31))
    ids, lengths = torch.from_numpy(text), Lengths.of(model.config, segment_len=6)
    with torch.no_grad():
        pieces = [*read_parts(model, ids, lengths=lengths, batch_size=batch_size)][:max_steps]
    n = sum(int(counted.sum()) for _, counted in pieces)
    total = sum(float((nll.double() * counted).sum()) for nll, counted in pieces)
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


@pytest.mark.parametrize("written", ["ab! ?ab a!!b", "!ab?!", "abba"])
def test_a_byte_of_ascii_is_a_character_known_or_not(tiny_config, written):
    vocab = train_vocab("chars", ["ab "], held_out=["c"])
    model = TransformerXL(replace(tiny_config, vocab_size=len(vocab))).eval()
    ids = vocab.encode(written)
    result = evaluate(model, ids, token_bytes=token_bytes_in(vocab, ids, len(written)))
    assert result.bits_per_byte == pytest.approx(result.bits_per_token)


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


@pytest.mark.parametrize("is_training", [False, True])
def test_the_mode_of_the_model_is_restored(tiny_config, text, is_training):
    model = TransformerXL(replace(tiny_config, dropout=0.5, attn_dropout=0.5)).train(is_training)
    assert evaluate(model, text).nll == evaluate(model, text).nll
    assert model.training == is_training
    with pytest.raises(ValueError, match="attn_len"):
        evaluate(model, text, WithMemory(attn_len=0))
    assert model.training == is_training
    assert torch.is_grad_enabled()


OUT_OF_RANGE = [
    ({"segment_len": 0}, "segment_len=0 must be at least 1"),
    ({"mem_len": -1}, "mem_len=-1 must be at least 0"),
    ({"batch_size": 0}, "batch_size=0 must be at least 1"),
    ({"attn_len": -1}, "attn_len=-1 must be at least 1"),
    ({"clamp_len": -1}, "clamp_len=-1 must be at least 0"),
    ({"ext_len": -1}, "ext_len=-1 must be at least 0"),
]


def test_a_length_out_of_range_is_named(model, text):
    for lengths, message in OUT_OF_RANGE:
        with pytest.raises(ValueError, match=message):
            evaluate(model, text, WithMemory(**lengths))


@pytest.mark.parametrize("n", [0, 1])
def test_a_text_without_anything_to_predict_is_an_error(model, text, n):
    with pytest.raises(ValueError, match=f"a text of {n} tokens: at least 2"):
        evaluate(model, text[:n])


@pytest.mark.parametrize("wrong", [31, -1])
@pytest.mark.parametrize("place", [0, 59])
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


def test_scoring_leaves_the_callers_gradients_as_they_were(model):
    for _ in score(model, [1, 2, 3], segment_len=1):
        assert torch.is_grad_enabled()


@torch.no_grad()
def test_training_settings_do_not_touch_the_evaluation(tiny_config, text):
    sampled = TransformerXL(replace(tiny_config, sample_softmax=4, init_std=0.3)).train()
    full = TransformerXL(replace(tiny_config, init_std=0.3))
    full.load_state_dict(sampled.state_dict())
    assert evaluate(sampled, text).nll == evaluate(full, text).nll


def test_an_adaptive_model_is_measured_by_its_distribution(tiny_config, text):
    model = TransformerXL(replace(tiny_config, cutoffs=(6, 14), div_val=2, init_std=0.3)).eval()
    with torch.no_grad():
        log_probs = model(torch.from_numpy(text[None, :-1])).log_probs[0]
    expected = -log_probs[range(59), text[1:]].mean().item()
    assert evaluate(model, text, WithMemory(segment_len=59)).nll == pytest.approx(
        expected, abs=1e-5
    )


WRONG_CALLS = [
    *({"ids": ids} for ids in ([1.0, 2.0], "ab", 3, [[1, 2]], None, torch.ones(4))),
    {"token_bytes": np.ones(30)},
    {"token_bytes": "utf-8"},
    {"how": "rms"},
    {"how": KnnConfig()},
    {"model": "runs/demo"},
]
WRONG_SETTINGS = [
    *({name: 1.5} for name in ("segment_len", "mem_len", "batch_size", "ext_len", "max_steps")),
    {"segment_len": True},
    {"attn_len": 0},
    {"attn_len": "8"},
    {"clamp_len": -1},
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
        if name not in ("batch_size", "max_steps"):
            with refused(name):
                WithNeighbours(**settings)
    with refused(r"knn=64 must be"):
        WithNeighbours(knn=64)


@torch.no_grad()
def test_integers_of_every_kind_are_a_text(model, text):
    expected = evaluate(model, text, WithMemory(segment_len=8)).nll
    tensor = torch.as_tensor(text)
    for ids in (tensor.int(), text.astype(np.uint8), [*text], tuple(text.tolist())):
        found = unwrap(evaluate)(
            model, ids, WithMemory(segment_len=np.int64(8), mem_len=np.int32(5))
        )
        assert found.nll == expected
        json.dumps(asdict(found))


@pytest.mark.parametrize("settings", [{"segment_len": 1.5}, {"mem_len": -1}], ids=str)
def test_a_wrong_call_of_score_is_refused_before_the_first_token(model, settings, refused):
    with refused(r"segment_len=1\.5|mem_len=-1"):
        unwrap(score)(model, [1, 2], **settings)
    with refused("ids must be integers"):
        unwrap(score)(model, [1.0])
