"""The training loop: read a segment, learn, and once in a while log, evaluate and save."""

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import Config
from transformer_xl.data import Corpus, Segments, prepare
from transformer_xl.device import autocast, pick_device, pick_precision
from transformer_xl.evaluate import Result, evaluate
from transformer_xl.nn import TransformerXL, build_model
from transformer_xl.ops import choose_backend
from transformer_xl.train.averaging import new_average
from transformer_xl.train.finish import finish
from transformer_xl.train.interrupts import Interrupted, caught_interrupts
from transformer_xl.train.lengths import VaryingSegments, longest_segment
from transformer_xl.train.metrics import MetricsLog, Progress
from transformer_xl.train.optim import Optimizer
from transformer_xl.train.regularization import activation_penalty
from transformer_xl.train.state import TrainState


def train(config: Config, run_dir: Path | str, *, quiet: bool = False) -> dict[str, Any]:
    """Train a model, or go on with a run that was stopped; then evaluate and report.

    Args:
        config: The recipe.
        run_dir: The run folder; one that holds a run of the same recipe is resumed.
        quiet: Print nothing.

    Returns:
        The contents of ``results.json``: the evaluation, also at other memory lengths, and the
        same text under gzip and xz.

    Raises:
        ValueError: The recipe does not fit the corpus or the run folder.
        OSError: A file cannot be read or written.
        RuntimeError: The loss is not a number any more, or a file is damaged.
        Interrupted: SIGINT or SIGTERM came, and the run was saved.
    """
    device = pick_device()
    with (
        Progress(config.train.steps, quiet=quiet) as progress,
        closing(RunFolder(run_dir)) as folder,
    ):
        folder.check(config)
        corpus = prepare(config.data, progress.say)
        config = _with_vocabulary(config, corpus)
        folder.check(config)
        state = _new_state(config, corpus, device)
        n_parameters = sum(p.numel() for p in state.model.parameters())
        folder.begin(config, n_parameters)
        if saved := folder.load(state.model, progress.say):
            state.load_state_dict(saved)
        progress.expect(state.total_steps, state.step)
        precision = pick_precision(config.train.precision, device)
        width, dtype = config.model.head_width, getattr(torch, precision)
        attention = choose_backend(device, dtype, width).backend
        progress.say(
            f"{n_parameters:,} parameters on {device.type} in {precision}, "
            f"{'compiled' if config.train.compile else attention} attention; "
            f"{corpus.n_tokens('train'):,} tokens to train on"
        )
        if state.step:
            progress.say(f"going on after step {state.step} of {state.total_steps}")
        if state.step < state.total_steps:
            with MetricsLog(folder.path, state.step) as log, caught_interrupts() as caught:
                _run(config, folder, corpus, state, log, progress, caught)
        return finish(config, folder, corpus, device, progress.say)


def train_step(
    config: Config, state: TrainState, model: Callable[..., Any], device: torch.device
) -> tuple[Tensor, float]:
    """Make one update; return its loss (nats per token) and learning rate."""
    settings = config.train
    segment_len, mem_len = state.next_lengths(config)
    tokens, targets = (_moved(x, device) for x in state.segments.next_segment())
    state.tokens += targets.numel()
    if settings.loss == "half":
        targets = targets[:, targets.shape[1] // 2 :]
    context = tokens.shape[1] - targets.shape[1]
    parts = settings.accumulate
    loss = torch.zeros((), device=device)
    for i, (part, part_targets) in enumerate(
        zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
    ):
        # Of the lengths that a memory has while it fills up, each would be compiled for itself.
        memory = state.mems[i]
        is_full = memory is not None and len(memory) == mem_len
        network = model if is_full else state.model
        with autocast(settings.precision, device):
            out = network(part, memory, part_targets, mem_len=mem_len, context=context)
            part_loss = out.nll.mean() / parts
            penalty = activation_penalty(settings, out, part_targets.shape[1])
        (part_loss + penalty / parts).backward()
        state.mems[i] = out.mems
        loss += part_loss.detach()
    if settings.clip_norm:
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), settings.clip_norm)
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
    return loss, lr


