import math

import pytest

from transformer_xl.studies.ablate import Length, Measured, Settings, markdown, summary


def _run(row: str, seed: int, losses: dict[int, float], unit: str = "perplexity") -> Measured:
    return Measured(
        row=row,
        seed=seed,
        settings=Settings(100, [*losses], "valid", None, {}),
        segment_len=50,
        lengths=[Length(length, x) for length, x in losses.items()],
        unit=unit,
    )


RUNS = [
    _run("none-ours-full", 1, {50: 4.0, 100: 3.5, 200: 3.6}),
    _run("recurrence-ours-full", 1, {50: 3.4, 100: 3.2, 200: 3.0005, 300: 3.0}),
    _run("recurrence-ours-full", 2, {50: 3.4, 100: 3.4, 200: 3.1005, 300: 3.1}),
]


def test_rows_are_in_the_papers_order_with_means_and_spreads() -> None:
    first, second = summary(RUNS)
    assert (first.row, second.row) == ("recurrence-ours-full", "none-ours-full")
    init = [math.exp(3.2), math.exp(3.4)]
    assert first.init.mean == pytest.approx(sum(init) / 2)
    assert first.init.std == pytest.approx(abs(init[0] - init[1]) / 2**0.5)
    # 200 is as good as 300.
    assert first.attn_len == 200
    best = [math.exp(3.0005), math.exp(3.1005)]
    assert first.best.mean == pytest.approx(sum(best) / 2)
    assert first.paper == (27.02, 26.77, 500)
    assert (second.attn_len, second.init.std) == (100, None)
    assert second.init == second.best


def test_bits_are_bits() -> None:
    (row,) = summary([_run("none-shaw-half", 1, {100: 2.0}, "bits per token")])
    assert row.best.mean == pytest.approx(2 / math.log(2))


def test_the_markdown_has_a_line_for_each_row() -> None:
    lines = markdown(summary(RUNS)).splitlines()
    assert lines[0].startswith("| recurrence | encoding | loss |")
    assert len({line.count("|") for line in lines}) == 1
    assert "| no | ours | full | 50 | 33.12 | 33.12 | 100 | 29.59 | 29.02 | 260 |" in lines
    assert markdown([]) == ""
