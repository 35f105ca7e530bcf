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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

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
from transformer_xl.model.building import build_model, weight_shapes
from transformer_xl.model.limits import require_loading

if TYPE_CHECKING:
    from transformer_xl.model.language_model import LanguageModel

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CHECKSUM_KEY = "transformer_xl.sha256"
"""The name of the checksum in the metadata of a safetensors file."""

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Keys of the file that are no settings; the last three are for transformers.
_ABOUT = ("origin", "eval", "preface", "architectures", "auto_map", "transformers")

log = logging.getLogger("transformer_xl")


class ModelFolder:
    """A folder with the settings and the weights of a model.

    Args:
        path: The folder, which need not exist yet.
        variant: That of transformers, as in ``model.fp16.safetensors``.

    Attributes:
        path: The folder.
        config_file: The file with the settings.
    """

    def __init__(self, path: Path, variant: str | None = None) -> None:
        self.path, self.config_file, self._variant = path, path / CONFIG_FILE, variant

    @staticmethod
    def candidates(path: Path) -> "list[ModelFolder]":
        """Return what may hold a model: a path itself, and the best and last model of a run."""
        return [ModelFolder(x) for x in (path, path / "model" / "best", path / "model" / "last")]

    @classmethod
    def find(cls, name: Path | str) -> "ModelFolder":
        """Return the folder of a model: a model folder, or the best or last model of a run folder.

        Args:
            name: The path of one, or the name of a shipped model.

        Raises:
            FileNotFoundError: There is none.
        """
        path = locate(name).path
        for folder in cls.candidates(path):
            if folder.config_file.is_file() and folder.weights.path.is_file():
                return folder
        raise FileNotFoundError(
            f"{path} is neither a model folder ({CONFIG_FILE} and {WEIGHTS_FILE}) nor a run folder "
            "with a finished evaluation or checkpoint"
        )

    @property
    def weights(self) -> "WeightsFiles":
        """The file with the weights, or the index if there are several files."""
        single, index = self.path / WEIGHTS_FILE, self.path / INDEX_FILE
        if self._variant is not None:
            single = single.with_suffix(f".{self._variant}.safetensors")
            index = index.with_suffix(f".{self._variant}.json")
        return WeightsFiles(index if index.is_file() and not single.is_file() else single)

    def _settings(self) -> dict[str, object]:
        """Read the settings file without validating the settings.

        Raises:
            CheckpointError: The file is damaged, of another model type or of a newer version.
        """
        path = self.config_file
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

    def read_config(self) -> ModelConfig:
        """Read and validate the settings of the model.

        Raises:
            CheckpointError: The file is damaged, of another model type or of a newer version.
            InputError: A setting is unknown, of a wrong type or out of range.
        """
        values = {name: x for name, x in self._settings().items() if name not in _ABOUT}
        return read_settings(ModelConfig, values, str(self.config_file), "model", is_stored=True)

    def read_eval_config(self) -> EvalConfig | None:
        """Read the evaluation settings, if any; errors as by :meth:`read_config`."""
        values = self._settings().get("eval")
        if values is None:
            return None
        return read_settings(EvalConfig, values, str(self.config_file), "eval")

    def read_weights(self, config: ModelConfig) -> dict[str, Tensor]:
        """Read and verify the weights of a model with these settings, by name.

        Raises:
            OSError: A file cannot be read.
            CheckpointError: A file is damaged, or has unexpected names or shapes, an unsupported
                dtype, or values that are not finite.
            MemoryLimitError: As :func:`require_loading`.
        """
        weights = self.weights
        path, shapes = weights.path, weights.shapes()
        try:
            # Checked before shapes are computed: a hostile n_layer would exhaust time and memory.
            require_loading(config, len(shapes), path)
            expected = weight_shapes(config)
        except (TypeError, RuntimeError, OverflowError) as error:
            # Raised by torch for impossible sizes.
            raise CheckpointError(f"{path} does not fit {CONFIG_FILE}: {error}") from error
        wrong = sorted(expected.keys() ^ shapes.keys()) or [
            f"{name} of shape {shapes[name]} instead of {tuple(shape)}"
            for name, shape in expected.items()
            if shapes[name] != tuple(shape)
        ]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise CheckpointError(
                f"{path} does not fit {CONFIG_FILE}: {', '.join(wrong[:3])}{more}"
            )
        tensors = {name: x for file in weights.files for name, x in read_tensors(file)[0].items()}
        return {name: tensors[name] for name in expected}

    def load(self, build: Callable[[ModelConfig], "LanguageModel"]) -> "LanguageModel":
        """Load the model as :func:`load_model` does; ``build`` builds it of its settings."""
        config, stored = self.read_config(), self._settings()
        weights = self.read_weights(config)
        model = build(config)
        if {name for name, _ in model.named_parameters()} != weights.keys():
            raise InputError(
                f"{type(model).__name__} has other parameters than the model in {self.path}: build "
                "it with its config, and load what they share with load_state_dict(..., "
                "strict=False)"
            )
        model.copy_weights(weights)
        preface = stored.get("preface") or []
        if not model.is_preface(preface, config.vocab_size):
            raise CheckpointError(
                f"{self.config_file} is damaged: its preface must be a list of tokens below "
                f"{config.vocab_size}; remove it, or restore the file from a copy"
            )
        model.preface = tuple(preface)
        settings = json.loads(json.dumps(dataclasses.asdict(config)))
        model.left_out = {
            name: value for name, value in stored.items() if value != settings.get(name, value)
        }
        return model.eval()

    def write(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        about: Mapping[str, object] | None = None,
    ) -> None:
        """Write settings and weights, tied weights once.

        ``about`` has more keys for the settings file: ``origin``, ``eval``, how to evaluate it, and
        ``preface``, the tokens that are read before a text is generated.

        Raises:
            OSError: A file cannot be written.
            InputError: The weights could not be loaded again; nothing was written.
        """
        WeightsFiles.require_storable(weights)
        content = {"model_type": MODEL_TYPE, "format_version": FORMAT_VERSION}
        content |= dataclasses.asdict(config) | dict(about or {})
        replace_file(self.config_file, (json.dumps(content, indent=2) + "\n").encode())
        tensors = {name: x.contiguous() for name, x in weights.items()}
        write_tensors(tensors, self.path / WEIGHTS_FILE, {"format": "pt"})


