"""What a layer is told of positions: distances, frequencies, rows of a table."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL, relative_positions
from transformer_xl.model.positions import frequencies

CPU = torch.device("cpu")


@pytest.mark.parametrize("d_model", [2, 6, 410])
def test_frequencies_fall_from_one_and_are_those_of_the_precision(d_model):
    single, double = (frequencies(d_model, dtype) for dtype in (torch.float32, torch.float64))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    expected = [10_000 ** (-2 * m / d_model) for m in range(d_model // 2)]
    torch.testing.assert_close(double, torch.tensor(expected).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(single.double(), double, rtol=2**-21, atol=0)
    assert single[0] == double[0] == 1
    assert torch.equal(frequencies(d_model), single)


def test_frequencies_are_rounded_to_float32_unless_asked_otherwise():
    single, double = (
        relative_positions(1000, 64, None, torch.float64, CPU, *precision)
        for precision in ((), (torch.float64,))
    )
    angle = 999 * frequencies(64, torch.float64)
    torch.testing.assert_close(double[0], torch.cat([angle.sin(), angle.cos()]), rtol=0, atol=1e-12)
    # Far away the rounding shows, and one does not stand in for the other.
    assert 1e-6 < (single - double).abs().max() < 1e-3
    again = relative_positions(1000, 64, None, torch.float64, CPU)
    assert torch.equal(again, single)


@torch.no_grad()
def tabled(attn_type, n_positions):
    config = ModelConfig(
        vocab_size=9,
        n_layer=2,
        n_head=2,
        d_model=8,
        d_inner=8,
        attn_type=attn_type,
        n_positions=n_positions,
        init_std=0.5,
    )
    return TransformerXL(config).double().eval()


def tables(model):
    names = ("distance_embedding", "distance_bias", "position_embedding")
    found = {name: x for name, x in model.named_parameters() if name in names}
    for table in found.values():
        assert table.shape[:2] == (2, model.config.n_positions)
    return found


def with_tables(model, resized):
    """The same model but for its tables."""
    rows = next(iter(resized.values())).shape[1]
    other = TransformerXL(replace(model.config, n_positions=rows)).double().eval()
    other.load_state_dict(model.state_dict() | resized)
    return other


@pytest.mark.parametrize("attn_type", [1, 3])
@torch.no_grad()
def test_distances_beyond_the_table_count_as_its_last(attn_type):
    short = tabled(attn_type, 4)
    for table in tables(short).values():
        table.normal_()
    long = with_tables(
        short, {name: x[:, [0, 1, 2, *[3] * 8]] for name, x in tables(short).items()}
    )
    text = torch.randint(9, (2, 10))
    mems = short(text[:, :5]).mems
    found, expected = long(text[:, 5:], mems).hidden, short(text[:, 5:], mems).hidden
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for table in tables(long).values():
        table[:, 4:].normal_()
    assert (long(text[:, 5:], mems).hidden - expected).abs().max() > 1e-4


@pytest.mark.parametrize("clamp_len", [2, 19])
@torch.no_grad()
def test_clamped_relative_distances_are_those_of_a_shorter_table(clamp_len):
    model = tabled(1, 20)
    for table in tables(model).values():
        table.normal_()
    short = with_tables(model, {name: x[:, : clamp_len + 1] for name, x in tables(model).items()})
    text = torch.randint(9, (2, 30))
    expected = short(text).hidden
    torch.testing.assert_close(model(text, clamp_len=clamp_len).hidden, expected)
    configured = TransformerXL(replace(model.config, clamp_len=clamp_len)).double().eval()
    configured.load_state_dict(model.state_dict())
    torch.testing.assert_close(configured(text).hidden, expected)
    assert torch.allclose(model(text).hidden, expected) == (clamp_len > 18)
