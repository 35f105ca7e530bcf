"""Training: the loop, its optimizers, and what a run reports."""

from transformer_xl.train.loop import Interrupted, TrainState, train, train_step

__all__ = ["Interrupted", "TrainState", "train", "train_step"]
