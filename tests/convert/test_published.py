"""Published models are recognized by their sizes, and evaluated as they were."""

import pytest

from transformer_xl.config import ModelConfig, load_recipe
from transformer_xl.interop.convert.published import _MODELS, published_evaluation


def config(name, **changes):
    recipe = load_recipe(f"paper-{name}").model
    names = ("n_layer", "n_head", "d_model", "d_inner")
    sizes = {x: getattr(recipe, x) for x in names} | {"vocab_size": _MODELS[name][0]}
    return ModelConfig(**sizes | changes)


@pytest.mark.parametrize("name", _MODELS)
def test_a_published_model_is_recognized_by_its_sizes(name):
    for is_pytorch in (True, False):
        of_recipe = load_recipe(f"paper-{name}").eval
        found, lengths = published_evaluation(config(name, mem_len=3), is_pytorch=is_pytorch)
        assert (found, lengths.split) == (name, "test")
        assert (lengths.segment_len, lengths.mem_len) == (of_recipe.segment_len, of_recipe.mem_len)
        assert lengths.clamp_len == (of_recipe.clamp_len or 1 << 30)
        assert lengths.attn_len == lengths.mem_len + (not is_pytorch)
    for changes in ({"n_layer": 3}, {"d_inner": 99}, {"vocab_size": 5000}, {"attn_type": 2}):
        assert published_evaluation(config(name, **changes), is_pytorch=True) is None, changes


def test_the_vocabulary_tells_models_of_the_same_widths_apart():
    for name, size, other in (
        ("wt103-large", 793_471, "lm1b-base"),
        ("enwik8-base", 27, "text8-base"),
    ):
        found, _ = published_evaluation(config(name, vocab_size=size), is_pytorch=True)
        assert found == other
