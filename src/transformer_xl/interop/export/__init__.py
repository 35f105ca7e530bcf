"""``txl export``: a step of the model as a program, and the folder with it.

A step is a pure function of tensors: it calls the model with a memory of fixed shape. The newest of
``mem_len`` positions are last, and ``seen`` is the number of visible positions of each stream.
"""

import copy
import json
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import FORMAT_VERSION, names_nearest, new_folder, require_new
from transformer_xl.data import load_vocab
from transformer_xl.errors import InputError
from transformer_xl.model import (
    KeysAndValues,
    LanguageModel,
    Lengths,
    Memory,
    TransformerXL,
    find_model_folder,
    load_model,
    read,
    read_all,
    require_token_inputs,
    weights_checksum,
    weights_path,
)

__all__ = [
    "Errors", "Exported", "Format", "KeptStep", "StateStep", "Step", "compare", "export",
    "make_step",
]  # fmt: skip


class Step(nn.Module, ABC):
    """The base of the two kinds of steps; :func:`make_step` chooses the one for a model.

    Attributes:
        mem_len: Memory length.
        n_tokens: Tokens of a step.
        lengths: The lengths of reading.
        memory_names: Names of the tensors of the memory.
        batch_dims: The batch dimension of each of them.
    """

    memory_names: tuple[str, ...]
    batch_dims: tuple[int, ...]

    def __init__(self, model: LanguageModel, mem_len: int, n_tokens: int) -> None:
        super().__init__()
        self.model, self.mem_len, self.n_tokens = model, mem_len, n_tokens
        self.lengths = Lengths.of(model.config, segment_len=n_tokens, mem_len=mem_len, ext_len=0)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Names of the tensors of the memory and of ``seen``: as input, and as output."""
        return [(name, f"new_{name}") for name in (*self.memory_names, "seen")]

    @abstractmethod
    def _memory_shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape of each tensor of the memory."""

    def start(self, batch_size: int) -> tuple[Tensor, ...]:
        """Return the memory at the start of a text, and how much of it is seen."""
        shape = self._memory_shape(batch_size)
        memory = [torch.zeros(shape, dtype=self.model.dtype) for _ in self.memory_names]
        seen = len(self.model.start_memory(1, self.mem_len))
        return *memory, torch.full((batch_size,), seen, dtype=torch.int64)

    def _read(self, tokens: Tensor, mems: Memory) -> tuple[Tensor, ...]:
        """Return the distribution after each token, the new memory, and its visible positions."""
        ((_, hidden, _, after),) = read(self.model, tokens, self.lengths, mems)
        assert after.forgotten is not None
        new = [torch.stack([*layers]) for layers in after.by_name()]
        return self.model.head.log_probs(hidden), *new, self.mem_len - after.forgotten


class KeptStep(Step):
    """A step with keys and values as the memory, which are projected only once."""

    memory_names = ("keys", "values")
    batch_dims = (2, 2)

    @torch.no_grad()
    def __init__(self, model: LanguageModel, mem_len: int, n_tokens: int) -> None:
        super().__init__(model, mem_len, n_tokens)
        assert isinstance(model, TransformerXL)
        # Projected positions depend only on the weights: they are constants of the program.
        model.positions.project(model, mem_len + n_tokens, self.lengths.clamp_len)

    def _memory_shape(self, batch_size: int) -> tuple[int, ...]:
        config = self.model.config
        return config.n_layer, config.n_head, batch_size, self.mem_len, config.head_width

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        keys: Float[Tensor, "N H B M K"],
        values: Float[Tensor, "N H B M K"],
        seen: Int[Tensor, " B"],
    ) -> tuple[
        Float[Tensor, "B T V"],
        Float[Tensor, "N H B M K"],
        Float[Tensor, "N H B M K"],
        Int[Tensor, " B"],
    ]:
        """Read tokens; return the distribution after each, and the memory after all of them."""
        forgotten = self.mem_len - seen
        memory = _InputKeysAndValues(keys.unbind(), values.unbind(), forgotten=forgotten)
        return self._read(tokens, memory)  # pyright: ignore[reportReturnType]


