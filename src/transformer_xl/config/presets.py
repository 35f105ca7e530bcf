"""Evaluation settings of the published models (the authors' scripts; Tables 1 to 4)."""

from typing import NamedTuple

from transformer_xl.config.checks import near
from transformer_xl.config.evaluation import EvalConfig
from transformer_xl.config.model import ModelConfig
from transformer_xl.errors import SettingsError

NO_LIMIT = 1 << 30
"""A ``clamp_len`` that limits nothing; None would leave the limit of the model in place."""


class Preset(NamedTuple):
    """Lengths of an evaluation, and the sizes by which a model is recognized."""

    segment_len: int
    mem_len: int
    clamp_len: int
    n_layer: int
    d_model: int
    d_inner: int
    vocab_sizes: range
    """Sizes of the vocabulary of the published model."""


_ENWIK8, _TEXT8 = range(204, 206), range(27, 29)
_WIKITEXT_103, _LM1B = range(267_735, 267_745), range(790_000, 800_000)

PRESETS = {
    "enwik8-base": Preset(80, 2100, 820, 12, 512, 2048, _ENWIK8),
    "enwik8-large": Preset(128, 3800, 1000, 24, 1024, 3072, _ENWIK8),
    "text8-base": Preset(80, 2100, 820, 12, 512, 2048, _TEXT8),
    "text8-large": Preset(128, 3800, 1000, 24, 1024, 3072, _TEXT8),
    "wt103-base": Preset(64, 640, 400, 16, 410, 2100, _WIKITEXT_103),
    "wt103-base-nvidia": Preset(64, 640, 400, 16, 512, 2048, _WIKITEXT_103),
    "wt103-large": Preset(128, 1600, 1000, 18, 1024, 4096, _WIKITEXT_103),
    "lm1b-base": Preset(32, 128, NO_LIMIT, 18, 1024, 4096, _LM1B),
    "lm1b-large": Preset(32, 128, NO_LIMIT, 24, 1280, 8192, _LM1B),
}


def recognize(config: ModelConfig) -> str | None:
    """Return the name of the published model of these sizes and positions, if any."""
    if config.attn_type != 0:
        return None
    widths = (config.n_layer, config.d_model, config.d_inner)
    for name, preset in PRESETS.items():
        is_it = widths == (preset.n_layer, preset.d_model, preset.d_inner)
        if is_it and config.vocab_size in preset.vocab_sizes:
            return name
    return None


def preset_eval(name: str, *, keys_beyond_memory: int = 0) -> EvalConfig:
    """Return the settings of a published evaluation, in which all tokens see as many keys.

    Args:
        name: The name of the preset.
        keys_beyond_memory: How many more keys than ``mem_len`` a token sees, counting its own:
            1 with the authors' TensorFlow code and NVIDIA's, 0 with the authors' PyTorch code.

    Raises:
        SettingsError: The preset is unknown.
    """
    if name not in PRESETS:
        nearest = near(name, PRESETS)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise SettingsError(f"{name!r} is no preset; there are {', '.join(PRESETS)}{hint}")
    segment_len, mem_len, clamp_len, *_ = PRESETS[name]
    return EvalConfig(
        split="test",
        segment_len=segment_len,
        mem_len=mem_len,
        attn_len=mem_len + keys_beyond_memory,
        clamp_len=clamp_len,
    )
