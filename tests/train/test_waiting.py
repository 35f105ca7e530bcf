"""Training neither waits for the device at each step nor compiles what it needs once."""

import functools
import math
import signal
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.train import Interrupted, Network, loop, train
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.checkpoint.checkpoints import read_about
from transformer_xl.train.runner import choose_runners, replays_steps

pytestmark = pytest.mark.usefixtures("one_thread", "unfinished")
# Torch hides this warning, unless warnings are errors.
hides_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture
def unfinished(monkeypatch):
    """Leave out what comes after the last step."""
    monkeypatch.setattr(loop, "finish", lambda *about: {})


@pytest.fixture
def change_step(monkeypatch):
    """Put a function around every update."""
    before = loop.train_step

    def change(around):
        def train_step(config, state, network):
            return around(state, before(config, state, network))

        monkeypatch.setattr(loop, "train_step", train_step)

    return change


def test_a_loss_is_read_where_it_is_logged_or_saved(tmp_path, toy_recipe, change_step):
    read_at = []

    class Loss(torch.Tensor):
        def __float__(self):
            read_at.append(now.step)
            return super().__float__()

    now = None

    def around(state, update):
        nonlocal now
        now = state
        return update._replace(loss=update.loss.as_subclass(Loss))

    change_step(around)
    settings = {
        "log_every": 4,
        "save_every": 6,
        "eval_every": 0,
        "steps": 13,
        "keep_checkpoints": 3,
    }
    train(toy_recipe(train=settings), tmp_path, quiet=True)
    # Each loss once: four for the line at step 4, two more for the checkpoint at step 6.
    assert read_at == [4] * 4 + [6] * 2 + [8] * 2 + [12] * 4 + [13]
    saved = read_about(tmp_path / "checkpoints" / "step_00000006")
    assert [type(loss) for loss in saved["losses"]] == [float, float]
    assert all(map(math.isfinite, saved["losses"]))


@pytest.mark.gpu
def test_a_step_waits_for_the_gpu_once(toy_recipe):
    # To know whether the gradient is a number before it moves the weights.
    device = torch.device("cuda")
    corpus = prepare(toy_recipe().data)
    config = fit_to_corpus(toy_recipe(), corpus)
    state = new_state(config, corpus, device, World())
    network = Network(state.model, config.train, state.world)
    try:
        # The first steps fill the memory, and the libraries set themselves up.
        for _ in range(3):
            loop.train_step(config, state, network)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as waited:
            warnings.simplefilter("always")
            for _ in range(3):
                loop.train_step(config, state, network)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waited) == 3


@pytest.mark.compile
@pytest.mark.slow
def test_only_steps_with_a_full_memory_are_compiled(tmp_path, toy_recipe, change_step, monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    # Ten segments until the memory is full: more shapes than torch compiles before it gives up.
    model = {"mem_len": 80, "n_layer": 1}
    config = toy_recipe(model=model, train={"compile": True, "steps": 14, "save_every": 0})
    train(config, tmp_path / "whole", quiet=True)
    # The first full memory was put together, those after it are cut out of a longer one.
    assert counter.frame_count == 1

    # The same bits, whether the steps before were compiled in this process or not.
    def interrupt(state, update):
        if state.step == 12:
            signal.raise_signal(signal.SIGINT)
        return update

    change_step(interrupt)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "parts", quiet=True)
    train(config, tmp_path / "parts", quiet=True)
    name = "model/last/model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


