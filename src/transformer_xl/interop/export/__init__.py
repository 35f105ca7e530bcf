"""``txl export``: a step of the model as a program, and the folder with it.

A step is a pure function of tensors: it calls the model with a memory of fixed shape, its keys and
values. The newest of ``mem_len`` positions are last, and ``seen`` is the number of visible
positions of each stream.
"""

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transformer_xl.config import FORMAT_VERSION, new_folder
from transformer_xl.data import load_vocab
from transformer_xl.errors import InputError
from transformer_xl.model import (
    KeysAndValues,
    LanguageModel,
    Lengths,
    Memory,
    ModelFolder,
    TransformerXL,
    load_model,
    read,
    read_all,
    whole,
)

__all__ = ["Exported", "Format", "Step", "compare", "export"]


class Step(nn.Module):
    """A step of a Transformer-XL, with keys and values as the memory.

    Args:
        model: The model, in evaluation mode, on the CPU; it is not changed.
        mem_len: Memory length. None: as the model is configured.
        n_tokens: Tokens of a step.

    Raises:
        InputError: The model cannot be exported, or a length is out of range.
    """

    @torch.no_grad()
    def __init__(
        self, model: LanguageModel, *, mem_len: int | None = None, n_tokens: int = 1
    ) -> None:
        super().__init__()
        config = model.config
        n_tokens = whole("n_tokens", n_tokens, 1)
        self.lengths = Lengths.of(config, segment_len=n_tokens, mem_len=mem_len, ext_len=0)
        mem_len = self.lengths.mem_len
        # Normalization without a bias leaves zeros as they are.
        fits_zeros = config.start_memory == "empty" or not config.norm_first or config.norm == "rms"
        zeros = "start_memory='zeros', norm_first=True, norm='layer'"
        needed = (
            (isinstance(model, TransformerXL), f"kind={config.kind!r}", "a Transformer-XL"),
            (config.attn_type in (0, 1), f"attn_type={config.attn_type}", "attn_type 0 or 1"),
            (not config.input_recurrence, "input_recurrence=True", "no input recurrence"),
            (config.reset_at is None, f"reset_at={config.reset_at}", "no documents"),
            (not config.n_features, f"n_features={config.n_features}", "tokens, not vectors"),
            (fits_zeros, zeros, "no zeros before a text, whose keys are not zeros"),
            (model.dtype == torch.float32, f"weights in {model.dtype}", "weights in float32"),
        )
        if failed := [(found, wanted) for is_met, found, wanted in needed if not is_met]:
            found, wanted = (", ".join(texts) for texts in zip(*failed, strict=True))
            raise InputError(f"a model with {found} cannot be exported: a step needs {wanted}")
        assert isinstance(model, TransformerXL)
        if mem_len < 1:
            raise InputError(f"mem_len={mem_len}: a step has a memory of at least 1")
        self.model, self.mem_len, self.n_tokens = model, mem_len, n_tokens
        # Projected positions depend only on the weights: they are constants of the program.
        model.positions.project(model, mem_len + n_tokens, self.lengths.clamp_len)

    def start(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values at the start of a text, and how much of them is seen."""
        config = self.model.config
        shape = config.n_layer, config.n_head, batch_size, self.mem_len, config.head_width
        seen = len(self.model.start_memory(1, self.mem_len))
        return torch.zeros(shape), torch.zeros(shape), torch.full((batch_size,), seen)

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
        log_probs, after = _predicted(self.model, tokens, self.lengths, memory)
        assert after.forgotten is not None
        new_keys, new_values = (torch.stack([*layers]) for layers in after.by_name())
        return log_probs, new_keys, new_values, self.mem_len - after.forgotten


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

_EQUAL = 1e-5
# Another order of summation gave up to 2.3 times the model's own error.
_MOST_TIMES = 4.0
_STEPS = 4
_PIECE = 64


@torch.no_grad()
def compare(step: Step, run: Run) -> tuple[float, float]:
    """Compare a program with the model in double precision, with full and partial memories.

    It starts with the memory of ``mem_len`` random tokens, all of which are visible to the first
    of three streams, half to the second and none to the third, and makes four steps.

    Returns:
        The largest difference of log-probabilities in nats, NaN if one of them is NaN, and what
        rounding explains: 1e-5, or four times the error of the model in single precision.
    """
    draw = torch.Generator().manual_seed(0)
    model, lengths = step.model, step.lengths
    exact = copy.deepcopy(model).double()
    worst = torch.zeros(2, dtype=torch.float64)

    def draw_ids(n: int) -> Int[Tensor, "B n"]:
        return torch.randint(model.config.vocab_size, (3, n), generator=draw)

    # In segments, to limit the peak memory.
    pieces = lengths._replace(segment_len=_PIECE)
    mems = model.keep(model.start_memory(3, step.mem_len))
    mems = read_all(model, draw_ids(step.mem_len), pieces, mems)
    hidden = torch.linspace(0, step.mem_len, 3).long()
    if mems.forgotten is not None:
        hidden = hidden.maximum(mems.forgotten)
    mems = mems.forgetting(hidden)
    state = mems.state_dict()
    memory = [state["keys"], state["values"], step.mem_len - hidden]
    exact_mems = mems.to(dtype=torch.float64)
    for _ in range(_STEPS):
        tokens = draw_ids(step.n_tokens)
        expected, mems = _predicted(model, tokens, lengths, mems)
        right, exact_mems = _predicted(exact, tokens, lengths, exact_mems)
        log_probs, *memory = run(tokens, *memory)
        errors = [(x.double() - right).abs().max() for x in (log_probs, expected)]
        # The maximum of two, which propagates NaN.
        worst = worst.maximum(torch.stack(errors))
    difference, own = worst.tolist()
    return difference, max(_EQUAL, _MOST_TIMES * own)


def _predicted(
    model: LanguageModel, tokens: Int[Tensor, "B T"], lengths: Lengths, mems: Memory
) -> tuple[Float[Tensor, "B T V"], Memory]:
    ((_, hidden, _, after),) = read(model, tokens, lengths, mems)
    return model.head.log_probs(hidden), after


Format = Literal["onnx", "torch"]

MANIFEST_FILE = "step.json"
PROGRAM_FILES = {"onnx": "step.onnx", "torch": "step.pt2"}
_MEMORY = ("keys", "values", "seen")

# The largest ONNX file, with a margin; larger weights are stored in a second file.
_LARGEST_ONNX = 1_900_000_000


class Exported(NamedTuple):
    """An exported program."""

    folder: Path
    """The folder."""
    difference: float | None
    """The largest difference of its log-probabilities from those of the model in double precision;
    None: there was no runtime for it."""


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
            explains (:func:`~transformer_xl.interop.export.compare`).
        InputError: The model cannot be exported, or a setting is out of range.

    Example:
        >>> from transformer_xl import shipped_path
        >>> step = export(shipped_path("shakespeare"), "step", format="torch")
        >>> sorted(path.name for path in step.folder.iterdir())
        ['step.json', 'step.pt2', 'tokenizer.json', 'vocab.json']
    """
    model_folder, folder = ModelFolder.find(source), Path(folder).absolute()
    if format not in get_args(Format):
        raise InputError(f"format={format!r} is unknown; choose from {', '.join(get_args(Format))}")
    if format == "onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise RuntimeError(
                f"--format onnx needs {error.name}: pip install 'transformer-xl[onnx]'"
            ) from error
    with new_folder(folder) as unfinished:
        step = Step(load_model(source).requires_grad_(False), mem_len=mem_len, n_tokens=n_tokens)
        path, difference = unfinished / PROGRAM_FILES[format], None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = (_write_onnx if format == "onnx" else _write_torch)(step, path)
        if run is not None:
            difference, allowed = compare(step, run)
            # Comparisons with NaN are false.
            if not difference <= allowed:
                raise RuntimeError(
                    f"the program's log-probabilities are off by {difference:.1e}, and rounding "
                    f"explains {allowed:.1e}, so it is not the model and was not written; another "
                    "--format or other versions of torch and onnxruntime may do better"
                )
        about = _about(step, format) | {"weights": model_folder.weights.checksum}
        about["difference"] = difference
        try:
            load_vocab(model_folder.path).save(unfinished)
            about["vocabulary"] = "tokenizer.json"
        except FileNotFoundError:
            about["vocabulary"] = None
        (unfinished / MANIFEST_FILE).write_text(json.dumps(about, indent=2) + "\n")
    return Exported(folder, difference)


