"""The run folder and its checkpoints."""

from transformer_xl.train.checkpoint.run_folder import (
    CHECKPOINTS,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    RESULTS_FILE,
    SAMPLE_FILE,
    RunFolder,
)

__all__ = [
    "CHECKPOINTS",
    "ENVIRONMENT_FILE",
    "METRICS_FILE",
    "RECIPE_FILE",
    "RESULTS_FILE",
    "SAMPLE_FILE",
    "RunFolder",
]
