"""How far back a model finds an answer: accuracy by distance on synthetic episodes.

The episodes are those of :mod:`transformer_xl.studies.episodes`; only the tokens that are
determined count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from transformer_xl.inference import states_at
from transformer_xl.model import (
    SEGMENT_LEN,
    LanguageModel,
    Lengths,
    evaluating,
    require_at_least,
    require_mem_len,
    require_remembering,
)
from transformer_xl.studies.episodes import (
    TASKS,
    Episode,
    EpisodeConfig,
    evaluation_episodes,
    training_episodes,
)

_GOLDEN_RATIO = (5**0.5 - 1) / 2
DISTANCES = (10, 30, 100, 300, 1000, 3000, 10000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled:
    """What a model answers in the episodes of one task and distance."""

    task: str
    distance: int
    accuracy: float
    """Share of the answers to which the model gives the highest probability."""
    nll: float
    """Mean of -log p of the answers, in nats."""
    n_answers: int


@torch.no_grad()
def accuracy_by_distance(
    model: LanguageModel,
    distances: Sequence[int] = DISTANCES,
    *,
    tasks: Sequence[str] = TASKS,
    n_episodes: int = 100,
    config: EpisodeConfig | None = None,
    seed: int = 0,
    batch_size: int = 25,
    segment_len: int = SEGMENT_LEN,
    mem_len: int | None = None,
    attn_len: int | None = None,
    clamp_len: int | None = None,
) -> list[Recalled]:
    """Measure how often a model finds the answer at each distance.

    Each episode is read in segments with the memory carried, as in an evaluation. Before it comes
    the end of other episodes, as in training, of different length, so that answers stand at all
    places of a segment.

    Args:
        model: A model trained on episodes with the same ``config``; its mode is restored
            afterwards.
        distances: The distances.
        tasks: The tasks.
        n_episodes: Episodes of each task and distance.
        config: The sizes of the episodes. None: the defaults.
        seed: Random seed of the episodes.
        batch_size: Episodes that are read as a batch.
        segment_len: Segment length.
        mem_len: Memory length. None: as configured, like ``attn_len`` and ``clamp_len``.
        attn_len: Keys a query sees, counting its own.
        clamp_len: Distances above it count as it.

    Returns:
        A result for each task and distance, in this order.

    Raises:
        ValueError: The vocabulary of the model is not that of the episodes, a distance is too short
            for a task, a length does not fit the model, or a count is below 1.
    """
    config = config or EpisodeConfig()
    require_at_least(1, n_episodes=n_episodes, batch_size=batch_size)
    if model.config.vocab_size != config.vocab_size:
        raise ValueError(
            f"the model has a vocabulary of {model.config.vocab_size} tokens, and these episodes "
            f"have {config.vocab_size}: measure with the EpisodeConfig of its training text, and "
            f"train with --data.vocab integers --data.vocab_size {config.vocab_size}"
        )
    require_mem_len(model, mem_len)
    lengths = Lengths.of(
        model.config,
        segment_len=segment_len,
        mem_len=mem_len,
        attn_len=attn_len,
        clamp_len=clamp_len,
        ext_len=0,
    )
    require_remembering(model, lengths)
    results = []
    with evaluating(model):
        for task in tasks:
            for distance in distances:
                episodes = evaluation_episodes(task, distance, n_episodes, config=config, seed=seed)
                leads = _leads(task, distance, lengths.segment_len, config=config, seed=seed)
                answers = [
                    _answers(model, episodes[i : i + batch_size], leads, lengths)
                    for i in range(0, n_episodes, batch_size)
                ]
                nll, is_right = (np.concatenate(each) for each in zip(*answers, strict=True))
                results.append(
                    Recalled(
                        task=task,
                        distance=distance,
                        accuracy=float(is_right.mean()),
                        nll=float(nll.mean()),
                        n_answers=len(nll),
                    )
                )
    return results


def _leads(
    task: str, distance: int, segment_len: int, *, config: EpisodeConfig, seed: int
) -> Iterator[list[int]]:
    """Yield what is read before an episode: the end of others, 1 to ``segment_len`` tokens."""
    # No longer than needed to fill a segment.
    distance = max(min(distance, segment_len), config.shortest(task))
    others = training_episodes((distance, distance), config=config, tasks=[task], seed=seed)
    for i in count():
        # Spread evenly, whatever the number of episodes.
        length, lead = 1 + int(segment_len * (i * _GOLDEN_RATIO % 1)), [config.eos_id]
        while len(lead) < length:
            lead = [config.eos_id, *next(others).tokens.tolist(), *lead]
        yield lead[-length:]


def _answers(
    model: LanguageModel,
    episodes: Sequence[Episode],
    leads: Iterator[list[int]],
    lengths: Lengths,
) -> tuple[Float[np.ndarray, " answers"], Float[np.ndarray, " answers"]]:
    """Return -log p of each answer of a batch, and 1 where it is the most likely token, else 0."""
    texts, places, targets = [], [], []
    for episode in episodes:
        lead = next(leads)
        texts.append([*lead, *episode.tokens.tolist()])
        # An answer is predicted where the token before it is read.
        places.append((len(lead) + episode.answers - 1).tolist())
        targets.append(episode.tokens[episode.answers].tolist())
    states = states_at(model, texts, torch.tensor(places), lengths)
    log_probs: Tensor = model.head.log_probs(states.flatten(0, 1)).double().cpu()
    asked = torch.tensor(targets).flatten()
    nll = -log_probs.gather(1, asked[:, None])[:, 0]
    return nll.numpy(), (log_probs.argmax(1) == asked).double().numpy()
