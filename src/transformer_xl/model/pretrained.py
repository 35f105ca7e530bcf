"""The model folder: ``config.json`` and ``model.safetensors``.

Weights are one file, or sharded with an index in the format of transformers::

    model.safetensors                     one file
    model.safetensors.index.json          the index: {"weight_map": {name: file}}
    model-00001-of-00002.safetensors      ... and its files

A checksum of names, shapes, dtypes and values is in the metadata of each file, so that a replaced
file is never verified with the checksum of its predecessor.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from transformer_xl.config import (
    FORMAT_VERSION,
    MODEL_TYPE,
    EvalConfig,
    ModelConfig,
    NotRegularError,
    checksum,
    locate,
    open_regular,
    read_settings,
    read_small_file,
    replace_file,
    same_file,
    write_atomically,
)
from transformer_xl.errors import CheckpointError, InputError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHECKSUM_KEY = "transformer_xl.sha256"
"""The name of the checksum in the metadata of a safetensors file."""

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

log = logging.getLogger("transformer_xl")


def weights_path(folder: Path, variant: str | None = None) -> Path:
    """Return the file with the weights of a model folder, or the index if there are several files.

    ``variant`` is that of transformers, as in ``model.fp16.safetensors``.
    """
    whole, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if variant is not None:
        whole = whole.with_suffix(f".{variant}.safetensors")
        index = index.with_suffix(f".{variant}.json")
    return index if index.is_file() and not whole.is_file() else whole


def weights_files(path: Path) -> list[Path]:
    """Return the files at a :func:`weights_path`.

    Raises:
        CheckpointError: The index is damaged, or names a file outside its folder.
    """
    if path.suffix != ".json":
        return [path]
    try:
        # In the order of the index, in which the checksums of a folder are one.
        names = [*dict.fromkeys(dict(json.loads(read_small_file(path))["weight_map"]).values())]
        for name in names:
            # The name of the parent folder passes the comparison; longer names raise OSError.
            if Path(name).name != name or name == ".." or len(name) > 255:
                raise ValueError(f"{name!r} is not the name of a file beside it")
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or no index of weights: {error!r}") from error
    for name in names:
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path} names {name}, which is missing: copy it there, too")
    return [path.parent / name for name in names]


def require_storable(weights: Mapping[str, Tensor]) -> None:
    """Require weights that can be loaded again, before anything is written.

    Raises:
        InputError: A dtype is not supported, or a value is not finite.
    """
    for name, x in weights.items():
        dtype = str(x.dtype).removeprefix("torch.")
        if dtype not in _DTYPES.values():
            raise InputError(
                f"{name} is {dtype}; weights are stored as {', '.join(_DTYPES.values())}: convert "
                "the model first, as by model.float()"
            )
        if not _is_finite(x):
            raise InputError(
                f"{name} has values that are not finite: such a model would not load again"
            )


def write_tensors(tensors: dict[str, Tensor], path: Path, about: Mapping[str, str]) -> None:
    """Write tensors and metadata to a safetensors file, atomically and with their checksum.

    Raises:
        OSError: The file cannot be written; what was at ``path`` is still there.
    """
    about = dict(about) | {CHECKSUM_KEY: tensors_checksum(tensors, about)}

    def write(temporary: Path) -> None:
        save_file(tensors, temporary, about)
        _sort_metadata(temporary)

    write_atomically(path, write)


def read_weights(
    path: Path, expected: Callable[[int], Mapping[str, torch.Size]], fits: str
) -> dict[str, Tensor]:
    """Read weights by name, and verify them.

    Args:
        path: From :func:`weights_path`.
        expected: Maps the number of stored tensors to the expected names and shapes.
        fits: The file that defines the expected shapes; named in errors.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: A file is damaged, or has unexpected names or shapes, an unsupported dtype,
            or values that are not finite.
    """
    files = weights_files(path)
    shapes = _shapes(files)
    try:
        wanted = expected(len(shapes))
    except (TypeError, RuntimeError, OverflowError) as error:
        # Raised by torch for impossible sizes.
        raise CheckpointError(f"{path} does not fit {fits}: {error}") from error
    wrong = sorted(wanted.keys() ^ shapes.keys()) or [
        f"{name} of shape {shapes[name]} instead of {tuple(shape)}"
        for name, shape in wanted.items()
        if shapes[name] != tuple(shape)
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{path} does not fit {fits}: {', '.join(wrong[:3])}{more}")
    weights = {name: x for file in files for name, x in verified_tensors(file)[0].items()}
    return {name: weights[name] for name in wanted}


def verify_weights(path: Path) -> int:
    """Verify the weights at a :func:`weights_path`, of any model; return the number of tensors.

    Raises:
        OSError: A file cannot be read.
        CheckpointError: A file is damaged, has an unsupported dtype, or values that are not finite.
    """
    files = weights_files(path)
    n_tensors = len(_shapes(files))
    for file in files:
        verified_tensors(file)
    return n_tensors


def has_checksum(path: Path) -> bool:
    """Whether a safetensors file has a checksum; errors as in :func:`verify_weights`."""
    with _opened(path) as file:
        return CHECKSUM_KEY in (file.metadata() or {})


def verified_tensors(
    path: Path, *, follow: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; errors: :func:`verify_weights`.

    ``follow``: whether it may be a symbolic link; if not, that is a ``NotRegularError``.
    """
    tensors, about = _contents(path, follow=follow)
    recorded = about.pop(CHECKSUM_KEY, None)
    if recorded is None:
        log.warning(
            "%s has no checksum, so damage to it cannot be detected: it was written by an earlier "
            "version or by another program",
            path,
        )
    elif recorded != tensors_checksum(tensors, about):
        raise CheckpointError(
            f"{path} is damaged: its contents do not match its checksum. Restore it from a copy"
        )
    for name, x in tensors.items():
        if not _is_finite(x):
            raise CheckpointError(
                f"{path} has values of {name} that are not finite, with which nothing can be "
                "computed: restore it from a copy, or from an earlier checkpoint of its training"
            )
    return tensors, about


