"""Accuracy by distance, of a model that knows the rules and of one that knows nothing."""

from dataclasses import replace

import pytest

from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL
from transformer_xl.studies.episodes import ASK, TASKS, EpisodeConfig
from transformer_xl.studies.recall import accuracy_by_distance

EPISODES = EpisodeConfig(n_symbols=8, n_filler=3, string_len=3, n_pairs=2)
DISTANCES = (7, 10, 24)
SIZES = {"vocab_size": EPISODES.vocab_size, "mem_len": 64}


def model_of(**settings) -> TransformerXL:
    V = EPISODES.vocab_size
    settings = {"mem_len": 64} | settings
    config = ModelConfig(vocab_size=V, n_layer=1, n_head=1, d_model=V, d_inner=4, **settings)
    return TransformerXL(config).eval()


def oracle(known: list[int]) -> int:
    """Return the answer by the rule of the task, or ``<eos>`` where it is not in reach."""
    nothing = EPISODES.eos_id
    known = known[::-1]
    known = [nothing, *(known[: known.index(nothing)] if nothing in known else known)[::-1]]
    if len(known) < 2:
        return nothing
    last, before = known[-1], known[1:-1]
    if ASK in known:
        place = known.index(ASK)
        if known[1] == TASKS.index("copy"):
            source = 2 + len(known) - 1 - place
            return known[source] if source < place else nothing
    # What came after the same symbol.
    return before[before.index(last) + 1] if last in before[:-1] else nothing


@pytest.mark.parametrize("segment_len", [1, 5, 64])
def test_who_knows_the_rules_is_always_right(ruled, segment_len) -> None:
    found = accuracy_by_distance(
        ruled(oracle, **SIZES), DISTANCES, n_episodes=7, batch_size=3, config=EPISODES,
        segment_len=segment_len,
    )  # fmt: skip
    assert [(x.task, x.distance) for x in found] == [(t, d) for t in TASKS for d in DISTANCES]
    assert all(x.accuracy == 1 and x.nll < 1e-6 for x in found)
    assert [x.n_answers for x in found[::3]] == [21, 7, 7]


@pytest.mark.parametrize("distance", [9, 10, 11, 12])
def test_the_look_back_that_is_needed_is_the_distance(ruled, distance) -> None:
    def copied(known: list[int]) -> int:
        # The token 10 before the one to predict.
        return known[-10] if len(known) >= 10 else EPISODES.eos_id

    found = accuracy_by_distance(
        ruled(copied, **SIZES | {"mem_len": 9}),
        (distance,),
        n_episodes=5,
        config=EPISODES,
        segment_len=1,
    )
    is_found = [x.accuracy == 1 for x in found]
    assert is_found == [distance == 10] * 3
    # The same with one position less: ten tokens are not there.
    found = accuracy_by_distance(
        ruled(copied, **SIZES | {"mem_len": 8}),
        (distance,),
        n_episodes=5,
        config=EPISODES,
        segment_len=1,
    )
    assert not any(x.accuracy == 1 for x in found)


def test_answers_stand_at_all_places_of_a_segment(ruled) -> None:
    def copied(known: list[int]) -> int:
        return known[-24] if len(known) >= 24 else EPISODES.eos_id

    found = accuracy_by_distance(
        ruled(copied, **SIZES | {"mem_len": 20}),
        (24,),
        n_episodes=400,
        batch_size=100,
        config=EPISODES,
        segment_len=8,
    )
    # 24 tokens are known from the fourth of eight places on.
    assert [x.accuracy for x in found] == pytest.approx([5 / 8] * 3, abs=0.05)


def test_who_always_says_the_same_is_right_by_chance(ruled) -> None:
    found = accuracy_by_distance(
        ruled(lambda known: ASK + 1, **SIZES),
        (10,),
        n_episodes=300,
        batch_size=300,
        config=EPISODES,
    )
    for result in found:
        # Four standard deviations.
        bound = 4 * (EPISODES.chance * (1 - EPISODES.chance) / result.n_answers) ** 0.5
        assert abs(result.accuracy - EPISODES.chance) < bound


def test_a_result_does_not_depend_on_batches_and_the_mode_stays(small) -> None:
    model = small(replace(model_of().config, n_head=4))
    found = [
        accuracy_by_distance(model, (7, 30), n_episodes=6, config=EPISODES, batch_size=n)
        for n in (1, 4, 6)
    ]
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert (one.accuracy, one.nll) == pytest.approx((other.accuracy, other.nll))
    assert model.training


def test_a_segment_has_no_effect_with_enough_memory() -> None:
    # Nothing before an episode is seen, either.
    model = model_of(mem_len=128, reset_at=EPISODES.eos_id).double()
    found = [
        accuracy_by_distance(model, (30,), n_episodes=4, config=EPISODES, segment_len=n)
        for n in (3, 8, 64)
    ]
    for one, *others in zip(*found, strict=True):
        assert [x.nll for x in others] == pytest.approx([one.nll] * 2)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="vocabulary of 16 tokens, and these episodes have 41"):
        accuracy_by_distance(model_of(), (10,))
    with pytest.raises(ValueError, match="n_episodes=0 must be at least 1"):
        accuracy_by_distance(model_of(), (10,), n_episodes=0, config=EPISODES)
    with pytest.raises(ValueError, match="distance=2 must be at least 4 for copy"):
        accuracy_by_distance(model_of(), (2,), config=EPISODES)
    with pytest.raises(ValueError, match="mem_len=0: nothing is remembered"):
        accuracy_by_distance(model_of(), (10,), config=EPISODES, mem_len=0)
