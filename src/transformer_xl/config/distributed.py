"""The processes of distributed training, as started by ``torchrun``.

A single process has a world of size 1, without a process group. In a larger world, each process
owns some of the streams and their memory; processes exchange gradients (DDP or FSDP), a few metrics
after each step, and checkpoints.

Collective operations fail after the timeout, except for those that wait for work of the first
process.
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

from transformer_xl.errors import SettingsError, TxlError

_T = TypeVar("_T")

LONGEST_WORK = timedelta(days=7)
"""Timeout for work that only the first process does."""
LONGEST_CONNECTING = timedelta(seconds=20)
"""Timeout while process groups connect, once every process has arrived; gloo tries five times."""

_group_numbers = count()
_rendezvous_result: list[tuple[Store, int]] = []


class Stalled(TxlError, RuntimeError):  # noqa: N818  (it says what happened)
    """Another process of the run stopped, or did not answer within the time limit."""


@dataclass
class World:
    """The processes of a run.

    Attributes:
        rank: Rank of this process.
        size: Number of processes.
        mesh: The device mesh of distributed tensors; None in a world of size 1.
        background: A process group for the thread that writes checkpoints.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    background: Any = None
    _patient_group: Any = None
    _pending_maximum: tuple[Any, torch.Tensor] | None = None

    @staticmethod
    def is_first_here() -> bool:
        """Whether this process has rank 0, or is the only one, before it has joined."""
        return os.environ.get("RANK", "0") == "0"

    @classmethod
    @contextmanager
    def join(cls, device: torch.device, minutes: float) -> "Iterator[World]":
        """Initialize the process group of torchrun, if any; destroy it at the end.

        Args:
            device: The device of this process; on a GPU, collective operations use NCCL.
            minutes: Timeout of collective operations in the block, in minutes.

        Raises:
            Stalled: Not all processes joined within the timeout.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            yield cls()
            return
        timeout = timedelta(minutes=minutes)
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with _convert_network_errors():
            # A prefix hides the keys of earlier groups. The store of torchrun outlives the
            # processes, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set; then restarts are not in
            # the prefix, because launchers on several machines count them separately.
            store, rank = _rendezvous(timeout)
            is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_shared else "-"
            store = PrefixStore(f"joined {restarts} {size} {next(_group_numbers)}", store)
            store.set(f"arrived {rank}", "")
            store.wait([f"arrived {other}" for other in range(size)], timeout)
            # A process can still be lost while the groups connect. Gloo tries for five times the
            # timeout that a group is created with, so the longer ones are set afterwards.
            connecting = min(timeout, LONGEST_CONNECTING)
            dist.init_process_group(
                backend, timeout=connecting, store=store, rank=rank, world_size=size
            )
            world = cls(
                rank=rank,
                size=size,
                mesh=init_device_mesh(device.type, (size,)),
                background=dist.new_group(backend="gloo", timeout=connecting),
                _patient_group=dist.new_group(backend="gloo", timeout=connecting),
            )
            for group, longest in (
                (dist.group.WORLD, timeout),
                (world.background, LONGEST_WORK),
                (world._patient_group, LONGEST_WORK),
            ):
                group.set_timeout(longest)  # pyright: ignore[reportOptionalMemberAccess]
        try:
            with _convert_network_errors():
                yield world
        finally:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files, prints and evaluates."""
        return self.rank == 0

    def rows(self, n_streams: int) -> range:
        """Return the streams that this process owns.

        Args:
            n_streams: Number of streams of all processes.

        Raises:
            SettingsError: The streams cannot be divided evenly.
        """
        if n_streams % self.size:
            raise SettingsError(
                f"train.batch_size={n_streams} streams cannot be divided evenly over "
                f"{self.size} processes: start a number of processes that divides it"
            )
        n_rows = n_streams // self.size
        return range(self.rank * n_rows, (self.rank + 1) * n_rows)

    def by_first(self, work: Callable[[], _T]) -> _T:
        """Call a function in the first process; return its result in all. Collective.

        Args:
            work: The function; its result must be picklable.

        Raises:
            Exception: The one that the function raised, in all processes; in the others as a
                RuntimeError if it cannot be pickled.
        """
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        error = None
        if self.is_first:
            try:
                outcome[0] = work()
            except Exception as raised:  # noqa: BLE001  (it is raised, in all of them)
                error, outcome[1] = raised, _sendable(raised)
        dist.broadcast_object_list(outcome, group=self._patient_group)
        if error := error or outcome[1]:
            raise error
        return outcome[0]

    def wait(self) -> None:
        """Wait for all processes, with the timeout of :data:`LONGEST_WORK`. Collective."""
        if self.size > 1:
            dist.barrier(self._patient_group)

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise means over all processes. Collective."""
        return [sum(each) / self.size for each in zip(*self.gather(values), strict=True)]

    def gather(self, value: _T, *, is_long: bool = False) -> list[_T]:
        """Return the values of all processes, by rank. Collective.

        With ``is_long``, the timeout is :data:`LONGEST_WORK`.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _convert_network_errors():
            dist.all_gather_object(values, value, group=self._patient_group if is_long else None)
        return values

    def largest_before(self, *values: float) -> list[float]:
        """Start an elementwise maximum over all processes; return that of the previous call.

        So communication overlaps with the next step. All processes get the same values in the same
        step, zeros in the first. A world of size 1 gets its own values back at once. Collective.
        """
        if self.size == 1:
            return list(values)
        before = [0.0] * len(values)
        if self._pending_maximum is not None:
            work, largest = self._pending_maximum
            with _convert_network_errors():
                work.wait()
            before = largest.tolist()
        largest = torch.tensor(values, dtype=torch.float64)
        self._pending_maximum = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True), largest
        return before

    def seed_apart(self, step: int = 0) -> None:
        """Seed each process differently, as a function of the step.

        At step 0 the first process keeps its seed, so that it draws what it would draw alone.
        """
        if step or self.rank:
            torch.manual_seed(hash((torch.initial_seed(), self.size, self.rank, step)) % 2**63)


def _sendable(error: Exception) -> Exception:
    """Return an exception, or a RuntimeError with its message if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (whatever its class makes of it)
        return RuntimeError(f"{type(error).__name__}: {error}")


def _rendezvous(timeout: timedelta) -> tuple[Store, int]:
    """Return the store that the processes share, and the rank of this process."""
    # Once, as the first process may host the store.
    if not _rendezvous_result:
        store, rank, _ = next(rendezvous("env://", timeout=timeout))
        _rendezvous_result.append((store, rank))
    return _rendezvous_result[0]


@contextmanager
def _convert_network_errors() -> Iterator[None]:
    """Raise network errors of gloo and NCCL in a ``with`` block as :class:`Stalled`.

    Raises:
        Stalled: The connection to another process was lost, or an operation timed out.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo's errors contain the path of its source file.
        origins = ("third_party/gloo", "Gloo ", "NCCL", "ProcessGroup")
        is_of_network = isinstance(error, dist.DistError) or any(x in str(error) for x in origins)
        if isinstance(error, Stalled) or not is_of_network:
            raise
        raise Stalled(
            f"process {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} lost another one, "
            "which stopped or did not answer within the time limit (train.hang_minutes; while they "
            f"connect, {LONGEST_CONNECTING.seconds} seconds for each attempt): {error}"
        ) from error
