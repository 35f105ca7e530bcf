"""Whatever reads with a model reads without dropout, and leaves each module in its mode."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.answers import features_of
from transformer_xl.inference.evaluate import WithMemory, evaluate, score
from transformer_xl.inference.generate import Session, generate, generate_batch
from transformer_xl.model import TransformerXL
from transformer_xl.model.calling import evaluating
from transformer_xl.model.segment import Lengths
from transformer_xl.studies.recl import context_losses

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
DROPPED = ("dropout", "attn_dropout", "qkv_dropout", "embed_dropout")


def _kept(model):
    with torch.no_grad():
        return [x.tolist() for x in model.keep(model.start_memory(1)).tensors]


def _spoken(model):
    session = Session(model, train_vocab("bytes", []), seed=1)
    return session.write("written", scored=True), list(session.generate(9))


READERS = {
    "evaluate": lambda model: evaluate(model, IDS, WithMemory(segment_len=4)).nll,
    "score": lambda model: list(score(model, IDS)),
    "recl": lambda model: context_losses(
        model, IDS, [9, 11], range(2, 9, 2), Lengths.of(model.config, segment_len=8)
    ).tolist(),
    "features_of": lambda model: features_of(
        model, [IDS, IDS[:3]], Lengths.of(model.config, segment_len=8)
    ).tolist(),
    "generate": lambda model: list(islice(generate(model, IDS, seed=1), 9)),
    "generate_batch": lambda model: list(generate_batch(model, [IDS, [1]], length=9, seed=1)),
    "session": _spoken,
    "attention_weights": lambda model: [
        x.tolist() for x in model.attention_weights(torch.tensor([IDS]))
    ],
    "keep": _kept,
}


def _model(tiny_config):
    torch.manual_seed(0)
    changes = {"vocab_size": 256, "init_std": 0.3, "start_memory": "zeros", "norm_first": True}
    model = TransformerXL(replace(tiny_config, **changes, **dict.fromkeys(DROPPED, 0.5)))
    # So that a memory of zeros has keys.
    for layer in model.layers:
        torch.nn.init.normal_(layer.attention_norm.bias)
    return model


def _modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_drops_nothing_and_restores_each_mode(tiny_config, reader):
    expected = READERS[reader](_model(tiny_config).eval())
    for is_training in (True, False):
        model = _model(tiny_config).train(is_training)
        model.layers[1].train(not is_training)
        before = _modes(model)
        assert READERS[reader](model) == expected
        assert _modes(model) == before


def test_an_error_restores_each_mode_too(tiny_config):
    model = _model(tiny_config)
    model.layers[0].eval()
    before = _modes(model)
    with pytest.raises(ValueError, match="not empty"), evaluating(model):
        model(torch.zeros(1, 0, dtype=torch.int64))
    assert _modes(model) == before