class StateStep(Step):
    """A step with hidden states as the memory.

    For absolute positions, with which keys change at each step, and for a recurrence of the inputs,
    which goes on from a hidden state.
    """

    memory_names = ("states",)
    batch_dims = (1,)

    def _memory_shape(self, batch_size: int) -> tuple[int, ...]:
        config = self.model.config
        return config.n_layer, batch_size, self.mem_len, config.d_model

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        states: Float[Tensor, "N B M D"],
        seen: Int[Tensor, " B"],
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "N B M D"], Int[Tensor, " B"]]:
        """Read tokens; return the distribution after each, and the memory after all of them."""
        return self._read(tokens, Memory(states.unbind(), self.mem_len - seen))  # pyright: ignore[reportReturnType]


def make_step(
    model: LanguageModel, *, mem_len: int | None = None, n_tokens: int = 1
) -> KeptStep | StateStep:
    """Build the step of a model.

    Args:
        model: The model, in evaluation mode, on the CPU; it is not changed.
        mem_len: Memory length. None: as the model is configured.
        n_tokens: Tokens of a step.

    Raises:
        InputError: The model cannot be exported, or a length is out of range.
    """
    config = model.config
    require_token_inputs(config)
    mem_len = Lengths.of(config, mem_len=mem_len).mem_len
    if not isinstance(model, TransformerXL):
        raise InputError(
            f"a model of kind={config.kind!r} cannot be exported: export a Transformer-XL"
        )
    if mem_len < 1:
        raise InputError(f"mem_len={mem_len}: a step without a memory knows one token; at least 1")
    if n_tokens < 1:
        raise InputError(f"n_tokens={n_tokens} must be at least 1")
    if model.dtype != torch.float32:
        raise InputError(f"weights in {model.dtype} are for reading here: export those in float32")
    has_keys = config.attn_type in (0, 1) and not config.input_recurrence
    # Normalization without a bias leaves zeros as they are.
    has_bias = config.norm_first and config.norm == "layer"
    if config.start_memory == "zeros" and has_bias and has_keys:
        raise InputError(
            "start_memory='zeros' with norm_first=True and norm='layer': the keys of zeros are not "
            "zeros, and a step begins with zeros"
        )
    return (KeptStep if has_keys else StateStep)(model, mem_len, n_tokens)