def tensors_checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Return the SHA-256 of tensors with their names, shapes and dtypes, and of the metadata."""
    digest = hashlib.sha256(json.dumps(sorted(about.items())).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode("utf-8", "surrogatepass"))
        if x.numel():
            # NumPy has no bfloat16.
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def add_checksums(path: Path) -> None:
    """Add checksums to weights that another library wrote; errors as in :func:`verify_weights`."""
    for file in weights_files(path):
        if not has_checksum(file):
            tensors, about = _contents(file)
            write_tensors(tensors, file, about)


def weights_checksum(weights: Path | str) -> str:
    """Return the SHA-256 of the files at a :func:`weights_path`; a checksum is returned as is."""
    if isinstance(weights, str):
        return weights
    sums = []
    for path in weights_files(weights):
        about = path.stat()
        sums.append(_checksum_at(path, about.st_ino, about.st_size, about.st_mtime_ns))
    return sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()


# Cached: repeated saves would otherwise hash the file each time.
@lru_cache(maxsize=32)
def _checksum_at(weights: Path, *what_changes_with_it: int) -> str:
    return checksum(weights)


@contextmanager
def _opened(path: Path, *, follow: bool = True) -> Iterator[Any]:
    """Open a safetensors file; errors name it."""
    try:
        # safetensors reports a file without read permission as missing, and waits for a pipe.
        with (
            open_regular(path, follow=follow) as opened,
            safe_open(same_file(path, opened), "pt") as file,
        ):
            yield file
    except (FileNotFoundError, NotRegularError, PermissionError):
        raise
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is damaged, no safetensors file, or larger than this machine can map: {error}"
        ) from error


def _contents(path: Path, *, follow: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    with _opened(path, follow=follow) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


def _shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights from the headers: a file may claim more than fits in memory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with _opened(file) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            dtypes = {name: x.get_dtype() for name, x in slices.items()}
            of_file = {name: tuple(x.get_shape()) for name, x in slices.items()}
        if twice := sorted(shapes.keys() & of_file.keys()):
            raise CheckpointError(f"{file} is damaged: it has {twice[0]}, as has another file")
        shapes |= of_file
        for name, dtype in dtypes.items():
            if dtype not in _DTYPES:
                raise CheckpointError(
                    f"{file} has {name} as {dtype}; weights are {', '.join(_DTYPES)}: convert them "
                    "with safetensors.torch, for example by save_file({k: x.float() for k, x in "
                    "load_file(old).items()}, new)"
                )
    return shapes


def _is_finite(x: Tensor) -> bool:
    if not x.is_floating_point() or not x.numel():
        return True
    # Much faster than isfinite() of each number; a NaN is both the smallest and the largest.
    return all(bool(extreme.isfinite()) for extreme in x.aminmax())


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file, whose order differs from run to run.

    Equal contents then give equal files, with equal checksums.
    """
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        values = json.loads(header)
        values["__metadata__"] = dict(sorted(values["__metadata__"].items()))
        content = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(content) <= len(header)
        file.seek(8)
        file.write(content.ljust(len(header)))


