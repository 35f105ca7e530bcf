import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.model import TransformerXL

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "endless.py"


@pytest.mark.slow
def test_a_text_is_scored_again_and_again_and_each_part_is_measured(tiny_config, tmp_path):
    model = TransformerXL(replace(tiny_config, vocab_size=256))
    (tmp_path / "model").mkdir()
    model.save_pretrained(tmp_path / "model", train_vocab("bytes", []))
    # Without a line end at the end: it is added where the text is repeated.
    (tmp_path / "text").write_text("one line\nanother line\nthe last")
    done = subprocess.run(
        [
            *(sys.executable, PROGRAM, tmp_path / "model", tmp_path / "text"),
            *("--tokens", "3000", "--parts", "3", "--json", tmp_path / "found.json"),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["bytes_of_text"] == 9 + 13 + 9
    for n, part in enumerate(found["parts"], 1):
        assert n * 1000 <= part["tokens"] < n * 1000 + 13
        # What was scored is whole lines of the text.
        whole, rest = divmod(part["tokens"] + 1, 31)
        assert rest in (0, 9, 22)
        assert part["lines"] == 3 * whole + (0, 9, 22).index(rest)
        assert part["memory"] > 1e7
        assert part["tokens_per_second"] > 0
    assert found["memory_deviation"] < 0.1
    assert "memory: at most" in done.stdout
