"""Synthetic time series with seasons, trends and changes of regime, and forecasts to compare with.

A series is hourly. In each regime, of 240 hours on average,

    y(t) = level + slope t + amplitude weekday(t) day(t) + week(t) + noise(t)

where ``day`` is a random sum of four harmonics of 24 hours, ``weekday`` and ``week`` are seven
factors and seven offsets, and the noise is autoregressive with Student-t innovations. A new regime
changes level, slope, amplitude and noise, and sometimes the shape of the day.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from transformer_xl.data import Recordings

DAY, WEEK = 24, 168
"""Hours of the two seasons."""
LENGTH = 960
"""Hours of a series."""
REGIME = 240
"""Mean hours of a regime."""
HORIZON = DAY
"""Hours of a forecast."""
ORIGINS = (503, 671, 839, 935)
"""Last known hours of the forecasts of a series."""
N_FEATURES = 7


def made_series(n: int, seed: int, length: int = LENGTH) -> Float[np.ndarray, "n length"]:
    """Return series; the same seed makes the same ones."""
    return np.stack([_one(np.random.default_rng([seed, k]), length) for k in range(n)])


def _one(draw: np.random.Generator, length: int) -> Float[np.ndarray, " length"]:
    start, phase = draw.normal(0, 2), int(draw.integers(WEEK))
    weekday, week = np.exp(draw.normal(0, 0.3, 7)), draw.normal(0, 0.4, 7)
    day = _day(draw)
    values, shock, first = np.empty(length), 0.0, 0
    while first < length:
        stop = min(length, first + 24 + int(draw.exponential(REGIME - 24)))
        if first and draw.random() < 0.3:
            day = _day(draw)
        amplitude, slope = np.exp(draw.normal(0.3, 0.5)), draw.normal(0, 0.01)
        scale, kept = np.exp(draw.normal(-1.5, 0.5)), draw.uniform(0, 0.9)
        innovations = scale * draw.standard_t(4, stop - first)
        times = np.arange(first, stop)
        hours = times + phase
        weekdays = hours // 24 % 7
        regular = start + slope * (times - first)
        regular = regular + amplitude * weekday[weekdays] * day[hours % 24] + week[weekdays]
        for t in range(stop - first):
            shock = kept * shock + innovations[t]
            values[first + t] = regular[t] + shock
        start += slope * (stop - first) + draw.normal(0, 1.0)
        first = stop
    return values


def _day(draw: np.random.Generator) -> Float[np.ndarray, " day"]:
    hours, k = np.arange(24)[:, None], np.arange(1, 5)
    amplitudes, shifts = draw.normal(0, 1 / k), draw.uniform(0, 2 * np.pi, 4)
    day = (amplitudes * np.cos(2 * np.pi * k * hours / 24 + shifts)).sum(1)
    return day / (day.std() + 1e-9)


class Scaled(NamedTuple):
    """Series whose first week has mean 0 and deviation 1."""

    values: Float[np.ndarray, "n length"]
    features: Float[np.ndarray, "n length F"]
    """At each hour t: y(t); y(t + 1 - 24) and y(t + 1 - 168), as 0 in the first week; the position
    of t + 1 in cycles of 24 and of 168 hours from the start of the series, as points on circles.
    The phase of a series, at which hour of a day and of a week it starts, is unknown."""


def scaled(series: Float[np.ndarray, "n length"]) -> Scaled:
    """Scale series by their first week, and return the inputs of a model."""
    known = series[:, :WEEK]
    values = (series - known.mean(1, keepdims=True)) / (known.std(1, keepdims=True) + 1e-9)
    features = np.zeros((*values.shape, N_FEATURES))
    features[..., 0] = values
    for n, lag in ((1, DAY), (2, WEEK)):
        features[:, lag - 1 :, n] = values[:, : values.shape[1] - lag + 1]
    after = np.arange(1, values.shape[1] + 1)
    for n, season in ((3, DAY), (5, WEEK)):
        angle = 2 * np.pi * after / season
        features[..., n], features[..., n + 1] = np.sin(angle), np.cos(angle)
    return Scaled(values, features)


def recordings(series: Float[np.ndarray, "n length"]) -> Recordings:
    """Return the inputs of a model behind the first week, and the seasonal differences that follow.

    The target of hour t is y(t + 1) - y(t + 1 - 24).
    """
    values, features = scaled(series)
    targets = np.full(values.shape, np.nan, np.float32)
    targets[:, WEEK - 1 : -1] = values[:, WEEK:] - values[:, WEEK - DAY : -DAY]
    starts = np.zeros(values.shape, bool)
    starts[:, WEEK - 1] = True
    kept = slice(WEEK - 1, None)
    inputs = features[:, kept].reshape(-1, N_FEATURES).astype(np.float32)
    return Recordings(inputs, targets[:, kept].reshape(-1), starts[:, kept].reshape(-1))


def seasonal_naive(
    values: Float[np.ndarray, "n length"], origin: int, season: int = DAY
) -> Float[np.ndarray, "n horizon"]:
    """Forecast that the last season repeats."""
    last = values[:, origin + 1 - season : origin + 1]
    return last[:, np.arange(HORIZON) % season]


def mase(
    values: Float[np.ndarray, "n length"], origin: int, point: Float[np.ndarray, "n horizon"]
) -> Float[np.ndarray, " n"]:
    """Return the mean absolute error of forecasts, as a share of that of the seasonal naive one.

    The share is that of the past of each series (MASE; Hyndman and Koehler, 2006).
    """
    truth = values[:, origin + 1 : origin + 1 + HORIZON]
    past = values[:, : origin + 1]
    naive = np.abs(past[:, DAY:] - past[:, :-DAY]).mean(1)
    return np.abs(point - truth).mean(1) / naive


def crps(
    paths: Float[np.ndarray, "n paths horizon"], truth: Float[np.ndarray, "n horizon"]
) -> Float[np.ndarray, " n"]:
    """Return the continuous ranked probability score of paths, the mean over the horizon.

    E|X - y| - E|X - X'| / 2, the expectations over pairs of paths.
    """
    ordered = np.sort(paths, axis=1)
    P = paths.shape[1]
    weights = 2 * np.arange(1, P + 1) - P - 1
    spread = (weights[:, None] * ordered).sum(1) / (P * (P - 1))
    return (np.abs(paths - truth[:, None]).mean(1) - spread).mean(1)


def origins_of(values: Float[np.ndarray, "n length"]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the last known hours of the forecasts, and the values that follow."""
    for origin in ORIGINS:
        yield origin, values[:, origin + 1 : origin + 1 + HORIZON]
