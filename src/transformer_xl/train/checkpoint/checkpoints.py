"""Checkpoints: the state of training, written in the background and resharded when loaded.

A checkpoint is a folder in the format of ``torch.distributed.checkpoint``: a safetensors file for
each process, with its shards. Any number of processes can load it. No file can contain code::

    shard-00001-model-….safetensors  tensors of the first process, and so on
    state.json                       counters, and the corpus that the run belongs to
    checksums.json                   SHA-256 of each of these files

It is written under a temporary name, synced to disk and renamed. Training continues meanwhile, as
tensors are copied first. An error is raised by the next call.
"""

# pyright: reportPrivateImportUsage=false

import json
import re
import shutil
import stat
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import _hf_utils as hf_format
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from transformer_xl.config import (
    FORMAT_VERSION,
    UNFINISHED,
    World,
    checksum,
    is_disk_full,
    replace_file,
    sync,
)
from transformer_xl.errors import CheckpointError

STATE_FILE = "state.json"
CHECKSUMS_FILE = "checksums.json"

# A single process saves without a process group. Not scoped, as a background thread warns.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Checkpoints:
    """The checkpoints of a run; to be created in every process.

    A context manager, which waits for pending writes.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.folder = folder
        self._world = world
        self._writing: tuple[int, Future[Any]] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._writing is not None and self._world.size == 1:
            # Wait for the writer without raising a second error. With several processes, one may be
            # lost, and waiting would never end.
            self._writing[1].exception()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        keep: int,
        *,
        before_rename: Callable[[Path], object] | None = None,
    ) -> None:
        """Start writing a checkpoint. Collective: call on every rank in the same step.

        The tensors are copied and may change when this returns; shards are written by their owners,
        replicated tensors once.

        When the checkpoint is written, all others but the newest of earlier steps are removed.
        Those of later steps are damaged: training would have resumed from an intact one.

        Args:
            step: The step.
            tensors: Tensors by name.
            state: Values for ``state.json``.
            keep: Number of checkpoints to keep, this one included.
            before_rename: Called in the first process with the temporary folder, when all tensors
                are in it, and before it gets the name of a checkpoint.

        Raises:
            OSError: The previous checkpoint could not be written.
        """
        self.wait()
        # Serialized now, as training changes it.
        content = json.dumps({"format_version": FORMAT_VERSION, **state}).encode()
        final = self.folder / f"step_{step:08d}"

        def complete(folder: Path) -> None:
            replace_file(folder / STATE_FILE, content)
            if before_rename is not None:
                before_rename(folder)
            sums = {path.name: checksum(path) for path in sorted(folder.iterdir())}
            replace_file(folder / CHECKSUMS_FILE, json.dumps(sums).encode())
            sync(folder)
            if final.exists():
                _remove(final)
            folder.rename(final)
            sync(self.folder)
            checkpoints = checkpoints_in(self.folder)
            kept = [path for path in checkpoints if path.name <= final.name][:keep]
            for other in checkpoints:
                if other not in kept:
                    _remove(other)

        future = dcp.async_save(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            storage_writer=_Writer(self._temporary(step), complete),
            process_group=self._world.background,
            no_dist=self._world.size == 1,
        )
        assert isinstance(future, Future)
        self._writing = step, future

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`wait` would raise an error at once."""
        if self._writing is None or not self._writing[1].done():
            return False
        return self._writing[1].exception() is not None

    def wait(self) -> None:
        """Wait until the pending checkpoint is on disk.

        Raises:
            OSError: The checkpoint could not be written; earlier ones are intact.
        """
        if self._writing is None:
            return
        step, future = self._writing
        self._writing = None
        error = future.exception()
        if error is None:
            return
        if self._world.is_first:
            shutil.rmtree(self._temporary(step), ignore_errors=True)
        causes = _causes(error)
        reason, remedy = "; ".join(dict.fromkeys(map(str, causes))), "see to that"
        if any(map(is_disk_full, causes)):
            reason, remedy = "the disk is full", "make room"
        raise OSError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {reason}. "
            f"The ones before it are intact; {remedy} and start the same command again"
        ) from causes[0]

    def _temporary(self, step: int) -> Path:
        return self.folder / f"{UNFINISHED}step_{step:08d}"

    def exist(self) -> bool:
        """Return whether any checkpoint exists, intact or not. Collective: call on every rank."""
        return self._world.by_first(lambda: bool(checkpoints_in(self.folder)))

    def newest(self, say: Callable[[str], None] = print) -> Path | None:
        """Return the newest intact checkpoint; None if there is no checkpoint. Collective.

        Each process verifies the checksums of some of the files.

        Raises:
            CheckpointError: All checkpoints are damaged, or the newest is of a newer version.
        """
        world = self._world
        names = world.by_first(lambda: [path.name for path in checkpoints_in(self.folder)])
        for name in names:
            folder = self.folder / name
            damaged = world.gather(first_damaged(folder, world), is_long=True)
            if not any(damaged):
                if (version := read_about(folder)["format_version"]) > FORMAT_VERSION:
                    raise CheckpointError(
                        f"{folder} has format {version}; this version reads up to "
                        f"{FORMAT_VERSION}: update transformer_xl"
                    )
                return folder
            say(f"{next(filter(None, damaged))} is damaged; trying the checkpoint before it")
        if names:
            raise CheckpointError(
                f"every checkpoint in {self.folder} is damaged: restore one from a copy, or "
                "delete that folder to train from the beginning"
            )
        return None


