"""Training: the loop, its optimizers, and what a run reports."""

from transformer_xl.train.interrupts import Interrupted
from transformer_xl.train.loop import train, train_step
from transformer_xl.train.state import TrainState

__all__ = ["Interrupted", "TrainState", "train", "train_step"]
