"""Functions in processes of their own: threads, failures, and the end of their parent."""

import os
import subprocess
import sys

import pytest
import torch

from transformer_xl.studies.process import in_process

pytestmark = pytest.mark.slow
SECONDS = 60
"""Nothing here takes so long on the slowest machine."""
WORK = """
import signal, sys, time

def work():
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    print("began", flush=True)
    while not stopped:
        time.sleep(0.01)
    print("saved", flush=True)
    if "fails" in sys.argv:
        raise RuntimeError("stopped")
"""
PROGRAM = """
from work import work
from transformer_xl.studies.process import in_process

if __name__ == "__main__":
    in_process(1, work)
"""


def test_a_process_that_is_killed_fails_its_own_run_alone_and_the_next_has_its_threads():
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="its process was killed"):
        in_process(1, os._exit, 3)
    assert in_process(2, torch.get_num_threads) == 2
    assert os.environ == before


@pytest.mark.parametrize("outcome", ["returns", "fails"])
def test_a_process_saves_and_ends_with_the_one_that_began_it(tmp_path, outcome):
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, "program.py", outcome], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout.readline() == "began\n"
    finally:
        program.kill()
    # The output ends once all processes that could write to it have ended.
    rest, _ = program.communicate(timeout=SECONDS)
    assert rest == "saved\n"
