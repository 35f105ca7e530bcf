"""How far back a model finds an answer: accuracy by distance on synthetic episodes.

The episodes are those of :mod:`transformer_xl.data.episodes`; only the tokens that are determined
count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from transformer_xl.data.episodes import (
    TASKS,
    Episode,
    EpisodeConfig,
    evaluation_episodes,
)
from transformer_xl.model import LanguageModel
from transformer_xl.model.arguments import require_at_least
from transformer_xl.model.lengths import SEGMENT_LEN, Lengths
from transformer_xl.model.limits import require_mem_len
from transformer_xl.model.reading import read
from transformer_xl.model.wrapping import evaluating

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

    Each episode is a text of its own, which begins with an ``<eos>``, as it does in training. It is
    read in segments with the memory carried, as in an evaluation.

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
    results = []
    with evaluating(model):
        for task in tasks:
            for distance in distances:
                episodes = evaluation_episodes(task, distance, n_episodes, config=config, seed=seed)
                batches = (episodes[i : i + batch_size] for i in range(0, n_episodes, batch_size))
                answers = [_answers(model, batch, config.eos_id, lengths) for batch in batches]
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


def _answers(
    model: LanguageModel, episodes: Sequence[Episode], eos_id: int, lengths: Lengths
) -> tuple[Float[np.ndarray, " answers"], Float[np.ndarray, " answers"]]:
    """Return -log p of each answer of a batch, and 1 where it is the most likely token, else 0."""
    texts = _padded(episodes, eos_id)
    # An answer is predicted where the token before it is read; <eos> moves it by one.
    places = torch.from_numpy(np.stack([episode.answers for episode in episodes]))
    rows = torch.arange(len(texts))[:, None].expand_as(places)
    targets = texts.gather(1, places + 1)
    mems = model.keep(model.start_memory(len(texts), lengths.mem_len))
    nll, is_right = [], []
    for piece in read(model, texts[:, :-1], lengths, mems):
        within = (piece.start <= places) & (places < piece.start + piece.hidden.shape[1])
        if not within.any():
            continue
        states = piece.hidden[rows[within], places[within] - piece.start]
        log_probs: Tensor = model.head.log_probs(states).double().cpu()
        asked = targets[within]
        nll.append(-log_probs.gather(1, asked[:, None])[:, 0].numpy())
        is_right.append((log_probs.argmax(1) == asked).double().numpy())
    return np.concatenate(nll), np.concatenate(is_right)


def _padded(episodes: Sequence[Episode], eos_id: int) -> Int64[Tensor, "B L"]:
    """Return texts of one length that begin with ``<eos>``; what follows the answers is padding."""
    longest = max(len(episode.tokens) for episode in episodes)
    texts = np.full((len(episodes), longest + 1), eos_id)
    for row, episode in zip(texts, episodes, strict=True):
        row[1 : len(episode.tokens) + 1] = episode.tokens
    return torch.from_numpy(texts)
