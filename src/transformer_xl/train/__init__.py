"""Training: optimizers, schedules, the loop and what it records."""

from transformer_xl.train.loop import Interrupted, train
from transformer_xl.train.runner import Network
from transformer_xl.train.state import TrainState
from transformer_xl.train.step import train_step

__all__ = ["Interrupted", "Network", "TrainState", "train", "train_step"]
