"""Models that predict by a rule from the tokens they remember, and small ones of each kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from transformer_xl.config import ModelConfig
from transformer_xl.model import LanguageModel, Memory, TransformerXL, build_model

Rule = Callable[[list[int]], int]


class Ruled(TransformerXL):
    """Says which token comes next; its hidden states are the tokens themselves."""

    rule: Rule

    def _embedded(self, segment):
        return one_hot(segment.tokens, self.config.vocab_size).float()

    def _read(self, states, mems, view):
        M, T = len(mems), states.shape[1]
        most = view.mem_len if view.padding is None else M + T
        read = torch.cat([mems.states[0], states], 1).argmax(2).tolist()
        unseen = [0] * len(read) if mems.forgotten is None else mems.forgotten.tolist()
        answers = [
            [self.rule(row[n : M + t + 1]) for t in range(T)]
            for row, n in zip(read, unseen, strict=True)
        ]
        mems = mems.extend([states], most)
        if view.padding is not None:
            mems = mems.realigned(view.padding, view.mem_len)
        return one_hot(torch.tensor(answers), self.config.vocab_size).float(), mems

    def keep(self, memory: Memory) -> Memory:
        return memory


@pytest.fixture(params=["transformer_xl", "gpt", "lstm", "mamba2"])
def small(request: pytest.FixtureRequest, of_kind: Any) -> Callable[[ModelConfig], LanguageModel]:
    """Builds a model of one kind with the sizes of given settings: `small(config)`."""
    kind = request.param
    if kind == "mamba2":
        pytest.importorskip("transformers", reason="transformers is not installed")
    own = {"mamba2": {"n_head": 4, "state_size": 8, "d_inner": 2048}}.get(kind, {})
    return lambda config: build_model(of_kind(config, kind, **own)).double().train()


@pytest.fixture
def ruled() -> Callable[..., Ruled]:
    """Makes models of a rule: `ruled(rule, vocab_size=16, mem_len=9)`."""

    def make(rule: Rule, *, vocab_size: int, mem_len: int) -> Ruled:
        config = ModelConfig(
            vocab_size=vocab_size,
            n_layer=1,
            n_head=1,
            d_model=vocab_size,
            d_inner=4,
            mem_len=mem_len,
        )
        model = Ruled(config).eval()
        model.rule = rule
        with torch.no_grad():
            model.softmax.weight.copy_(50 * torch.eye(vocab_size))
            model.softmax.bias.zero_()
        return model

    return make
