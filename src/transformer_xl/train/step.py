"""A training step: forward and backward pass on a segment of each stream, and the update."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from transformer_xl.config import Config, TrainConfig
from transformer_xl.errors import TxlError
from transformer_xl.model import Memory, Output
from transformer_xl.ops import IGNORED
from transformer_xl.train.runner import Network
from transformer_xl.train.state import TrainState


def activation_penalty(config: TrainConfig, out: Output, predicted: int) -> Tensor | float:
    r"""Return AR and TAR of a segment (Merity et al., arXiv 1708.02182).

    $$\alpha\,\mathrm{mean}(m \odot h_t)^2 + \beta\,\mathrm{mean}(h_t - h_{t-1})^2$$

    with the last layer's outputs $h$ and the dropout mask $m$. Means are over streams, positions
    and dimensions, as in the code of that paper, so that the penalty of a batch is the mean of
    those of equal parts. Only the last ``predicted`` positions have a target; the others are
    context.
    """
    penalty = 0.0
    if config.activation_reg:
        hidden = out.hidden[:, -predicted:].float()
        penalty = penalty + config.activation_reg * hidden.square().mean()
    if config.temporal_activation_reg and predicted > 1:
        changes = out.raw_hidden[:, -predicted:].float().diff(dim=1)
        penalty = penalty + config.temporal_activation_reg * changes.square().mean()
    return penalty


_RESET, _MEM_LEN = 0x7265736574, 0x6D656D
"""The first numbers of the seeds of resets and of memory lengths; other seeds have none."""


class Update(NamedTuple):
    """The result of a step."""

    loss: Tensor
    """Mean loss of the streams of this process, in nats per token."""
    lr: float
    offset: int
    """Start of its segments, in tokens from the beginning of each stream."""
    norm: float
    """Norm of the gradient before clipping."""
    is_skipped: bool
    is_counted: bool = True
    """Whether any target of its segments counts, in any process."""


def train_step(config: Config, state: TrainState, network: Network) -> Update:
    """Make one update, or skip it if the norm of its gradient is not finite.

    A skipped update changes neither weights nor memory: the streams advance, and the memory lacks a
    segment.

    Raises:
        Diverged: More than ``max_skips`` updates in a row were skipped.
    """
    settings, device, parts = config.train, state.model.device, config.train.accumulate
    mem_len, scale = config.model.mem_len, 1.0
    if settings.stages or settings.random_segment_len:
        mem_len, scale = state.next_lengths(config)
    offset = state.segments.offset
    tokens, targets = state.segments.next_segment()
    state.tokens += targets.numel() * state.world.size
    tokens, targets = _moved(tokens, device), _moved(targets, device)
    starts = state.segments.starts
    starts = [None] * parts if starts is None else _moved(starts, device).chunk(parts)
    weights, is_counted = _loss_weights(state, settings)
    if settings.loss == "half":
        targets = targets[:, targets.shape[1] // 2 :]
    if weights is not None:
        # The softmax is not computed for them.
        ignored = torch.nan if targets.is_floating_point() else IGNORED
        targets = targets.masked_fill(weights == 0, ignored)
    lengths = {"mem_len": mem_len, "context": tokens.shape[1] - targets.shape[1]}
    memories = read = _partly_reset(state, settings)
    read_len = random_mem_len(settings, mem_len, state.step)
    if is_part := read_len < mem_len:
        # All of the segment is remembered, whatever is read.
        lengths["mem_len"] = read_len + tokens.shape[1]
        read = [memory and memory.last(read_len) for memory in memories]
    loss, mems = torch.zeros((), device=device), []
    segments = tokens.chunk(parts), read, targets.chunk(parts)
    for i, segment in enumerate(zip(*segments, strict=True)):
        with network.running(*segment, starts=starts[i], **lengths, is_last=i == parts - 1) as out:
            assert out.nll is not None
            nll = out.nll if weights is None else out.nll * weights.chunk(parts)[i]
            objective = part_loss = nll.mean() / parts
            if settings.activation_reg or settings.temporal_activation_reg:
                penalty = activation_penalty(settings, out, targets.shape[1])
                objective = part_loss + penalty / parts
            if state.loss_scale != 1:
                objective = objective * state.loss_scale
            objective.backward()
        whole, after = memories[i], out.mems
        if is_part:
            n = tokens.shape[1]
            after = after.last(mem_len) if whole is None else _appended(whole, after, n, mem_len)
        mems.append(after)
        loss += part_loss.detach()

    trained = [p for p in state.model.parameters() if p.grad is not None]
    gradients = [p.grad for p in trained if p.grad is not None]
    if state.loss_scale != 1:
        torch._foreach_mul_(gradients, 1 / state.loss_scale)  # pyright: ignore[reportPrivateImportUsage]
    length = get_total_norm(gradients)
    length = length.full_tensor() if isinstance(length, DTensor) else length
    # Synchronizes the device, which is cheaper than corrupting the weights. The norm is that over
    # all processes, so all of them decide alike.
    norm = float(length)
    state.adapt_loss_scale(settings, is_finite=math.isfinite(norm))
    if not math.isfinite(norm):
        state.model.zero_grad()
        state.step += 1
        state.skipped += 1
        # Overflows are how the loss scale finds its value; a loss that is not finite lowers it to
        # below 1, and counts from there on.
        state.skipped_in_a_row += settings.precision != "float16" or state.loss_scale < 1
        if state.skipped_in_a_row > settings.max_skips:
            raise diverged(
                state.step,
                f"{state.skipped_in_a_row} updates in a row were left out (train.max_skips="
                f"{settings.max_skips}): the norm of the gradient is {norm}, the loss "
                f"{float(loss)}, on segments that begin {offset:,} tokens into each stream,",
            )
        return Update(loss, 0.0, offset, norm, is_skipped=True)
    state.skipped_in_a_row = 0
    state.mems = mems
    if settings.clip_norm:
        clip_grads_with_norm_(trained, settings.clip_norm, length)
    scale *= state.lr_scale(settings)
    state.optimizer.step(scale)
    state.step += 1
    state.add_to_average(settings)
    return Update(loss, settings.lr * scale, offset, norm, is_skipped=False, is_counted=is_counted)


def _loss_weights(state: TrainState, settings: TrainConfig) -> tuple[Tensor | None, bool]:
    """Return the weight of the loss of each target, 1 on average over all processes; None: all 1.

    Also whether any is above 0, in any process: without a completion in the segments, and without
    ``prompt_loss_weight``, all are 0.
    """
    completed = state.segments.completed
    if completed is None:
        return None, True
    if settings.loss == "half":
        completed = completed[:, completed.shape[1] // 2 :]
    weights = completed.float().clamp(min=settings.prompt_loss_weight)
    (mean,) = state.world.mean([float(weights.mean())])
    return _moved(weights / mean if mean else weights, state.model.device), mean > 0


def random_mem_len(settings: TrainConfig, mem_len: int, step: int) -> int:
    """Return how much of the memory a step reads: a function of seed and step.

    As many steps as there are lengths read each of them once, in random order.
    """
    lengths = settings.mem_lens(mem_len)
    if len(lengths) == 1:
        return mem_len
    around, place = divmod(step, len(lengths))
    draw = np.random.default_rng([_MEM_LEN, settings.seed, around])
    return lengths[draw.permutation(len(lengths))[place]]


def _appended(whole: Memory, after: Memory, T: int, mem_len: int) -> Memory:
    """Return a memory with a segment of T positions, given the memory after it of what was read."""
    appended = whole.extend(after.last(T).states, mem_len)
    if after.forgotten is None:
        return appended
    n_visible = len(after) - after.forgotten
    before = torch.zeros_like(n_visible) if appended.forgotten is None else appended.forgotten
    # Where a document began in the segment, what was not read is forgotten, too.
    return appended.forgetting(torch.where(n_visible <= T, len(appended) - n_visible, before))


def _partly_reset(state: TrainState, settings: TrainConfig) -> list[Memory | None]:
    """Return the memory, reset for random streams; the draw covers those of all processes."""
    if not settings.reset_memory:
        return state.mems
    numbers = np.random.default_rng([_RESET, settings.seed, state.step])
    drawn = numbers.random(settings.batch_size) < settings.reset_memory
    parts = np.split(drawn[state.world.rows(settings.batch_size)], len(state.mems))
    # Also where no stream is reset: a checkpoint has the masks of all parts and processes or none.
    return [
        None if memory is None else memory.reset(torch.from_numpy(rows))
        for memory, rows in zip(state.mems, parts, strict=True)
    ]


class Diverged(TxlError, RuntimeError):  # noqa: N818  (what happened, as `Interrupted`)
    """The training diverged."""


def diverged(step: int, what: str) -> Diverged:
    """Return the error for a run that diverged."""
    return Diverged(
        f"{what} after step {step}: lower train.lr or train.clip_norm, or raise "
        "train.warmup_steps; the checkpoints before it are intact"
    )


def _moved(x: Tensor, device: torch.device) -> Tensor:
    # Copies from pinned memory are asynchronous; the buffer is not reused before they are done.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
