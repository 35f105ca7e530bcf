"""Lengths are those that are given, else the configured ones; one without effect is refused."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.model import build_model
from transformer_xl.model.segment import SEGMENT_LEN, Lengths


@pytest.fixture
def config(tiny_config):
    return replace(tiny_config, mem_len=6, attn_len=5, clamp_len=4, ext_len=2)


def test_what_is_not_given_is_as_configured(config):
    assert Lengths.of(config) == (SEGMENT_LEN, 6, 5, 4, 2)
    given = {"segment_len": 7, "mem_len": 0, "attn_len": 9, "clamp_len": 0, "ext_len": 0}
    assert Lengths.of(config, **given)._asdict() == given
    for name, value in given.items():
        found = Lengths.of(config, **{name: value})
        assert found == Lengths.of(config)._replace(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"segment_len": 0}, "segment_len=0 must be at least 1"),
        ({"attn_len": 0}, "attn_len=0 must be at least 1"),
        ({"mem_len": -1}, "mem_len=-1 must be at least 0"),
        ({"clamp_len": -1}, "clamp_len=-1 must be at least 0"),
        ({"ext_len": 1.0}, r"ext_len=1\.0 must be an integer"),
        ({"mem_len": True}, "mem_len=True must be an integer"),
    ],
)
def test_a_wrong_length_is_named(config, given, message):
    with pytest.raises(ValueError, match=message):
        Lengths.of(config, **given)
    # What is no int, the check of types in signatures refuses, where it is on.
    if "segment_len" not in given and type(next(iter(given.values()))) is int:
        with pytest.raises(ValueError, match=message):
            build_model(config)(torch.zeros(1, 3, dtype=torch.int64), **given)


def test_a_length_without_effect_is_refused_unless_it_is_the_configured_one(tiny_config, of_kind):
    lstm = of_kind(tiny_config, "lstm")
    with pytest.raises(ValueError, match="attn_len=3 has no effect with kind='lstm'"):
        Lengths.of(lstm, attn_len=3)
    assert Lengths.of(lstm, attn_len=3, requires_effect=False).attn_len == 3
    assert Lengths.of(lstm, ext_len=0) == Lengths.of(lstm)
    learned = replace(tiny_config, attn_type=3, n_positions=12)
    with pytest.raises(ValueError, match="clamp_len=3 has no effect with attn_type=3"):
        Lengths.of(learned, clamp_len=3)
