from dataclasses import replace

import torch

from transformer_xl.model.layer import make_norm
from transformer_xl.model.variants.norms import RMSNorm


def test_the_settings_choose_the_normalization(tiny_config):
    layer = make_norm(replace(tiny_config, norm_eps=0.5))
    assert isinstance(layer, torch.nn.LayerNorm)
    assert (layer.eps, layer.normalized_shape) == (0.5, (16,))
    rms = make_norm(replace(tiny_config, norm="rms", norm_eps=0.5))
    assert isinstance(rms, RMSNorm)
    assert {name: tuple(x.shape) for name, x in rms.named_parameters()} == {"weight": (16,)}


def test_a_root_mean_square_of_one_is_left_alone(tiny_config):
    module = RMSNorm(16, 0.0)
    x = torch.randn(3, 16)
    torch.testing.assert_close(module(x).square().mean(-1), torch.ones(3))
    torch.testing.assert_close(module(3 * x), module(x))
    torch.testing.assert_close(module(module(x)), module(x))
