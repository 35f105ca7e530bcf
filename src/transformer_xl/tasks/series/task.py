"""Time series: forecasts with intervals of synthetic series with seasons, trends and regimes."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from transformer_xl.data import write_recordings
from transformer_xl.tasks.series.forecast import forecast
from transformer_xl.tasks.series.made import (
    DAY,
    HORIZON,
    LENGTH,
    WEEK,
    crps,
    made_series,
    mase,
    origins_of,
    recordings,
    scaled,
    seasonal_naive,
)
from transformer_xl.tasks.task import Measured, Task, Trained

SEEDS = {"train": 1, "valid": 2, "test": 3}
"""Seeds of the splits."""
N_SERIES = {"train": 1_000, "valid": 100, "test": 100}
PATHS = 100
QUANTILES = (0.1, 0.5, 0.9)


class TimeSeries(Task):
    """A series is read hour by hour; the next 24 hours are drawn, 100 times, from the mixture.

    Medians are scored by MASE, the mean over the forecasts of a series; the score of a series in
    paired tests is its negative.
    """

    name = "series"
    title = "Synthetic time series, 24 hours ahead"
    metric = "MASE (smaller is better)"
    models = {"txl": ("series",)}  # noqa: RUF012
    makes_data = True

    def identity(self, source: Path | None) -> Mapping[str, object]:
        """Return seeds, numbers and hours of the series."""
        return {"seeds": SEEDS, "series": N_SERIES, "hours": LENGTH}

    def prepare(self, source: Path, folder: Path) -> None:
        """Make the series and write what models read."""
        for split, n in N_SERIES.items():
            write_recordings(folder, split, recordings(made_series(n, SEEDS[split])))

    def measure(self, trained: Trained, folder: Path, split: str) -> Measured:
        """Forecast each series from each origin."""
        series = scaled(made_series(N_SERIES[split], SEEDS[split]))
        quantiles, scores = [], []
        for origin, truth in origins_of(series.values):
            paths = forecast(
                trained.model,
                series.features[:, WEEK - 1 : origin + 1],
                HORIZON,
                known=series.features[:, origin + 1 : origin + 1 + HORIZON, 1:],
                offsets=seasonal_naive(series.values, origin),
                paths=PATHS,
                lengths=trained.lengths,
            )
            quantiles.append(dict(zip(QUANTILES, np.quantile(paths, QUANTILES, 1), strict=True)))
            scores.append(crps(paths, truth))
        measured = _measured(series.values, quantiles)
        return measured._replace(metrics=measured.metrics | {"CRPS": float(np.mean(scores))})

    def baselines(self, folder: Path, split: str) -> Iterator[tuple[str, Measured]]:
        """Yield seasonal naive forecasts, with the quantiles of past errors."""
        values = scaled(made_series(N_SERIES[split], SEEDS[split])).values
        for name, season in (("seasonal naive, day", DAY), ("seasonal naive, week", WEEK)):
            origins = [origin for origin, _ in origins_of(values)]
            yield name, _measured(values, [_naive(values, x, season) for x in origins])


def _naive(
    values: Float[np.ndarray, "n length"], origin: int, season: int
) -> dict[float, Float[np.ndarray, "n horizon"]]:
    """Return seasonal naive forecasts and, around them, the quantiles of their errors so far."""
    point, past = seasonal_naive(values, origin, season), values[:, : origin + 1]
    errors = past[:, season:] - past[:, :-season]
    around = {q: point + np.quantile(errors, q, axis=1)[:, None] for q in QUANTILES}
    return around | {0.5: point}


def _measured(
    values: Float[np.ndarray, "n length"],
    forecasts: list[dict[float, Float[np.ndarray, "n horizon"]]],
) -> Measured:
    errors, covered, widths = [], [], []
    for (origin, truth), quantiles in zip(origins_of(values), forecasts, strict=True):
        low, middle, high = (quantiles[q] for q in QUANTILES)
        errors.append(mase(values, origin, middle))
        covered.append(((low <= truth) & (truth <= high)).mean())
        widths.append((high - low).mean())
    by_series = np.mean(errors, axis=0)
    metrics = {
        "MASE": float(by_series.mean()),
        "coverage of 80 % intervals, %": 100 * float(np.mean(covered)),
        "width": float(np.mean(widths)),
    }
    return Measured(metrics, -by_series)