def _about(step: Step, format: Format) -> dict[str, object]:
    """Describe a program: its inputs, its outputs, its initial state."""
    keys, _, seen = step.start(1)
    memory = [*keys.shape[:2], "B", *keys.shape[3:]]
    tokens = ["B", step.n_tokens]
    vocab_size = step.model.config.vocab_size
    about = {"keys": ("float32", memory), "values": ("float32", memory), "seen": ("int64", ["B"])}
    inputs = {"tokens": ("int64", tokens)} | about
    outputs = {"log_probs": ("float32", [*tokens, vocab_size])}
    outputs |= {f"new_{name}": x for name, x in about.items()}
    described = [
        [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape) in each.items()]
        for each in (inputs, outputs)
    ]
    return {
        "kind": "transformer-xl-step",
        "format_version": FORMAT_VERSION,
        "format": format,
        "program": PROGRAM_FILES[format],
        "mem_len": step.mem_len,
        "n_tokens": step.n_tokens,
        "vocab_size": vocab_size,
        "inputs": described[0],
        "outputs": described[1],
        # The outputs of a step are the inputs of the next; a text starts with zeros, of which so
        # many are visible.
        "next": {f"new_{name}": name for name in _MEMORY},
        "start": {"seen": int(seen)},
    }


def _traced(step: Step) -> torch.export.ExportedProgram:
    streams = torch.export.Dim("B")
    # Two streams: a batch size of one would be traced as a constant.
    example = (torch.zeros(2, step.n_tokens, dtype=torch.int64), *step.start(2))
    dynamic = ({0: streams}, {2: streams}, {2: streams}, {0: streams})
    with torch.no_grad():
        return torch.export.export(step.eval(), example, dynamic_shapes=dynamic, strict=False)


def _write_torch(step: Step, path: Path) -> Run:
    torch.export.save(_traced(step), path)
    program = torch.export.load(path).module()
    return lambda *inputs: program(*inputs)


def _write_onnx(step: Step, path: Path) -> Run | None:
    program = torch.onnx.export(
        _traced(step),
        dynamo=True,
        input_names=["tokens", *_MEMORY],
        output_names=["log_probs", *(f"new_{name}" for name in _MEMORY)],
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
