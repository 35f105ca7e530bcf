"""The beginning of a run: the recipe is compared with the corpus and the machine; first weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace

import torch
from torch import Tensor

from transformer_xl.config import Config, World
from transformer_xl.data import (
    Corpus,
    FeatureCorpus,
    Segments,
    Vocab,
    is_vocabulary,
    load_vocab,
)
from transformer_xl.errors import DataError, InputError, SettingsError
from transformer_xl.inference.evaluate import Passage, require_recordings
from transformer_xl.model import Lengths, ModelFolder, build_model, least_weights, require_bytes
from transformer_xl.train.optim import Average, Optimizer
from transformer_xl.train.runner import shard
from transformer_xl.train.state import INITIAL_LOSS_SCALE, TrainState, longest_segment

_FREE = {
    *("mem_len", "ext_len", "attn_len", "layer_attn_lens", "clamp_len", "start_memory", "reset_at"),
    "completion_at",
    *("dropout", "attn_dropout", "qkv_dropout", "embed_dropout", "input_dropout", "ff_dropout"),
    *("output_dropout", "variational_dropout", "sample_softmax"),
    *("init", "init_range", "embed_init", "embed_init_range", "init_std", "proj_init_std"),
}
"""Model settings that may change in fine-tuning."""
_FLOAT = 4
"""Bytes of a float32."""
_BLOCK = 1 << 16
"""Positions of the training data that are searched at once."""


def check_machine(config: Config, device: torch.device, world: World) -> None:
    """Require that the processes can divide the batch, and enough memory, by a lower bound.

    Raises:
        SettingsError: They cannot, or the device has less memory.
    """
    settings = config.train
    n_streams = len(world.rows(settings.batch_size))
    if n_streams % settings.accumulate:
        raise SettingsError(
            f"train.accumulate={settings.accumulate} does not divide the {n_streams} streams that "
            f"each of {world.size} processes has of train.batch_size={settings.batch_size}"
        )
    shards = world.size if settings.parallel == "fsdp" else 1
    require_memory(config, device, n_streams=n_streams, shards=shards)


def initial_weights(config: Config) -> dict[str, Tensor] | None:
    """Return the weights of ``train.init_from``; None without one.

    Raises:
        FileNotFoundError: The folder holds no model.
        CheckpointError: The model is damaged.
        SettingsError: Its architecture is not that of the recipe.
    """
    init_from = config.train.init_from
    if init_from is None:
        return None
    folder = ModelFolder.find(init_from)
    stored = folder.read_config()
    here, there = (
        asdict(x) | {"d_head": x.head_width, "d_embed": x.embed_width}
        for x in (config.model, stored)
    )
    # Without a size, it depends on the corpus.
    free = _FREE if config.model.vocab_size else {*_FREE, "vocab_size"}
    different = [
        f"{name}={here[name]!r} and {there[name]!r}"
        for name in sorted(here.keys() - free)
        if here[name] != there[name]
    ]
    if different:
        raise SettingsError(
            f"train.init_from={init_from!r} has another network than the recipe: "
            f"{', '.join(different)}. `txl train {init_from}` takes the network and the "
            "vocabulary that it has"
        )
    return folder.read_weights(stored)


def require_memory(
    config: Config, device: torch.device, *, n_streams: int, shards: int = 1
) -> None:
    """Require that a step of ``n_streams`` fits, with weights sharded over ``shards`` processes.

    Raises:
        MemoryLimitError: It does not fit.
        SettingsError: It needs what is gone: a sampled softmax, or dropout as in AWD-LSTM.
    """
    model, train = config.model, config.train
    if model.sample_softmax:
        raise SettingsError(
            f"model.sample_softmax={model.sample_softmax}: there is no sampled softmax any more; "
            "for a large vocabulary, set model.cutoffs (an adaptive softmax)"
        )
    if model.family == "lstm" and model.variational_dropout and model.dropout and model.n_layer > 1:
        raise SettingsError(
            "model.variational_dropout=True with kind='lstm' and dropout between its layers "
            "(AWD-LSTM) is gone; revision 47b3a2d of transformer_xl has it"
        )
    T = max([train.segment_len, *(length for _, length, _ in train.stages)])
    M = max([model.mem_len, *(length for *_, length in train.stages)])
    if train.minutes is None and model.start_memory == "empty":
        # A memory is no longer than the text read so far.
        M = min(M, train.steps * T)
    positions = n_streams * M if model.has_attention else 0
    # Inputs of layers are saved for the backward pass, even with activation checkpointing.
    positions += n_streams // train.accumulate * (T + model.ext_len)
    # Weights, gradients and optimizer state, of which Muon has the least: one value per weight.
    numbers = least_weights(model) * 3 // shards + model.n_layer * model.d_model * positions
    settings = {f"train.{name}": getattr(train, name) for name in ("batch_size", "segment_len")}
    for name in ("mem_len", "ext_len", "n_layer", "d_model", "d_inner", "vocab_size"):
        settings |= {f"model.{name}": x} if (x := getattr(model, name)) else {}
    remedy = (
        "shorten the memory or the segments, read fewer streams, raise train.accumulate, or make a "
        "smaller model"
    )
    require_bytes("a step", _FLOAT * numbers, device, settings, remedy)


def require_vocabulary(config: Config, corpus: Corpus | FeatureCorpus) -> None:
    """Require the vocabulary of the model to fine-tune; recordings have none.

    Raises:
        DataError: The vocabularies differ.
    """
    assert config.train.init_from is not None
    folder = ModelFolder.find(config.train.init_from).path
    # A converted model may have none; then only the sizes are compared.
    if corpus.vocab is None or not is_vocabulary(folder):
        return
    if load_vocab(folder).hash != corpus.vocab.hash:
        raise DataError(
            f"train.init_from={config.train.init_from!r} has another vocabulary than the text was "
            f"tokenized with: give --data.tokenizer {folder}"
        )


def fit_to_corpus(config: Config, corpus: Corpus | FeatureCorpus) -> Config:
    """Return the recipe with the settings that depend on the vocabulary resolved.

    Raises:
        SettingsError: They contradict the vocabulary, or the recordings.
    """
    model, size = config.model, config.model.vocab_size
    if isinstance(corpus, FeatureCorpus):
        model = replace(model, vocab_size=size or corpus.n_classes)
        with _named(f"{corpus.folder}, train"):
            require_recordings(corpus.split("train"), model)
        return replace(config, model=model)
    if size not in (0, len(corpus.vocab)):
        remedy = "leave it out to take that"
        if config.train.init_from is not None:
            remedy = "give --data.tokenizer or --data.vocab as the model was trained with"
        raise SettingsError(
            f"model.vocab_size={size} is not the size of the corpus's vocabulary, "
            f"{len(corpus.vocab)}; {remedy}"
        )
    model = replace(model, vocab_size=len(corpus.vocab))
    for name in ("reset_at", "completion_at"):
        model = replace(model, **{name: _number_of(name, config, corpus.vocab)})
    # At the end of the training it would be too late.
    prompt = config.generate.prompt
    with _named(f"generate.prompt={prompt!r}"):
        if not corpus.vocab.encode(prompt):
            raise InputError("the sample at the end needs a token to continue")
    return replace(config, model=model)


@contextmanager
def _named(setting: str) -> Iterator[None]:
    """Name a setting in errors of the block."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"{setting}: {error}") from error


