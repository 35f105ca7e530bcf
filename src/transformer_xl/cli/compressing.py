"""The commands compress and decompress."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer_xl.cli.given import LoadsModels, PrintsResult
from transformer_xl.cli.loading import load, name_of, read_bytes, require_model, require_readable
from transformer_xl.cli.printing import say, show
from transformer_xl.config import replace_file, require, require_new_file
from transformer_xl.errors import DataError, SettingsError

if TYPE_CHECKING:
    from transformer_xl.apps.compress import Compressed

_SUFFIX = ".txl"


@dataclass(kw_only=True)
class Compress(LoadsModels, PrintsResult):
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

    file: Annotated[Path, tyro.conf.Positional]
    """The file; - reads the standard input."""
    out: Annotated[Path | None, tyro.conf.Positional] = None
    """The archive; - is the standard output. None: FILE.txl."""
    model: str | None = None
    """A model folder, a run folder, or the name of a model; one of bytes compresses any file. None:
    a shipped one or xz, chosen by the contents of the file; with --learn, an untrained one."""
    learn: bool = False
    """Train while coding. Decompression then needs the same kind of processor."""
    lr: float | None = None
    """Largest learning rate; None: 0.005 without a model, 0.0005 with one."""
    streams: int | None = None
    """Parts of the file coded as a batch: more are faster and compress a little less; None: by
    the size."""
    segment_len: int | None = None
    """Segment length: tokens of each part between updates; None: 64, with --learn 32."""
    mem_len: int | None = None
    """Memory length; None: as configured in the model."""
    seed: int = 0
    """Seed of the random initialization; for --learn without --model."""
    ram: float = 4.0
    """Limit on RAM in gigabytes, without model and file; decompression needs as much. A text that
    is stored with xz must be within it to be restored."""
    verify: bool = False
    """Decompress the result and compare it with the file before it is written. Takes longer than
    compression, as tokens are decoded one at a time."""
    force: bool = False
    """Overwrite an existing file."""

    def run(self) -> None:
        """Compress."""
        out = _checked_out(self, Path(f"{self.file}{_SUFFIX}"))
        # Slow imports come after all checks of the arguments.
        from transformer_xl.apps import compress as compression
        from transformer_xl.config import pick_device, prepare_process

        names = ("streams", "segment_len", "mem_len", "learn", "lr", "seed", "ram")
        settings = compression.Settings(**{name: getattr(self, name) for name in names})
        compression.check_installed()
        prepare_process()
        if self.learn:
            say(
                "--learn: the archive can be decompressed only on this kind of processor with this "
                "version of PyTorch; without --learn, on any"
            )
        model, vocab = load(self.model) if self.model else (None, None)
        data, name = read_bytes(self.file), name_of(self.file)
        with _progress("compressing") as progress, _named(self.file):
            if self.model or self.learn:
                result = compression.compress(data, model, vocab, settings, progress)
            else:
                result, choice = compression.compress_best(
                    data,
                    settings,
                    pick_device(),
                    say=lambda text: say(f"{name}: {text}"),
                    progress=progress,
                )
                if choice is not None:
                    model, vocab = choice.model, choice.vocab
        if self.model or self.learn:
            self._compare(result, data, name)
        report = result.report()
        if self.verify:
            self._verify(result.content, data, model, vocab)
            report["verified"] = True
        _write(out, result.content)
        if out is None:
            say(f"{report['bytes']:,} bytes to {report['compressed_bytes']:,}")
        else:
            known = {name: x for name, x in report.items() if self.json or x is not None}
            show({"file": str(out), **known}, as_json=self.json)

    def _verify(self, content: bytes, data: bytes, model: Any, vocab: Any) -> None:
        """Decompress the archive, and compare it with the data.

        Raises:
            DataError: It differs.
        """
        from transformer_xl.apps import compress as compression

        say("verifying: restoring what was compressed")
        name, ram = name_of(self.file), max(self.ram, len(data) / 1e9)
        decoder = (model, vocab) if compression.needs_model(content) else (None, None)
        try:
            with _progress("verifying") as progress:
                is_same = compression.decompress(content, *decoder, progress, ram) == data
        except (ValueError, RuntimeError) as error:
            why = f"{name} cannot be restored; no archive was written: {error}"
            raise DataError(why) from error
        if not is_same:
            raise DataError(f"{name}: restored contents differ; no archive was written")
        say(f"verified: the {len(data):,} bytes are restored")

    def _compare(self, result: "Compressed", data: bytes, name: str) -> None:
        """Say whether the model that was given is worse than xz, or of no use."""
        from transformer_xl.apps.compress import store

        if result.method == "model":
            size, other = len(result.content), store(data, self.ram)
            if len(other.content) < size and other.method == "xz":
                say(
                    f"{name}: xz would be smaller, {len(other.content):,} bytes in place of "
                    f"{size:,}; without --model and --learn the smallest is chosen"
                )
        elif data:
            how = "with xz" if result.method == "xz" else "unchanged"
            say(
                f"{name}: stored {how}, as it is incompressible with the model; it can be restored "
                "on any machine"
            )


@dataclass(kw_only=True)
class Decompress(LoadsModels, PrintsResult):
    """Restore a file that was compressed with txl compress, with the same model.

    A model that comes with the package is found by the checksum in the file. The output is written
    only after all of it is restored and its checksum verified.

    Examples:
      txl decompress notes.txt.txl
      txl decompress notes.txt.txl --model runs/enwik8-cpu
      txl decompress notes.txt.txl restored.txt
      txl decompress notes.txl - --model runs/demo | less
    """

    file: Annotated[Path, tyro.conf.Positional]
    """The file; - reads the standard input."""
    out: Annotated[Path | None, tyro.conf.Positional] = None
    """The restored file; - is the standard output. None: FILE without .txl."""
    model: str | None = None
    """The model it was compressed with; None: a shipped one, or it needs none."""
    ram: float = 4.0
    """Limit on RAM in gigabytes, without the model and the restored file; of an archive of xz with
    the restored file."""
    force: bool = False
    """Overwrite an existing file."""

    def run(self) -> None:
        """Decompress."""
        out = _checked_out(self, self.file.with_suffix("") if self.file.suffix == _SUFFIX else None)
        from transformer_xl.apps.compress import check_installed, decompress, find, needs_model
        from transformer_xl.config import pick_device, prepare_process

        content, model, vocab = read_bytes(self.file), None, None
        started = time.perf_counter()
        with _named(self.file):
            needs = needs_model(content)
        if self.model and not needs:
            say(f"{name_of(self.file)} needs no model: --model {self.model} is ignored")
        elif needs:
            check_installed()
            if self.model:
                model, vocab = load(self.model)
            else:
                prepare_process()
                with _named(self.file):
                    choice = find(content, pick_device(), say=say)
                model, vocab = choice.model, choice.vocab
                say(f"{choice.shipped.using}, which compressed it")
        with _progress("restoring") as progress, _named(self.file, self.model):
            data = decompress(content, model, vocab, progress, self.ram)
        seconds = time.perf_counter() - started
        _write(out, data)
        if out is not None:
            about = {"file": str(out), "bytes": len(data), "compressed_bytes": len(content)}
            show(about | {"seconds": seconds}, as_json=self.json)


def _checked_out(command: Compress | Decompress, default: Path | None) -> Path | None:
    """Check files and model before anything is loaded; return the output, None: standard output."""
    require_readable(command.file, is_text=False)
    is_piped = str(command.file) == "-" or _is_device(command.file)
    out = command.out or (Path("-") if is_piped else default)
    if out is None:
        raise SettingsError(f"{command.file} does not end in {_SUFFIX}: give the output file")
    if str(out) == "-":
        require(
            not command.json,
            "--json and the output cannot both go to the standard output: give an output file",
        )
    else:
        if str(command.file) != "-" and out.is_file() and out.samefile(command.file):
            raise FileExistsError(f"{out} is the input file: give the output another name")
        # Checked now, not after hours of computing.
        require_new_file(out, force=command.force)
    if command.model is not None:
        require_model(command.model)
    return None if str(out) == "-" else out


def _is_device(file: Path) -> bool:
    """Whether a file is a pipe, such as /dev/stdin, beside which nothing is written."""
    return not file.is_file() or file.parent in (Path("/dev"), Path("/dev/fd"))


@contextmanager
def _named(file: Path, model: str | None = None) -> Iterator[None]:
    """Name the file, and the model that was given for it, in errors about it."""
    try:
        yield
    except ValueError as error:
        from transformer_xl.apps.compress import ArchiveError

        is_of_model = model is not None and not isinstance(error, ArchiveError)
        about = f" (given: --model {model})" if is_of_model else ""
        raise DataError(f"{name_of(file)}: {error}{about}") from error


def _write(out: Path | None, content: bytes) -> None:
    if out is None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        replace_file(out, content)


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far a text is, of which a callback takes the tokens that are done and all."""
    from transformer_xl.train import Progress

    with Progress(0, description=description, passes=True) as progress:

        def update(done: int, of: int) -> None:
            progress.expect(of)
            progress.update(done)

        yield update
