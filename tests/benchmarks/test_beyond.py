"""What groups of GPUs would take is counted as what one takes."""

from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from transformer_xl.apps.estimate import HARDWARE, Assumed, Plan, times
from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
H100, ASSUMED = HARDWARE["h100"], Assumed()


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("beyond")


def _plan(n_layer: int, ranks: int) -> Plan:
    shape = {"n_head": 4, "d_model": 64, "d_inner": 256, "mem_len": 32}
    model = ModelConfig(vocab_size=1000, n_layer=n_layer, dropout=0.0, **shape)
    train = TrainConfig(batch_size=8, segment_len=48, precision="float32")
    return Plan(config=Config(model=model, data=DataConfig(), train=train), ranks=ranks)


def test_a_group_of_one_is_what_there_is(beyond: ModuleType) -> None:
    for way in ("sequence", "tensor", "pipeline"):
        made = _plan(4, 4)
        alone, now = beyond.WAYS[way](made, 1), beyond.WAYS["data"](made, 1)
        assert alone.flops == now.flops, way
        assert alone.bytes_between == pytest.approx(now.bytes_between, abs=4), way
        assert alone.idle == 0, way
        if way != "pipeline":
            # That one reads a stream after the other.
            assert alone.bytes_held == now.bytes_held, way
            assert alone.bytes_in_group == 0, way
        assert beyond.seconds(now, made, 1, H100, ASSUMED) == times(made, H100, ASSUMED).hidden, way


def test_a_larger_group_holds_less_and_computes_less_each(beyond: ModuleType) -> None:
    for way in ("sequence", "tensor", "pipeline"):
        made = _plan(4, 4)
        shares = [beyond.WAYS[way](made, G) for G in (1, 2, 4)]
        for a, b in pairwise(shares):
            assert b.bytes_held < a.bytes_held, way
            assert b.flops == pytest.approx(a.flops / 2), way


def test_a_group_divides_what_it_can_and_lies_within_a_machine(beyond: ModuleType) -> None:
    made = _plan(3, 1)
    with pytest.raises(ValueError, match=r"G=3 must divide model.n_head=4"):
        beyond.WAYS["tensor"](made, 3)
    with pytest.raises(ValueError, match=r"G=2 must divide model.n_layer=3"):
        beyond.WAYS["pipeline"](made, 2)
    with pytest.raises(ValueError, match="G=0 must be at least 1"):
        beyond.WAYS["sequence"](made, 0)
    with pytest.raises(ValueError, match="G=2: without another way"):
        beyond.WAYS["data"](made, 2)
    with pytest.raises(ValueError, match="G=16: a machine has 8 GPUs"):
        beyond.seconds(beyond.WAYS["sequence"](made, 16), made, 16, H100, ASSUMED)
