"""The folder that ``txl export`` writes: the program, its description, the vocabulary."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from transformer_xl.config import FORMAT_VERSION
from transformer_xl.config.files import new_folder, require_new
from transformer_xl.data import load_vocab
from transformer_xl.interop.export.checking import Errors, Run, compare
from transformer_xl.interop.export.exported_step import Step, make_step, names
from transformer_xl.model import load_model
from transformer_xl.model.pretrained import find_model_folder, weights_checksum, weights_path

Format = Literal["onnx", "torch"]

MANIFEST_FILE = "step.json"
PROGRAM_FILES = {"onnx": "step.onnx", "torch": "step.pt2"}

# What one file of ONNX can hold, with a reserve; what is larger lies beside it.
_LARGEST_ONNX = 1_900_000_000


class Exported(NamedTuple):
    """What was written."""

    folder: Path
    """The folder."""
    errors: Errors | None
    """How far its log-probabilities are from the model's; None: there was nothing to run it."""


def export(
    source: Path | str,
    folder: Path | str,
    *,
    format: Format = "onnx",
    mem_len: int | None = None,
    n_tokens: int = 1,
) -> Exported:
    """Write a step of a model as a program for ONNX Runtime or ``torch.export``.

    A step reads ``n_tokens`` tokens of each of any number of streams, with the memory handed in,
    and returns the log-probabilities of what comes after each and the memory for the next step.
    The program is run against the model before the folder appears.

    Args:
        source: A model folder or a run folder.
        folder: A new folder, or an empty one.
        format: ``onnx``, which needs the packages of the extra ``onnx``, or ``torch``.
        mem_len: Remembered positions. None: as the model is configured.
        n_tokens: Tokens that a step reads.

    Raises:
        FileExistsError: The folder holds something.
        FileNotFoundError: There is no model.
        RuntimeError: A package is missing, or the program is further from the model than rounding
            explains (:class:`~transformer_xl.interop.export.checking.Errors`).
        ValueError: The model cannot be exported, or a setting is out of range.
    """
    source, folder = find_model_folder(source), Path(folder).absolute()
    if format not in get_args(Format):
        raise ValueError(f"format={format!r} is unknown; choose from {', '.join(get_args(Format))}")
    require_new(folder)
    if format == "onnx":
        _require_onnx()
    step = make_step(load_model(source).requires_grad_(False), mem_len=mem_len, n_tokens=n_tokens)
    with new_folder(folder) as unfinished:
        path = unfinished / PROGRAM_FILES[format]
        with _quietly():
            run = (_write_onnx if format == "onnx" else _write_torch)(step, path)
        errors = None if run is None else compare(step, run)
        if errors is not None and not errors.is_equal:
            raise RuntimeError(
                f"the program's log-probabilities are off by {errors.program:.1e} and the model's "
                f"own by {errors.model:.1e}, so it is not the model and was not written; another "
                "--format or other versions of torch and onnxruntime may do better"
            )
        about = _about(step, format) | {"weights": weights_checksum(weights_path(source))}
        about["errors"] = None if errors is None else errors._asdict()
        try:
            load_vocab(source).save(unfinished)
            about["vocabulary"] = "tokenizer.json"
        except FileNotFoundError:
            about["vocabulary"] = None
        (unfinished / MANIFEST_FILE).write_text(json.dumps(about, indent=2) + "\n")
    return Exported(folder, errors)


def _about(step: Step, format: Format) -> dict[str, Any]:
    """Describe a program: what goes in, what comes out, how it begins."""
    vocab_size = step.model.config.vocab_size
    memory = step.start(1)
    described = []
    for (name, _), x, batch_dim in zip(names(step), memory, (*step.batch_dims, 0), strict=True):
        shape: list[int | str] = list(x.shape)
        shape[batch_dim] = "B"
        described.append({"name": name, "dtype": str(x.dtype)[6:], "shape": shape})
    tokens = {"name": "tokens", "dtype": "int64", "shape": ["B", step.n_tokens]}
    shape = ["B", step.n_tokens, vocab_size]
    log_probs = {"name": "log_probs", "dtype": "float32", "shape": shape}
    pairs = list(names(step))
    return {
        "kind": "transformer-xl-step",
        "format_version": FORMAT_VERSION,
        "format": format,
        "program": PROGRAM_FILES[format],
        "mem_len": step.mem_len,
        "n_tokens": step.n_tokens,
        "vocab_size": vocab_size,
        "inputs": [tokens, *described],
        "outputs": [
            log_probs,
            *(each | {"name": after} for each, (_, after) in zip(described, pairs, strict=True)),
        ],
        # The next step is given what this one returned; a text begins with zeros, and with so much
        # of them seen.
        "next": {after: name for name, after in pairs},
        "start": {"seen": int(memory[-1][0])},
    }


def _traced(step: Step) -> torch.export.ExportedProgram:
    streams = torch.export.Dim("B")
    # Two: one would be taken for a number that never changes.
    example = (torch.zeros(2, step.n_tokens, dtype=torch.int64), *step.start(2))
    dynamic = ({0: streams}, *({dim: streams} for dim in (*step.batch_dims, 0)))
    with torch.no_grad():
        return torch.export.export(step.eval(), example, dynamic_shapes=dynamic, strict=False)


def _write_torch(step: Step, path: Path) -> Run:
    torch.export.save(_traced(step), path)
    program = torch.export.load(path).module()
    return lambda *given: program(*given)


def _write_onnx(step: Step, path: Path) -> Run | None:
    pairs = list(names(step))
    traced = _traced(step)
    if step.model.config.reset_at is not None:
        traced = traced.run_decompositions({torch.ops.aten.cummax.default: _cummax})
    program = torch.onnx.export(
        traced,
        dynamo=True,
        input_names=["tokens", *(name for name, _ in pairs)],
        output_names=["log_probs", *(after for _, after in pairs)],
        verbose=False,
    )
    assert program is not None
    n_bytes = sum(x.nbytes for x in (*step.parameters(), *step.buffers()))
    program.save(path, external_data=n_bytes > _LARGEST_ONNX)
    try:
        import onnxruntime
    except ImportError:
        return None
    onnxruntime.set_default_logger_severity(3)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = [each.name for each in session.get_inputs()]

    def run(*given: Tensor) -> list[Tensor]:
        arrays = {name: x.numpy() for name, x in zip(inputs, given, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, arrays)]

    return run


def _cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the largest number up to each place of a row: ONNX has no operator for that.

    The places of these numbers, the second result, are not asked for.
    """
    T = x.shape[dim]
    later_TT = torch.ones(T, T, dtype=torch.bool).triu(1)
    values = x.unsqueeze(dim).masked_fill(later_TT, torch.iinfo(x.dtype).min).amax(-1)
    return values, torch.zeros_like(values)


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"--format onnx needs {error.name}: pip install 'transformer-xl[onnx]'"
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what libraries say of themselves from whoever wants to know of errors alone."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
