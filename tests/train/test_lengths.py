"""Lengths that change: every token of every stream is still read once, in its order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import TrainConfig
from transformer_xl.data import Segments, prepare
from transformer_xl.train.state import longest_segment, random_segment_len, stage_at

pytestmark = pytest.mark.usefixtures("one_thread")
STAGES = ((0.0, 3, 5), (0.25, 6, 12), (0.6, 8, 8))


def test_a_stage_begins_at_its_share():
    for progress, stage in ((0.0, 0), (0.2499, 0), (0.25, 1), (0.59, 1), (0.6, 2), (1.0, 2)):
        assert stage_at(STAGES, progress) == stage, progress


def test_random_lengths_are_spread_as_the_paper_says():
    lengths = np.array([random_segment_len(70, 1, step) for step in range(20_000)])
    short = lengths < 52.5
    assert short.mean() == pytest.approx(0.05, abs=0.005)
    for chosen, mean in ((short, 35), (~short, 70)):
        assert lengths[chosen].mean() == pytest.approx(mean, abs=0.5)
        assert lengths[chosen].std() == pytest.approx(5, abs=0.4)
    assert lengths.max() <= longest_segment(TrainConfig(segment_len=70, random_segment_len=True))
    for segment_len in (1, 3, 6):
        lengths = [random_segment_len(segment_len, 1, step) for step in range(300)]
        assert min(lengths) == min(5, segment_len), segment_len


def test_random_lengths_are_functions_of_seed_and_step_alone():
    first = [random_segment_len(70, 3, step) for step in range(50)]
    assert first[20:] == [random_segment_len(70, 3, step) for step in range(20, 50)]
    assert first != [random_segment_len(70, 4, step) for step in range(50)]


@pytest.mark.parametrize("ext_len", [0, 2])
def test_streams_of_varying_segments_never_break(ext_len):
    text = np.arange(50, dtype=np.uint16)
    varying = Segments(text, batch_size=2, segment_len=9, ext_len=ext_len)
    read, following = [], []
    for length in (4, 9, 1, 7, 4):
        varying.length = length
        tokens, targets = varying.next_segment()
        assert tokens.shape == (2, ext_len + length)
        # What comes once more is what was read last.
        if read and ext_len:
            assert torch.equal(tokens[:, :ext_len], torch.cat(read, 1)[:, -ext_len:])
        read.append(tokens[:, ext_len:])
        following.append(targets)
    expected = torch.stack([torch.arange(25), torch.arange(25, 50)])
    assert torch.equal(torch.cat(read, 1), expected)
    assert torch.equal(torch.cat(following, 1), (expected + 1) % 50)


def test_a_saved_position_goes_on():
    text = np.arange(40, dtype=np.uint16)
    one, other = Segments(text, 2, 5), Segments(text, 2, 5)
    for length in (3, 5, 2):
        one.length = length
        one.next_segment()
    other.load_state_dict(one.state_dict())
    one.length = other.length = 4
    assert torch.equal(one.next_segment()[0], other.next_segment()[0])
    # A position may be counted around the ring.
    one.load_state_dict(one.state_dict() | {"position": 33})
    other.load_state_dict(other.state_dict() | {"position": 73})
    one.length = other.length = 5
    assert torch.equal(one.next_segment()[0], other.next_segment()[0])
    assert one.offset == other.offset == 38


def test_each_stage_reads_and_remembers_as_much_as_it_says(begun, toy_recipe):
    training, lengths = begun(toy_recipe(train={"stages": STAGES})), []
    for _ in range(12):
        training.step()
        lengths.append((training.state.segments.length, len(training.state.mems[0])))
    # Memories fill up from 0 and grow by a segment at most; they are cut at once.
    assert lengths == [(3, 3), (3, 5), (3, 5), (6, 11), *[(6, 12)] * 4, *[(8, 8)] * 4]


def test_a_single_stage_changes_nothing(updated):
    weights, staged = updated(5)[0], updated(5, stages=((0.0, 8, 8),))[0]
    assert all(map(torch.equal, weights, staged))


@pytest.mark.slow
def test_the_rate_follows_the_length(begun, toy_recipe):
    settings = {"random_segment_len": True, "lr": 0.1, "steps": 10**6}
    training = begun(toy_recipe(train=settings))
    for _ in range(6):
        lr = training.step().lr
        assert lr == pytest.approx(0.1 * training.state.segments.length / 8)


@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("stages", [(), STAGES])
def test_streams_are_turned_by_the_seed_of_the_training_where_it_says_so(
    begun, toy_recipe, is_rolled, stages
):
    recipe = toy_recipe(train={"roll": is_rolled, "stages": stages, "seed": 5})
    longest, seed = longest_segment(recipe.train), 5 if is_rolled else None
    tokens = prepare(recipe.data).split("train")
    expected = Segments(tokens, recipe.train.batch_size, longest, 0, None, seed)
    tokens, _ = begun(recipe).state.segments.next_segment()
    assert torch.equal(tokens, expected.next_segment()[0])


COOLDOWN = {"minutes": 1.0, "schedule": "constant_cooldown", "cooldown_fraction": 0.4}
STAGE_RULE = r"train\.stages\[0\]\[[12]\]=(0|-1) must be (above|at least) 0"


def test_contradictory_settings_are_errors(toy_recipe):
    for settings, message in (
        ({"stages": ((0.1, 8, 8),)}, "must rise from 0 to below 1"),
        ({"stages": ((0.0, 4, 8), (0.5, 8, 8), (0.5, 8, 8))}, "must rise from 0 to below 1"),
        (
            {"stages": ((0.0, 4, 8), (1.0, 8, 8))},
            r"stages\[1\]\[0\]=1\.0 must be below 1",
        ),
        ({"stages": ((0.0, 0, 8), (0.5, 8, 8))}, STAGE_RULE),
        ({"stages": ((0.0, 4, -1), (0.5, 8, 8))}, STAGE_RULE),
        ({"stages": ((0.0, 8, 8), (0.5, 16, 8))}, "must end with segment_len=8"),
        ({"stages": ((0.0, 4, 8), (0.6, 8, 8)), **COOLDOWN}, "start before the cooldown"),
        ({"random_segment_len": True, "compile": True}, "choose one"),
        ({"roll": True, "seed": -1}, "seed=-1 with roll=true must be at least 0"),
        ({"reset_memory": 0.1, "seed": -1}, "seed=-1 with reset_memory=0.1 must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(TrainConfig(segment_len=8), **settings)
    for model, settings, message in (
        ({"mem_len": 6}, {"stages": STAGES}, r"the lengths of the model, model\.mem_len=6"),
        ({"mem_len": 0}, {"reset_memory": 0.1}, "no effect with model.mem_len=0"),
        ({"ext_len": 2}, {"reset_memory": 0.1}, "needs model.start_memory='empty' and model.ext_l"),
        ({"start_memory": "zeros"}, {"reset_memory": 0.1}, "needs model.start_memory='empty'"),
    ):
        with pytest.raises(ValueError, match=message):
            toy_recipe(model=model, train=settings)
