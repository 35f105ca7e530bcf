"""The runner of a segment: the fastest one that can run it, with the results of all others."""

from types import SimpleNamespace

import pytest
import torch

from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.model import Memory
from transformer_xl.train import Network, runner, train_step
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.runner import CapturedRunner, CompiledRunner, EagerRunner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def graphs(monkeypatch):
    """A CPU in the place of a GPU and of the compiler: graphs are not captured but computed."""
    counts = SimpleNamespace(captured=0, replayed=0)

    def capture(module, arguments, allow_unused_input):
        # Warm-up calls draw masks of dropout.
        module(*arguments)
        counts.captured += 1
        return module

    def begin_step():
        counts.replayed += 1

    monkeypatch.setattr(runner, "replays_steps", lambda *about: True)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", begin_step)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda x, device: torch.set_rng_state(x))
    warn = "set_warn_on_accumulate_grad_stream_mismatch"
    monkeypatch.setattr(torch.autograd.graph, warn, lambda is_on: None)
    return counts


def losses(recipe, steps=6):
    corpus = prepare(recipe.data)
    config = fit_to_corpus(recipe, corpus)
    torch.manual_seed(3)
    state = new_state(config, corpus, torch.device("cpu"), World())
    state.model.train()
    network = Network(state.model, config.train, state.world)
    return torch.stack([train_step(config, state, network).loss for _ in range(steps)])


@pytest.mark.parametrize("compiled", [True, "layers"])
def test_replayed_steps_have_the_losses_of_the_plain_model(toy_recipe, graphs, compiled):
    settings = {"accumulate": 1, "activation_reg": 0.2, "precision": "float32"}
    model = {"mem_len": 16, "dropout": 0.1}
    plain = losses(toy_recipe(model=model, train=settings))
    assert (graphs.captured, graphs.replayed) == (0, 0)
    replayed = losses(toy_recipe(model=model, train=settings | {"compile": compiled}))
    assert torch.equal(replayed, plain)
    # The memory of 16 is full after two segments of 8.
    is_whole = compiled is True
    assert (graphs.captured, graphs.replayed) == (not is_whole, 4 * is_whole)


def full(forgotten=None):
    return Memory([torch.zeros(2, 6, 8)], forgotten)


@pytest.mark.parametrize(
    ("mems", "starts", "expected"),
    [
        (None, None, (False, False, True)),
        (full().last(5), None, (False, False, True)),
        (full(), None, (True, True, True)),
        (full(torch.tensor([0, 3])), None, (False, True, True)),
        (full(), torch.zeros(2, 4, dtype=torch.bool), (False, True, True)),
    ],
    ids=["no memory", "filling up", "full", "reset", "recordings"],
)
def test_graphs_have_full_memories_without_masks(mems, starts, expected):
    model = torch.nn.Identity()
    runners = CapturedRunner(model, {}, False), CompiledRunner(model, {}), EagerRunner(model)
    assert tuple(each.accepts(mems, 6, starts) for each in runners) == expected


def test_compiled_code_is_in_place_during_a_segment_alone():
    model = torch.nn.Identity()
    compiled = CompiledRunner(model, {model: lambda *arguments: 1 / 0})
    with pytest.raises(ZeroDivisionError), compiled.prepared():
        compiled(torch.zeros(1), None, torch.zeros(1))
    assert "forward" not in vars(model)