class _InputKeysAndValues(KeysAndValues):
    """Keys and values that are inputs: new ones are concatenated, not written into a buffer."""

    def with_capacity(self, T: int, mem_len: int) -> "_InputKeysAndValues":
        self._before = [*self.keys], [*self.values]
        return self

    def join(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for longer, before, new in zip((self.keys, self.values), self._before, (k, v), strict=True):
            longer[layer] = torch.cat([before[layer], new.permute(2, 0, 1, 3)], 2)
        return self.keys[layer].permute(1, 2, 0, 3), self.values[layer].permute(1, 2, 0, 3)


Run = Callable[..., Sequence[Tensor]]
"""A program from tokens and memory to log-probabilities and the new memory, as tensors."""

EQUAL = 1e-5
"""Absolute tolerance of log-probabilities."""
MOST_TIMES = 4.0
"""Allowed ratio of the program's error to that of the model, if the latter is above ``CLOSE``.
Another order of summation gave ratios up to 2.3, in the worst of some thousand numbers."""

_STEPS = 4
_PIECE = 64


class Errors(NamedTuple):
    """Largest differences of log-probabilities in nats; NaN if one of them is NaN."""

    difference: float
    """Between the program and the model."""
    program: float
    """Between the program and the model in double precision."""
    model: float
    """Between the model in single and in double precision."""

    @property
    def is_equal(self) -> bool:
        """Whether the program equals the model up to rounding in single precision.

        Its error is at most 1e-5, or, for a model that amplifies rounding so much that its own
        error is larger, at most four times the error of the model.
        """
        # Comparisons with NaN are false.
        return self.program <= max(EQUAL, MOST_TIMES * self.model)


@torch.no_grad()
def compare(step: Step, run: Run) -> Errors:
    """Compare a program with the model in both precisions, with full, partial and empty memories.

    They start with the memory of ``mem_len`` random tokens, all of which are visible to the first
    of three streams, half to the second and none to the third, and make four steps, each with its
    own memory.
    """
    draw = torch.Generator().manual_seed(0)
    model, lengths = step.model, step.lengths
    exact = copy.deepcopy(model).double()
    worst = torch.zeros(3, dtype=torch.float64)
    for streams in (1, 3):

        def draw_ids(n: int, streams: int = streams) -> Int[Tensor, "B n"]:
            return torch.randint(model.config.vocab_size, (streams, n), generator=draw)

        mems = model.start_memory(streams, step.mem_len)
        if isinstance(step, KeptStep):
            mems = model.keep(mems)
        # In segments, to limit the peak memory.
        mems = read_all(model, draw_ids(step.mem_len), lengths._replace(segment_len=_PIECE), mems)
        hidden = torch.linspace(0, step.mem_len, streams).long()
        if mems.forgotten is not None:
            hidden = hidden.maximum(mems.forgotten)
        mems = mems.forgetting(hidden)
        state = mems.state_dict()
        memory = [*(state[name] for name in step.memory_names), step.mem_len - hidden]
        exact_mems = mems.to(dtype=torch.float64)
        for _ in range(_STEPS):
            tokens = draw_ids(step.n_tokens)
            expected, mems = _predicted(model, tokens, lengths, mems)
            right, exact_mems = _predicted(exact, tokens, lengths, exact_mems)
            log_probs, *memory = run(tokens, *memory)
            pairs = ((log_probs, expected), (log_probs, right), (expected, right))
            # The maximum of two, which propagates NaN.
            worst = worst.maximum(torch.stack([(a.double() - b).abs().max() for a, b in pairs]))
    return Errors(*worst.tolist())


def _predicted(
    model: LanguageModel, tokens: Int[Tensor, "B T"], lengths: Lengths, mems: Memory
) -> tuple[Float[Tensor, "B T V"], Memory]:
    ((_, hidden, _, after),) = read(model, tokens, lengths, mems)
    return model.head.log_probs(hidden), after


Format = Literal["onnx", "torch"]

MANIFEST_FILE = "step.json"
PROGRAM_FILES = {"onnx": "step.onnx", "torch": "step.pt2"}

# The largest ONNX file, with a margin; larger weights are stored in a second file.
_LARGEST_ONNX = 1_900_000_000


class Exported(NamedTuple):
    """An exported program."""

    folder: Path
    """The folder."""
    errors: Errors | None
    """Differences of log-probabilities from the model; None: there was no runtime for it."""


@names_nearest
def export(
    source: Path | str,
    folder: Path | str,
    *,
    format: Format = "onnx",
    mem_len: int | None = None,
    n_tokens: int = 1,
) -> Exported:
    """Write a step of a model as a program for ONNX Runtime or ``torch.export``.

    A step reads ``n_tokens`` tokens of each of any number of streams, with the memory as input, and
    returns the log-probabilities of the token after each and the memory for the next step. The
    program is compared with the model before the folder is created.

    Args:
        source: A model folder or a run folder.
        folder: A new folder, or an empty one.
        format: ``onnx``, which needs the packages of the extra ``onnx``, or ``torch``.
        mem_len: Memory length. None: as the model is configured.
        n_tokens: Tokens of a step.

    Raises:
        FileExistsError: The folder is not empty.
        FileNotFoundError: There is no model.
        RuntimeError: A package is missing, or the program is further from the model than rounding
            explains (:class:`~transformer_xl.interop.export.Errors`).
        InputError: The model cannot be exported, or a setting is out of range.

    Example:
        >>> from transformer_xl import shipped_path
        >>> step = export(shipped_path("shakespeare"), "step", format="torch")
        >>> sorted(path.name for path in step.folder.iterdir())
        ['step.json', 'step.pt2', 'tokenizer.json', 'vocab.json']
    """
    source, folder = find_model_folder(source), Path(folder).absolute()
    if format not in get_args(Format):
        raise InputError(f"format={format!r} is unknown; choose from {', '.join(get_args(Format))}")
    require_new(folder)
    if format == "onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise RuntimeError(
                f"--format onnx needs {error.name}: pip install 'transformer-xl[onnx]'"
            ) from error
    step = make_step(load_model(source).requires_grad_(False), mem_len=mem_len, n_tokens=n_tokens)
    with new_folder(folder) as unfinished:
        path = unfinished / PROGRAM_FILES[format]
        with _without_logs():
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
    """Describe a program: its inputs, its outputs, its initial state."""
    vocab_size = step.model.config.vocab_size
    memory = step.start(1)

    def described(name: str, dtype: str, *shape: int | str) -> dict[str, Any]:
        return {"name": name, "dtype": dtype, "shape": list(shape)}

    inputs = [described("tokens", "int64", "B", step.n_tokens)]
    outputs = [described("log_probs", "float32", "B", step.n_tokens, vocab_size)]
    for (name, after), x, batch_dim in zip(step.names, memory, (*step.batch_dims, 0), strict=True):
        shape = (*x.shape[:batch_dim], "B", *x.shape[batch_dim + 1 :])
        inputs.append(described(name, str(x.dtype)[6:], *shape))
        outputs.append(described(after, str(x.dtype)[6:], *shape))
    return {
        "kind": "transformer-xl-step",
        "format_version": FORMAT_VERSION,
        "format": format,
        "program": PROGRAM_FILES[format],
        "mem_len": step.mem_len,
        "n_tokens": step.n_tokens,
        "vocab_size": vocab_size,
        "inputs": inputs,
        "outputs": outputs,
        # The outputs of a step are the inputs of the next; a text starts with zeros, of which so
        # many are visible.
        "next": {after: name for name, after in step.names},
        "start": {"seen": int(memory[-1][0])},
    }


