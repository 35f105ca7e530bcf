"""The numbers below the figures are right, and the pictures are the same each time."""

import math

import numpy as np
import pytest

from transformer_xl.train import figures

pytestmark = pytest.mark.usefixtures("whole_reports")


def test_only_finite_numbers_count():
    record = {"a": 1, "b": math.nan, "c": math.inf, "d": "2", "e": True, "f": None, "g": 10**400}
    assert [figures.number(record, name) for name in "abcdefgh"] == [1.0, *[None] * 7]


def test_bits_are_found_in_nats_and_in_bits_per_character():
    asked = "bits_per_token"
    assert figures.number({"bits_per_token": 3.0, "bits": 2.0, "nll": 1.0}, asked) == 3.0
    assert figures.number({"bits": 3.0, "nll": 1.0}, asked) == 3.0
    assert figures.number({"nll": 2 * math.log(2)}, asked) == pytest.approx(2.0)
    assert figures.number({"bpc": 1.5}, asked) == 1.5
    assert figures.number({}, asked) is None


def test_a_series_leaves_out_what_is_not_finite():
    records = [
        {"step": step, "bits_per_token": bits} for step, bits in [(1, 4.0), (2, math.nan), (3, 2.0)]
    ]
    steps, values = figures.series(records, "bits_per_token")
    assert (steps.tolist(), values.tolist()) == ([1, 3], [4.0, 2.0])


def test_smoothing_keeps_a_constant_and_the_length():
    for n in (0, 1, 2, 3, 49, 50, 1000):
        assert figures.smoothed(np.full(n, 1.5)) == pytest.approx(np.full(n, 1.5)), n


def test_smoothing_is_the_mean_of_the_neighbors():
    values = np.random.default_rng(1).normal(size=200)
    smooth = figures.smoothed(values)
    assert smooth[0] == pytest.approx(values[0])
    assert smooth[100] == pytest.approx(values[96:105].mean())
    assert smooth[-1] == pytest.approx(values[195:].mean())


def test_thinning_keeps_the_ends_and_the_limit():
    for n, most in ((0, 5), (1, 5), (5, 5), (6, 5), (1001, 20)):
        kept = figures.thinned(n, most).tolist()
        assert len(kept) == min(n, most), n
        assert kept == sorted(set(kept)), n
        assert not n or kept[-1] == n - 1, n
        assert n < 2 or kept[0] == 0, n


def test_the_unit_is_bytes_only_where_all_results_have_it():
    assert figures.memory_unit([{"bits_per_byte": 1.0}, {"bits_per_byte": 2}]) == "bits_per_byte"
    assert (
        figures.memory_unit([{"bits_per_byte": 1.0}, {"bits_per_byte": None}]) == "bits_per_token"
    )


def test_any_memory_curve_can_be_drawn():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    for lengths, trained in (
        ([0], None),
        ([64], 0),
        ([0, 64], 64),
        ([0, 16, 32, 64, 128, 256, 512, 1024], 4096),
        ([0], 4096),
    ):
        curve = [{"mem_len": length, "bits_per_byte": 2.0} for length in lengths]

        def draw(figure, curve=curve, trained=trained):
            figures.draw_memory(figure.subplots(), curve, {"gzip -9": 1.9, "xz -9e": 1.7}, trained)

        svg = figures.as_svg("memory", "label", draw)
        assert "gzip -9" in svg, (lengths, trained)
        assert ("memory in training" in svg) == (trained is not None), (lengths, trained)
