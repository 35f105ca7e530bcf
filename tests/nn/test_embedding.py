import math
from dataclasses import replace

import pytest
import torch
from tests.nn.conftest import filled
from torch._subclasses import FakeTensorMode

from transformer_xl.model import (
    AdaptiveEmbedding,
    Embedding,
    build_model,
    positions,
    relative_positions,
)

CPU = torch.device("cpu")


def encodings(S, d_model=8, clamp_len=None, dtype=torch.float64):
    return relative_positions(S, d_model, clamp_len, dtype, CPU)


def made(config):
    return filled((AdaptiveEmbedding if config.div_val > 1 else Embedding)(config), 1.0)


def test_an_embedding_is_a_row_times_the_root_of_the_width(tiny_config):
    embedding = made(tiny_config)
    tokens = torch.tensor([[0, 30, 7], [7, 7, 1]])
    assert embedding.proj is None
    assert torch.equal(embedding(tokens), embedding.weight[tokens] * 4)


def test_a_narrow_embedding_is_projected_first(tiny_config):
    embedding = made(replace(tiny_config, d_embed=6))
    tokens = torch.tensor([[0, 30, 7]])
    assert embedding.weight.shape == (31, 6)
    assert embedding.proj.weight.shape == (16, 6)
    assert embedding.proj.bias is None
    expected = embedding.weight[tokens] @ embedding.proj.weight.T * 4
    torch.testing.assert_close(embedding.widened(embedding(tokens)), expected)


ADAPTIVE = {
    "equal widths projected": {"cutoffs": (3, 9), "div_val": 2},
    "equal widths as they are": {"cutoffs": (3, 9), "div_val": 2, "proj_same_dim": False},
    "much narrower": {"cutoffs": (3, 9, 30), "div_val": 4, "d_embed": 64},
    "one cluster": {"div_val": 2},
}


@pytest.fixture(params=ADAPTIVE)
def adaptive(request, tiny_config):
    return made(replace(tiny_config, **ADAPTIVE[request.param]))


def test_an_adaptive_embedding_is_the_row_of_its_cluster_projected(adaptive):
    of_all = [[0, 30, 7, 2], [3, 29, 8, 9]]
    for words in (of_all, [[1]], [[30], [30], [30]], [[5, 2, 7, 5]], [[], []]):
        tokens = torch.tensor(words, dtype=torch.int64)
        expected = torch.empty(*tokens.shape, 16)
        for place in torch.cartesian_prod(*map(torch.arange, tokens.shape)).tolist():
            word = int(tokens[tuple(place)])
            i = next(i for i, c in enumerate(adaptive.clusters) if word < c.stop)
            row, proj = adaptive.weights[i][word - adaptive.clusters[i].start], adaptive.projs[i]
            row = proj.weight @ row if isinstance(proj, torch.nn.Linear) else row
            expected[tuple(place)] = row * 4
        torch.testing.assert_close(adaptive(tokens), expected, msg=f"{words}")


def test_fixed_shapes_give_the_same_vectors_and_gradients(adaptive):
    tokens = torch.randint(31, (3, 20))
    found, expected = adaptive.in_fixed_shapes(tokens), adaptive(tokens)
    torch.testing.assert_close(found, expected)
    weights, upstream = [*adaptive.parameters()], torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, weights, upstream),
        torch.autograd.grad(expected, weights, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_token_outside_the_vocabulary_is_an_error_in_fixed_shapes_too(adaptive):
    for token in (-1, 31, 77):
        for embed in (adaptive, adaptive.in_fixed_shapes):
            with pytest.raises(IndexError, match="out of range"):
                embed(torch.tensor([[3, token]]))


@pytest.mark.parametrize("clamp_len", [None, 0, 1, 5, 63, 64, 1000])
def test_positions_are_sines_and_cosines_of_the_distance(clamp_len):
    D = 6
    for S in (1, 2, 3, 7, 64, 65):
        expected = torch.empty(S, D, dtype=torch.float64)
        for row in range(S):
            distance = S - 1 - row
            distance = distance if clamp_len is None else min(distance, clamp_len)
            for m in range(D // 2):
                angle = distance * 10_000 ** (-2 * m / D)
                expected[row, m], expected[row, D // 2 + m] = math.sin(angle), math.cos(angle)
        # The frequencies are those of the published checkpoints, rounded to float32.
        tolerance = S * 2**-23
        found = encodings(S, D, clamp_len)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=f"{S} positions")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_rounds_the_result_and_not_the_distance(dtype):
    # 257 and 258 are the same number in bfloat16.
    assert torch.equal(encodings(2000, dtype=dtype), encodings(2000).to(dtype))


@pytest.mark.parametrize("kind", ["transformer_xl", "gpt"])
@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
def test_a_model_that_was_first_read_in_another_mode_can_be_trained(tiny_config, kind, mode):
    config = replace(tiny_config, kind=kind)
    positions._sinusoids.cache_clear()
    with mode():
        build_model(config)(torch.zeros(2, 11, dtype=torch.int64))
    tokens = torch.randint(config.vocab_size, (2, 11))
    model = build_model(config)
    model(tokens, targets=tokens).loss.backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())