def read_about(checkpoint: Path) -> dict[str, Any]:
    """Return the contents of ``state.json``."""
    return json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))


def read_metadata(checkpoint: Path) -> dict[str, dcp.TensorStorageMetadata]:
    """Return the metadata of the tensors in a checkpoint, by name, without loading them."""
    metadata: Any = dcp.HuggingFaceStorageReader(str(checkpoint)).read_metadata()
    # A safetensors file has nothing but tensors.
    return metadata.state_dict_metadata


def read_tensors(checkpoint: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Load tensors of a checkpoint in place, each process its shards. Collective.

    Raises:
        CheckpointError: The checkpoint has no such tensors.
    """
    try:
        dcp.load(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)),
            no_dist=world.size == 1,
        )
    except (dcp.CheckpointException, RuntimeError, ValueError) as error:
        reasons = "; ".join(dict.fromkeys(map(str, _causes(error))))
        raise CheckpointError(
            f"{checkpoint} does not fit this run: {reasons} Give the recipe that it was begun with"
        ) from error


def read_whole(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    """Load the whole tensors whose names start with a prefix.

    Args:
        checkpoint: The checkpoint.
        prefix: The beginning of the names.

    Returns:
        The tensors, by their names without the prefix.

    Raises:
        CheckpointError: The tensors cannot be read.
    """
    metadata = read_metadata(checkpoint)
    names = (name for name in metadata if name.startswith(prefix))
    tensors = {name: allocate(metadata[name]) for name in names}
    read_tensors(checkpoint, tensors, World())
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def allocate(metadata: dcp.TensorStorageMetadata) -> Tensor:
    """Return an uninitialized tensor of the size and type of one in a checkpoint."""
    return torch.empty(metadata.size, dtype=metadata.properties.dtype)


class _Writer(dcp.HuggingFaceStorageWriter):
    """Writes to a folder, which the first process completes when all have written."""

    def __init__(self, folder: Path, complete: Callable[[Path], object]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._complete = folder, complete

    def write_data(
        self, plan: dcp.SavePlan, planner: dcp.SavePlanner
    ) -> TorchFuture[list[WriteResult]]:
        """Write the shards of this process.

        As the base class, but without its two copies of all tensors, which would block training.
        """
        tensors, places = {}, {}
        for item in plan.items:
            assert item.tensor_data is not None
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[item.index.fqn] = tensor.detach().contiguous()
            places[item.index.fqn] = {hf_format.SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
        if tensors:
            shard = plan.storage_data["shard_index"]
            path = self._folder / hf_format._gen_file_name(1, 1, shard)
            about = {
                hf_format.CUSTOM_METADATA_KEY: json.dumps(places),
                hf_format.FORMAT_KEY: hf_format.FORMAT_VALUE,
                hf_format.DCP_VERSION_KEY: str(hf_format.HF_DCP_VERSION),
            }
            # The mode according to the umask: safetensors writes files that only their owner reads.
            path.touch()
            mode = stat.S_IMODE(path.stat().st_mode)
            save_file(tensors, path, about)
            path.chmod(mode)
            sync(path)
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(
            [WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items]
        )
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint; called in the first process when all have written."""
        self._complete(self._folder)


def _causes(error: BaseException) -> list[BaseException]:
    """Return the errors of all processes that an error of a collective operation stands for."""
    if isinstance(error, dcp.CheckpointException):
        return [cause for cause, _ in error.failures.values()]
    return [error]


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first; other files are ignored."""
    ours = (x for x in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", x.name))
    return sorted(ours, reverse=True)


def _remove(folder: Path) -> None:
    """Remove a checkpoint."""
    # Renamed first, so that a half-removed checkpoint is not taken for a damaged one.
    shutil.rmtree(folder.rename(folder.with_name(f"{UNFINISHED}old-{folder.name}")))


def first_damaged(folder: Path, world: World = World()) -> str | None:  # noqa: B008 (frozen)
    """Return the first damaged file of a checkpoint, among those that this process verifies.

    Raises:
        PermissionError: A file cannot be read.
        CheckpointError: The checkpoint is of an earlier version.
    """
    if (folder / "state.pt").exists():
        raise CheckpointError(
            f"{folder} is of an earlier version, whose runs cannot be resumed: give another "
            "--out, or use that version. The models of that run, in model/, load as before"
        )
    path = folder / CHECKSUMS_FILE
    try:
        sums = dict(json.loads(path.read_text()))
        # A file without a checksum would be loaded with the rest.
        files = {x.name for x in folder.iterdir()} - {CHECKSUMS_FILE} | {STATE_FILE}
        if differing := files ^ sums.keys():
            return str(folder / min(differing))
        for name in sorted(sums)[world.rank :: world.size]:
            path = folder / name
            if checksum(path) != sums[name]:
                return str(path)
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError):
        return str(path)
    return None
