"""Lengths that change: every token of every stream is still read once, in its order."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import TrainConfig
from transformer_xl.data import Segments
from transformer_xl.train.state import longest_segment, random_segment_len, stage_at
from transformer_xl.train.step import random_mem_len

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


def test_each_stage_reads_and_remembers_as_much_as_it_says(begun, toy_recipe):
    training, lengths = begun(toy_recipe(train={"stages": STAGES})), []
    for _ in range(12):
        training.step()
        lengths.append((training.state.segments.length, len(training.state.mems[0])))
    # Memories fill up from 0 and grow by a segment at most; they are cut at once.
    assert lengths == [(3, 3), (3, 5), (3, 5), (6, 11), *[(6, 12)] * 4, *[(8, 8)] * 4]


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
        ({"random_mem_len": 4, "compile": True}, "random_mem_len=4 with compile=true .* choose"),
        ({"roll": True, "seed": -1}, "seed=-1 with roll=true must be at least 0"),
        ({"random_mem_len": 4, "seed": -1}, "seed=-1 with random_mem_len=4 must be at least 0"),
        ({"reset_memory": 0.1, "seed": -1}, "seed=-1 with reset_memory=0.1 must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(TrainConfig(segment_len=8), **settings)
    for model, settings, message in (
        ({"mem_len": 6}, {"stages": STAGES}, r"the lengths of the model, model\.mem_len=6"),
        ({"mem_len": 0}, {"reset_memory": 0.1}, "no effect with model.mem_len=0"),
        ({"mem_len": 0}, {"random_mem_len": 4}, "no effect with model.mem_len=0"),
        ({"mem_len": 7}, {"random_mem_len": 4}, "mem_len=7: it must be at least twice as long"),
        ({"ext_len": 2}, {"random_mem_len": 4}, "needs model.start_memory='empty' and model.ext_l"),
        ({"ext_len": 2}, {"reset_memory": 0.1}, "needs model.start_memory='empty' and model.ext_l"),
        ({"start_memory": "zeros"}, {"reset_memory": 0.1}, "needs model.start_memory='empty'"),
    ):
        with pytest.raises(ValueError, match=message):
            toy_recipe(model=model, train=settings)


def test_memory_lengths_are_drawn_by_halving():
    settings = TrainConfig(random_mem_len=8)
    drawn = np.array([random_mem_len(settings, 64, step) for step in range(400)]).reshape(100, 4)
    assert {*map(tuple, np.sort(drawn))} == {(8, 16, 32, 64)}
    assert len({*map(tuple, drawn)}) == 24
    assert drawn[0].tolist() == [random_mem_len(settings, 64, step) for step in range(4)]
    assert {random_mem_len(settings, 40, step) for step in range(99)} == {10, 20, 40}
    for mem_len in (0, 5, 8):
        assert random_mem_len(settings, mem_len, 1) == mem_len


def test_a_part_of_the_memory_is_read_and_all_of_it_kept(begun, toy_recipe):
    """Each step equals the model called with the newest part, and its states are appended."""
    model = {"mem_len": 24, "dropout": 0.0, "attn_dropout": 0.0}
    train = {"random_mem_len": 3, "segment_len": 6, "accumulate": 1}
    recipe = toy_recipe(model=model, train=train)
    training, read = begun(recipe), []
    state = training.state
    kept: list = []
    for _ in range(14):
        before, length = state.mems[0], random_mem_len(recipe.train, 24, state.step)
        model = copy.deepcopy(state.model)
        tokens, _ = copy.deepcopy(state.segments).next_segment()
        past = None if before is None else before.last(length)
        expected = model(tokens, past, mem_len=length + 6).mems.last(6)
        training.step()
        after = state.mems[0]
        kept.append(expected)
        for layer, states in enumerate(after.states):
            whole = torch.cat([x.states[layer] for x in kept], 1)[:, -24:]
            assert torch.equal(states, whole)
        read.append(length)
    assert len({*read}) > 2


def test_what_is_not_read_is_forgotten_where_a_document_begins(begun, toy_recipe):
    """A step with all of the memory and one with a part leave the same positions visible."""
    model = {"mem_len": 24, "dropout": 0.0, "attn_dropout": 0.0}
    settings = {"segment_len": 6, "accumulate": 2, "reset_memory": 0.2}
    data = replace(toy_recipe().data, reset_at="e")
    masks = []
    for random in (None, 3):
        recipe = toy_recipe(model=model, train=settings | {"random_mem_len": random})
        training, found = begun(replace(recipe, data=data)), []
        for _ in range(12):
            training.step()
            mems = training.state.mems
            found.append(torch.cat([len(x) - x.forgotten for x in mems]))
        masks.append(torch.stack(found))
    assert torch.equal(*masks)
    assert len(masks[0].unique()) > 6


def test_a_recurrent_state_is_carried_from_step_to_step(begun, toy_recipe):
    lstm = {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0, "attn_dropout": 0.0}
    training, read = begun(toy_recipe(model=lstm)), []
    training.state.model.register_forward_pre_hook(lambda _, given: read.append(given[1]))
    for _ in range(2):
        training.step()
    assert [None if x is None else len(x) for x in read] == [None, None, 1, 1]
