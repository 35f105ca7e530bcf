"""What a run leaves on the disk: its folder, and in it the checkpoints that it goes on from."""

from transformer_xl.train.checkpoint.run_folder import (
    CHECKPOINTS,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    RunFolder,
)

__all__ = ["CHECKPOINTS", "ENVIRONMENT_FILE", "METRICS_FILE", "RECIPE_FILE", "RunFolder"]
