"""How many steps take a time."""

from dataclasses import replace

import pytest

from transformer_xl.studies import pace
from transformer_xl.train import stepping

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def staged(models):
    recipe = models["txl"]
    T, M = recipe.train.segment_len, recipe.model.mem_len
    stages = ((0.0, 2, 2), (0.25, T, M))
    return replace(recipe, train=replace(recipe.train, stages=stages))


def test_every_stage_has_a_pace_and_text_and_memory_of_its_lengths(monkeypatch, models, staged):
    monkeypatch.setattr(pace, "ROUNDS", 2)
    read, train_step = [], stepping.train_step

    def noted(config, state, network):
        train_step(config, state, network)
        memory = state.mems[0]
        read.append((config.model.kind, config.train.segment_len, len(memory)))

    monkeypatch.setattr(stepping, "train_step", noted)
    configs = {"staged": staged, "lstm": models["lstm"]}
    seconds = pace.paces(configs)
    assert {name: len(each) for name, each in seconds.items()} == {"staged": 2, "lstm": 1}
    assert min(min(each) for each in seconds.values()) > 0
    # In turns, the last rounds of all with a full memory.
    T, M = staged.train.segment_len, staged.model.mem_len
    turn = [("transformer_xl", 2, 2)] * 2 + [("transformer_xl", T, M)] * 2
    turn += [("lstm", models["lstm"].train.segment_len, 1)] * 2
    assert read[-12:] == turn * 2


def test_a_turn_has_a_step_of_each_random_memory_length(monkeypatch, staged):
    monkeypatch.setattr(pace, "ROUNDS", 1)
    train = replace(staged.train, stages=(), random_mem_len=1)
    config = replace(staged, train=train)
    lengths = train.mem_lens(staged.model.mem_len)
    assert len(lengths) > pace._STEPS
    made, train_step = [], stepping.train_step

    def noted(config, state, network):
        made.append(state)
        train_step(config, state, network)

    monkeypatch.setattr(stepping, "train_step", noted)
    pace.paces({"staged": config})
    # After those that fill the memory, one turn that is not timed, and one that is.
    filling = -(-staged.model.mem_len // train.segment_len)
    assert len(made) - filling == 2 * len(lengths)


def test_a_stage_too_short_for_random_memory_lengths_has_a_pace_without_them(monkeypatch, staged):
    monkeypatch.setattr(pace, "ROUNDS", 1)
    train = replace(staged.train, random_mem_len=staged.model.mem_len // 2)
    assert len(pace.paces({"staged": replace(staged, train=train)})["staged"]) == 2


def test_learning_rates_do_not_fall_below_zero_while_the_pace_is_measured(monkeypatch, models):
    monkeypatch.setattr(pace, "ROUNDS", 2)
    scales, train_step = [], stepping.train_step

    def noted(config, state, network):
        scales.append(state.lr_scale(config.train))
        train_step(config, state, network)

    monkeypatch.setattr(stepping, "train_step", noted)
    settings = {"steps": 1, "warmup_steps": 0, "schedule": "constant_cooldown"}
    train = replace(models["lstm"].train, **settings, cooldown_fraction=0.5)
    pace.paces({"lstm": replace(models["lstm"], train=train)})
    assert len(scales) > 2
    assert min(scales) > 0


def test_the_steps_of_all_stages_take_the_time(staged):
    assert pace.steps_in(1.0, staged, [0.1, 0.3]) == round(60 / (0.25 * 0.1 + 0.75 * 0.3))
    plain = replace(staged, train=replace(staged.train, stages=()))
    assert pace.steps_in(0.5, plain, [0.25]) == 120
