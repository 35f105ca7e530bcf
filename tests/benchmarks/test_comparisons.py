"""The table of the comparison: losses in the unit of each corpus, missing rows named."""

# ruff: noqa: RUF001 - Chinese punctuation

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import comparisons


def result(*models, baselines=()):
    """Return what a file has of contestants, given as name, mean and deviation in bits."""
    rows = [
        {"model": name, "mean": mean, "std": std}
        | {"at_tokens": mean + 1, "at_flops": None, "with_counts": mean - 1}
        for name, mean, std in models
    ]
    return {"models": rows, "baselines": list(baselines)}


def test_losses_are_in_the_unit_of_the_corpus():
    found = {
        "ptb-char": result(("txl", 1.5, 0.004), ("gpt", 1.6, None)),
        "brown": result(("txl", 7.0, 0.01)),
    }
    head, _, txl, gpt = comparisons.comparison(found).splitlines()
    assert "Penn Treebank, bits per character: equal time" in head
    assert txl == "| txl | 1.500 ± 0.004 | 2.500; - | 0.500 | 128 ± 1 | 256; - | 64 |"
    assert gpt == "| gpt | 1.600 | 2.600; - | 0.600 | - |  |  |"


def test_baselines_say_what_they_were_given():
    rows = [{"name": "PPMd", "trained": True, "bits": 1.26}]
    table = comparisons.comparison({"python-stdlib": result(("txl", 1.5, None), baselines=rows)})
    assert table.splitlines()[-1] == "| PPMd, given the training text | 1.260 |  |  |"

    chinese = comparisons.comparison({"brown": result(baselines=rows)}, "zh").splitlines()
    assert chinese[0].startswith("| 模型 | Brown，困惑度：同等时间 |")
    assert chinese[-1] == "| PPMd，读过训练文本 | 2 |  |  |"


def test_two_runs_of_a_seed_are_an_error(tmp_path):
    (tmp_path / "comparison.json").write_text('{"models": []}')
    (tmp_path / "runs.json").write_text("[]")
    for digest in ("a", "b"):
        (tmp_path / "txl" / f"seed_1-{digest}").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparisons, "by_memory", lambda *_: {})
        with pytest.raises(ValueError, match="two runs of txl/seed_1"):
            comparisons.recorded(tmp_path, None)