def _moved(x: Tensor, device: torch.device) -> Tensor:
    # From pinned memory the copy waits for nothing; its room is not used again before it is done.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _run(
    config: Config,
    folder: RunFolder,
    corpus: Corpus,
    state: TrainState,
    log: MetricsLog,
    progress: Progress,
    interrupts: list[int],
) -> None:
    settings = config.train
    device = state.model.device
    # Without dynamic shapes, a resumed run compiles what the first one did, to the same bits; and
    # as only full memories come to it, there is one shape.
    model = torch.compile(state.model, dynamic=False) if settings.compile else state.model
    state.model.train()
    logged_at = state.seconds
    while state.step < state.total_steps:
        began = time.perf_counter()
        loss, lr = train_step(config, state, model, device)
        # Asked once: a signal that comes later is for the next step, which saves before it stops.
        is_stopping = bool(interrupts)
        if is_stopping:
            progress.say("stopping after this step and saving; once more stops at once")
        state.losses.append(loss)
        is_last = state.step == state.total_steps
        is_logged = is_last or _every(settings.log_every, state.step)
        is_evaluated = is_last or _every(settings.eval_every, state.step)
        is_saved = is_last or is_stopping or _every(settings.save_every, state.step)
        if is_logged or is_evaluated or is_saved:
            # Only here is the device waited for.
            _require_finite_losses(state)
        state.seconds += time.perf_counter() - began
        _fix_end(config, state, progress)

        if is_logged:
            losses = state.read_losses()
            bits = sum(losses) / len(losses) / math.log(2)
            speed = state.tokens / max(state.seconds - logged_at, 1e-9)
            state.losses.clear()
            state.tokens, logged_at = 0, state.seconds
            log.log("train", state.step, bits=bits, lr=lr, tokens_per_second=speed)
            progress.update(state.step, bits, speed)

        if is_evaluated:
            _require_finite_weights(state)
            result = _validate(config, corpus, state.shown, device)
            log.log("valid", state.step, bits=result.bpc, nll=result.nll)
            progress.say(_validation_line(state.step, result))
            if result.nll < state.best:
                state.best = result.nll
                folder.save_model("best", state.shown, corpus.vocab)

        if is_saved:
            _require_finite_weights(state)
            # The checkpoint comes last: a run that goes on from it finds the rest as it should be.
            folder.save_model("last", state.shown, corpus.vocab)
            log.sync()
            folder.save(state.step, state.model, state.state_dict(), settings.keep_checkpoints)

        if is_stopping:
            raise Interrupted(interrupts[0], state.step)


def _every(n: int, step: int) -> bool:
    return n > 0 and step % n == 0


def _require_finite_losses(state: TrainState) -> None:
    losses = state.read_losses()
    for step, loss in enumerate(losses, state.step - len(losses) + 1):
        if not math.isfinite(loss):
            raise _diverged(step, f"the loss is {loss}")


def _require_finite_weights(state: TrainState) -> None:
    # The gradient of a finite loss may not be finite; the next loss tells, which may be too late.
    if not all(bool(p.isfinite().all()) for p in state.model.parameters()):
        raise _diverged(state.step, "the weights are not finite")


def _diverged(step: int, what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} after step {step}: lower train.lr or train.clip_norm, or raise "
        "train.warmup_steps; the checkpoints before it are intact"
    )


def _with_vocabulary(config: Config, corpus: Corpus) -> Config:
    size = config.model.vocab_size
    if size not in (0, len(corpus.vocab)):
        raise ValueError(
            f"model.vocab_size={size} is not the size of the corpus's vocabulary, "
            f"{len(corpus.vocab)}; leave it out to take that"
        )
    model = replace(config.model, vocab_size=len(corpus.vocab))
    if config.data.reset_at is not None:
        try:
            reset_at = corpus.vocab.number_of(config.data.reset_at)
        except ValueError as error:
            raise ValueError(f"data.reset_at: {error}") from error
        if model.reset_at not in (None, reset_at):
            raise ValueError(
                f"model.reset_at={model.reset_at} is not the number of data.reset_at="
                f"{config.data.reset_at!r}, which is {reset_at}; leave it out to take that"
            )
        model = replace(model, reset_at=reset_at)
    return replace(config, model=model)


