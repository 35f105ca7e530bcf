"""The commands that make files smaller and restore them: compress and decompress."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from transformer_xl.cli.loading import load
from transformer_xl.cli.printing import say, show
from transformer_xl.config.files import replace_file, require_model_place

if TYPE_CHECKING:
    from transformer_xl.data import Vocab
    from transformer_xl.model import LanguageModel

_SUFFIX = ".txl"
_SECONDS_BETWEEN_NEWS = 10.0


@dataclass(kw_only=True)
class Compress:
    """Make a file smaller by what a model knows, so that nothing is lost.

    Each symbol takes -log2 of the probability that the model gave it, in bits. With --learn the
    model learns from what was coded; without --model it begins with drawn weights, and nothing but
    the file is needed to read it, on the same kind of processor with the same PyTorch. Without
    --learn any machine that has the model restores it. What does not shrink is stored as it is.
    """

    examples: ClassVar = (
        "txl compress notes.txt --model runs/enwik8-cpu",
        "txl compress notes.txt --learn --verify",
        "txl compress enwik8 enwik8.txl --model runs/enwik8-cpu --learn --lr 0.0003",
        "cat notes.txt | txl compress - --model runs/demo > notes.txl",
    )

    file: Annotated[Path, tyro.conf.Positional]
    """The file; - reads the standard input."""
    out: Annotated[Path | None, tyro.conf.Positional] = None
    """Where it goes; - is the standard output. None: FILE.txl."""
    model: Path | None = None
    """A model folder or run folder; one of bytes takes any file."""
    learn: bool = False
    """Learn on the way. The file is then restored on the same kind of processor only."""
    lr: float | None = None
    """Largest learning rate; None: 0.005 without a model, 0.0005 with one."""
    streams: int | None = None
    """Parts coded side by side: more are faster and cost a little; None: by the size."""
    segment_len: int | None = None
    """Symbols of each part in a round, after which a model may learn; None: 64, learning 32."""
    mem_len: int | None = None
    """Remembered positions; None: as the model was trained."""
    seed: int = 0
    """Of the drawn weights; for --learn without --model."""
    ram: float = 4.0
    """Gigabytes of RAM that may be taken, beside model and file; to restore it takes as many."""
    verify: bool = False
    """Restore the result here and compare it with the file before it is written. Takes longer
    than compressing: symbols are restored one after the other."""
    force: bool = False
    """Replace what is there already."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Compress."""
        _check_input(self.file)
        out = _out(self.file, self.out, self.file.with_name(self.file.name + _SUFFIX), self.force)
        _check_json(self.json, out)
        if self.model is None and not self.learn:
            raise ValueError("--model DIR says what predicts; without it, --learn a fresh one")
        if self.model is not None:
            require_model_place(self.model)
        # What takes a while comes when nothing is left to refuse.
        from transformer_xl.apps.compress import (
            Settings,
            UnrestorableError,
            check_installed,
            compress,
        )

        settings = Settings(
            streams=self.streams,
            segment_len=self.segment_len,
            mem_len=self.mem_len,
            learn=self.learn,
            lr=self.lr,
            seed=self.seed,
            ram=self.ram,
        )
        check_installed()
        if self.learn:
            say(
                "--learn: the archive can be restored only on this kind of processor with this "
                "PyTorch; without --learn, on any"
            )
        model, vocab = _load(self.model)
        data = _read(self.file)
        try:
            found = compress(data, model, vocab, settings, _news())
        except UnrestorableError as error:
            raise ValueError(f"{_name(self.file)}: {error}") from error
        if self.learn and found.made_for is None:
            say(f"{_name(self.file)} does not shrink and is stored: it can be restored anywhere")
        if self.verify:
            self._verify(data, found.content, model, vocab)
        _write(out, found.content)
        report = found.report() | ({"verified": True} if self.verify else {})
        if out is None:
            say(f"{report['bytes']:,} bytes to {report['compressed_bytes']:,}")
        else:
            known = {name: x for name, x in report.items() if self.json or x is not None}
            show({"file": str(out), **known}, as_json=self.json)

    def _verify(
        self, data: bytes, content: bytes, model: "LanguageModel | None", vocab: "Vocab | None"
    ) -> None:
        """Restore what is about to be written.

        Raises:
            RuntimeError: The restored contents differ, or there are none.
        """
        from transformer_xl.apps.compress import decompress, needs_model

        given = (model, vocab) if needs_model(content) else (None, None)
        say("verifying: restoring what was compressed")
        try:
            restored = decompress(content, *given, _news(), self.ram)
        except RuntimeError as error:
            raise RuntimeError(
                f"{_name(self.file)} cannot be restored; no archive was written: {error}"
            ) from error
        if restored != data:
            raise RuntimeError(
                f"{_name(self.file)}: restored contents differ; no archive was written"
            )
        say(f"verified: the {len(data):,} bytes are restored")