def load_model(name: Path | str) -> "LanguageModel":
    """Load a model of any kind in float32, in evaluation mode.

    Args:
        name: A model folder, a run folder, of which the best model is loaded, or the name of a
            shipped model.

    Raises:
        FileNotFoundError: There is no such model, or the folder holds none.
        CheckpointError: A file is damaged.
        InputError: The settings are invalid.
    """
    return ModelFolder.find(name).load(build_model)


class WeightsFiles:
    """The weights of any model: a safetensors file, or several files with an index.

    Methods raise OSError if a file cannot be read, and CheckpointError if one is damaged, or if the
    index names a file outside its folder.

    Args:
        path: The file, or the index.

    Attributes:
        path: As the argument.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def files(self) -> list[Path]:
        """The files, in the order of the index."""
        path = self.path
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

    @property
    def checksum(self) -> str:
        """The SHA-256 of the files."""
        sums = []
        for path in self.files:
            about = path.stat()
            sums.append(_checksum_at(path, about.st_ino, about.st_size, about.st_mtime_ns))
        return sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()

    @property
    def has_checksums(self) -> bool:
        """Whether each file has the checksum of its contents."""
        return all(_has_checksum(file) for file in self.files)

    def add_checksums(self) -> None:
        """Add checksums to weights that another library wrote."""
        for file in self.files:
            if not _has_checksum(file):
                tensors, about = _contents(file)
                write_tensors(tensors, file, about)

    def verify(self) -> int:
        """Verify the weights; return the number of tensors.

        Raises:
            OSError: A file cannot be read.
            CheckpointError: A file is damaged, has an unsupported dtype, or values that are not
                finite.
        """
        n_tensors = len(self.shapes())
        for file in self.files:
            read_tensors(file)
        return n_tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes by the headers: a file may claim more than fits in memory."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
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
                        f"{file} has {name} as {dtype}; weights are {', '.join(_DTYPES)}: convert "
                        "them with safetensors.torch, for example by save_file({k: x.float() for "
                        "k, x in load_file(old).items()}, new)"
                    )
        return shapes

    @staticmethod
    def require_storable(weights: Mapping[str, Tensor]) -> None:
        """Require weights that can be loaded again, before anything is written.

        Raises:
            InputError: A dtype is not supported, or a value is not finite.
        """
        for name, x in weights.items():
            dtype = str(x.dtype).removeprefix("torch.")
            if dtype not in _DTYPES.values():
                raise InputError(
                    f"{name} is {dtype}; weights are stored as {', '.join(_DTYPES.values())}: "
                    "convert the model first, as by model.float()"
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
    about = dict(about) | {CHECKSUM_KEY: _tensors_checksum(tensors, about)}

    def write(temporary: Path) -> None:
        save_file(tensors, temporary, about)
        _sort_metadata(temporary)

    write_atomically(path, write)


def read_tensors(path: Path, *, follow: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read and verify the tensors and the metadata of a safetensors file.

    Args:
        path: The file.
        follow: Whether it may be a symbolic link; if not, that is a ``NotRegularError``.

    Raises:
        OSError: The file cannot be read.
        CheckpointError: It is damaged, or has values that are not finite.
    """
    tensors, about = _contents(path, follow=follow)
    recorded = about.pop(CHECKSUM_KEY, None)
    if recorded is None:
        log.warning(
            "%s has no checksum, so damage to it cannot be detected: it was written by an earlier "
            "version or by another program",
            path,
        )
    elif recorded != _tensors_checksum(tensors, about):
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


def _tensors_checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Return the SHA-256 of tensors with their names, shapes and dtypes, and of the metadata."""
    digest = hashlib.sha256(json.dumps(sorted(about.items())).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode("utf-8", "surrogatepass"))
        if x.numel():
            # NumPy has no bfloat16.
            digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Cached: repeated saves would otherwise hash the file each time.
@lru_cache(maxsize=32)
def _checksum_at(weights: Path, *what_changes_with_it: int) -> str:
    return checksum(weights)


@contextmanager
def _opened(path: Path, *, follow: bool = True) -> Iterator[safe_open]:
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


def _has_checksum(path: Path) -> bool:
    with _opened(path) as file:
        return CHECKSUM_KEY in (file.metadata() or {})


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
