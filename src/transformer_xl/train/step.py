"""One update: a segment of each stream forward and backward, and the weights moved."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from transformer_xl.config import Config, TrainConfig
from transformer_xl.config.device import autocast
from transformer_xl.train.network import Network
from transformer_xl.train.regularization import activation_penalty
from transformer_xl.train.state import TrainState

KNOWN_AFTER = 20
"""Updates after which it is known how long a gradient usually is."""
_KEPT = 0.98


class Update(NamedTuple):
    """What became of a step."""

    loss: Tensor
    """Of the streams of this process, in nats per token."""
    lr: float
    """Learning rate; 0 where nothing was learned."""
    offset: int
    """Where its segments begin: tokens from the beginning of each stream."""
    norm: float
    """Norm of the gradient, before it was clipped."""
    is_skipped: bool
    """Whether the update was left out."""


def train_step(config: Config, state: TrainState, network: Network) -> Update:
    """Make one update, or leave it out because its gradient is not finite or too long.

    An update that is left out moves neither weights nor what is remembered: the streams go on, and
    the memory lacks one segment.

    Raises:
        RuntimeError: More updates in a row were left out than ``max_skips``.
    """
    settings, device = config.train, state.model.device
    segment_len, mem_len = state.next_lengths(config)
    offset = state.segments.offset
    tokens, targets = (_moved(x, device) for x in state.segments.next_segment())
    state.tokens += targets.numel() * state.world.size
    if settings.loss == "half":
        targets = targets[:, targets.shape[1] // 2 :]
    context = tokens.shape[1] - targets.shape[1]
    parts = settings.accumulate
    loss, mems = torch.zeros((), device=device), []
    for i, (part, part_targets) in enumerate(
        zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
    ):
        # Of the lengths that a memory has while it fills up, each would be compiled for itself.
        memory = state.mems[i]
        is_full = memory is not None and len(memory) == mem_len
        lengths = {"mem_len": mem_len, "context": context}
        with network.shares_gradients(i == parts - 1):
            with autocast(settings.precision, device):
                out = network(part, memory, part_targets, is_compiled=is_full, **lengths)
                assert out.nll is not None
                part_loss = out.nll.mean() / parts
                penalty = activation_penalty(settings, out, part_targets.shape[1])
            (part_loss + penalty / parts).backward()
        mems.append(out.mems)
        loss += part_loss.detach()

    weights = [p for p in state.model.parameters() if p.grad is not None]
    length = get_total_norm([p.grad for p in weights if p.grad is not None])
    length = length.full_tensor() if isinstance(length, DTensor) else length
    # Here the device is waited for, which is cheaper than weights that are lost.
    norm = float(length)
    if not _is_usual(norm, settings, state):
        _skip(norm, loss, offset, settings, state)
        return Update(loss, 0.0, offset, norm, is_skipped=True)
    state.skipped_in_a_row = 0
    state.usual_norm = running_mean(state.usual_norm, norm)
    state.mems = mems
    if settings.clip_norm:
        clip_grads_with_norm_(weights, settings.clip_norm, length)
    usual_len = settings.segment_len
    if settings.stages:
        usual_len = settings.stages[state.stage][1]
    # Else short segments would have more of a say for each of their tokens than long ones.
    share = segment_len / usual_len if settings.random_segment_len else 1.0
    lr = state.optimizer.step(
        state.step, state.total_steps, share=share, cooldown_steps=state.cooldown_steps
    )
    state.step += 1
    state.add_to_average(settings)
    return Update(loss, lr, offset, norm, is_skipped=False)


def running_mean(before: float | None, value: float) -> float:
    """Return the mean of the latest values, each counting less than the one after it."""
    return value if before is None else _KEPT * before + (1 - _KEPT) * value


def _is_usual(norm: float, settings: TrainConfig, state: TrainState) -> bool:
    # The gradient of all processes, so that all decide alike.
    if not math.isfinite(norm):
        return False
    is_known = state.usual_norm is not None and state.step - state.skipped >= KNOWN_AFTER
    if not (settings.skip_norm and is_known):
        return True
    assert state.usual_norm is not None
    return norm <= settings.skip_norm * state.usual_norm


def _skip(norm: float, loss: Tensor, offset: int, settings: TrainConfig, state: TrainState) -> None:
    state.optimizer.skip()
    state.step += 1
    state.skipped += 1
    state.skipped_in_a_row += 1
    if state.skipped_in_a_row > settings.max_skips:
        raise diverged(
            state.step,
            f"{state.skipped_in_a_row} updates in a row were left out (train.max_skips="
            f"{settings.max_skips}): the norm of the gradient is {norm}, the loss {float(loss)}, "
            f"on segments that begin {offset:,} tokens into each stream,",
        )


def diverged(step: int, what: str) -> RuntimeError:
    """Return the error for a run that cannot be saved by going on."""
    return RuntimeError(
        f"{what} after step {step}: lower train.lr or train.clip_norm, or raise "
        "train.warmup_steps; the checkpoints before it are intact"
    )


def _moved(x: Tensor, device: torch.device) -> Tensor:
    # From pinned memory the copy waits for nothing; its room is not used again before it is done.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
