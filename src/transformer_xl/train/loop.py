"""The training loop: update steps with periodic logging, evaluation and checkpoints.

SIGINT and SIGTERM are handled between steps.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import Config, Precision, Stalled, World, pick_device
from transformer_xl.data import Corpus, FeatureCorpus, open_corpus
from transformer_xl.errors import InputError
from transformer_xl.inference.evaluate import Result, evaluate_by
from transformer_xl.model import LanguageModel, shown
from transformer_xl.ops import choose_backend
from transformer_xl.train.beginning import (
    check_machine,
    fit_to_corpus,
    initial_weights,
    new_state,
    require_vocabulary,
    validation,
)
from transformer_xl.train.checkpoint.checkpoints import Checkpoints, read_whole
from transformer_xl.train.checkpoint.run_folder import CHECKPOINTS, RunFolder
from transformer_xl.train.finish import finish
from transformer_xl.train.metrics import MetricsLog, Progress
from transformer_xl.train.minutes import TimeLimit
from transformer_xl.train.runner import Network, whole_model
from transformer_xl.train.state import TrainState, local
from transformer_xl.train.step import Update, diverged, train_step


class Interrupted(Exception):  # noqa: N818  (it is no error)
    """The run was interrupted by a signal, and a checkpoint was saved."""

    def __init__(self, signal_number: int, where: str) -> None:
        # With its own arguments, so that a process can pass it to the one that started it.
        super().__init__(signal_number, where)
        self.signal_number, self._where = signal_number, where

    def __str__(self) -> str:
        return f"stopped {self._where} and saved; the same command resumes from there"


@contextmanager
def catch_interrupts() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a ``with`` block, whose target is the list of their numbers.

    After the first signal, SIGINT has its previous handler, so that a second one ends at once.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        # SIGTERM may come twice: from the launcher, and from the parent of the launcher.
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        # No output here: the signal may have interrupted a write.

    for number in numbers:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def train(
    config: Config, run_dir: Path | str, *, quiet: bool = False, reports: bool = True
) -> dict[str, Any]:
    """Train a model, or resume an interrupted run; then evaluate it and write the report.

    Under ``torchrun``, all processes train one model (:mod:`transformer_xl.config.distributed`),
    and the first one writes files and prints.

    Args:
        config: The recipe.
        run_dir: The run folder, on a shared disk if there are several machines. A run of the same
            recipe is resumed.
        quiet: Print nothing.
        reports: False: end with the training, without the evaluation and the report.

    Returns:
        The contents of ``results.json``: the evaluation, also at other memory lengths, and the
        compression of the same text by gzip and xz; printed, its figures. Empty without
        ``reports``.

    Raises:
        InputError: ``config`` is not a recipe.
        SettingsError: The recipe does not fit the run folder, the machine or the number of
            processes.
        DataError: The corpus does not fit the recipe, or is damaged.
        CheckpointError: A checkpoint is damaged.
        OSError: A file cannot be read or written.
        RuntimeError: Training diverged; as `Stalled`, another process stopped or hangs.
        Interrupted: SIGINT or SIGTERM was received, and a checkpoint was saved.

    Example:
        >>> from transformer_xl import DataConfig, ModelConfig, TrainConfig
        >>> Path("mine.txt").write_text("To be, or not to be. " * 500)
        10500
        >>> recipe = Config(
        ...     model=ModelConfig(n_layer=1, d_model=16, n_head=2, d_inner=16, mem_len=8),
        ...     data=DataConfig(path="mine.txt", vocab="bytes"),
        ...     train=TrainConfig(steps=2, batch_size=2, segment_len=8),
        ... )
        >>> train(recipe, Path("runs/mine"), quiet=True, reports=False)
        {}
    """
    if not isinstance(config, Config):
        raise InputError(
            f"config={shown(config)} is not a Config: load_recipe(NAME_OR_FILE) reads that of a "
            "recipe, and Config(model=ModelConfig(), data=DataConfig(path=TEXT)) is one for a text"
        )
    device = pick_device()
    with (
        World.join(device, config.train.hang_minutes) as world,
        Progress(config.train.steps, quiet=quiet or not world.is_first) as progress,
        closing(RunFolder(run_dir)) as folder,
        Checkpoints(folder.path / CHECKPOINTS, world) as checkpoints,
    ):
        check_machine(config, device, world)
        world.by_first(lambda: folder.check(config))
        # A resumed run does not need the model that it was initialized from.
        weights = None if checkpoints.exist() else initial_weights(config)
        corpus = open_corpus(config.data, progress.say)
        if weights is not None:
            require_vocabulary(config, corpus)
        config = fit_to_corpus(config, corpus)
        check_machine(config, device, world)
        world.wait()
        state = new_state(config, corpus, device, world, weights)
        del weights
        n_parameters = sum(p.numel() for p in state.model.parameters())
        world.by_first(lambda: folder.begin(config, n_parameters))
        if not folder.holds_run:
            raise OSError(
                f"process {world.rank} does not see the run folder {folder.path} that the first "
                "process created: give an --out on a disk that all machines share"
            )
        if newest := checkpoints.newest(progress.say):
            state.load(newest)
            if state.step < state.total_steps and state.validation != validation(config):
                state.best, state.validation = math.inf, validation(config)
                progress.say(
                    "the settings of validations differ from those of the checkpoint: the next one "
                    "replaces model/best, even by a worse model; copy that folder to keep it"
                )
        progress.expect(state.total_steps, state.step)
        progress.say(_describe_run(config, corpus, state, n_parameters))
        if state.step:
            progress.say(f"resuming after step {state.step} of {state.total_steps}")
        if state.step < state.total_steps:
            log = MetricsLog(folder.path, state.step) if world.is_first else None
            with log or nullcontext(), catch_interrupts() as caught:
                _Run(config, folder, corpus, state, checkpoints, log, progress).go(caught)
        progress.stop()
        if not reports:
            return {}
        try:
            return world.by_first(
                lambda: finish(config, folder, corpus, device, progress.say, quiet)
            )
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT, "before the report, with the training done") from None


def _describe_run(
    config: Config, corpus: Corpus | FeatureCorpus, state: TrainState, n_parameters: int
) -> str:
    """Return the first line of a run: its parameters, devices, precision and text."""
    device, size = state.model.device, state.world.size
    precision = Precision(config.train.precision, device).name
    attention = choose_backend(device, getattr(torch, precision), config.model.head_width).backend
    how = ", compiled" if config.train.compile else ""
    return (
        f"{n_parameters:,} parameters on "
        f"{device.type if size == 1 else f'{size} x {device.type}'} in {precision}, "
        f"{attention} attention{how}; "
        f"{corpus.n_tokens('train'):,} tokens to train on"
    )


@dataclass
class _Run:
    """A run from its current step to its end or an interruption."""

    config: Config
    folder: RunFolder
    corpus: Corpus | FeatureCorpus
    state: TrainState
    checkpoints: Checkpoints
    log: MetricsLog | None
    """None in all processes but the first."""
    progress: Progress
    logged_at: float = 0.0

    def go(self, interrupts: list[int]) -> None:
        """Train to the end, or until a signal was received."""
        config, settings, state = self.config, self.config.train, self.state
        network = Network(state.model, settings, state.world)
        limit = None if settings.minutes is None else TimeLimit(settings, self.progress.say)
        state.model.train()
        self.logged_at = local_seconds = state.seconds
        while state.step < state.total_steps:
            began = time.perf_counter()
            update = train_step(config, state, network)
            if update.is_skipped:
                self._report_skip(update)
            elif update.is_counted:
                state.losses.append(update.loss)
            local_seconds += time.perf_counter() - began
            # Read once: a later signal is handled after the next step.
            now = max(interrupts, default=0), local_seconds, self.checkpoints.has_failed
            # All processes get the same values, and so take the same branches; at first zeros.
            number, seconds, has_failed = state.world.largest_before(*now)
            state.seconds = max(state.seconds, seconds)
            if number:
                self.progress.say("stopping after this step and saving; Ctrl-C now stops at once")
            if has_failed:
                self.checkpoints.wait()
            is_last = state.step == state.total_steps
            is_evaluated = is_last or _every(settings.eval_every, state.step)
            is_saved = is_last or number or _every(settings.save_every, state.step)
            if limit is not None:
                last_step, seconds_left = limit.update(state, is_timed=seconds > 0)
                self.progress.expect(last_step, seconds=seconds_left)
            if is_last or _every(settings.log_every, state.step):
                self._write_log(update.lr)
            else:
                self.progress.update(state.step)
            if is_evaluated or is_saved:
                self._require_finite_weights()
            if is_evaluated:
                self._evaluate()
            if is_saved:
                self._save()
            if number:
                self._stop(int(number), interrupts)
        # The other processes have not received a signal of the last step yet.
        number = max(state.world.gather(max(interrupts, default=0)))
        if state.world.size > 1 and number:
            self._stop(number, interrupts)
        self.checkpoints.wait()

    def _stop(self, number: int, interrupts: list[int]) -> None:
        """Wait for the checkpoint and raise the interruption."""
        self.checkpoints.wait()
        stopped = Interrupted(number, f"at step {self.state.step}")
        if not interrupts:
            # The signal was on another machine; this launcher may restart with the remaining ones.
            raise Stalled(f"another process of this run was asked to end; {stopped}")
        raise stopped

    def _record(self, kind: str, **values: float) -> None:
        """Write values of this step to the log; no effect in processes other than the first."""
        if self.log is not None:
            self.log.log(kind, self.state.step, **values)

    def _report_skip(self, update: Update) -> None:
        """Record and show that an update was skipped. Collective."""
        state = self.state
        (loss,) = state.world.mean([float(update.loss)])
        self._record("skip", nll=loss, norm=update.norm, offset=update.offset)
        self.progress.say(
            f"step {state.step}: the norm of the gradient is {update.norm:g}, the loss {loss:g}; "
            f"the update is left out ({state.skipped} so far). Its segments begin "
            f"{update.offset:,} tokens into each stream"
        )

    def _write_log(self, lr: float) -> None:
        """Record and show the mean loss and the speed since the last time."""
        state = self.state
        losses = state.read_losses()
        bits = sum(losses) / len(losses) / math.log(2) if losses else math.nan
        # With several processes, the time of the last step is known after the next one.
        seconds = state.seconds - self.logged_at
        speed = state.tokens / seconds if seconds > 0 else 0.0
        state.losses.clear()
        state.tokens, self.logged_at = 0, state.seconds
        self._record("train", bits_per_token=bits, lr=lr, tokens_per_second=speed)
        self.progress.update(state.step, bits if losses else None, speed)

    def _evaluate(self) -> None:
        """Evaluate the validation text, and save the model if it is the best so far. Collective."""
        state, config = self.state, self.config
        model = whole_model(state.shown, config, state.world)

        def evaluate_and_save_best() -> Result:
            result = _validate(config, self.corpus, model)
            if result.nll < state.best:
                self._save_model("best", model.named_weights())
            return result

        result = state.world.by_first(evaluate_and_save_best)
        bits, per_byte = result.bits_per_token, result.bits_per_byte
        self._record("valid", bits_per_token=bits, nll=result.nll)
        line = f"step {state.step}: validation {result.nll:.4f} nats, {bits:.4f} bits per token"
        if per_byte is not None and not math.isclose(per_byte, bits):
            line += f", {per_byte:.4f} bits per byte"
        self.progress.say(line)
        state.best = min(state.best, result.nll)

    def _save(self) -> None:
        """Start writing a checkpoint of this step, and the weights to evaluate as model ``last``.

        The log and the model are on disk before the checkpoint gets its name. So when a run resumes
        from a checkpoint, its folder has the log and the model of that step at least. Collective.

        Raises:
            OSError: The previous checkpoint could not be written.
        """
        state = self.state
        if self.log is not None:
            self.log.sync()
        values = state.about()

        def save_last_model(checkpoint: Path) -> None:
            # Read from the checkpoint, as training may have changed the weights since.
            self._save_model("last", read_whole(checkpoint, f"{values['shown']}."))

        self.checkpoints.save(
            state.step,
            state.tensors(),
            values,
            self.config.train.keep_checkpoints,
            before_rename=save_last_model,
        )

    def _save_model(self, name: str, weights: dict[str, Tensor]) -> None:
        """Write a model folder of the run, with the vocabulary."""
        self.folder.save_model(name, self.config, weights, self.corpus.vocab)

    def _require_finite_weights(self) -> None:
        """Require finite weights in all processes. Collective.

        Raises:
            Diverged: A weight is infinite or not a number.
        """
        # Finite gradients may still lead to infinite weights.
        own = all(bool(local(p).isfinite().all()) for p in self.state.model.parameters())
        if not all(self.state.world.gather(own)):
            raise diverged(self.state.step, "the weights are not finite")


def _every(n: int, step: int) -> bool:
    return n > 0 and step % n == 0


def _validate(config: Config, corpus: Corpus | FeatureCorpus, model: LanguageModel) -> Result:
    with Precision(config.train.precision, model.device).autocast():
        return evaluate_by(
            config.eval,
            model,
            corpus.split("valid"),
            vocab=corpus.vocab,
            n_bytes=corpus.n_bytes("valid"),
            segment_len=config.train.segment_len,
        )