def _traced(step: Step) -> torch.export.ExportedProgram:
    streams = torch.export.Dim("B")
    # Two streams: a batch size of one would be traced as a constant.
    example = (torch.zeros(2, step.n_tokens, dtype=torch.int64), *step.start(2))
    dynamic = ({0: streams}, *({dim: streams} for dim in (*step.batch_dims, 0)))
    with torch.no_grad():
        return torch.export.export(step.eval(), example, dynamic_shapes=dynamic, strict=False)


def _write_torch(step: Step, path: Path) -> Run:
    torch.export.save(_traced(step), path)
    program = torch.export.load(path).module()
    return lambda *inputs: program(*inputs)


def _write_onnx(step: Step, path: Path) -> Run | None:
    traced = _traced(step)
    if step.model.config.reset_at is not None:
        traced = traced.run_decompositions({torch.ops.aten.cummax.default: _cummax})
    program = torch.onnx.export(
        traced,
        dynamo=True,
        input_names=["tokens", *(name for name, _ in step.names)],
        output_names=["log_probs", *(after for _, after in step.names)],
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

    def run(*values: Tensor) -> list[Tensor]:
        arrays = {name: x.numpy() for name, x in zip(inputs, values, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, arrays)]

    return run


def _cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Compute ``torch.cummax``, for which ONNX has no operator.

    The second result, the indices, is not used.
    """
    T = x.shape[dim]
    later_TT = torch.ones(T, T, dtype=torch.bool).triu(1)
    values = x.unsqueeze(dim).masked_fill(later_TT, torch.iinfo(x.dtype).min).amax(-1)
    return values, torch.zeros_like(values)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Suppress warnings and logs of libraries, except errors."""
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
