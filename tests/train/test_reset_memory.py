"""train.reset_memory: the memory of random streams is reset before a segment."""

import pytest
import torch

from transformer_xl.config.distributed import World
from transformer_xl.data import prepare
from transformer_xl.train import Network, loop
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.checkpoint.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")
ALMOST_ALWAYS = 1 - 1e-12


def begun(recipe, model=None, **settings):
    model = {"dropout": 0.0, "attn_dropout": 0.0, **(model or {})}
    config = recipe(model=model, train={"accumulate": 1, **settings})
    corpus = prepare(config.data)
    config = fit_to_corpus(config, corpus)
    return config, new_state(config, corpus, torch.device("cpu"), World())


def step(config, state):
    return loop.train_step(config, state, Network(state.model, config.train, state.world))


def losses(recipe, **settings):
    config, state = begun(recipe, **settings)
    return [float(step(config, state).loss) for _ in range(4)]


def test_a_step_after_a_reset_is_that_of_a_model_without_memory(toy_recipe):
    config, state = begun(toy_recipe, reset_memory=ALMOST_ALWAYS)
    for _ in range(3):
        segment = state.segments.next_segment()
        with torch.no_grad():
            expected = state.model(segment[0], targets=segment[1]).nll.mean()
        state.segments.next_segment = lambda segment=segment: segment
        torch.testing.assert_close(step(config, state).loss, expected)
        del state.segments.next_segment
    assert losses(toy_recipe)[1:] != losses(toy_recipe, reset_memory=ALMOST_ALWAYS)[1:]


@pytest.mark.slow
def test_as_many_streams_are_reset_as_asked_for(toy_recipe):
    config, state = begun(toy_recipe, {"mem_len": 16}, reset_memory=0.25, lr=1e-9)
    n_reset = 0
    for _ in range(100):
        step(config, state)
        (memory,) = state.mems
        # Of two segments in the memory, that before the reset is masked.
        n_reset += 0 if memory.forgotten is None else int((memory.forgotten == 8).sum())
    assert n_reset == pytest.approx(0.25 * 4 * 100, rel=0.2)


def test_resets_are_a_function_of_seed_and_step(toy_recipe):
    plain = losses(toy_recipe)
    assert losses(toy_recipe, reset_memory=0.0) == plain
    changed = losses(toy_recipe, reset_memory=0.5)
    assert changed != plain
    assert losses(toy_recipe, reset_memory=0.5) == changed
    assert losses(toy_recipe, reset_memory=0.5, accumulate=2) == pytest.approx(changed, rel=1e-4)


def test_what_cannot_be_reset_to_the_beginning_of_a_text_is_refused(toy_recipe):
    for model, message in (
        ({"mem_len": 0}, r"reset_memory=0\.1 has no effect with model.mem_len=0"),
        ({"ext_len": 2}, r"reset_memory=0\.1 needs model.start_memory='empty' and model.ext_len=0"),
        ({"start_memory": "zeros"}, r"reset_memory=0\.1 needs model.start_memory='empty'"),
    ):
        with pytest.raises(ValueError, match=message):
            toy_recipe(model=model, train={"reset_memory": 0.1})


LSTM = {"kind": "lstm", "n_head": 8, "d_inner": 2048}


@pytest.mark.parametrize(("model", "seed"), [({}, 0), ({}, 1), (LSTM, 2), (LSTM, 3)])
def test_a_checkpoint_has_the_masks_of_all_parts(toy_recipe, tmp_path, model, seed):
    # Where only some parts have been reset, all are in the checkpoint.
    settings = {"accumulate": 2, "reset_memory": 0.3, "seed": seed}
    config, state = begun(toy_recipe, model, **settings)
    for _ in range(2):
        step(config, state)
    with Checkpoints(tmp_path, World()) as checkpoints:
        checkpoints.save(2, state.tensors(), state.about(), keep=1)
    expected = [float(step(config, state).loss) for _ in range(2)]
    (checkpoint,) = tmp_path.iterdir()
    config, resumed = begun(toy_recipe, model, **settings)
    resumed.load(checkpoint)
    assert [float(step(config, resumed).loss) for _ in range(2)] == expected
