"""What would come after data parallelism: three ways to let several GPUs share a stream.

None of them is built. Each function returns what one GPU of a group would take, from the same
counts as everything that `txl estimate` says, so that they can be compared before one of them is
begun; `scale_tables.py` puts them into docs/scale.md. A group of G GPUs stands in the place of one
process; W groups share the gradients as W processes do now.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformer_xl.apps.estimate.plan import FLOAT, Plan, count_weights
from transformer_xl.apps.estimate.scaling import (
    Assumed,
    Hardware,
    link_rate,
    sent_bytes,
    step_flops,
    times,
    update_bytes,
)
from transformer_xl.apps.estimate.training_memory import layer_activations, peak


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one GPU of a group takes and does in a step."""

    bytes_held: int
    flops: float
    bytes_in_group: int
    """Sent to GPUs of its group."""
    bytes_between: int
    """Sent to those of other groups: gradients and weights."""
    update: int
    """Bytes read and written by the update."""
    idle: float = 0.0
    """Share of the time in which it waits for others of its group."""


def data(plan: Plan, G: int) -> Share:
    """As it is: every GPU has streams of its own; G is 1."""
    if G != 1:
        raise ValueError(f"G={G}: without another way to divide the work, a group is one GPU")
    return Share(
        bytes_held=peak(plan)[1].total,
        flops=sum(step_flops(plan).values()),
        bytes_in_group=0,
        bytes_between=sum(sent_bytes(plan).values()),
        update=update_bytes(plan),
    )


def sequence(plan: Plan, G: int) -> Share:
    """Sequence parallel: each GPU has T / G tokens and M / G remembered positions of a stream.

    Weights are whole, or shared by all as before. Keys and values of the positions go around the
    group (ring attention; Liu et al., arXiv 2310.01889), and their gradients once more: three times
    2 c W S a layer and stream, of which a GPU sends (G - 1) / G. The gradients are added up over
    the group, too. Every query sees about as many keys as any other, because of the memory: so all
    GPUs have as much to do.
    """
    _require_group(G)
    held, config = peak(plan)[1], plan.config.model
    width = config.n_head * config.head_width
    tables = held.memory + held.activations + held.temporary
    keys = 2 * plan.operand * width * (plan.M + plan.T) * plan.streams * config.n_layer
    muon, between = step_flops(plan)["Muon"], sum(sent_bytes(plan).values())
    if not plan.is_sharded:
        n = plan.ranks * G
        between = 2 * FLOAT * count_weights(config).total * (n - 1) // n
    return Share(
        bytes_held=held.total - tables + tables // G,
        flops=(sum(step_flops(plan).values()) - muon) / G + muon,
        bytes_in_group=3 * keys * (G - 1) // G,
        bytes_between=between,
        update=update_bytes(plan),
    )


def tensor(plan: Plan, G: int) -> Share:
    """Tensor parallel (Shoeybi et al., arXiv 1909.08053): heads and inner units divided by G.

    Weights, gradients, states and inner activations are divided; the states between the blocks and
    the memory are whole on each GPU. Two sums of the states, T D numbers a stream, in the forward
    pass of a layer and two in the backward pass: each sends 2 (G - 1) / G of it.

    Raises:
        ValueError: G does not divide the heads.
    """
    _require_group(G)
    config = plan.config.model
    if config.n_head % G:
        raise ValueError(f"G={G} must divide model.n_head={config.n_head}")
    held = peak(plan)[1]
    tokens = plan.streams * plan.T * config.d_model
    states = config.n_layer * plan.B * plan.T * config.d_model * 2 * (FLOAT + plan.operand)
    inside = config.n_layer * layer_activations(plan) - states
    whole = held.memory + held.activations - min(inside, held.activations)
    return Share(
        bytes_held=whole + (held.total - whole) // G,
        flops=sum(step_flops(plan).values()) / G,
        bytes_in_group=4 * config.n_layer * plan.operand * tokens * 2 * (G - 1) // G,
        bytes_between=sum(sent_bytes(plan).values()) // G,
        update=update_bytes(plan) // G,
    )


def pipeline(plan: Plan, G: int) -> Share:
    """Pipeline: each GPU has N / G layers, with their memory, and streams follow one another.

    One stream at a time is handed on, T D numbers forward and back. GPUs wait while the pipeline
    fills and empties: (G - 1) / (streams + G - 1) of the time. The first one still keeps the inner
    states of up to G streams, and so as much of them as one GPU keeps of all layers for one stream.

    Raises:
        ValueError: G does not divide the layers.
    """
    _require_group(G)
    config = plan.config.model
    if config.n_layer % G:
        raise ValueError(f"G={G} must divide model.n_layer={config.n_layer}")
    held, streams = peak(plan)[1], plan.streams
    kept = (held.activations + held.temporary) * min(G, streams) // (plan.B * G)
    rest = held.total - held.activations - held.temporary
    return Share(
        bytes_held=rest // G + kept,
        flops=sum(step_flops(plan).values()) / G,
        bytes_in_group=2 * FLOAT * streams * plan.T * config.d_model,
        bytes_between=sum(sent_bytes(plan).values()) // G,
        update=update_bytes(plan) // G,
        idle=(G - 1) / (streams + G - 1),
    )


WAYS: Mapping[str, Callable[[Plan, int], Share]] = {
    "data": data,
    "sequence": sequence,
    "tensor": tensor,
    "pipeline": pipeline,
}
"""How a group divides its work."""


def seconds(share: Share, plan: Plan, G: int, hardware: Hardware, assumed: Assumed) -> float:
    """Return the seconds of a step: within a group nothing is hidden, between groups everything.

    A group lies within a machine.

    Raises:
        ValueError: A machine has fewer GPUs.
    """
    if hardware.gpus < G:
        raise ValueError(f"G={G}: a machine has {hardware.gpus} GPUs")
    products = times(plan, hardware, assumed).products
    computing = products * share.flops / sum(step_flops(plan).values()) / (1 - share.idle)
    computing += share.update / (1e9 * hardware.memory_gb_per_s)
    links = 1e9 * assumed.links
    inside = share.bytes_in_group / (links * hardware.nvlink_gb_per_s)
    between = share.bytes_between / (links * link_rate(hardware, plan.ranks * G))
    return max(computing + inside, between)


def has_room(share: Share, hardware: Hardware, assumed: Assumed) -> bool:
    """Return whether a GPU has room for its share."""
    return share.bytes_held <= assumed.room * 1e9 * hardware.memory_gb


def _require_group(G: int) -> None:
    if G < 1:
        raise ValueError(f"G={G} must be at least 1")
