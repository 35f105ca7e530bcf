"""Models of all kinds, and a text to step through."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from transformer_xl.model import TransformerXL


@pytest.fixture(autouse=True)
def _one_thread(one_thread) -> None:
    """Models this small only wait for a second thread."""


@pytest.fixture
def made(tiny_config) -> Callable[..., TransformerXL]:
    """Makes models with weights far from zero, which hide no mistake."""

    def make(**options):
        config = replace(tiny_config, n_layer=2, init_std=0.3, **options)
        return TransformerXL(config).eval().requires_grad_(False)

    return make


@pytest.fixture
def steps_alike() -> Callable[..., float]:
    """Runs steps beside the model, from the start of three texts to beyond a full memory.

    Returns the largest difference. The texts are of different ages: one begins late, another is
    reset to the start of a text in the middle.
    """

    @torch.no_grad()
    def compare(model, step, run, *, streams=3):
        T, start = step.n_tokens, step.start(streams)
        n = max(4, -(-(step.mem_len + 4) // T))
        text = torch.randint(31, (streams, n * T))
        memory, mems, largest = list(start), model.start_memory(streams, step.mem_len), 0.0
        mems = model.keep(mems)
        for place in range(0, text.shape[1], T):
            segment = text[:, place : place + T].contiguous()
            if place == 2 * T and len(mems) and model.config.start_memory == "empty":
                mems = mems.reset([0])
                memory[-1] = memory[-1].clone()
                memory[-1][0] = 0
            log_probs, *memory = run(segment, *memory)
            out = model(segment, mems, mem_len=step.mem_len, ext_len=0)
            mems = out.mems
            largest = max(largest, (log_probs - out.log_probs).abs().max().item())
            assert log_probs.isfinite().all()
            seen = torch.full((streams,), len(mems))
            seen = seen if mems.forgotten is None else seen - mems.forgotten
            assert torch.equal(memory[-1], seen)
        assert len(mems) == step.mem_len
        return largest

    return compare
