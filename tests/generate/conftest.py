"""The model that writes."""

from dataclasses import replace

import pytest

from transformer_xl.model import TransformerXL


@pytest.fixture
def model(tiny_config):
    return TransformerXL(replace(tiny_config, init_std=0.3)).eval()