def _new_state(config: Config, corpus: Corpus, device: torch.device) -> TrainState:
    settings = config.train
    kind = VaryingSegments if settings.stages or settings.random_segment_len else Segments
    segments = kind(
        corpus.split("train"), settings.batch_size, longest_segment(settings), config.model.ext_len
    )
    if settings.stages and settings.stages[-1][2] != config.model.mem_len:
        raise ValueError(
            f"train.stages ends with mem_len={settings.stages[-1][2]}, and model.mem_len is "
            f"{config.model.mem_len}: the last stage must have the lengths of the model"
        )
    # What is needed at the end had better be right at the beginning.
    if len(corpus.split("valid")) < 2:
        raise ValueError("the validation text has one token; to predict one, at least 2 are needed")
    try:
        prompt = corpus.vocab.encode(config.generate.prompt)
    except ValueError as error:
        raise ValueError(f"generate.prompt={config.generate.prompt!r}: {error}") from error
    if not prompt:
        raise ValueError(
            "generate.prompt is empty: the sample at the end needs a token to continue"
        )
    torch.manual_seed(settings.seed)
    model = build_model(config.model).to(device)
    return TrainState(
        model=model,
        optimizer=Optimizer(model, settings),
        segments=segments,
        mems=[None] * settings.accumulate,
        total_steps=settings.steps,
        end_is_fixed=settings.minutes is None,
        average=new_average(model, settings),
        corpus={
            "vocab": corpus.vocab.hash,
            **{name: corpus.manifest["splits"][name]["sha256"] for name in ("train", "valid")},
        },
    )


def _fix_end(config: Config, state: TrainState, progress: Progress) -> None:
    """Choose the last step of a run with a time limit once its cooldown has to begin."""
    settings = config.train
    if state.end_is_fixed or settings.minutes is None:
        return
    before_cooldown = 1 - settings.cooldown_fraction
    if state.step >= before_cooldown * settings.steps:
        state.end_is_fixed = True
    elif state.seconds >= before_cooldown * settings.minutes * 60:
        state.end_is_fixed = True
        # The present stage goes on to the end, at the speed that it has shown so far.
        seconds = max(state.seconds - state.stage_seconds, 1e-9)
        pace = (state.step - state.stage_step) / seconds
        left = max(1, round((settings.minutes * 60 - state.seconds) * pace))
        state.cooldown_steps = min(left, settings.steps - state.step)
        state.total_steps = state.step + state.cooldown_steps
    if state.total_steps != settings.steps or not state.end_is_fixed:
        pace = state.step / state.seconds
        expected = min(settings.steps, round(settings.minutes * 60 * pace))
        progress.expect(state.total_steps if state.end_is_fixed else max(expected, state.step))


def _validate(config: Config, corpus: Corpus, model: TransformerXL, device: torch.device) -> Result:
    settings = config.eval
    with autocast(config.train.precision, device):
        return evaluate(
            model,
            corpus.split("valid"),
            segment_len=settings.segment_len or config.train.segment_len,
            batch_size=settings.batch_size,
            token_bytes=corpus.vocab.token_bytes,
            mem_len=settings.mem_len,
            attn_len=settings.attn_len,
            clamp_len=settings.clamp_len,
            ext_len=settings.ext_len,
        )


def _validation_line(step: int, result: Result) -> str:
    line = f"step {step}: validation {result.nll:.4f} nats, {result.bpc:.4f} bits per token"
    if result.bits_per_byte is not None and not math.isclose(result.bits_per_byte, result.bpc):
        line += f", {result.bits_per_byte:.4f} bits per byte"
    return line
