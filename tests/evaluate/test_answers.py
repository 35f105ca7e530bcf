"""What is said of texts of any lengths is what a pass over each of them says."""

import numpy as np
import pytest
import torch

from transformer_xl.inference import features_of, losses
from transformer_xl.model import Lengths

TEXTS = [np.random.default_rng(n).integers(0, 31, n).tolist() for n in (7, 2, 12, 5, 12, 3)]


@pytest.fixture
def lengths(model):
    return Lengths.of(model.config, segment_len=4, mem_len=20)


@pytest.mark.parametrize("batch_size", [1, 4])
@torch.no_grad()
def test_texts_of_any_lengths_are_read_whole_in_any_batch(model, lengths, batch_size):
    means = features_of(model, TEXTS, lengths, is_mean=True, batch_size=batch_size)
    lasts = features_of(model, TEXTS, lengths, batch_size=batch_size)
    log_probs = model.head.log_probs(lasts)
    nll = losses(model, TEXTS, lengths, batch_size=batch_size)
    for n, text in enumerate(TEXTS):
        tokens = torch.tensor([text])
        out, scored = model(tokens), model(tokens[:, :-1], targets=tokens[:, 1:])
        torch.testing.assert_close(lasts[n], out.hidden[0, -1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(means[n], out.hidden[0].mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(log_probs[n], out.log_probs[0, -1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(nll[n], scored.nll[0].numpy(), rtol=1e-4, atol=1e-5)


def test_texts_that_cannot_be_read_are_named(model, lengths):
    with pytest.raises(ValueError, match="texts is empty: give at least one"):
        features_of(model, [], lengths)
    with pytest.raises(ValueError, match="each text needs 1 or more tokens: the shortest has 0"):
        features_of(model, [[1], []], lengths)
    with pytest.raises(ValueError, match="each text needs 2 or more tokens: the shortest has 1"):
        losses(model, [[1, 2], [1]], lengths)
    with pytest.raises(ValueError, match="mem_len=0: nothing is remembered"):
        features_of(model, [[1]], lengths._replace(mem_len=0))
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        losses(model, [[1, 2]], lengths, batch_size=0)
