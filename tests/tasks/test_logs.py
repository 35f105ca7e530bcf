"""Synthetic logs: sessions keep their order, and only the context of a line shows an anomaly."""

from collections import Counter

import numpy as np
import pytest

from transformer_xl.tasks.logs.made import ANOMALIES, LATENCIES, log_lines, template

ENDS = {"close", "reply", "done", "dead", "free"}
BEGINS = {"open", "get", "take"}


@pytest.fixture(scope="module")
def usual():
    """The templates of a long log without anomalies."""
    return [template(line.text) for line in log_lines(50_000, seed=1)]


def test_the_same_seed_gives_the_same_log():
    first, second = (list(log_lines(500, seed=4, anomalies=0.1)) for _ in range(2))
    assert first == second
    assert first != list(log_lines(500, seed=5, anomalies=0.1))
    assert list(log_lines(200, seed=4, anomalies=0.1)) == first[:200]


def test_a_log_without_anomalies_keeps_every_rule():
    opened: dict[str, list[str]] = {}
    for line in log_lines(5_000, seed=1):
        assert line.anomaly is None
        name, event, *rest = line.text.split()
        begins = event in BEGINS or (event == "run" and rest == ["1"])
        assert begins == (name not in opened)
        first = opened.setdefault(name, line.text.split())
        if name[0] in "fk":
            assert rest[0] == first[2]
        if event == "write":
            assert first[3] == "rw"
        if event == "reply":
            path = int(first[2][1:])
            assert rest[0] == first[2]
            assert rest[1] in LATENCIES[path : path + 2]
        if event in ENDS:
            del opened[name]


@pytest.mark.slow
def test_a_share_of_the_lines_are_anomalies_of_all_kinds():
    lines = list(log_lines(20_000, seed=3, anomalies=0.02))
    found = Counter(line.anomaly for line in lines if line.anomaly)
    assert found.total() / len(lines) == pytest.approx(0.02, rel=0.25)
    assert {*found} == {*ANOMALIES}
    assert min(found.values()) > 20


@pytest.mark.slow
def test_anomalies_look_like_other_lines(usual):
    found = {template(line.text) for line in log_lines(5_000, seed=3, anomalies=0.3)}
    assert found <= {*usual[:20_000]}


def test_how_frequent_a_template_is_hardly_tells_an_anomaly(usual):
    counts = Counter(usual)
    lines = list(log_lines(20_000, seed=3, anomalies=0.02))
    frequent = np.array([counts[template(line.text)] for line in lines])
    is_anomaly = np.array([line.anomaly is not None for line in lines])
    # The area under the ROC curve: neither the rare ones nor the frequent ones.
    pairs = frequent[is_anomaly][:, None] - frequent[~is_anomaly]
    assert 0.25 <= ((pairs > 0) + 0.5 * (pairs == 0)).mean() <= 0.75
