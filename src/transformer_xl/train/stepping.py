"""Steps of a training, to measure how long they take."""

from collections.abc import Callable

import torch

from transformer_xl.config import Config, World
from transformer_xl.data import Corpus
from transformer_xl.train.beginning import fit_to_corpus, new_state
from transformer_xl.train.runner import Network
from transformer_xl.train.step import train_step


def stepper(config: Config, corpus: Corpus, device: torch.device) -> Callable[[], None]:
    """Return a function that makes a training step with a full memory, as often as it is called."""
    config = fit_to_corpus(config, corpus)
    state = new_state(config, corpus, device, World())
    # No step is beyond the end, where the learning rate would be negative.
    state.total_steps = 1_000_000
    state.model.train()
    network = Network(state.model, config.train, state.world)

    def step() -> None:
        train_step(config, state, network)

    for _ in range(-(-config.model.mem_len // config.train.segment_len)):
        step()
    return step