@dataclass(kw_only=True)
class Decompress:
    """Restore a file that txl compress made, with the same model.

    Nothing is written before all of it is restored and its checksum is right.
    """

    examples: ClassVar = (
        "txl decompress notes.txt.txl --model runs/enwik8-cpu",
        "txl decompress notes.txt.txl restored.txt",
        "txl decompress notes.txl - --model runs/demo | less",
    )

    file: Annotated[Path, tyro.conf.Positional]
    """The file; - reads the standard input."""
    out: Annotated[Path | None, tyro.conf.Positional] = None
    """Where it goes; - is the standard output. None: FILE without .txl."""
    model: Path | None = None
    """The model that it was made with; None: it needs none."""
    ram: float = 4.0
    """Gigabytes of RAM that a file may ask for, beside the model and what it holds."""
    force: bool = False
    """Replace what is there already."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> None:
        """Decompress."""
        _check_input(self.file)
        default = self.file.with_suffix("") if self.file.suffix == _SUFFIX else None
        out = _out(self.file, self.out, default, self.force)
        _check_json(self.json, out)
        if self.model is not None:
            require_model_place(self.model)
        from transformer_xl.apps.compress import check_installed, decompress, needs_model

        check_installed()
        content = _read(self.file)

        started = time.perf_counter()
        with _named(self.file, None):
            needed = needs_model(content)
            if needed and self.model is None:
                raise ValueError("it was made with a model: give the same one with --model DIR")
        if self.model is not None and not needed:
            say(f"{_name(self.file)} needs no model: --model {self.model} is not read")
        # Outside: what is wrong with the model is not wrong with the file.
        model, vocab = _load(self.model) if needed else (None, None)
        with _named(self.file, self.model):
            data = decompress(content, model, vocab, _news(), self.ram)
        seconds = time.perf_counter() - started
        _write(out, data)
        if out is not None:
            about = {"file": str(out), "bytes": len(data), "compressed_bytes": len(content)}
            show(about | {"seconds": seconds}, as_json=self.json)


def _out(file: Path, out: Path | None, default: Path | None, force: bool) -> Path | None:
    """Return where the result goes; None: the standard output."""
    if out is None:
        out = Path("-") if str(file) == "-" else default
    if out is None:
        raise ValueError(f"{file} does not end in {_SUFFIX}: say where the result goes")
    if str(out) == "-":
        return None
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: name a file in it for the result")
    if not _is_stdin(file) and out.exists() and out.samefile(file):
        raise FileExistsError(f"{out} is the file that is read: give the result another name")
    if out.exists() and not force:
        raise FileExistsError(f"{out} is there already; --force replaces it")
    # Now, and not after hours of computing.
    place = next(x for x in (out.absolute().parent, *out.absolute().parents) if x.exists())
    if not place.is_dir():
        raise NotADirectoryError(f"cannot write {out}: {place} is a file, not a folder")
    if not os.access(place, os.W_OK):
        raise PermissionError(f"cannot write {out}: no permission for the folder {place}")
    return out


def _check_json(as_json: bool, out: Path | None) -> None:
    if as_json and out is None:
        raise ValueError("--json and the result cannot both go to the standard output: name a file")


def _check_input(path: Path) -> None:
    """Check, before anything else is asked of the user, that the file can be read.

    Raises:
        OSError: It cannot.
    """
    if not _is_stdin(path) and (path.is_file() or path.is_dir() or not path.exists()):
        try:
            path.open("rb").close()
        except OSError as error:
            raise OSError(f"cannot read {path}: {error.strerror}") from error


def _read(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if _is_stdin(path) else path.read_bytes()
    except OSError as error:
        raise OSError(f"cannot read {_name(path)}: {error.strerror}") from error


def _is_stdin(path: Path) -> bool:
    return str(path) == "-"


def _name(path: Path) -> str:
    return "the standard input" if _is_stdin(path) else str(path)


@contextmanager
def _named(file: Path, model: Path | None) -> Iterator[None]:
    """Name the archive, and the model that was given for it, in what is wrong with them."""
    from transformer_xl.apps.compress import ArchiveError

    try:
        yield
    except ArchiveError as error:
        raise ArchiveError(f"{_name(file)}: {error}") from error
    except ValueError as error:
        given = "" if model is None else f" (given: --model {model})"
        raise ValueError(f"{_name(file)}: {error}{given}") from error


def _write(out: Path | None, content: bytes) -> None:
    if out is None:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    else:
        replace_file(out, content)


def _load(folder: Path | None) -> tuple["LanguageModel | None", "Vocab | None"]:
    from transformer_xl.config.device import pick_device

    return (None, None) if folder is None else load(folder, pick_device(), "float32")


def _news() -> Callable[[int, int], None]:
    """Return what says now and then how far it has come."""
    last = started = time.perf_counter()

    def tell(done: int, of: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last > _SECONDS_BETWEEN_NEWS:
            last = now
            left = (now - started) * (of / done - 1)
            say(f"{done:,} of {of:,} symbols, {left:,.0f} s to go")

    return tell
