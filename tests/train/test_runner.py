"""Compiled and replayed segments have the results of the plain model, and wait for no device."""

import functools
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl.model import Memory, Output, TransformerXL
from transformer_xl.train import Interrupted, runner, train
from transformer_xl.train.runner import _replayed, replays_steps

pytestmark = pytest.mark.usefixtures("one_thread", "unfinished")
# Torch hides this warning, unless warnings are errors.
hides_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
EXACT = {"dropout": 0.0, "attn_dropout": 0.0}


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


@pytest.mark.parametrize("compiled", [True, "layers"])
def test_replayed_steps_have_the_losses_of_the_plain_model(begun, toy_recipe, graphs, compiled):
    def losses(**settings):
        settings |= {"accumulate": 1, "activation_reg": 0.2}
        training = begun(toy_recipe(model={"mem_len": 16, "dropout": 0.1}, train=settings))
        return torch.stack([training.step().loss for _ in range(6)])

    plain = losses()
    assert (graphs.captured, graphs.replayed) == (0, 0)
    assert torch.equal(losses(compile=compiled), plain)
    # The memory of 16 is full after two segments of 8.
    is_whole = compiled is True
    assert (graphs.captured, graphs.replayed) == (not is_whole, 4 * is_whole)


def full(forgotten=None):
    return Memory([torch.zeros(2, 6, 8)] * 2, forgotten)


@pytest.mark.parametrize(
    ("mems", "starts", "expected"),
    [
        (None, None, "plain"),
        (full().last(5), None, "plain"),
        (full(), None, "graphs"),
        (full(torch.tensor([0, 3])), None, "compiled"),
        (full(), torch.zeros(2, 4, dtype=torch.bool), "compiled"),
    ],
    ids=["no memory", "filling up", "full", "reset", "recordings"],
)
def test_graphs_have_full_memories_without_masks(
    begun, toy_recipe, graphs, monkeypatch, mems, starts, expected
):
    training = begun(toy_recipe(train={"compile": "layers"}))
    model, network = training.state.model, training.network
    ways = []

    def call(way):
        def forward(*arguments, **options):
            is_compiled = ["forward" in vars(layer) for layer in model.layers]
            assert is_compiled == [expected != "plain"] * 2
            ways.append(way)
            return Output(hidden=torch.zeros(1, 1, 1), raw_hidden=torch.zeros(1, 1, 1), mems=full())

        return forward

    monkeypatch.setattr(network, "_module", call("graphs" if expected == "graphs" else expected))
    monkeypatch.setattr(network, "_graphs", call("graphs"))
    segment = torch.zeros(2, 4), mems, torch.zeros(2, 4)
    with network.running(*segment, starts=starts, mem_len=6, context=0):
        pass
    assert ways == [expected]
    # Evaluation, and the next segment, call the modules as they are.
    assert not any("forward" in vars(layer) for layer in model.layers)


@pytest.mark.gpu
def test_a_step_waits_for_the_gpu_once(begun, toy_recipe):
    # To know whether the gradient is a number before it moves the weights.
    training = begun(toy_recipe(), "cuda")
    try:
        # The first steps fill the memory, and the libraries set themselves up.
        for _ in range(3):
            training.step()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as waited:
            warnings.simplefilter("always")
            for _ in range(3):
                training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waited) == 3


@pytest.fixture
def counter(monkeypatch):
    """Count what is compiled, without translating it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    return counter


@pytest.mark.compile
@pytest.mark.slow
def test_only_steps_with_a_full_memory_are_compiled(tmp_path, toy_recipe, counter, interrupted_at):
    # Ten segments until the memory is full: more shapes than torch compiles before it gives up.
    model = {"mem_len": 80, "n_layer": 1}
    config = toy_recipe(model=model, train={"compile": True, "steps": 14, "save_every": 0})
    train(config, tmp_path / "whole", quiet=True)
    # The first full memory was put together, those after it are cut out of a longer one.
    assert counter.frame_count == 1
    # The same bits, whether the steps before were compiled in this process or not.
    interrupted_at(12)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "parts", quiet=True)
    train(config, tmp_path / "parts", quiet=True)
    name = "model/last/model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


@hides_grad
@pytest.mark.compile
@pytest.mark.slow
def test_layers_that_are_alike_are_compiled_once_and_evaluated_as_they_are(
    tmp_path, toy_recipe, counter
):
    settings = {"steps": 6, "eval_every": 2, "save_every": 0}
    for compiled in ("layers", False):
        model = {"mem_len": 16, "n_layer": 3, **EXACT}
        config = toy_recipe(model=model, train=settings | {"compile": compiled})
        train(config, tmp_path / str(compiled), quiet=True)
    # All three, as the compiler has code for them: within a pass of training, not in evaluation.
    assert counter.frame_count == 1
    weights = [
        load_file(tmp_path / name / "model/last/model.safetensors") for name in ("layers", "False")
    ]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


REPLAYED = {
    "whole": {"compile": True},
    "layers, bfloat16": {"compile": "layers", "precision": "bfloat16"},
    "layers, stages": {"compile": "layers", "steps": 12, "stages": ((0, 4, 4), (0.5, 8, 8))},
    "layers, penalties and Muon": {
        "compile": "layers",
        "optimizer": "muon",
        "activation_reg": 0.2,
        "temporal_activation_reg": 0.1,
    },
}


@hides_grad
@pytest.mark.gpu
@pytest.mark.compile
@pytest.mark.parametrize("settings", REPLAYED.values(), ids=REPLAYED)
def test_steps_replayed_by_a_gpu_are_those_of_the_plain_model(begun, toy_recipe, settings):
    losses = []
    for compiled in (False, settings["compile"]):
        # A compiled model draws other random numbers.
        recipe = toy_recipe(model=EXACT, train=settings | {"compile": compiled, "accumulate": 1})
        training = begun(recipe, "cuda")
        state, config = training.state, training.config
        assert replays_steps(state.model, config.train, state.world) == bool(compiled)
        updates = [training.step() for _ in range(8)]
        # A skipped update leaves the memory as it was.
        weight = next(state.model.parameters())
        before = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(torch.nan)
        assert training.step().is_skipped
        with torch.no_grad():
            weight.copy_(before)
        updates += [training.step() for _ in range(4)]
        losses.append(torch.stack([update.loss for update in updates]))
    # The memory is full, and its steps are replayed, after a few segments.
    assert len(state.mems[0]) == config.model.mem_len
    tolerance = 0.03 if "precision" in settings else 1e-3
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("one_thread")
def test_a_replayed_pass_keeps_what_is_masked(tiny_config):
    model = TransformerXL(replace(tiny_config, reset_at=3)).eval()
    tokens = torch.tensor([[5, 6, 3, 7], [5, 6, 7, 8]])
    with torch.no_grad():
        plain, replayed = model(tokens), _replayed(model.forward)(tokens)
    assert plain.mems.forgotten is not None
    assert torch.equal(replayed.mems.forgotten, plain.mems.forgotten)
