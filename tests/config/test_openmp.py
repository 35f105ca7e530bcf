import os
import subprocess
import sys

import pytest

from transformer_xl.config import openmp

# In a process of its own: threads of torch differ, and those of other tests come and go.
STARTS_AND_ENDS = """
import os, torch
torch.ones(1 << 20).add_(1)
from transformer_xl.config import openmp
print(openmp.reason_against_sleeping())
library = openmp._gnu_openmp()
before = len(os.listdir("/proc/self/task"))
idle = openmp.IdleThreads(library)
during = len(os.listdir("/proc/self/task"))
idle.stop()
print(during - before, len(os.sched_getaffinity(0)))
# The system removes ended threads a moment later.
import time
end = time.monotonic() + 30
while len(os.listdir("/proc/self/task")) > before and time.monotonic() < end:
    time.sleep(0.01)
print(len(os.listdir("/proc/self/task")) - before)
"""


def gnu_openmp_or_skip():
    if openmp._gnu_openmp() is None or not openmp.waited():
        pytest.skip("needs Linux with GNU OpenMP and statistics of the scheduler")


def run(code):
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return found.stdout.splitlines()


@pytest.mark.slow
def test_there_are_more_threads_than_processors_until_they_are_stopped():
    gnu_openmp_or_skip()
    against, added, left = run(STARTS_AND_ENDS)
    assert against == "None"
    threads, processors = map(int, added.split())
    # With the two that compute there are more than processors.
    assert threads == max(1, processors - 1) + 1
    assert left == "0"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_choice_of_the_user_is_kept(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert openmp.reason_against_sleeping() == f"{name} is set"


@pytest.mark.usefixtures("one_thread")
def test_one_thread_waits_for_nobody():
    gnu_openmp_or_skip()
    assert openmp.reason_against_sleeping() == "there is one thread"


def test_threads_that_wait_share_the_processors_and_four_quiet_looks_end_that():
    load = openmp.Load()
    assert not load.look(0.01)
    assert not load.look(0.04)
    assert load.look(0.5)
    assert [load.look(0.0) for _ in range(openmp.QUIET_LOOKS)] == [True, True, True, False]


def test_a_look_between_the_thresholds_begins_the_quiet_ones_anew():
    load = openmp.Load()
    load.look(1.0)
    looks = [0.0, 0.0, 0.0, 0.03, 0.0, 0.0, 0.0, 0.0]
    assert [load.look(share) for share in looks] == [True] * 7 + [False]
