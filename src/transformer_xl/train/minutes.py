"""The time limit of a run (``train.minutes``), which fixes where its cooldown begins and ends."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from transformer_xl.config import TrainConfig
from transformer_xl.train.state import TrainState

_LATEST_STEPS = 16
"""Number of recent steps from which the step time is estimated."""
_STEPS_TO_JUDGE = 4
"""Minimum number of recent steps before a run is shortened."""
_LATEST_END = 1.1
"""Maximum duration of a run, as a factor of its time limit."""


class TimeLimit:
    """Updates the last step of a run after each step.

    Args:
        settings: The settings of the training, with a limit.
        say: Takes a line of text for the user.
    """

    def __init__(self, settings: TrainConfig, say: Callable[[str], None]) -> None:
        self._limit, self._settings, self._say = 60 * (settings.minutes or 0), settings, say
        self._is_late = False
        # Without the first step, which may compile, as it ends before the first of these times.
        self._ends: deque[float] = deque(maxlen=_LATEST_STEPS + 1)

    def update(self, state: TrainState, *, is_timed: bool) -> tuple[int, float]:
        """Update ``total_steps`` of a state after a step.

        Args:
            state: The state of training.
            is_timed: Whether the time of the step is known yet.

        Returns:
            The step at which the run is expected to end, and the seconds that its limit leaves.
        """
        if is_timed:
            self._ends.append(state.seconds)
        # The median, as single steps may wait or compile.
        durations = [end - begin for begin, end in pairwise(self._ends)]
        step_seconds = median(durations) if durations else 0.0
        if not state.end_is_fixed:
            self._fix_end(state, step_seconds)
        left, seconds_left = state.total_steps - state.step, self._limit - state.seconds
        if state.end_is_fixed and seconds_left < 0 and len(durations) >= _STEPS_TO_JUDGE:
            possible = int((_LATEST_END * self._limit - state.seconds) / step_seconds)
            if (possible := max(1, possible)) < left:
                self._shorten(state, possible)
        elif not state.end_is_fixed and step_seconds:
            left = min(left, max(1, round(seconds_left / step_seconds)))
            return state.step + left, seconds_left
        return state.total_steps, seconds_left

    def _shorten(self, state: TrainState, possible: int) -> None:
        """Let a run that is late end after some more steps; the cooldown gets fewer of them."""
        left = state.total_steps - state.step
        if not self._is_late:
            self._say(
                f"train.minutes={self._settings.minutes:g} are over and the steps take longer "
                f"than before: {possible:,} of the {left:,} remaining steps are made"
            )
        self._is_late = True
        before = state.cooldown_steps or self._settings.cooldown_fraction * state.total_steps
        state.cooldown_steps = before * possible / left
        state.total_steps = state.step + possible

    def _fix_end(self, state: TrainState, step_seconds: float) -> None:
        """Fix the last step when the cooldown has to start."""
        settings = self._settings
        before_cooldown = 1 - settings.cooldown_fraction
        if state.step >= before_cooldown * settings.steps:
            state.end_is_fixed = True
        elif state.seconds >= before_cooldown * self._limit:
            state.end_is_fixed = True
            # Extrapolates the speed of the current stage.
            seconds = max(state.seconds - state.stage_seconds, 1e-9)
            pace = (state.step - state.stage_step) / seconds
            if settings.compile and step_seconds:
                # Compiling will not be repeated.
                pace = max(pace, 1 / step_seconds)
            left = max(1, round((self._limit - state.seconds) * pace))
            state.cooldown_steps = min(left, settings.steps - state.step)
            state.total_steps = state.step + state.cooldown_steps
            if state.step < settings.warmup_steps:
                self._say(
                    f"warning: the cooldown of train.minutes={settings.minutes:g} begins after "
                    f"{state.step} of train.warmup_steps={settings.warmup_steps}, and the learning "
                    "rate has not reached its peak: lower train.warmup_steps or raise train.minutes"
                )
