"""FLOPs, bytes sent and seconds of a step, and the limits of scaling.

Collectives are ring algorithms: in an all-gather or a reduce-scatter of n bytes each of W processes
sends (W - 1) / W n bytes and receives as many; in an all-reduce, twice that. Latency, some ten
microseconds for each collective and growing with W, is not counted.
"""

import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformer_xl.apps.bench.speed import forward_flops, training_flops
from transformer_xl.apps.estimate.plan import Plan, count_weights, muon_weights, optimizer_numbers
from transformer_xl.apps.estimate.training_memory import checkpoint_bytes, moments, peak
from transformer_xl.config import Config
from transformer_xl.data.catalogue import known_vocab_size
from transformer_xl.model.arguments import require_token_inputs
from transformer_xl.model.limits import FLOAT, layer_matrices

MUON_ITERATIONS = 5
"""Newton-Schulz iterations in each update of Muon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Figures of the data sheet of a GPU and of its machine, from ``hardware.toml``."""

    name: str
    bfloat16_tflops: float
    """Peak rate of dense products."""
    float32_tflops: float
    """Peak rate without tensor cores, as TF32 rounds its operands."""
    memory_gb: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    """Unidirectional, to all GPUs of the machine together."""
    network_gb_per_s: float
    """Unidirectional, of the network card of a GPU."""
    gpus: int = 8
    """GPUs in a machine."""


