"""An agent that has to remember: Gated Transformer-XL in a small game, with memory and without.

A game begins with a signal, one of four. Then come 11 to 23 steps of noise, and the last step asks
for the signal. The agent reads segments of 8 steps, so when it is asked, the signal is never in
what it reads: it has to be in the memory. For the right answer there is a reward of 1, and
nothing else is ever said to the agent: it learns by policy gradient (REINFORCE; Williams, 1992).

64 games go on side by side. Where one ends, the next begins in the same row, in the middle of
a segment: ``starts`` says where, so that no game sees the one before it. In play, step by step, it
is ``mems.reset(rows)``, and the numbers are the same.

    python examples/memory_task.py

Observations are vectors of real numbers. The agent maps them to the width of the model and hands
them to it as ``inputs_embeds``; the model's vocabulary are the actions, its softmax is the policy.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transformer_xl import ModelConfig, TransformerXL

SIGNALS = 4
NOISE = 4
WIDTH = SIGNALS + 1 + NOISE
"""Of an observation: the signal, whether it is asked for, and noise."""
GAMES = 64
SEGMENT = 8
SHORTEST, LONGEST = 13, 25
"""Steps of a game: longer than a segment, and shorter than the memory."""
MEMORY = 32


class Step(NamedTuple):
    """What the games show at one moment, a row for each game."""

    observation: Tensor
    starts: Tensor
    """Where a game begins."""
    asks: Tensor
    """Where the signal is asked for, and the game ends."""
    signal: Tensor
    """The answer, which the agent does not see."""


class Games:
    """Games side by side, each followed by another."""

    def __init__(self, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.left = torch.zeros(GAMES, dtype=torch.long)
        self.signal = torch.zeros(GAMES, dtype=torch.long)

    def step(self) -> Step:
        """Go on by one step in every game."""
        starts = self.left == 0
        lengths = torch.randint(SHORTEST, LONGEST + 1, (GAMES,), generator=self.draw)
        signals = torch.randint(SIGNALS, (GAMES,), generator=self.draw)
        self.left = torch.where(starts, lengths, self.left) - 1
        self.signal = torch.where(starts, signals, self.signal)
        asks = self.left == 0
        shown = nn.functional.one_hot(self.signal, SIGNALS) * starts[:, None]
        noise = torch.randn(GAMES, NOISE, generator=self.draw)
        return Step(torch.cat([shown, asks[:, None], noise], 1), starts, asks, self.signal)

    def segment(self) -> Step:
        """Go on by a segment: the same, with a column for each step."""
        steps = zip(*(self.step() for _ in range(SEGMENT)), strict=True)
        return Step(*(torch.stack(each, 1) for each in steps))


class Agent(nn.Module):
    """Sees vectors, remembers, and chooses among the signals."""

    def __init__(self, mem_len: int) -> None:
        super().__init__()
        config = ModelConfig(
            vocab_size=SIGNALS,
            n_layer=2,
            n_head=2,
            d_model=32,
            d_inner=64,
            mem_len=mem_len,
            norm_first=True,
            final_norm=True,
            gate="gru",
            dropout=0.0,
            init_std=0.1,
        )
        self.eyes = nn.Linear(WIDTH, config.d_model)
        self.model = TransformerXL(config)

    def forward(
        self, observation: Tensor, mems: Any = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return the logarithms of the probabilities of all actions, and the memory."""
        out = self.model(inputs_embeds=self.eyes(observation), mems=mems, starts=starts)
        return out.log_probs, out.mems


def learn(agent: Agent, updates: int, games: Games, say: Callable[[str], None]) -> None:
    """Play, and make more likely what was rewarded more often than usual."""
    optimizer = torch.optim.AdamW(agent.parameters(), lr=3e-3, weight_decay=0.0)
    mems, usual = None, 1 / SIGNALS
    for update in range(1, updates + 1):
        observation, starts, asks, signal = games.segment()
        log_probs, mems = agent(observation, mems, starts)
        if not asks.any():
            continue
        log_probs, signal = log_probs[asks], signal[asks]
        action = torch.multinomial(log_probs.detach().exp(), 1)[:, 0]
        reward = (action == signal).float()
        chosen = log_probs.gather(1, action[:, None])[:, 0]
        # A little is gained by staying undecided, as long as nothing is known.
        entropy = -(log_probs.exp() * log_probs).sum(1)
        loss = -((reward - usual) * chosen + 0.01 * entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        usual += 0.02 * (reward.mean().item() - usual)
        if update % 100 == 0:
            say(f"  after {update:4,} segments: {usual:.0%} of the answers were right")


@torch.no_grad()
def play(agent: Agent, steps: int, games: Games) -> float:
    """Play step by step; return the share of right answers."""
    mems, right, asked = None, 0, 0
    for _ in range(steps):
        observation, starts, asks, signal = games.step()
        if mems is not None:
            # Games that begin anew, single rows of the batch.
            mems = mems.reset(starts)
        log_probs, mems = agent(observation[:, None], mems)
        answers = log_probs[asks, 0].argmax(1)
        right += int((answers == signal[asks]).sum())
        asked += int(asks.sum())
    return right / max(asked, 1)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Let an agent with memory and one without learn and play; print how often each is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=600, help="segments to learn from")
    parser.add_argument("--steps", type=int, default=1000, help="steps to play afterwards")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    found = {}
    for name, mem_len in (("with memory", MEMORY), ("without memory", 0)):
        print(f"{name}, {mem_len} positions")
        torch.manual_seed(settings.seed)
        agent = Agent(mem_len)
        began = time.perf_counter()
        learn(agent, settings.updates, Games(settings.seed), print)
        seconds = time.perf_counter() - began
        found[name] = play(agent.eval(), settings.steps, Games(settings.seed + 1))
        print(f"  in play {found[name]:.1%} right, after {seconds:.0f} s of learning")
    print(f"By chance {1 / SIGNALS:.0%} would be right.")
    return found


if __name__ == "__main__":
    main()
