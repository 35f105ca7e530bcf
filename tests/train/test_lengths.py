"""Lengths that change: every token of every stream is still read once, in its order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from transformer_xl.config import TrainConfig
from transformer_xl.config.distributed import World
from transformer_xl.data import Segments, prepare
from transformer_xl.train import Network, loop
from transformer_xl.train.beginning import fit_to_corpus, new_state
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


def test_random_lengths_are_functions_of_seed_and_step_alone():
    first = [random_segment_len(70, 3, step) for step in range(50)]
    assert first[20:] == [random_segment_len(70, 3, step) for step in range(20, 50)]
    assert first != [random_segment_len(70, 4, step) for step in range(50)]


def test_short_segments_stay_at_least_as_long_as_they_may():
    for segment_len in (1, 3, 6):
        lengths = [random_segment_len(segment_len, 1, step) for step in range(300)]
        assert min(lengths) == min(5, segment_len), segment_len


def test_streams_of_varying_segments_never_break():
    for ext_len in (0, 2):
        text = np.arange(50, dtype=np.uint16)
        varying = Segments(text, batch_size=2, segment_len=9, ext_len=ext_len)
        read, following = [], []
        for length in (4, 9, 1, 7, 4):
            varying.length = length
            tokens, targets = varying.next_segment()
            assert tokens.shape == (2, ext_len + length), ext_len
            # What comes once more is what was read last.
            if read and ext_len:
                assert torch.equal(tokens[:, :ext_len], torch.cat(read, 1)[:, -ext_len:]), ext_len
            read.append(tokens[:, ext_len:])
            following.append(targets)
        expected = torch.stack([torch.arange(25), torch.arange(25, 50)])
        assert torch.equal(torch.cat(read, 1), expected), ext_len
        assert torch.equal(torch.cat(following, 1), (expected + 1) % 50), ext_len


def test_a_saved_position_goes_on():
    text = np.arange(40, dtype=np.uint16)
    one, other = Segments(text, 2, 5), Segments(text, 2, 5)
    for length in (3, 5, 2):
        one.length = length
        one.next_segment()
    other.load_state_dict(one.state_dict())
    one.length = other.length = 4
    assert torch.equal(one.next_segment()[0], other.next_segment()[0])


def test_a_position_counted_around_the_ring_goes_on_as_one_that_is_not():
    text = np.arange(40, dtype=np.uint16)
    one, other = Segments(text, 2, 5), Segments(text, 2, 5)
    one.load_state_dict(one.state_dict() | {"position": 33})
    other.load_state_dict(other.state_dict() | {"position": 73})
    assert torch.equal(one.next_segment()[0], other.next_segment()[0])
    assert one.offset == other.offset == 38


def begun(config):
    corpus = prepare(config.data)
    config = fit_to_corpus(config, corpus)
    return config, new_state(config, corpus, torch.device("cpu"), World())


def test_each_stage_reads_and_remembers_as_much_as_it_says(toy_recipe):
    config, state = begun(toy_recipe(train={"stages": STAGES}))
    seen = []
    for _ in range(12):
        loop.train_step(config, state, Network(state.model, config.train, state.world))
        seen.append((state.segments.length, len(state.mems[0])))
    # Memories fill up from 0 and grow by a segment at most; they are cut at once.
    assert seen == [(3, 3), (3, 5), (3, 5), (6, 11), *[(6, 12)] * 4, *[(8, 8)] * 4]


def test_a_single_stage_changes_nothing(toy_recipe):
    def weights(**settings):
        config, state = begun(toy_recipe(train=settings))
        for _ in range(5):
            loop.train_step(config, state, Network(state.model, config.train, state.world))
        return [*state.model.parameters()]

    for one, other in zip(weights(), weights(stages=((0.0, 8, 8),)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_the_rate_follows_the_length(toy_recipe):
    config, state = begun(toy_recipe(train={"random_segment_len": True, "lr": 0.1, "steps": 10**6}))
    for _ in range(6):
        lr = loop.train_step(config, state, Network(state.model, config.train, state.world)).lr
        assert lr == pytest.approx(0.1 * state.segments.length / 8)


def test_the_last_stage_has_the_memory_of_the_model(toy_recipe):
    with pytest.raises(ValueError, match=r"the lengths of the model, model\.mem_len=6"):
        toy_recipe(model={"mem_len": 6}, train={"stages": STAGES})


COOLDOWN = {"minutes": 1.0, "schedule": "constant_cooldown", "cooldown_fraction": 0.4}


def test_what_cannot_be_is_refused():
    for settings, message in (
        ({"stages": ((0.1, 8, 8),)}, "must rise from 0 to below 1"),
        ({"stages": ((0.0, 4, 8), (0.5, 8, 8), (0.5, 8, 8))}, "must rise from 0 to below 1"),
        ({"stages": ((0.0, 4, 8), (1.0, 8, 8))}, "train.stages=.* at least 0 and below 1"),
        (
            {"stages": ((0.0, 0, 8), (0.5, 8, 8))},
            "train.stages=.* an integer above 0, an integer at least 0",
        ),
        (
            {"stages": ((0.0, 4, -1), (0.5, 8, 8))},
            "train.stages=.* an integer above 0, an integer at least 0",
        ),
        ({"stages": ((0.0, 8, 8), (0.5, 16, 8))}, "must end with segment_len=8"),
        ({"stages": ((0.0, 4, 8), (0.6, 8, 8)), **COOLDOWN}, "start before the cooldown"),
        ({"random_segment_len": True, "compile": True}, "choose one"),
        ({"roll": True, "seed": -1}, "seed=-1 with roll=true must be at least 0"),
        ({"reset_memory": 0.1, "seed": -1}, "seed=-1 with reset_memory=0.1 must be at least 0"),
        ({"reset_memory": 1.0}, "reset_memory=1.0 must be below 1"),
        ({"average_start": 1.5}, "average_start=1.5 must be at most 1"),
        ({"average_decay": 1.0}, "average_decay=1.0 must be below 1"),
        ({"activation_reg": -1.0}, "activation_reg=-1.0 must be at least 0"),
        ({"embedding_lr": 0.0}, "embedding_lr=0.0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(TrainConfig(segment_len=8), **settings)


def test_streams_are_turned_by_the_seed_of_the_training_where_it_says_so(toy_recipe):
    for is_rolled in (False, True):
        for stages in ((), STAGES):
            settings = {"roll": is_rolled, "stages": stages, "seed": 5}
            config, state = begun(toy_recipe(train=settings))
            tokens, longest = prepare(config.data).tokens("train"), longest_segment(config.train)
            seed = 5 if is_rolled else None
            expected = Segments(tokens, config.train.batch_size, longest, 0, None, seed)
            tokens, _ = state.segments.next_segment()
            assert torch.equal(tokens, expected.next_segment()[0]), (is_rolled, stages)
