"""The training loop: read a segment, learn, and once in a while log, evaluate and save.

Signals that ask it to stop are noted, and heard between two steps.
"""

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch

from transformer_xl.config import Config
from transformer_xl.config.device import autocast, pick_device, pick_precision
from transformer_xl.config.distributed import World, joined
from transformer_xl.data import Corpus, prepare
from transformer_xl.inference.evaluate import Result, cost_of, evaluate_by
from transformer_xl.model import LanguageModel, build_model
from transformer_xl.model.pretrained import copy_weights, model_weights
from transformer_xl.ops import choose_backend
from transformer_xl.train.beginning import (
    check_division,
    check_room,
    fit_to_corpus,
    initial_weights,
    new_state,
    require_vocabulary,
)
from transformer_xl.train.checkpoint import CHECKPOINTS, RunFolder
from transformer_xl.train.checkpoint.checkpoints import Checkpoints, read_whole
from transformer_xl.train.finish import finish
from transformer_xl.train.metrics import MetricsLog, Progress
from transformer_xl.train.state import TrainState, local
from transformer_xl.train.step import (
    Network,
    Update,
    diverged,
    running_mean,
    train_step,
    whole_weights,
)


class Interrupted(Exception):  # noqa: N818  (it is no error)
    """The run was asked to stop and has saved all it needs to go on."""

    def __init__(self, signal_number: int, where: str) -> None:
        super().__init__(f"stopped {where} and saved; the same command goes on from there")
        self.signal_number = signal_number


@contextmanager
def caught_interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; after the first, SIGINT is as usual."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        # SIGTERM may come twice, from a launcher and from who told the launcher.
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        # Nothing is said here: what was just being written may not be interrupted by more.

    for number in numbers:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number in numbers:
            signal.signal(number, before[number])


_LATEST_STEPS = 16
"""Steps by which the present speed is known."""
_STEPS_TO_JUDGE = 4
"""Fewer do not tell that a run is too slow."""
_LATEST_END = 1.1
"""How much later than its time limit a run ends at most, as a factor."""


def train(config: Config, run_dir: Path | str, *, quiet: bool = False) -> dict[str, Any]:
    """Train a model, or go on with a run that was stopped; then evaluate and report.

    Started by ``torchrun``, all its processes train one model
    (:mod:`transformer_xl.config.distributed`); the first one writes and speaks for all.

    Args:
        config: The recipe.
        run_dir: The run folder; one that holds a run of the same recipe is resumed. Processes on
            several machines need a disk that they share.
        quiet: Print nothing.

    Returns:
        The contents of ``results.json``: the evaluation, also at other memory lengths, and the
        same text under gzip and xz.

    Raises:
        ValueError: The recipe does not fit the corpus, the run folder or the number of processes.
        OSError: A file cannot be read or written.
        RuntimeError: The loss is not a number any more, or a file is damaged; as `Stalled`, another
            process stopped or hangs.
        Interrupted: SIGINT or SIGTERM came, and the run was saved.
    """
    device = pick_device()
    with (
        joined(device, config.train.hang_minutes) as world,
        Progress(config.train.steps, quiet=quiet or not world.is_first) as progress,
        closing(RunFolder(run_dir)) as folder,
    ):
        check_division(config, world)
        check_room(config, device, world)
        world.by_first(lambda: folder.check(config))
        checkpoints = Checkpoints(folder.path / CHECKPOINTS, world)
        # A run that goes on has its weights, wherever those are that it began with.
        weights = None if checkpoints.exist() else initial_weights(config)
        corpus = prepare(config.data, progress.say)
        if weights is not None:
            require_vocabulary(config, corpus)
        config = fit_to_corpus(config, corpus)
        check_room(config, device, world)
        world.wait()
        state = new_state(config, corpus, device, world, weights)
        del weights
        n_parameters = sum(p.numel() for p in state.model.parameters())
        world.by_first(lambda: _begin(folder, config, n_parameters))
        if not folder.holds_run:
            raise OSError(
                f"process {world.rank} does not see the run folder {folder.path} that the first "
                "process has made: give an --out on a disk that all machines share"
            )
        with checkpoints:
            if newest := checkpoints.newest(progress.say):
                state.load(checkpoints, newest)
            progress.expect(state.total_steps, state.step)
            progress.say(_opening(config, corpus, device, n_parameters, world))
            if cost := cost_of(config.eval, corpus.n_tokens("valid") - 1):
                progress.say(f"each validation, by eval.{cost}")
            if state.step:
                progress.say(f"going on after step {state.step} of {state.total_steps}")
            if state.step < state.total_steps:
                log = MetricsLog(folder.path, state.step) if world.is_first else None
                with log or nullcontext(), caught_interrupts() as caught:
                    _Run(config, folder, corpus, state, checkpoints, log, progress).go(caught)
        progress.stop()
        try:
            return world.by_first(
                lambda: finish(config, folder, corpus, device, progress.say, quiet)
            )
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, "before the report, with the training done") from None


