"""How many training steps take a given time: measured for several models in turns.

In turns, whatever else the machine does slows all of them alike. A comparison at equal time then
trains each for the steps that take that time, so that its results do not depend on how busy the
machine is.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

import torch

from transformer_xl.config import Config, GenerateConfig, pick_device
from transformer_xl.data import Corpus, prepare
from transformer_xl.inference.generate import prompt_for
from transformer_xl.train import stepper

ROUNDS = 10
"""Turns of each model."""
_LEAST_ROUNDS = 3
"""Its turns at least, where there is little time."""
_STEPS = 2
"""Steps in a turn, or one for each memory length of the training, if these are more."""


def stages_of(config: Config) -> tuple[tuple[float, int, int], ...]:
    """Return the stages of a training; without a curriculum, a single one."""
    whole = (0.0, config.train.segment_len, config.model.mem_len)
    return config.train.stages or (whole,)


def paces(configs: Mapping[str, Config], seconds: float = math.inf) -> dict[str, list[float]]:
    """Measure the seconds of a training step of each model in each stage, in turns.

    Args:
        configs: The recipes by name, with their text.
        seconds: After this time, no further turn begins, but for the first three.

    Returns:
        For each model, the median seconds of a step in each stage, to five digits.
    """
    device = pick_device()
    corpora = {name: prepare(config.data, lambda _: None) for name, config in configs.items()}
    steps, n_steps = {}, {}
    for name, config in configs.items():
        for n, stage in enumerate(stages_of(config)):
            in_stage = _in_stage(config, stage, corpora[name])
            steps[name, n] = stepper(in_stage, corpora[name], device)
            n_steps[name, n] = max(_STEPS, len(config.train.mem_lens(stage[2])))
    for key, step in steps.items():
        for _ in range(n_steps[key]):
            step()
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    first_began = time.perf_counter()
    for n in range(ROUNDS):
        if n >= _LEAST_ROUNDS and time.perf_counter() - first_began > seconds:
            break
        for key, step in steps.items():
            began = time.perf_counter()
            for _ in range(n_steps[key]):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken[key].append((time.perf_counter() - began) / n_steps[key])
    return {
        name: [float(f"{median(taken[name, n]):.5g}") for n in range(len(stages_of(config)))]
        for name, config in configs.items()
    }


def with_others(
    known: Mapping[str, list[float]], measured: Mapping[str, list[float]]
) -> dict[str, list[float]]:
    """Add measured paces to known ones, which stay, as the runs of these models depend on them.

    Args:
        known: Seconds of a step in each stage, by model.
        measured: The same of more models, in the same turns as some of the known ones.

    Returns:
        The known ones, and the others, scaled by how much faster or slower the known ones were
        measured, to five digits, so that a file of them gives the same steps.
    """
    both = [name for name in measured if name in known]
    before = [x for name in both for x in known[name]]
    now = [x for name in both for x in measured[name]]
    ratio = median([x / y for x, y in zip(before, now, strict=True)] or [1.0])
    added = {name: [float(f"{ratio * x:.5g}") for x in each] for name, each in measured.items()}
    return {**added, **known}


def steps_in(minutes: float, config: Config, seconds: list[float]) -> int:
    """Return how many steps take a time, if those of each stage take so many seconds."""
    starts = [start for start, _, _ in stages_of(config)]
    shares = [stop - start for start, stop in zip(starts, [*starts[1:], 1.0], strict=True)]
    mean = sum(share * each for share, each in zip(shares, seconds, strict=True))
    return max(1, round(60 * minutes / mean))


def _in_stage(config: Config, stage: tuple[float, int, int], corpus: Corpus) -> Config:
    _, segment_len, mem_len = stage
    is_random = len(config.train.mem_lens(mem_len)) > 1
    least = config.train.random_mem_len if is_random else None
    return replace(
        config,
        train=replace(config.train, stages=(), segment_len=segment_len, random_mem_len=least),
        model=replace(config.model, mem_len=mem_len),
        # Required, although no sample is written.
        generate=GenerateConfig(prompt=prompt_for(corpus.vocab)),
    )
