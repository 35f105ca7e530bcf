"""A vocabulary of another size: tokens are added at its end, or removed from there."""

from dataclasses import replace

import torch
from torch import nn

from transformer_xl.errors import InputError
from transformer_xl.model import LanguageModel, build_model, first_wrapped, whole


@torch.no_grad()
def resize_vocabulary(model: LanguageModel, vocab_size: int, *, draws: bool = False) -> None:
    """Give a model a vocabulary of another size; what it knows of the other tokens stays.

    With an adaptive softmax, tokens are added to the last cluster, or removed from it. Weights that
    were tied are tied again. An optimizer has to be made anew, as some parameters are others.

    Args:
        model: The model. It is changed.
        vocab_size: The new size.
        draws: Draw the weights of new tokens from a normal distribution of standard deviation
            ``init_std``. False: the mean of the other tokens of its cluster, so that a new token is
            about as likely as an average one.

    Raises:
        InputError: The size is no positive integer, or does not fit another setting (the last of
            ``cutoffs``); or the embedding or the softmax was wrapped, by an adapter for example.
    """
    whole("vocab_size", vocab_size, 1)
    # A name for each weight: of tied ones the first.
    old = dict(model.named_parameters())
    config = replace(model.config, vocab_size=vocab_size)
    for name in ("embedding", "softmax"):
        if wrapped := first_wrapped(model.get_submodule(name)):
            raise InputError(
                f"{name}: {wrapped} was wrapped, replaced or hooked; resize the vocabulary first, "
                "or merge adapters (model.merge_and_unload())"
            )
    with torch.device("meta"):
        resized = build_model(config)
    parameters: dict[int, nn.Parameter] = {}
    for name, shape in resized.named_parameters():
        before = parameters[id(shape)] = old[name]
        if before.shape != shape.shape:
            new, n = before.new_empty(shape.shape), min(len(before), len(shape))
            # One table, or the vector of biases, may hold all clusters.
            has_all = len(before) == model.config.vocab_size
            new[:n] = before[:n]
            new[n:] = before[model.config.clusters[-1].start if has_all else 0 :].mean(0)
            if draws and new.ndim > 1:
                new[n:].normal_(0.0, config.init_std)
            parameters[id(shape)] = nn.Parameter(new, requires_grad=before.requires_grad)
    for name in ("embedding", "softmax"):
        before, module = model.get_submodule(name), resized.get_submodule(name)
        for part in module.modules():
            for key, shape in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
                part.register_parameter(key, parameters[id(shape)])
        setattr(model, name, module.train(before.training))
    model.config = config
