"""A saved model, and weights that are far from zero."""

import pytest
import torch

from transformer_xl.model import TransformerXL


@pytest.fixture
def paper(tiny_config):
    """The paper's network, as it is drawn."""
    return TransformerXL(tiny_config).eval()


@pytest.fixture
def folder(paper, tmp_path):
    """The folder of the same model."""
    paper.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@torch.no_grad()
def filled(module, std=0.5):
    """Draw all parameters of a module anew."""
    for parameter in module.parameters():
        parameter.normal_(0, std)
    return module.eval()


def tokens(B=2, T=4):
    return torch.randint(31, (B, T))
