"""The commands compress and decompress."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer_xl.cli.given import LoadsModels, PrintsResult
from transformer_xl.cli.loading import (
    load,
    name_of,
    read_bytes,
    require_model,
    require_readable,
    say_if_unmeasured,
)
from transformer_xl.cli.printing import say, show
from transformer_xl.config import replace_file, require, require_new_file
from transformer_xl.errors import DataError

_SUFFIX = ".txl"


@dataclass(kw_only=True)
class _ArchiveCommand(LoadsModels, PrintsResult):
    """A command that reads one file, and writes another one."""

    file: Annotated[Path, tyro.conf.Positional]
    """The file; - reads the standard input."""
    out: Annotated[Path | None, tyro.conf.Positional] = None
    """The output; - is the standard output. None: FILE.txl, or FILE without .txl."""
    model: str | None = None
    """A model folder, a run folder, or the name of a model; one of bytes compresses any file. None:
    a shipped one, chosen by the contents or the checksum of the file."""
    ram: float = 4.0
    """Limit on RAM in gigabytes, without model and file; decompression needs as much as
    compression. A text that is stored with xz must be within it to be restored."""
    force: bool = False
    """Overwrite an existing file."""

    def _checked_out(self, default: Path | None) -> Path | None:
        """Check files and model before anything is loaded; return the output, None: stdout."""
        file = self.file
        require_readable(file, is_text=False)
        # Beside a pipe, such as /dev/stdin, nothing is written.
        is_device = not file.is_file() or file.parent in (Path("/dev"), Path("/dev/fd"))
        out = self.out or (Path("-") if is_device else default)
        require(out is not None, f"{file} does not end in {_SUFFIX}: give the output file")
        assert out is not None
        if str(out) == "-":
            require(not self.json, "--json writes to the standard output: give an output file")
        else:
            if file.is_file() and out.is_file() and out.samefile(file):
                raise FileExistsError(f"{out} is the input file: give the output another name")
            # Checked now, not after hours of computing.
            require_new_file(out, force=self.force)
        if self.model is not None:
            require_model(self.model)
        return None if str(out) == "-" else out

    def _write(self, out: Path | None, content: bytes, report: Mapping[str, object]) -> None:
        """Write the output, and print what it is."""
        if out is None:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        else:
            replace_file(out, content)
            show({"file": str(out), **report}, as_json=self.json)


@dataclass(kw_only=True)
class Compress(_ArchiveCommand):
    """Compress a file losslessly with the predictions of a model (arithmetic coding).

    A symbol takes -log2 p bits, with p its probability under the model. Without --model and
    --learn, the model is the one of those that come with the package (txl models) that compresses a
    sample of the file best; a file that xz packs smaller is stored with xz. With --learn the model
    is trained on what was coded; with --learn and without --model it starts randomly initialized,
    and decompression needs only the file, on the same kind of processor with the same PyTorch.
    Without --learn, any machine with the model can decompress. Incompressible data are stored
    unchanged.

    Examples:
      txl compress notes.txt
      txl compress notes.txt --model runs/enwik8-cpu
      txl compress notes.txt --learn --verify
      txl compress enwik8 enwik8.txl --model runs/enwik8-cpu --learn --lr 0.0003
      cat notes.txt | txl compress - --model runs/demo > notes.txl
    """

    learn: bool = False
    """Train while coding. Decompression then needs the same kind of processor."""
    lr: float | None = None
    """Largest learning rate; None: 0.003 without a model, 0.001 with one."""
    streams: int | None = None
    """Parts of the file coded as a batch: more are faster and compress a little less; None: by
    the size."""
    segment_len: int | None = None
    """Segment length: tokens of each part between updates; None: 64."""
    mem_len: int | None = None
    """Memory length; None: as configured in the model."""
    verify: bool = False
    """Decompress the result and compare it with the file before it is written. Takes longer than
    compression, as tokens are decoded one at a time."""

    def run(self) -> None:
        """Compress."""
        out = self._checked_out(Path(f"{self.file}{_SUFFIX}"))
        # Slow imports come after all checks of the arguments.
        from transformer_xl.apps import compress as compression
        from transformer_xl.config import pick_device, prepare_process

        names = ("streams", "segment_len", "mem_len", "learn", "lr", "ram")
        settings = compression.Settings(**{name: getattr(self, name) for name in names})
        prepare_process()
        if self.learn:
            say(
                "--learn: the archive can be decompressed only on this kind of processor with this "
                "version of PyTorch; without --learn, on any"
            )
        coder = (None, None)
        if self.model:
            coder = load(self.model)
            say_if_unmeasured(self.model, coder[0], self.mem_len or 0)
        data, started = read_bytes(self.file), time.perf_counter()
        with _progress("compressing") as progress, _name_in_errors(self.file):
            if self.model or self.learn:
                result = compression.compress(data, *coder, settings, progress)
            else:
                device, options = pick_device(), {"say": say, "progress": progress}
                result, choice = compression.compress_best(data, settings, device, **options)
                if choice is not None:
                    coder = (choice.model, choice.vocab)
                    name = choice.shipped.full_name
                    say_if_unmeasured(name, choice.model, self.mem_len or 0)
        report = result.report() | {"seconds": time.perf_counter() - started}
        if self.verify:
            decoder = coder if compression.needs_model(result.content) else (None, None)
            ram, is_same = max(self.ram, len(data) / 1e9), False
            with (
                _progress("verifying") as progress,
                _name_in_errors(self.file, "; no archive was written"),
            ):
                is_same = compression.decompress(result.content, *decoder, progress, ram) == data
            if not is_same:
                raise DataError(
                    f"{name_of(self.file)}: restored contents differ; no archive was written"
                )
            report["verified"] = True
        self._write(out, result.content, report)


@dataclass(kw_only=True)
class Decompress(_ArchiveCommand):
    """Restore a file that was compressed with txl compress, with the same model.

    A model that comes with the package is found by the checksum in the file. The output is written
    only after all of it is restored and its checksum verified.

    Examples:
      txl decompress notes.txt.txl
      txl decompress notes.txt.txl --model runs/enwik8-cpu
      txl decompress notes.txt.txl restored.txt
      txl decompress notes.txl - --model runs/demo | less
    """

    def run(self) -> None:
        """Decompress."""
        is_named = self.file.suffix == _SUFFIX
        out = self._checked_out(self.file.with_suffix("") if is_named else None)
        from transformer_xl.apps.compress import decompress, find, needs_model
        from transformer_xl.config import pick_device, prepare_process

        content, coder = read_bytes(self.file), (None, None)
        started = time.perf_counter()
        with _name_in_errors(self.file):
            needs = needs_model(content)
        if self.model and not needs:
            say(f"{name_of(self.file)} needs no model: --model {self.model} is ignored")
        elif needs:
            if self.model:
                coder = load(self.model)
            else:
                prepare_process()
                with _name_in_errors(self.file):
                    choice = find(content, pick_device(), say)
                coder = (choice.model, choice.vocab)
                say(f"{choice.shipped.using}, which compressed it")
        with _progress("restoring") as progress, _name_in_errors(self.file):
            data = decompress(content, *coder, progress, self.ram)
        seconds = time.perf_counter() - started
        sizes = {"bytes": len(data), "compressed_bytes": len(content)}
        self._write(out, data, sizes | {"seconds": seconds})


@contextmanager
def _name_in_errors(file: Path, consequence: str = "") -> Iterator[None]:
    """Raise a ValueError of a ``with`` block as a DataError that begins with the file.

    Args:
        file: The file.
        consequence: The end of the message.
    """
    try:
        yield
    except ValueError as error:
        raise DataError(f"{name_of(file)}: {error}{consequence}") from error


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far a text is, of which a callback takes the tokens that are done and all."""
    from transformer_xl.train import Progress

    with Progress(0, description=description, passes=True) as progress:

        def update(done: int, of: int) -> None:
            progress.expect(of)
            progress.update(done)

        yield update
