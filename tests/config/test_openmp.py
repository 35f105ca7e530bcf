import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from transformer_xl.config import openmp

# In a process of its own: threads of torch differ, and those of other tests come and go.
STARTS_AND_ENDS = """
import os, threading, time, torch
torch.ones(1 << 20).add_(1)
from transformer_xl.config import openmp
print(openmp.reason_against_sleeping())
added = max(1, len(os.sched_getaffinity(0)) - 1) + 1
before, end = len(os.listdir("/proc/self/task")), threading.Event()

def wait_for(n):
    latest = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) != before + n and time.monotonic() < latest:
        time.sleep(0.01)
    print(len(os.listdir("/proc/self/task")) - before == n)

threading.Thread(target=openmp._keep_idle_threads, args=(openmp._gnu_openmp(), 2, end)).start()
# With the two that compute there are more than processors.
wait_for(added)
end.set()
wait_for(0)
"""


def gnu_openmp_or_skip():
    if openmp._gnu_openmp() is None or not openmp._seconds_waited():
        pytest.skip("needs Linux with GNU OpenMP and statistics of the scheduler")


@pytest.mark.slow
def test_there_are_more_threads_than_processors_until_they_are_stopped():
    gnu_openmp_or_skip()
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", STARTS_AND_ENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["None", "True", "True"]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_choice_of_the_user_is_kept(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert openmp.reason_against_sleeping() == f"{name} is set"


# OpenMP has a number of threads for each thread: a new one has that of the environment.
def test_the_number_of_threads_is_that_of_the_calling_thread(monkeypatch):
    gnu_openmp_or_skip()
    started = []
    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(openmp, "Thread", lambda args, **how: started.append(args) or thread)
    n_before = torch.get_num_threads()
    try:
        torch.set_num_threads(n_before + 1)
        openmp.adapt_spinning_to_load.__wrapped__()
    finally:
        torch.set_num_threads(n_before)
    assert [n_threads for _, n_threads in started] == [n_before + 1]


@pytest.mark.usefixtures("one_thread")
def test_one_thread_waits_for_nobody():
    gnu_openmp_or_skip()
    assert openmp.reason_against_sleeping() == "there is one thread"


def test_threads_that_wait_share_the_processors_and_four_quiet_looks_end_that(monkeypatch):
    # Shares of a second that its one thread waited; a look between the thresholds counts anew.
    shares = [0.01, 0.04, 0.5, 0.0, 0.0, 0.0, 0.03, 0.0, 0.0, 0.0, 0.0]
    now, waited, looks, idle = [0.0], [0.0], iter(shares), []

    def sleep(seconds):
        states.append(bool(idle) and not idle[-1].is_set())
        now[0] += 1
        waited[0] += next(looks)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0])
    states = []
    monkeypatch.setattr(openmp, "time", clock)
    monkeypatch.setattr(openmp, "_seconds_waited", lambda: {"1": waited[0]})
    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(openmp, "Thread", lambda args, **how: idle.append(args[2]) or thread)
    with pytest.raises(StopIteration):
        openmp._monitor_load(SimpleNamespace(), 1)
    assert states == [False] * 3 + [True] * 8 + [False]