def _number_of(name: str, config: Config, vocab: Vocab) -> int | None:
    """Return the ID of a token that both ``data`` and ``model`` may name."""
    symbol, number = getattr(config.data, name), getattr(config.model, name)
    if symbol is None:
        return number
    with _named(f"data.{name}"):
        known = vocab.number_of(symbol)
    if number not in (None, known):
        raise SettingsError(
            f"model.{name}={number} is not the number of data.{name}={symbol!r}, which is {known}; "
            "leave it out to take that"
        )
    return known


def new_state(
    config: Config,
    corpus: Corpus | FeatureCorpus,
    device: torch.device,
    world: World,
    weights: Mapping[str, Tensor] | None = None,
) -> TrainState:
    """Create the initial state of training.

    Args:
        config: The recipe, from :func:`fit_to_corpus`.
        corpus: The text, or recordings.
        device: Device of the model.
        world: The processes of the run.
        weights: Initial weights; None: random initialization.

    Raises:
        DataError: The recipe does not fit the corpus.
        SettingsError: It does not fit the memory of the device.
    """
    settings = config.train
    segments = Segments(
        corpus.split("train"),
        settings.batch_size,
        longest_segment(settings),
        config.model.ext_len,
        world.rows(settings.batch_size),
        roll_seed=settings.seed if settings.roll else None,
        completions=config.model,
    )
    _require_targets(corpus, config)
    torch.manual_seed(settings.seed)
    model = build_model(config.model)
    if weights is not None:
        model.copy_weights(weights)
    model = model.to(device)
    # The memories of a training grow with its steps, and those of evaluations may be longer.
    longest = config.model.mem_len
    if config.model.start_memory == "zeros":
        longest = max(longest, validation(config)["mem_len"] or 0, *config.eval.mem_lens)
    model.require_capacity(longest)
    model.recompute = settings.recompute
    average = None
    if settings.average != "none":
        average = Average(model, settings.average_decay if settings.average == "ema" else None)
    shard(model, settings, world, device)
    if average is not None:
        shard(average.module, settings, world, device)
    world.seed_apart()
    return TrainState(
        model=model,
        optimizer=Optimizer(model, settings),
        segments=segments,
        mems=[None] * settings.accumulate,
        total_steps=settings.steps,
        end_is_fixed=settings.minutes is None,
        world=world,
        average=average,
        loss_scale=INITIAL_LOSS_SCALE if settings.precision == "float16" else 1.0,
        # The test text may be another one when a run goes on.
        corpus={name: x for name, x in corpus.checksums.items() if name != "test"},
        validation=validation(config),
    )


