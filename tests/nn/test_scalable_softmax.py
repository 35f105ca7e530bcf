"""Queries that see more than N keys grow with the logarithm of how many; others stay."""

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL
from transformer_xl.model.segment import View


def test_queries_begin_to_grow_at_the_given_number_of_keys() -> None:
    config = ModelConfig(
        vocab_size=5, n_layer=1, n_head=2, d_model=4, d_inner=4, mem_len=2, scalable_softmax=4
    )
    scale = TransformerXL(config).layers[0].scale
    q = torch.ones(1, 4, 2, 2)
    grown = scale.scaled(q, torch.tensor([[1, 4, 8, 16]]))
    # log(n) / log(4) beyond 4 keys, with the factors of a new model.
    assert grown[0, :, 0, 0].tolist() == pytest.approx([1, 1, 1.5, 2])
    with torch.no_grad():
        scale.growth.copy_(torch.tensor([0.0, 1.0]))
    grown = scale.scaled(q, torch.tensor([[1, 4, 8, 16]]))
    assert grown[0, :, 0, 0].tolist() == [1, 1, 1, 1]
    assert grown[0, 3, 1, 0].item() == pytest.approx(1 + torch.tensor(4.0).log().item())


@pytest.mark.parametrize("attn_len", [None, 6])
@pytest.mark.parametrize("first", [[0, 5], [[0, 0, 7, 7], [5, 5, 5, 8]]])
def test_keys_that_a_query_does_not_see_do_not_count(first, attn_len) -> None:
    config = ModelConfig(
        vocab_size=5, n_layer=1, n_head=2, d_model=4, d_inner=4, mem_len=5, scalable_softmax=2
    )
    scale = TransformerXL(config).layers[0].scale
    first = torch.tensor(first)
    q, view = torch.ones(2, 4, 2, 2), View(first_key=first, attn_len=attn_len)
    query, key = torch.arange(5, 9)[:, None], torch.arange(9)
    sees = (key <= query) & (key >= first.view(2, -1, 1)) & (key > query - (attn_len or 9))
    assert torch.equal(scale(q, 9, view), scale.scaled(q, sees.sum(-1)))
