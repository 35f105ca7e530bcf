"""Episodes: each answer is determined by one token, at exactly its distance."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.config import DataConfig
from transformer_xl.data import prepare
from transformer_xl.studies.episodes import (
    ASK,
    FIRST_SYMBOL,
    TASKS,
    EpisodeConfig,
    evaluation_episodes,
    make_episode,
    training_episodes,
    write_episodes,
)

CONFIGS = (
    EpisodeConfig(),
    EpisodeConfig(n_symbols=3, n_filler=1, string_len=1, n_pairs=1),
    EpisodeConfig(n_symbols=12, n_filler=2, string_len=20, n_pairs=6),
)


def drawn(task, distance, config, n=60):
    return evaluation_episodes(task, distance, n, config=config)


def looked_up(tokens, config):
    """Predict the answers of an episode by its rule, from what stands before each of them.

    Where they stand is told by the marks and by symbols that come again, not by the distance.
    """
    task, *rest = tokens.tolist()
    if task == TASKS.index("induction"):
        first, second = rest[:2]
        again = rest.index(first, 2)
        return {again + 2: second}
    asked = rest.index(ASK)
    if task == TASKS.index("recall"):
        key = rest[asked + 1]
        return {asked + 3: rest[rest.index(key) + 1]}
    string = rest[: config.string_len]
    return {asked + 2 + i: symbol for i, symbol in enumerate(string)}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("beyond", [0, 1, 17, 200])
def test_each_answer_is_determined_by_the_token_at_its_distance(task, beyond) -> None:
    cases = [
        (config.shortest(task) + beyond, config, episode)
        for config in CONFIGS
        for episode in drawn(task, config.shortest(task) + beyond, config)
    ]
    for distance, config, episode in cases:
        tokens, answers = episode.tokens, episode.answers
        assert (answers - episode.sources == distance).all()
        assert (tokens[answers] == tokens[episode.sources]).all()
        told = dict(zip(answers.tolist(), tokens[answers].tolist(), strict=True))
        assert told == looked_up(tokens, config)
        # The last token is an answer, and none of the others could be padding.
        assert answers[-1] == len(tokens) - 1
        assert 0 <= tokens.min() <= tokens.max() < config.eos_id


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
@pytest.mark.parametrize("task", TASKS)
def test_an_episode_of_a_training_text_begins_with_an_answer_at_its_distance(task, config) -> None:
    draw = np.random.default_rng(0)
    for distance in range(config.shortest(task), 60):
        episode = make_episode(task, distance, draw, config, n_asked=4)
        tokens, answers, sources = episode
        assert answers[0] - sources[0] == distance
        assert (tokens[answers] == tokens[sources]).all()
        assert answers[-1] == len(tokens) - 1
        assert len(answers) == {"copy": config.string_len, "recall": min(4, config.n_pairs)}.get(
            task, 4
        )
        if task != "copy":
            # What stands before an answer stands before its source, too.
            assert (tokens[answers - 1] == tokens[sources - 1]).all()
            assert (np.diff(answers) > 0).all()
        if task == "recall":
            assert len({*sources.tolist()}) == len(sources)
            assert (np.abs(answers - sources - distance) < 2 * 2 * config.n_pairs).all()
        if task == "induction":
            assert (answers - sources <= distance).all()


@pytest.mark.parametrize("task", ["recall", "induction"])
def test_no_other_token_tells_the_answer(task) -> None:
    config = EpisodeConfig()
    for episode in drawn(task, 300, config):
        (place,) = episode.answers
        (before,) = np.flatnonzero(episode.tokens[:place] == episode.tokens[place])
        assert before == place - 300
        # And its key stands in two places, before both.
        key = episode.tokens[place - 1]
        assert np.flatnonzero(episode.tokens == key).tolist() == [before - 1, place - 1]


def test_a_guess_is_right_by_chance() -> None:
    config = EpisodeConfig(n_symbols=8)
    for task in TASKS:
        answers = [x for e in drawn(task, 40, config, 1000) for x in e.tokens[e.answers].tolist()]
        counts = Counter(answers)
        assert {*counts} == {*range(FIRST_SYMBOL, FIRST_SYMBOL + 8)}
        # Five standard deviations of a binomial distribution.
        bound = 5 * np.sqrt(config.chance * (1 - config.chance) / len(answers))
        for n in counts.values():
            assert abs(n / len(answers) - config.chance) < bound


def test_the_same_seed_gives_the_same_episodes_and_more_begin_with_the_same() -> None:
    config = EpisodeConfig()
    some, more = (evaluation_episodes("copy", 50, n, config=config, seed=3) for n in (5, 9))
    assert [x.tokens.tolist() for x in some] == [x.tokens.tolist() for x in more[:5]]
    others = evaluation_episodes("copy", 50, 5, config=config, seed=4)
    assert [x.tokens.tolist() for x in some] != [x.tokens.tolist() for x in others]


def test_a_longer_text_begins_with_a_shorter_one(tmp_path: Path) -> None:
    config, paths = EpisodeConfig(), [tmp_path / name for name in "abc"]
    sizes = [
        write_episodes(path, n, (10, 60), config=config, seed=seed)
        for path, n, seed in zip(paths, (500, 2000, 500), (1, 1, 2), strict=True)
    ]
    short, long, other = (path.read_text() for path in paths)
    assert long.startswith(short)
    assert short != other
    # The last episode has at most four times the distance and what stands around it.
    assert all(n <= size < n + 320 for n, size in zip((500, 2000, 500), sizes, strict=True))


def test_the_corpus_has_the_tokens_of_the_episodes(tmp_path: Path) -> None:
    config, path = EpisodeConfig(), tmp_path / "episodes.txt"
    n_tokens = write_episodes(path, 3000, (10, 60), config=config)
    data = DataConfig(
        path=str(path),
        vocab="integers",
        vocab_size=config.vocab_size,
        reset_at="<eos>",
        valid_fraction=0.0,
        test_fraction=0.0,
        cache_dir=str(tmp_path / "cache"),
    )
    corpus = prepare(data)
    assert len(corpus.vocab) == config.vocab_size
    assert corpus.vocab.eos_id == config.eos_id
    episodes = training_episodes((10, 60), config=config)
    expected: list[int] = []
    while len(expected) < n_tokens:
        expected += [*next(episodes).tokens.tolist(), config.eos_id]
    assert list(corpus.split("train")[:]) == expected


def test_distances_are_log_uniform_and_tasks_uniform() -> None:
    episodes = training_episodes((10, 999), config=EpisodeConfig())
    drawn = [next(episodes) for _ in range(3000)]
    distances = [int(x.answers[0] - x.sources[0]) for x in drawn]
    assert {*distances} <= {*range(10, 1000)}
    shares = [np.mean([d < limit for d in distances]) for limit in (32, 100, 316)]
    assert shares == pytest.approx([0.25, 0.5, 0.75], abs=0.05)
    tasks = Counter(int(x.tokens[0]) for x in drawn)
    assert [tasks[n] / len(drawn) for n in range(3)] == pytest.approx([1 / 3] * 3, abs=0.05)


def test_evaluation_is_on_other_episodes_than_training() -> None:
    config = EpisodeConfig()
    for seed in range(3):
        training = training_episodes((20, 20), config=config, tasks=["copy"], seed=seed)
        seen = {tuple(next(training).tokens[:9].tolist()) for _ in range(300)}
        held = {
            tuple(x.tokens[:9].tolist())
            for x in evaluation_episodes("copy", 20, 300, config=config, seed=seed)
        }
        assert not seen & held


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_pairs": 20}, "n_symbols=32 must be at least 40"),
        ({"n_filler": 0}, "n_filler=0 must be at least 1"),
        ({"n_symbols": 2, "n_pairs": 1}, "n_symbols=2 must be at least 3"),
    ],
)
def test_sizes_out_of_range_are_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        EpisodeConfig(**settings)


def test_what_cannot_be_drawn_is_named() -> None:
    config, draw = EpisodeConfig(), np.random.default_rng(0)
    with pytest.raises(
        ValueError, match="distance=8 must be at least 9 for copy with string_len=8"
    ):
        make_episode("copy", 8, draw, config)
    with pytest.raises(ValueError, match="task='sort' must be one of copy, recall, induction"):
        make_episode("sort", 8, draw, config)
    with pytest.raises(ValueError, match="seed=-1 must be at least 0"):
        evaluation_episodes("copy", 10, 1, config=config, seed=-1)
    with pytest.raises(ValueError, match="distances=20 to 10 must rise"):
        training_episodes((20, 10), config=config)
    with pytest.raises(ValueError, match="distance=3 must be at least 9"):
        training_episodes((3, 10), config=config)
    with pytest.raises(ValueError, match=r"tasks=\(\)"):
        training_episodes((10, 20), config=config, tasks=())
