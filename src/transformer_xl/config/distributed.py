"""The processes that train one model together, as ``torchrun`` starts them.

A process that was started alone is a world of one: it needs no communication and makes no process
group. In a larger one each process owns some of the streams of text and what is remembered of
them; what is exchanged are gradients (by DDP or FSDP), a few numbers after each step, and
checkpoints.

Operations end with an error when a process stays away for longer than the time limit, but for
the waiting on work that only the first process does: that may take as long as it takes.
"""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_T = TypeVar("_T")

LONGEST_WORK = timedelta(days=7)
"""How long the others wait for what the first process does alone."""


_times = count()
_met: list[tuple[Store, int]] = []


class Stalled(RuntimeError):  # noqa: N818  (it says what happened)
    """Another process of the run stopped, or did not answer within the time limit."""


@dataclass
class World:
    """The processes of a run.

    Attributes:
        rank: Number of this process, from 0.
        size: How many there are.
        mesh: The processes as PyTorch's distributed tensors know them; None in a world of one.
        background: A group for the thread that writes checkpoints, and for it alone.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    background: Any = None
    _patient: Any = None
    _said: tuple[Any, torch.Tensor] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process does what one does for all: it writes, speaks and evaluates."""
        return self.rank == 0

    def rows(self, n_streams: int) -> range:
        """Return which of the streams this process owns.

        Raises:
            ValueError: They cannot be divided evenly.
        """
        if n_streams % self.size:
            raise ValueError(
                f"train.batch_size={n_streams} streams cannot be divided evenly over "
                f"{self.size} processes: start a number of processes that divides it"
            )
        own = n_streams // self.size
        return range(self.rank * own, (self.rank + 1) * own)

    def by_first(self, work: Callable[[], _T]) -> _T:
        """Let the first process do something while the others wait; return its result in all.

        An error of the first process is raised in all of them. Where it cannot be sent, the others
        raise a RuntimeError that says the same.
        """
        if self.size == 1:
            return work()
        found: list[Any] = [None, None]
        own = None
        if self.is_first:
            try:
                found[0] = work()
            except Exception as error:  # noqa: BLE001  (it is raised, in all of them)
                own, found[1] = error, _sendable(error)
        dist.broadcast_object_list(found, group=self._patient)
        error = found[1] if own is None else own
        if error is not None:
            raise error
        return found[0]

    def wait(self) -> None:
        """Wait until all processes are here, however long that takes."""
        if self.size > 1:
            dist.barrier(self._patient)

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the means of numbers over all processes, each number by itself."""
        if self.size == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64)
        with _named():
            dist.all_reduce(found)
        return (found / self.size).tolist()

    def gather(self, value: _T, *, is_long: bool = False) -> list[_T]:
        """Return what each process has given, in their order.

        With ``is_long`` a process may take as long as it takes to have something to give.
        """
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _named():
            dist.all_gather_object(found, value, group=self._patient if is_long else None)
        return found

    def largest_before(self, *values: float) -> list[float]:
        """Tell the others numbers; return the largest of those told in the call before.

        So nobody waits for anybody: the answer is on its way while the next step is computed. All
        processes get the same numbers in the same step. The first answer is zeros. A world of one
        has nobody to wait for and gets its own numbers back.
        """
        if self.size == 1:
            return list(values)
        before = [0.0] * len(values)
        if self._said is not None:
            work, told = self._said
            with _named():
                work.wait()
            before = told.tolist()
        told = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(told, dist.ReduceOp.MAX, async_op=True)
        self._said = work, told
        return before

    def seed_apart(self, step: int = 0) -> None:
        """Let each process draw random numbers of its own, from a step on.

        At the beginning the first process draws what it would draw alone.
        """
        if step or self.rank:
            torch.manual_seed(hash((torch.initial_seed(), self.size, self.rank, step)) % 2**63)


def _sendable(error: Exception) -> Exception:
    """Return an error as another process can get it."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (whatever its class makes of it)
        return RuntimeError(f"{type(error).__name__}: {error}")


def is_first_process() -> bool:
    """Whether this process is alone, or the first of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: torch.device, minutes: float) -> Iterator[World]:
    """Join the processes that torchrun has started with this one; leave them at the end.

    Args:
        device: Where this process computes.
        minutes: How long the others are waited for before that is an error.

    Raises:
        Stalled: Not all processes came together within that time.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    timeout = timedelta(minutes=minutes)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with _named():
        # Who joins again must not find what the time before has left in the store. That of torchrun
        # outlives the processes, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE gives them a new one;
        # launchers on several machines count their restarts each for itself.
        store, rank = _rendezvous(timeout)
        is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_shared else "-"
        store = PrefixStore(f"joined {restarts} {size} {next(_times)}", store)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
        world = World(
            rank=rank,
            size=size,
            mesh=init_device_mesh(device.type, (size,)),
            background=dist.new_group(backend="gloo", timeout=LONGEST_WORK),
            _patient=dist.new_group(backend="gloo", timeout=LONGEST_WORK),
        )
    try:
        with _named():
            yield world
    finally:
        dist.destroy_process_group()


def _rendezvous(timeout: timedelta) -> tuple[Store, int]:
    # Once: the first process may be the one that holds the store.
    if not _met:
        store, rank, _ = next(rendezvous("env://", timeout=timeout))
        _met.append((store, rank))
    return _met[0]


@contextmanager
def _named() -> Iterator[None]:
    """Say what gloo and NCCL mean by their errors."""
    try:
        yield
    except Stalled:
        raise
    except (RuntimeError, dist.DistError) as error:
        if not _is_of_network(error):
            raise
        raise Stalled(
            f"process {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} lost another one, "
            f"which stopped or did not answer within the time limit (train.hang_minutes): {error}"
        ) from error


def _is_of_network(error: BaseException) -> bool:
    # Gloo's errors begin with the place in its source.
    words = ("third_party/gloo", "Gloo ", "NCCL", "ProcessGroup")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)
