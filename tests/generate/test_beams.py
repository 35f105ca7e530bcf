import math
from dataclasses import fields, replace
from itertools import product

import pytest
import torch

from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.generate import Sampling, Searching, beam_search, generate
from transformer_xl.model import TransformerXL, build_model

BYTES = train_vocab("bytes", [])
V, L, STOP = 5, 4, 4
PROMPTS = [[1, 2, 3], [0], [2, 2, 3]]


@pytest.fixture(params=["transformer_xl", "lstm"])
def small(tiny_config, of_kind, request):
    """A model of five symbols."""
    config = of_kind(replace(tiny_config, vocab_size=V, init_std=0.5), request.param)
    return build_model(config).double().eval()


def found(model, prompts=PROMPTS, **settings):
    names = {x.name for x in fields(Searching)}
    searching = {"stop_tokens": [STOP]} | {x: settings.pop(x) for x in names & settings.keys()}
    searched = beam_search(model, prompts, Searching(**searching), **{"length": 6} | settings)
    return [[(x.tokens, x.is_ended) for x in each] for each in searched]


def every_sequence(model, prompt, A):
    """All sequences up to a stop token or the full length, with their scores, the best first."""
    scored = []
    for n in range(1, L + 1):
        sequences = [
            tokens
            for tokens in product(range(V), repeat=n)
            if STOP not in tokens[:-1] and (n == L or tokens[-1] == STOP)
        ]
        texts = torch.tensor([[*prompt, *tokens] for tokens in sequences])
        with torch.no_grad():
            nll = model(texts[:, :-1], targets=texts[:, 1:]).nll[:, -n:].sum(1)
        scored += zip((-nll / n**A).tolist(), sequences, strict=True)
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("A", [0, 0.6, 1.0])
def test_a_beam_of_all_sequences_is_an_exhaustive_search(small, A):
    searched = beam_search(
        small,
        PROMPTS,
        length=L,
        searching=Searching(beam_size=V**L, length_penalty=A, n_best=V**L, stop_tokens=[STOP]),
    )
    for prompt, hypotheses in zip(PROMPTS, searched, strict=True):
        expected = every_sequence(small, prompt, A)
        assert [x.tokens for x in hypotheses] == [tokens for _, tokens in expected]
        assert [x.score for x in hypotheses] == pytest.approx([score for score, _ in expected])
        assert all(x.is_ended == (x.tokens[-1] == STOP) for x in hypotheses)
        assert all(x.score == x.log_prob / len(x.tokens) ** A for x in hypotheses)


def test_a_beam_of_one_is_greedy(small):
    for prompt, (((tokens, is_ended),)) in zip(PROMPTS, found(small, beam_size=1), strict=True):
        greedy = list(generate(small, prompt, length=6, sampling=Sampling(temperature=0)))
        n = greedy.index(STOP) + 1 if is_ended else 6
        assert tokens == (*greedy[:n],)
        assert is_ended == (STOP in greedy)


def test_each_prompt_gets_what_it_gets_alone_in_any_order(small):
    settings = {"beam_size": 3, "n_best": 3}
    expected = [found(small, [prompt], **settings)[0] for prompt in PROMPTS]
    assert found(small, **settings) == expected
    order = [2, 0, 1, 0]
    reordered = found(small, [PROMPTS[n] for n in order], **settings)
    assert reordered == [expected[n] for n in order]


def test_the_memory_before_a_prompt_counts_in_either_store(small):
    settings = {"beam_size": 3, "n_best": 3}
    expected = found(small, [[3, 1, *prompt] for prompt in PROMPTS], **settings)
    assert expected != found(small, **settings)
    with torch.no_grad():
        mems = small(torch.tensor([[3, 1]])).mems
    assert found(small, mems=mems, **settings) == expected
    assert found(small, mems=small.keep(mems), **settings) == expected
    assert found(small, mems=mems.select([0, 0, 0]), **settings) == expected


@pytest.fixture
def of_bytes(tiny_config):
    return TransformerXL(replace(tiny_config, vocab_size=256, init_std=0.3)).double().eval()


def test_a_stop_string_ends_a_text_as_a_stop_token_does(of_bytes):
    ends = [10, 40]
    settings, size = {"length": 5, "vocab": BYTES}, {"beam_size": 4, "n_best": 4}
    prompts = [b"one", b"two three"]
    expected = beam_search(
        of_bytes, prompts, searching=Searching(stop_tokens=ends, **size), **settings
    )
    searched = beam_search(
        of_bytes, prompts, searching=Searching(stop=[chr(n) for n in ends], **size), **settings
    )
    for ours, theirs in zip(searched, expected, strict=True):
        assert [x.tokens for x in ours] == [x.tokens for x in theirs]
        assert [x.is_ended for x in ours] == [x.is_ended for x in theirs]
        assert [x.text for x in ours] == [x.text for x in theirs]
        for x in ours:
            assert x.text == BYTES.decode(x.tokens[: len(x.tokens) - x.is_ended])


def test_a_stop_string_may_span_tokens(tiny_config):
    letters = train_vocab("chars", ["abcdefgh"])
    model = TransformerXL(replace(tiny_config, vocab_size=8, init_std=0.3)).double().eval()
    settings, size = {"length": 8, "vocab": letters}, {"beam_size": 4, "n_best": 4}
    best = beam_search(model, [[1, 2]], Searching(**size), **settings)[0][0]
    stop = best.text[3:5]
    ended = beam_search(model, [[1, 2]], searching=Searching(stop=stop, **size), **settings)[0]
    assert best.text.partition(stop)[0] in {x.text for x in ended if x.is_ended}
    assert all(stop not in x.text for x in ended)
    assert all((stop in letters.decode(x.tokens)) == x.is_ended for x in ended)


WRONG = [
    ({"length": None}, "length=None: beam search needs the maximum number of tokens"),
    ({"length": 0}, "length=0 must be at least 1"),
    ({"beam_size": 0}, "beam_size=0 must be above 0"),
    ({"beam_size": 2, "n_best": 3}, "n_best=3 must be from 1 to beam_size=2"),
    ({"length_penalty": -1.0}, "length_penalty=-1.0 must be at least 0"),
    ({"length_penalty": math.nan}, "length_penalty=nan must be a finite number"),
    ({"stop_tokens": [V]}, "token 5 of stop_tokens is outside the vocabulary of 5"),
    ({"stop": "\n"}, "needs the vocabulary: give vocab, or stop_tokens"),
    ({"prompts": []}, "give a list of prompts, one at least"),
    ({"prompts": [[]]}, "the prompt is empty"),
]


def test_a_wrong_setting_is_named(small):
    for settings, message in WRONG:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            found(small, **settings)


def test_a_model_with_damaged_weights_is_named(small):
    small.softmax.bias.data[3] = torch.nan
    with pytest.raises(RuntimeError, match="probabilities are not finite: its weights are damaged"):
        found(small)