CONFIG_FILE = "config.json"
# Keys of the file that are no settings; the last three are for transformers.
_ABOUT = ("origin", "eval", "preface", "architectures", "auto_map", "transformers")


@runtime_checkable
class SavesItself(Protocol):
    """The interface of a vocabulary that a model folder needs."""

    def save(self, folder: Path) -> None:
        """Write the vocabulary to a folder."""
        ...


def model_folders(path: Path) -> tuple[Path, ...]:
    """Return the candidate model folders: ``path`` itself, and the best and last model of a run."""
    return path, path / "model" / "best", path / "model" / "last"


def find_model_folder(name: Path | str) -> Path:
    """Return the folder of a model: a model folder, or the best or last model of a run folder.

    Args:
        name: The path of one, or the name of a shipped model.

    Raises:
        FileNotFoundError: There is none.
    """
    path = locate(name).path
    for folder in model_folders(path):
        if (folder / CONFIG_FILE).is_file() and weights_path(folder).is_file():
            return folder
    raise FileNotFoundError(
        f"{path} is neither a model folder ({CONFIG_FILE} and {WEIGHTS_FILE}) nor a run folder "
        "with a finished evaluation or checkpoint"
    )


def model_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights by name, tied weights once."""
    # named_parameters() omits the second name of a tied weight.
    return {name: x.detach().cpu().contiguous() for name, x in model.named_parameters()}


def write_model(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    folder: Path,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write settings and weights, tied weights once, as a model folder.

    ``about`` has more keys for the settings file: ``origin``, ``eval``, how to evaluate it, and
    ``preface``, the tokens that are read before a text is generated.

    Raises:
        OSError: A file cannot be written.
        InputError: The weights could not be loaded again; nothing was written.
    """
    require_storable(weights)
    content = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION}
    content |= dataclasses.asdict(config) | dict(about or {})
    replace_file(folder / CONFIG_FILE, (json.dumps(content, indent=2) + "\n").encode())
    tensors = {name: x.contiguous() for name, x in weights.items()}
    write_tensors(tensors, folder / WEIGHTS_FILE, {"format": "pt"})


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings file of a model without validating the settings.

    Raises:
        CheckpointError: The file is damaged, of another model type or of a newer version.
    """
    try:
        values = json.loads(read_small_file(path))
        kind, version = values.pop("model_type"), values.pop("format_version")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no settings file of a model: {error!r}") from error
    if kind != MODEL_TYPE:
        raise CheckpointError(f"{path} describes a model of type {kind!r}, not {MODEL_TYPE!r}")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {version!r}; this version reads up to {FORMAT_VERSION}: "
            "update transformer_xl"
        )
    return values


def load_config(path: Path) -> ModelConfig:
    """Read and validate the settings of a model.

    Raises:
        CheckpointError: As by :func:`read_config`.
        InputError: A setting is unknown, of a wrong type or out of range.
    """
    values = {name: x for name, x in read_config(path).items() if name not in _ABOUT}
    return read_settings(ModelConfig, values, str(path), "model", is_stored=True)


def is_preface(tokens: Any, vocab_size: int) -> bool:
    """Whether a value is a list of tokens of the vocabulary."""
    is_list = isinstance(tokens, list | tuple) and all(type(x) is int for x in tokens)
    return is_list and all(0 <= x < vocab_size for x in tokens)


def load_eval_config(path: Path) -> EvalConfig | None:
    """Read the evaluation settings of a model, if any; errors as by :func:`load_config`."""
    values = read_config(path).get("eval")
    return None if values is None else read_settings(EvalConfig, values, str(path), "eval")
