"""Evaluation lengths of the published models, which are those of the ``paper-*`` recipes."""

from transformer_xl.config import EvalConfig, ModelConfig, load_recipe

_NO_LIMIT = 1 << 30
"""A ``clamp_len`` that limits nothing; None would leave the limit of the model in place."""
_MODELS = {
    "enwik8-base": range(204, 206),
    "enwik8-large": range(204, 206),
    "text8-base": range(27, 29),
    "text8-large": range(27, 29),
    "wt103-base": range(267_735, 267_745),
    "wt103-base-nvidia": range(267_735, 267_745),
    "wt103-large": range(267_735, 267_745),
    "lm1b-base": range(790_000, 800_000),
    "lm1b-large": range(790_000, 800_000),
}
"""Sizes of the vocabulary of the published models, by the names of their recipes."""


def published_evaluation(config: ModelConfig, *, is_pytorch: bool) -> tuple[str, EvalConfig] | None:
    """Return the name of the published model of these sizes and its evaluation, if there is one.

    Args:
        config: The settings of a model.
        is_pytorch: Whether the authors' PyTorch code wrote it. In their TensorFlow code and
            NVIDIA's a token sees one more key than ``mem_len``, its own.
    """
    for name, vocab_sizes in _MODELS.items():
        if config.attn_type != 0 or config.vocab_size not in vocab_sizes:
            continue
        recipe = load_recipe(f"paper-{name}")
        widths = ("n_layer", "d_model", "d_inner")
        if all(getattr(config, x) == getattr(recipe.model, x) for x in widths):
            mem_len = recipe.eval.mem_len
            assert mem_len is not None
            return name, EvalConfig(
                split="test",
                segment_len=recipe.eval.segment_len,
                mem_len=mem_len,
                attn_len=mem_len + (not is_pytorch),
                clamp_len=recipe.eval.clamp_len or _NO_LIMIT,
            )
    return None