def _begin(folder: RunFolder, config: Config, n_parameters: int) -> None:
    folder.check(config)
    folder.begin(config, n_parameters)


def _opening(
    config: Config, corpus: Corpus, device: torch.device, n_parameters: int, world: World
) -> str:
    precision = pick_precision(config.train.precision, device)
    width, dtype = config.model.head_width, getattr(torch, precision)
    attention = choose_backend(device, dtype, width).backend
    where = device.type if world.size == 1 else f"{world.size} x {device.type}"
    return (
        f"{n_parameters:,} parameters on {where} in {precision}, "
        f"{'compiled' if config.train.compile else attention} attention; "
        f"{corpus.n_tokens('train'):,} tokens to train on"
    )


class _Run:
    """A part of a run: from where it was to where it ends or is stopped."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        corpus: Corpus,
        state: TrainState,
        checkpoints: Checkpoints,
        log: MetricsLog | None,
        progress: Progress,
    ) -> None:
        self._config, self._folder, self._corpus = config, folder, corpus
        self._state, self._checkpoints = state, checkpoints
        self._log, self._progress = log, progress
        self._network = Network(state.model, config.train, state.world)
        self._logged_at = state.seconds
        self._is_late = False
        # When the latest steps ended: what the next ones will take. The first one, which may have
        # to compile, ends before the first of these times.
        self._ends: deque[float] = deque(maxlen=_LATEST_STEPS + 1)

    def go(self, interrupts: list[int]) -> None:
        """Train to the end, or until there is an interrupt."""
        settings, state, world = self._config.train, self._state, self._state.world
        state.model.train()
        own_seconds = state.seconds
        while state.step < state.total_steps:
            began = time.perf_counter()
            update = train_step(self._config, state, self._network)
            self._note(update)
            own_seconds += time.perf_counter() - began
            # Asked once: a signal that comes later is for the next step, which saves before it
            # stops. All processes hear the same, and so they do the same.
            number, seconds, has_failed = world.largest_before(
                max(interrupts, default=0), own_seconds, self._checkpoints.has_failed
            )
            # The first answer is zeros.
            state.seconds = max(state.seconds, seconds)
            if seconds:
                self._ends.append(state.seconds)
            is_stopping = bool(number)
            if is_stopping:
                self._progress.say("stopping after this step and saving; Ctrl-C now stops at once")
            if has_failed:
                self._checkpoints.wait()
            is_last = state.step == state.total_steps
            is_logged = is_last or _every(settings.log_every, state.step)
            is_evaluated = is_last or _every(settings.eval_every, state.step)
            is_saved = is_last or is_stopping or _every(settings.save_every, state.step)
            if self._config.train.minutes is not None:
                self._keep_time(60 * self._config.train.minutes)
            if is_logged:
                self._write_log(update)
            else:
                self._progress.update(state.step)
            if is_evaluated:
                self._evaluate()
            if is_saved:
                self._save()
            if is_stopping:
                self._stop(int(number), interrupts)
        # Of a signal in the last step the others have not heard yet.
        if world.size > 1 and (number := max(world.gather(max(interrupts, default=0)))):
            self._stop(number, interrupts)
        self._checkpoints.wait()

    def _keep_time(self, limit: float) -> None:
        """Choose the last step of a run with a time limit, of so many seconds."""
        state = self._state
        if not state.end_is_fixed:
            _fix_end(self._config, state)
        left = state.total_steps - state.step
        # Not the mean: one step that had to wait or to compile says nothing of the next ones.
        taken = [end - begin for begin, end in pairwise(self._ends)]
        step_seconds = median(taken) if taken else 0.0
        if not state.end_is_fixed:
            if step_seconds:
                left = min(left, max(1, round((limit - state.seconds) / step_seconds)))
        elif state.seconds > limit and len(taken) >= _STEPS_TO_JUDGE:
            room = max(1, int((_LATEST_END * limit - state.seconds) / step_seconds))
            if room < left:
                self._shorten(left, room)
                left = room
        self._progress.expect(state.step + left, seconds=limit - state.seconds)

    def _shorten(self, left: int, room: int) -> None:
        """Let the learning rate fall from where it is to its end in fewer steps."""
        state, settings = self._state, self._config.train
        if not self._is_late:
            self._is_late = True
            self._progress.say(
                f"train.minutes={settings.minutes:g} are over and the steps take longer than "
                f"before: of {left:,} that are left, {room:,} are made"
            )
        before = state.cooldown_steps or settings.cooldown_fraction * state.total_steps
        state.cooldown_steps = before * room / left
        state.total_steps = state.step + room

    def _stop(self, number: int, interrupts: list[int]) -> None:
        """End a run that was asked to stop, when all is saved."""
        self._checkpoints.wait()
        stopped = Interrupted(number, f"at step {self._state.step}")
        if not interrupts:
            # On another machine, whose launcher ends; ours is to start again with those that stay.
            raise RuntimeError(f"another process of this run was asked to end; {stopped}")
        raise stopped

    def _record(self, kind: str, step: int, **values: float) -> None:
        if self._log is not None:
            self._log.log(kind, step, **values)

    def _note(self, update: Update) -> None:
        state = self._state
        if not update.is_skipped:
            state.losses.append(update.loss)
            state.offsets.append(update.offset)
            return
        (loss,) = state.world.mean([float(update.loss)])
        self._record("skip", state.step, nll=loss, norm=update.norm, offset=update.offset)
        self._progress.say(
            f"step {state.step}: the norm of the gradient is {update.norm:g}, the loss {loss:g}; "
            f"the update is left out ({state.skipped} so far). Its segments begin "
            f"{update.offset:,} tokens into each stream"
        )

    def _write_log(self, update: Update) -> None:
        state, settings = self._state, self._config.train
        losses = state.read_losses()
        first = state.step - len(losses) + 1
        for step, (loss, offset) in enumerate(zip(losses, state.offsets, strict=True), first):
            usual = state.usual_loss
            if usual is not None and loss > usual + settings.spike:
                self._record("spike", step, nll=loss, usual=usual, offset=offset)
                self._progress.say(
                    f"about step {step}: a loss of {loss:.3f} nats where {usual:.3f} is usual. Its "
                    f"segments begin {offset:,} tokens into each stream"
                )
            state.usual_loss = running_mean(usual, loss)
        bits = sum(losses) / len(losses) / math.log(2) if losses else math.nan
        # Of many processes, the time of the last step is told with the next one.
        seconds = state.seconds - self._logged_at
        speed = state.tokens / seconds if seconds > 0 else 0.0
        state.losses.clear()
        state.offsets.clear()
        state.tokens, self._logged_at = 0, state.seconds
        self._record(
            "train", state.step, bits_per_token=bits, lr=update.lr, tokens_per_second=speed
        )
        self._progress.update(state.step, bits, speed)

    def _evaluate(self) -> None:
        state = self._state
        _require_finite_weights(state)
        model = _whole(state.shown, self._config, state.world)

        def judge() -> Result:
            result = _validate(self._config, self._corpus, model)
            if result.nll < state.best:
                weights = model_weights(model)
                self._folder.save_model("best", self._config.model, weights, self._corpus.vocab)
            return result

        result = state.world.by_first(judge)
        self._record("valid", state.step, bits_per_token=result.bits_per_token, nll=result.nll)
        self._progress.say(_validation_line(state.step, result))
        state.best = min(state.best, result.nll)

    def _save(self) -> None:
        state = self._state
        _require_finite_weights(state)
        if self._log is not None:
            self._log.sync()
        # The checkpoint comes last: a run that goes on from it finds the rest as it should be.
        self._checkpoints.save(
            state.step,
            state.tensors(),
            about := state.about(),
            self._config.train.keep_checkpoints,
            before=lambda checkpoint: self._save_last(checkpoint, f"{about['shown']}."),
        )

    def _save_last(self, checkpoint: Path, prefix: str) -> None:
        weights = read_whole(checkpoint, prefix)
        self._folder.save_model("last", self._config.model, weights, self._corpus.vocab)


def _every(n: int, step: int) -> bool:
    return n > 0 and step % n == 0


def _whole(model: LanguageModel, config: Config, world: World) -> LanguageModel:
    """Return a model that is in one piece; all processes must ask, and the first one gets it."""
    if config.train.parallel != "fsdp" or world.size == 1:
        return model
    weights = whole_weights(model, world)
    if not world.is_first:
        return model
    # Initial weights are drawn for nothing; the random numbers of the training stay where they are.
    with torch.random.fork_rng(devices=[]):
        whole = build_model(config.model)
    copy_weights(whole, weights)
    return whole.to(model.device)


def _require_finite_weights(state: TrainState) -> None:
    # A gradient that is finite may still move a weight too far.
    own = all(bool(local(p).isfinite().all()) for p in state.model.parameters())
    if not all(state.world.gather(own)):
        raise diverged(state.step, "the weights are not finite")


def _fix_end(config: Config, state: TrainState) -> None:
    """Choose the last step of a run with a time limit once its cooldown has to begin."""
    settings = config.train
    assert settings.minutes is not None
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


def _validate(config: Config, corpus: Corpus, model: LanguageModel) -> Result:
    with autocast(config.train.precision, model.device):
        return evaluate_by(
            config.eval,
            model,
            corpus.split("valid"),
            vocab=corpus.vocab,
            n_bytes=corpus.n_bytes("valid"),
            segment_len=config.train.segment_len,
        )


def _validation_line(step: int, result: Result) -> str:
    line = (
        f"step {step}: validation {result.nll:.4f} nats, {result.bits_per_token:.4f} bits per token"
    )
    per_byte = result.bits_per_byte
    if per_byte is not None and not math.isclose(per_byte, result.bits_per_token):
        line += f", {per_byte:.4f} bits per byte"
    return line