def validation(config: Config) -> dict[str, int | None]:
    """Return the settings that the validation loss of a model on a text depends on."""
    lengths = Lengths.of(config.model, **config.eval.lengths_after(config.train.segment_len))
    names = "batch_size", "max_steps", "window"
    return {**lengths._asdict(), **{name: getattr(config.eval, name) for name in names}}


def _require_targets(corpus: Corpus | FeatureCorpus, config: Config) -> None:
    """Require that something is trained on, and counts in the evaluations.

    Raises:
        DataError: A split has no target.
    """
    symbol = config.model.completion_at
    if len(corpus.split("valid")) < 2:
        raise DataError(
            "the validation text has one token; to predict one, at least 2 are needed: give more "
            "text, or hold out more of it (data.valid_fraction)"
        )
    if isinstance(corpus, Corpus) and symbol is None:
        return
    if isinstance(corpus, Corpus) and not config.train.prompt_loss_weight:
        # Read up to the first one, as the text may be long. The last token has no target.
        text = corpus.split("train")
        last = len(text) - 1
        parts = (text[first : min(first + _BLOCK, last)] for first in range(0, last, _BLOCK))
        if not any((part == symbol).any() for part in parts):
            raise DataError(
                f"train: the text has no completion: the token completion_at={symbol} is not in "
                "it; give prompts and completions, or set train.prompt_loss_weight to learn from "
                "all"
            )
    for name in ("valid", "test"):
        if corpus.n_tokens(name) > 1:
            try:
                Passage.of(corpus.split(name), config.model)
            except ValueError as error:
                raise DataError(f"{name}: {error}") from error
