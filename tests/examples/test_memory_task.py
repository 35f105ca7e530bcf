"""The worked example is a game that needs the memory, and what it says of the memory holds."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "examples" / "memory_task.py"


@pytest.fixture(scope="module")
def program():
    spec = spec_from_file_location("memory_task", PROGRAM)
    module = module_from_spec(spec)
    # Annotations are looked up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_signal_is_never_in_the_segment_in_which_it_is_asked_for(program):
    games, since = program.Games(0), torch.full((program.GAMES,), -1)
    signals = torch.zeros(program.GAMES, dtype=torch.long)
    for _ in range(60):
        step = games.step()
        shown = step.observation[:, : program.SIGNALS]
        assert torch.equal(shown.sum(1) == 1, step.starts)
        since = torch.where(step.starts, 0, since + 1)
        signals = torch.where(step.starts, shown.argmax(1), signals)
        assert (since[step.asks] >= program.SEGMENT).all()
        assert (since < program.MEMORY).all()
        assert torch.equal(signals[step.asks], step.signal[step.asks])
        assert torch.equal(step.observation[:, program.SIGNALS] == 1, step.asks)


@torch.no_grad()
def test_step_by_step_with_resets_is_what_segments_with_starts_are(program):
    torch.manual_seed(0)
    agent = program.Agent(program.MEMORY).eval()
    games, mems, found, expected, alone = program.Games(0), None, [], [], None
    for _ in range(8):
        segment = games.segment()
        log_probs, mems = agent(segment.observation, mems, segment.starts)
        expected.append(log_probs)
        for observation, starts in zip(
            segment.observation.unbind(1), segment.starts.unbind(1), strict=True
        ):
            alone = None if alone is None else alone.reset(starts)
            log_probs, alone = agent(observation[:, None], alone)
            found.append(log_probs)
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), rtol=0, atol=1e-4)


def test_with_memory_it_is_learned_and_without_it_is_not(program, capsys):
    found = program.main(["--updates", "450", "--steps", "300"])
    printed = capsys.readouterr().out
    for name in ("with memory", "without memory"):
        assert f"{name}, " in printed
        assert f"in play {found[name]:.1%} right" in printed
    assert "after  100 segments" in printed
    assert found["with memory"] > 0.95
    # Of about 1,000 answers: five standard deviations above chance.
    assert found["without memory"] < 0.32