@hides_grad
@pytest.mark.compile
@pytest.mark.slow
def test_layers_that_are_alike_are_compiled_once_and_evaluated_as_they_are(
    tmp_path, toy_recipe, monkeypatch
):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    settings = {"steps": 6, "eval_every": 2, "save_every": 0}
    for compiled in ("layers", False):
        model = {"mem_len": 16, "n_layer": 3, "dropout": 0.0, "attn_dropout": 0.0}
        config = toy_recipe(model=model, train=settings | {"compile": compiled})
        train(config, tmp_path / str(compiled), quiet=True)
    # All three, as the compiler has code for them: within a pass of training, not in evaluation.
    assert counter.frame_count == 1
    _, state, _ = begun(config, torch.device("cpu"))
    settings = replace(config.train, compile="layers")
    compiled, eager = choose_runners(state.model, state.model, settings, state.world)
    for runner in (eager, compiled, eager):
        with runner.prepared():
            is_compiled = runner is compiled
            assert ["forward" in vars(x) for x in state.model.layers] == [is_compiled] * 3
    weights = [
        load_file(tmp_path / name / "model/last/model.safetensors") for name in ("layers", "False")
    ]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


@hides_grad
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_recomputed_activations_are_those_of_the_compiled_layers(toy_recipe):
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(3)
        recipe = toy_recipe(
            model={"n_layer": 1},
            train={"compile": "layers", "recompute": recompute, "accumulate": 1, "clip_norm": 0.0},
        )
        config, state, network = begun(recipe, torch.device("cpu"))
        norms = [loop.train_step(config, state, network).norm for _ in range(4)]
        gradients.append(torch.tensor(norms))
    # Other masks of dropout in the second computation would change them by much more.
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def begun(recipe, device):
    """A run before its first step."""
    corpus = prepare(recipe.data)
    config = fit_to_corpus(recipe, corpus)
    state = new_state(config, corpus, device, World())
    return config, state, Network(state.model, config.train, state.world)


REPLAYED = {
    "whole": {"compile": True},
    "layers": {"compile": "layers"},
    "layers, bfloat16": {"compile": "layers", "precision": "bfloat16"},
    "layers, half of the loss": {"compile": "layers", "loss": "half"},
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
def test_steps_replayed_by_a_gpu_are_those_of_the_plain_model(toy_recipe, settings):
    losses = []
    for compiled in (False, settings["compile"]):
        # A compiled model draws other random numbers.
        recipe = toy_recipe(
            model={"dropout": 0.0, "attn_dropout": 0.0},
            train=settings | {"compile": compiled, "accumulate": 1},
        )
        config, state, network = begun(recipe, torch.device("cuda"))
        assert replays_steps(state.model, config.train, state.world) == bool(compiled)
        updates = [loop.train_step(config, state, network) for _ in range(8)]
        # A skipped update leaves the memory as it was.
        weight = next(state.model.parameters())
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(torch.nan)
        assert loop.train_step(config, state, network).is_skipped
        with torch.no_grad():
            weight.copy_(kept)
        updates += [loop.train_step(config, state, network) for _ in range(4)]
        losses.append(torch.stack([update.loss for update in updates]))
    # The memory is full, and its steps are replayed, after a few segments.
    assert len(state.mems[0]) == config.model.mem_len
    tolerance = 0.03 if "precision" in settings else 1e-3
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=tolerance)


@hides_grad
@pytest.mark.gpu
@pytest.mark.compile
def test_a_capture_draws_no_masks_and_a_replay_draws_others(toy_recipe):
    found = []
    recipe = toy_recipe(train={"compile": "layers", "accumulate": 1})
    for renewed_at in (None, 6):
        config, state, network = begun(recipe, torch.device("cuda"))
        losses = []
        for step in range(10):
            if step == renewed_at:
                # As a resumed run does, which captures its passes at this step.
                network = Network(state.model, config.train, state.world)
            losses.append(loop.train_step(config, state, network).loss)
        found.append(torch.stack(losses))
    assert torch.equal(*found)
    tokens, targets = torch.randint(5, (2, 4, 8), device="cuda")
    losses = []
    for _ in range(2):
        segment = tokens, state.mems[0], targets
        with torch.no_grad(), network.running(*segment, starts=None, mem_len=8, context=0) as out:
            losses.append(out.nll.clone())
    assert not torch.equal(*losses)
