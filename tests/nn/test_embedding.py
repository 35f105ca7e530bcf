import math
from dataclasses import replace

import pytest
import torch

from transformer_xl.nn import Embedding, relative_positions

CPU = torch.device("cpu")


def encodings(S, d_model=8, clamp_len=None, dtype=torch.float64):
    return relative_positions(S, d_model, clamp_len, dtype, CPU)


def filled(config):
    embedding = Embedding(config)
    with torch.no_grad():
        for parameter in embedding.parameters():
            parameter.normal_()
    return embedding


def test_an_embedding_is_a_row_times_the_root_of_the_width(tiny_config):
    embedding = filled(tiny_config)
    tokens = torch.tensor([[0, 30, 7], [7, 7, 1]])
    assert embedding.proj is None
    assert torch.equal(embedding(tokens), embedding.weight[tokens] * 4)


def test_a_narrow_embedding_is_projected_first(tiny_config):
    embedding = filled(replace(tiny_config, d_embed=6))
    tokens = torch.tensor([[0, 30, 7]])
    assert embedding.weight.shape == (31, 6)
    assert embedding.proj.weight.shape == (16, 6)
    assert embedding.proj.bias is None
    expected = embedding.weight[tokens] @ embedding.proj.weight.T * 4
    torch.testing.assert_close(embedding(tokens), expected)


@pytest.mark.parametrize("S", [1, 2, 3, 7, 64, 65])
@pytest.mark.parametrize("clamp_len", [None, 0, 1, 5, 63, 64, 1000])
def test_positions_are_sines_and_cosines_of_the_distance(S, clamp_len):
    D = 6
    expected = torch.empty(S, D, dtype=torch.float64)
    for row in range(S):
        distance = S - 1 - row
        distance = distance if clamp_len is None else min(distance, clamp_len)
        for m in range(D // 2):
            angle = distance * 10_000 ** (-2 * m / D)
            expected[row, m], expected[row, D // 2 + m] = math.sin(angle), math.cos(angle)
    # The frequencies are those of the published checkpoints, rounded to float32.
    tolerance = max(S, 1) * 2**-23
    torch.testing.assert_close(encodings(S, D, clamp_len), expected, rtol=0, atol=tolerance)


def test_the_nearest_position_comes_last():
    assert encodings(5)[-1].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_encoding_of_a_distance_does_not_depend_on_the_number_of_positions():
    for S in (1, 2, 5, 8, 9, 100):
        assert torch.equal(encodings(S), encodings(300)[-S:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_rounds_the_result_and_not_the_distance(dtype):
    # 257 and 258 are the same number in bfloat16.
    assert torch.equal(encodings(2000, dtype=dtype), encodings(2000).to(dtype))


def test_encodings_made_without_gradients_can_be_trained_with():
    with torch.inference_mode():
        encodings(41, 10)
    weight = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    (encodings(41, 10) @ weight).sum().backward()
    assert weight.grad.isfinite().all()


def test_what_a_caller_does_to_its_encodings_is_its_own_affair():
    before = encodings(16).clone()
    encodings(16).zero_()
    encodings(16, clamp_len=3).zero_()
    assert torch.equal(encodings(16), before)
