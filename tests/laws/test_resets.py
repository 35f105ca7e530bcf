"""Where a text begins anew at a symbol, its parts may stand in any order."""

import random
from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.inference.evaluate import WithMemory, evaluate, score
from transformer_xl.model import Decoder, TransformerXL, build_model
from transformer_xl.model.segment import Lengths

V, EOS = 23, 4
CONFIG = ModelConfig(
    vocab_size=V,
    n_layer=2,
    n_head=2,
    d_model=12,
    d_inner=20,
    mem_len=12,
    dropout=0.0,
    init_std=0.4,
    reset_at=EOS,
)
VARIANTS = {
    "paper": {},
    "zeros": {"start_memory": "zeros"},
    "learned relative": {"attn_type": 1, "n_positions": 9},
    "read again": {"ext_len": 3},
    "gates": {"norm_first": True, "gate": "gru"},
    "lstm": {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0},
}


@pytest.fixture(params=VARIANTS)
def model(request):
    return build_model(replace(CONFIG, **VARIANTS[request.param])).double().eval()


def sentences():
    draw = random.Random(0)
    words = [word for word in range(V) if word != EOS]
    return [[*draw.choices(words, k=draw.randint(0, 9)), EOS] for _ in range(9)]


def text(order):
    return [EOS, *(word for sentence in order for word in sentence)]


def orders():
    some = sentences()
    yield some
    for seed in range(2):
        yield random.Random(seed).sample(some, len(some))


def test_the_loss_of_shuffled_sentences_does_not_depend_on_their_order(model):
    for segment_len, batch_size in ((1, 1), (5, 1), (64, 1), (4, 3)):
        if model.config.kind == "lstm" and batch_size > 1:
            # With no length of memory nothing is read before a part, which may begin in a sentence.
            continue
        how = {"segment_len": segment_len, "batch_size": batch_size}
        # Segments of one token are many: two of the orders will do.
        found = [
            evaluate(model, text(x), WithMemory(**how)).nll
            for x in [*orders()][: 2 + (segment_len > 1)]
        ]
        assert found == pytest.approx([found[0]] * len(found), rel=1e-12), how


def test_a_sentence_has_the_scores_that_it_has_alone(model):
    found = list(score(model, text(sentences()), segment_len=5))[1:]
    for sentence in sentences():
        alone = list(score(model, [EOS, *sentence], segment_len=64))[1:]
        assert found[: len(sentence)] == pytest.approx(alone, rel=1e-9)
        found = found[len(sentence) :]


@torch.no_grad()
def test_one_token_at_a_time_begins_anew_too():
    model = TransformerXL(replace(CONFIG, mem_len=5)).double().eval()
    tokens = torch.randint(V, (2, 20))
    tokens[0, [3, 4, 11]] = EOS
    expected, mems = [], model.keep(model.start_memory(2))
    decoder = Decoder.of(model, Lengths.of(model.config), mems)
    for token in tokens.T:
        hidden, mems = model.read(token[:, None].contiguous(), mems)
        torch.testing.assert_close(decoder(token), hidden[:, 0], rtol=0, atol=1e-12)
        expected.append(hidden)
    whole, _ = model.read(tokens, mem_len=5)
    torch.testing.assert_close(torch.cat(expected, 1)[:, :6], whole[:, :6], rtol=0, atol=1e-12)
    after = decoder.memory()
    assert after.forgotten.tolist() == mems.forgotten.tolist()
