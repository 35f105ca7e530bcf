import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "reading.py"


@pytest.mark.slow
def test_a_rank_reads_little_of_a_large_corpus(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    words = ["--gigabytes", "2", "--segments", "20", "--streams", "4", "--json", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    on_disk, in_store = found["rows"]
    assert (on_disk["from"], in_store["from"]) == ("a disk", "a store")
    assert found["shape"]["bytes_on_the_disk"] < 1e8
    # Two blocks a stream, one more where a stream begins in the middle, and what is small.
    most = 3 * 4 * in_store["block_bytes"] + 1e6
    assert found["shape"]["bytes_needed"] <= in_store["bytes_sent"] <= most
    assert all(row["memory_taken_mb"] < 300 for row in found["rows"])
