from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import Lengths, TransformerXL, build_model
from transformer_xl.studies import recl
from transformer_xl.studies.recl import context_losses, target_places

CONTEXTS = range(4, 21, 4)


def _one_by_one(
    model: TransformerXL, ids: list[int], places: list[int], window: int | None = None
) -> np.ndarray:
    """Read each context alone, at once and from nothing."""
    rows = []
    for c in CONTEXTS:
        seen = c if window is None else min(c, window)
        row = []
        for place in places:
            tokens = torch.tensor([ids[place - seen : place]])
            with torch.no_grad():
                row.append(-float(model(tokens).log_probs[0, -1, ids[place]]))
        rows.append(row)
    return np.array(rows)


@pytest.fixture
def ids() -> list[int]:
    return torch.randint(31, (70,)).tolist()


@pytest.mark.parametrize(
    ("kind", "batch_tokens"),
    [("relative", 1), ("relative", 10_000), ("shaw", 64), ("lstm", 10_000), ("window", 64)],
)
def test_it_is_what_each_context_alone_gives(
    kind: str,
    batch_tokens: int,
    tiny_config: ModelConfig,
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recl, "BATCH_TOKENS", batch_tokens)
    changes = {
        "relative": {"mem_len": 30},
        "shaw": {"attn_type": 1, "n_positions": 40, "mem_len": 30},
        "lstm": {"kind": "lstm", "n_head": 8, "d_inner": 2048},
        "window": {"mem_len": 0},
    }
    model = build_model(replace(tiny_config, init_std=0.2, **changes[kind])).eval()
    window = 10 if kind == "window" else None
    places = target_places(len(ids), CONTEXTS, 9)
    lengths = Lengths.of(model.config, segment_len=6)
    found = context_losses(model, ids, places, CONTEXTS, lengths, window)
    expected = _one_by_one(model, ids, places, window)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    if kind == "window":
        assert (found[2] == found[-1]).all()


def test_the_memory_is_as_short_as_it_is_told(tiny_config: ModelConfig, ids: list[int]) -> None:
    model = TransformerXL(replace(tiny_config, init_std=0.2)).eval()
    places = target_places(len(ids), CONTEXTS, 5)
    lengths = Lengths.of(model.config, segment_len=4, mem_len=3)
    found = context_losses(model, ids, places, CONTEXTS, lengths)
    # The same by hand: segments of 4 from the beginning of the window, remembering 3.
    for row, c in enumerate(CONTEXTS):
        for column, place in enumerate(places):
            mems = None
            with torch.no_grad():
                for start in range(place - c, place, 4):
                    tokens = torch.tensor([ids[start : start + 4]])
                    out = model(tokens, mems, mem_len=3)
                    mems = out.mems
            loss = -float(out.log_probs[0, -1, ids[place]])
            assert found[row, column] == pytest.approx(loss, rel=1e-4)


def test_targets_are_different_and_have_room() -> None:
    for n_tokens in (21, 22, 39, 70):
        for n in {1, (n_tokens - 20) // 2 or 1, n_tokens - 20}:
            places = target_places(n_tokens, CONTEXTS, n)
            assert len({*places}) == n, n_tokens
            assert min(places) >= 20, n_tokens
            assert max(places) < n_tokens, n_tokens


def test_errors_name_what_is_wrong(tiny_config: ModelConfig, ids: list[int]) -> None:
    model = TransformerXL(tiny_config)
    with pytest.raises(ValueError, match="need a text of 25 tokens, and this one has 20"):
        target_places(20, CONTEXTS, 5)
    with pytest.raises(ValueError, match="the model knows 0 to 30"):
        context_losses(model, [*ids, 31], [40], CONTEXTS, Lengths.of(model.config))
