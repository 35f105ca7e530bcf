"""What a model is put together from: positions of a user, and linear maps that are called."""

from dataclasses import replace

import pytest
import torch
from tests.laws.conftest import CONFIG
from torch import nn

from transformer_xl import Positions, PositionScheme
from transformer_xl.model import TransformerXL
from transformer_xl.model.decoder import Decoder
from transformer_xl.model.layer import project
from transformer_xl.model.positions import RelativeSinusoids
from transformer_xl.model.segment import Lengths
from transformer_xl.ops import Linear

CONFIG = replace(CONFIG, mem_len=40)


class Slopes(PositionScheme):
    """The linear biases of ALiBi, with a learned factor."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def encode(self, model, n_keys, n_queries, view):
        H, K = model.config.n_head, model.config.head_width
        distance = torch.arange(n_keys - 1, -1, -1, dtype=model.dtype)
        bias = -self.factor * distance[:, None] * torch.tensor([0.5, 0.25]).to(distance)
        none = bias.new_zeros(n_keys, H, K)
        return [Positions(none, none[0], none[0], bias)] * model.config.n_layer


@pytest.fixture
def sloped():
    return TransformerXL(CONFIG, positions=Slopes()).double().eval()


@torch.no_grad()
def test_positions_of_a_user_make_segments_invisible_and_are_stepped(sloped):
    tokens = torch.randint(23, (2, 30))
    whole = sloped(tokens).hidden
    other = TransformerXL(CONFIG).double().eval()
    other.load_state_dict(sloped.state_dict(), strict=False)
    assert (other(tokens).hidden - whole).abs().max() > 1e-3
    for keeps in (False, True):
        mems, hidden = sloped.start_memory(2), []
        mems = sloped.keep(mems) if keeps else mems
        for segment in tokens.split(7, 1):
            out = sloped(segment, mems)
            mems = out.mems
            hidden.append(out.hidden)
        torch.testing.assert_close(torch.cat(hidden, 1), whole, rtol=0, atol=1e-12)
    decoder = Decoder.of(sloped, Lengths.of(CONFIG), sloped.start_memory(2))
    stepped = torch.stack([decoder(token) for token in tokens.T], 1)
    torch.testing.assert_close(stepped, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("M", [0, 5])
def test_a_map_that_was_put_in_is_called_once_with_memory_and_segment(M):
    x, memory = torch.randn(2, 3, 4), torch.randn(2, M, 4)
    module, calls = Linear(4, 12, bias=False), []

    class Wrapper(nn.Module):
        def forward(self, x):
            calls.append(x.shape[1])
            return module(x)

    expected = project(module, x, memory if M else None, 2)
    found = project(Wrapper(), x, memory if M else None, 2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert calls == [M + 3]


def test_positions_of_which_the_settings_do_not_know_are_not_saved(sloped, tmp_path):
    with pytest.raises(ValueError, match=r"positions=Slopes: kind='transformer_xl' .*register_mod"):
        sloped.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())


@torch.no_grad()
def test_two_models_may_have_one_scheme():
    scheme, tokens = RelativeSinusoids(), torch.randint(23, (1, 9))
    models = [TransformerXL(CONFIG, positions=scheme).eval() for _ in range(2)]
    for model in models * 2:
        kept = model(tokens, model.keep(model.start_memory(1))).hidden
        torch.testing.assert_close(kept, model(tokens).hidden, rtol=1e-4, atol=1e-5)