_LISTED = tomllib.loads(Path(__file__).with_name("hardware.toml").read_text(encoding="utf-8"))
HARDWARE: Mapping[str, Hardware] = {name: Hardware(**given) for name, given in _LISTED.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """Assumed utilizations: shares of the data sheet's figures that a program reaches.

    Raises:
        ValueError: A share is not above 0 and at most 1.
    """

    products: float = 0.4
    """Utilization of the peak FLOP/s, over a whole step (MFU)."""
    links: float = 0.8
    """Utilization of NVLink and network; measured for large messages: 0.8 to 0.95."""
    room: float = 0.9
    """Usable share of the GPU's memory; the rest is for CUDA, NCCL and fragmentation."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value <= 1:
                raise ValueError(f"the share {name}={value} must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a step on one process."""

    products: float
    """Matrix products, at the assumed utilization."""
    update: float
    """Reading and writing weights, gradients and optimizer state."""
    sending: float
    """Communication, at the assumed utilization of the slowest link."""

    @property
    def hidden(self) -> float:
        """The lower bound: communication fully overlaps with computation."""
        return max(self.products + self.update, self.sending)

    @property
    def open(self) -> float:
        """The upper bound: communication does not overlap with computation."""
        return self.products + self.update + self.sending

    @property
    def is_bound_by_sending(self) -> bool:
        """Whether communication takes longer than computation."""
        return self.sending > self.products + self.update


def sent_bytes(plan: Plan) -> Mapping[str, int]:
    """Count the bytes that a process sends in a step, by purpose; it receives as many.

    DDP all-reduces the gradients once a step. FSDP all-gathers the layers for the forward pass and
    again for the backward pass of each part, the root and the projections of positions once for
    each part; it reduce-scatters the gradients once a step. Muon updates whole matrices, which FSDP
    all-gathers in float32.
    """
    model, weights = plan.config.model, count_weights(plan.config.model)
    gradients = _ring(FLOAT * weights.total, plan.ranks)
    if not plan.is_sharded:
        return {"gradients": 2 * gradients}
    positions = 0
    if model.attn_type == 0:
        positions = model.n_layer * model.n_head * model.head_width * model.d_model
    layers = model.n_layer * weights.layer - positions
    gathered = plan.config.train.accumulate * (weights.root + positions + 2 * layers)
    return {
        "weights": _ring(plan.operand * gathered, plan.ranks),
        "gradients": gradients,
        "matrices of Muon": _ring(FLOAT * muon_weights(plan.config), plan.ranks),
    }


def step_flops(plan: Plan) -> Mapping[str, float]:
    """Count the FLOPs of a step of one process, two for a multiplication, by purpose.

    Those of the model are counted in :mod:`transformer_xl.apps.bench.speed`, for the lengths of
    segments and memory at the end of the run.
    """
    config, settings = plan.config.model, plan.config.train
    T, M = settings.segment_len, config.mem_len
    predicted = T - T // 2 if settings.loss == "half" else T
    T += config.ext_len
    flops = training_flops(config, plan.streams, T, M, predicted, settings.accumulate)
    again = 0.0
    if settings.recompute:
        again = forward_flops(config, plan.streams, T, M, 0, is_kept=False)
    return {"model": flops, "computed again": again, "Muon": muon_flops(plan)}


def muon_flops(plan: Plan) -> float:
    """Count the FLOPs of Muon's update, which every process computes in full.

    An iteration on r rows and c columns, r the fewer, is three products: r r c, r r r and r r c.
    """
    if plan.config.train.optimizer != "muon":
        return 0.0
    sides = [(min(shape), max(shape)) for shape in layer_matrices(plan.config.model)]
    products = sum(2 * r * r * c + r**3 for r, c in sides)
    return 2.0 * MUON_ITERATIONS * plan.config.model.n_layer * products


def update_bytes(plan: Plan) -> int:
    """Count the bytes that an update reads and writes, at least.

    Weights and optimizer state are read and written, gradients read; an average of the weights, if
    any, is read and written, and the weights are read again for it.
    """
    n = count_weights(plan.config.model).total
    has_average = plan.config.train.average != "none"
    numbers = (3 + 3 * has_average) * n + 2 * optimizer_numbers(plan.config)
    return FLOAT * numbers // (plan.ranks if plan.is_sharded else 1)


def link_rate(hardware: Hardware, ranks: int) -> float:
    """Return the bandwidth of ring collectives of a process in GB/s.

    There are as many rings as a machine has network cards, and each leaves it through another card:
    together they are as fast as all cards together, or as NVLink if that is slower.
    """
    if ranks <= hardware.gpus:
        return hardware.nvlink_gb_per_s
    return min(hardware.nvlink_gb_per_s, hardware.gpus * hardware.network_gb_per_s)


def times(plan: Plan, hardware: Hardware, assumed: Assumed) -> Times:
    """Return the seconds of a step at the assumed utilizations."""
    # Tensor cores multiply both at the same rate.
    is_rounded = plan.precision != "float32"
    tflops = hardware.bfloat16_tflops if is_rounded else hardware.float32_tflops
    rate = link_rate(hardware, plan.ranks)
    return Times(
        products=sum(step_flops(plan).values()) / (1e12 * tflops * assumed.products),
        update=update_bytes(plan) / (1e9 * hardware.memory_gb_per_s),
        sending=sum(sent_bytes(plan).values()) / (1e9 * rate * assumed.links),
    )


def fits(plan: Plan, hardware: Hardware, assumed: Assumed) -> bool:
    """Return whether the peak memory of a process fits into the usable memory of a GPU."""
    return peak(plan)[1].total <= assumed.room * 1e9 * hardware.memory_gb


def largest_batch(plan: Plan, hardware: Hardware, assumed: Assumed) -> int:
    """Return the largest ``batch_size`` that fits into the memory; 0 if none does.

    The number of parts (``train.accumulate``) is that of the recipe.
    """
    step = plan.ranks * plan.config.train.accumulate

    def is_too_large(n: int) -> bool:
        train = replace(plan.config.train, batch_size=n * step)
        larger = replace(plan, config=replace(plan.config, train=train))
        return not fits(larger, hardware, assumed)

    high = 1
    while not is_too_large(high):
        high *= 2
    first = bisect_left(range(high + 1), True, lo=max(high // 2, 1), key=is_too_large)
    return (first - 1) * step


def most_gpus(plan: Plan) -> int:
    """Return the largest number of GPUs: one stream for each GPU and part."""
    return plan.config.train.batch_size // plan.config.train.accumulate


def bound_by_sending_from(plan: Plan, hardware: Hardware, assumed: Assumed) -> int | None:
    """Return from how many GPUs on communication takes longer than computation; None: never.

    Only numbers of GPUs that divide the streams of the recipe are considered.
    """
    most = most_gpus(plan)
    plans = (replace(plan, ranks=n) for n in range(2, most + 1) if most % n == 0)
    bound = (x.ranks for x in plans if times(x, hardware, assumed).is_bound_by_sending)
    return next(bound, None)


def _ring(n_bytes: int, ranks: int) -> int:
    """Bytes that each process sends in a ring all-gather or reduce-scatter of ``n_bytes``."""
    return n_bytes * (ranks - 1) // ranks


def with_known_vocabulary(config: Config) -> Config:
    """Return the recipe with its vocabulary size, if that is known without the text.

    Raises:
        ValueError: It depends on the text.
    """
    require_token_inputs(config.model)
    size = known_vocab_size(config.data)
    if size is None:
        raise ValueError(
            f"model.vocab_size=0 takes the size from the text, and how many {config.data.vocab} it "
            "has is not known before it is read: give the number with --model.vocab_size"
        )
    return replace(config, model=replace(config.model, vocab_size=size))


def summary(plan: Plan, hardware: Hardware, assumed: Assumed) -> dict[str, Any]:
    """Return the whole estimate: bytes, FLOPs and seconds of one GPU in a step."""
    moment, most = peak(plan)
    taken = times(plan, hardware, assumed)
    tokens = plan.config.train.batch_size * plan.config.train.segment_len
    return {
        "is_estimate": True,
        "parameters": count_weights(plan.config.model).total,
        "gpus": plan.ranks,
        "parallel": plan.parallel,
        "precision": plan.precision,
        "batch_size": plan.config.train.batch_size,
        "segment_len": plan.config.train.segment_len,
        "mem_len": plan.config.model.mem_len,
        "memory": {
            "most": most.total,
            "moment": moment,
            "moments": {name: asdict(x) | {"total": x.total} for name, x in moments(plan).items()},
        },
        "fits": fits(plan, hardware, assumed),
        "largest_batch": largest_batch(plan, hardware, assumed),
        "checkpoint": checkpoint_bytes(plan),
        "flops": dict(step_flops(plan)),
        "sent": dict(sent_bytes(plan)),
        "seconds": asdict(taken) | {"hidden": taken.hidden, "open": taken.open},
        "tokens_per_second": {"hidden": tokens / taken.hidden, "open": tokens / taken.open},
        "most_gpus": most_gpus(plan),
        "bound_by_sending_from": bound_by_sending_from(plan, hardware, assumed),
        "hardware": asdict(hardware),
        "assumed": asdict(assumed),
    }
