"""Small recipes on paper."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from transformer_xl.apps.estimate import Plan
from transformer_xl.config import Config, DataConfig, ModelConfig, TrainConfig

BASE = Config(
    model=ModelConfig(
        vocab_size=1000, n_layer=3, n_head=4, d_model=64, d_inner=256, mem_len=32, dropout=0.0
    ),
    data=DataConfig(),
    train=TrainConfig(batch_size=8, segment_len=48, precision="float32"),
)


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """Makes plans: `plan(ranks=2, model={"n_layer": 4}, train={"batch_size": 16})`."""

    def make(
        model: dict[str, Any] | None = None, train: dict[str, Any] | None = None, **settings: Any
    ) -> Plan:
        config = replace(
            BASE,
            model=replace(BASE.model, **(model or {})),
            train=replace(BASE.train, **(train or {})),
        )
        return Plan(config=config, **settings)

    return make
