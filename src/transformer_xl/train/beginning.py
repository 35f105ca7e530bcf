"""Initialization of a run: validation of the recipe, initial weights and state."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from transformer_xl.config import Config, ModelConfig, TrainConfig
from transformer_xl.config.distributed import World
from transformer_xl.data import Corpus, Segments, Vocab
from transformer_xl.data.completions import in_completion
from transformer_xl.data.features import FeatureCorpus, FeatureSegments
from transformer_xl.data.recordings import Recordings
from transformer_xl.data.vocab_files import is_vocabulary, load_vocab
from transformer_xl.inference.evaluate.dynamic import segments_to_learn
from transformer_xl.inference.evaluate.streams import places_read
from transformer_xl.inference.generate import for_tokens
from transformer_xl.model import build_model
from transformer_xl.model.limits import require_training
from transformer_xl.model.loading import read_model_weights
from transformer_xl.model.pretrained import (
    CONFIG_FILE,
    copy_weights,
    find_model_folder,
    load_config,
)
from transformer_xl.model.segment import Lengths
from transformer_xl.train.finish import held_out
from transformer_xl.train.optim import Optimizer, new_average
from transformer_xl.train.sharding import shard
from transformer_xl.train.state import INITIAL_LOSS_SCALE, TrainState, longest_segment

_FREE = {
    *("mem_len", "ext_len", "attn_len", "layer_attn_lens", "clamp_len", "start_memory", "reset_at"),
    "completion_at",
    *("dropout", "attn_dropout", "qkv_dropout", "embed_dropout", "input_dropout", "ff_dropout"),
    *("output_dropout", "variational_dropout", "sample_softmax"),
    *("init", "init_range", "embed_init", "embed_init_range", "init_std", "proj_init_std"),
}
"""Model settings that may change in fine-tuning."""
_BLOCK = 1 << 16
"""Positions of the training data that are searched at once."""


def check_machine(config: Config, device: torch.device, world: World) -> None:
    """Require that the processes can divide the batch, and enough memory, by a lower bound.

    Raises:
        ValueError: They cannot, or the device has less memory.
    """
    settings = config.train
    own = len(world.rows(settings.batch_size))
    if own % settings.accumulate:
        raise ValueError(
            f"train.accumulate={settings.accumulate} does not divide the {own} streams that "
            f"each of {world.size} processes has of train.batch_size={settings.batch_size}"
        )
    shards = world.size if settings.parallel == "fsdp" else 1
    require_training(config, device, n_streams=own, shards=shards)


def initial_weights(config: Config) -> dict[str, Tensor] | None:
    """Return the weights of ``train.init_from``; None without one.

    Raises:
        FileNotFoundError: The folder holds no model.
        RuntimeError: The model is damaged.
        ValueError: Its architecture is not that of the recipe.
    """
    init_from = config.train.init_from
    if init_from is None:
        return None
    folder = find_model_folder(init_from)
    given = load_config(folder / CONFIG_FILE)
    mine, theirs = (
        asdict(x) | {"d_head": x.head_width, "d_embed": x.embed_width}
        for x in (config.model, given)
    )
    if not config.model.vocab_size:
        # It still depends on the corpus.
        theirs["vocab_size"] = 0
    different = [
        f"{name}={mine[name]!r} and {theirs[name]!r}"
        for name in sorted(mine.keys() - _FREE)
        if mine[name] != theirs[name]
    ]
    if different:
        raise ValueError(
            f"train.init_from={init_from!r} has another network than the recipe: "
            f"{', '.join(different)}. `txl train {init_from}` takes the network and the "
            "vocabulary that it has"
        )
    return read_model_weights(folder, given)


def require_vocabulary(config: Config, corpus: Corpus | FeatureCorpus) -> None:
    """Require the vocabulary of the model to fine-tune; recordings have none.

    Raises:
        ValueError: The vocabularies differ.
    """
    assert config.train.init_from is not None
    folder = find_model_folder(config.train.init_from)
    if corpus.vocab is None:
        return
    # A converted model may have none; then only the sizes are compared.
    if is_vocabulary(folder) and load_vocab(folder).hash != corpus.vocab.hash:
        raise ValueError(
            f"train.init_from={config.train.init_from!r} has another vocabulary than the text was "
            f"tokenized with: give --data.tokenizer {folder}"
        )


def fit_to_corpus(config: Config, corpus: Corpus | FeatureCorpus) -> Config:
    """Return the recipe with the settings that depend on the vocabulary resolved.

    Raises:
        ValueError: They contradict the vocabulary, or the recordings.
    """
    if isinstance(corpus, FeatureCorpus):
        return replace(config, model=_fit_to_recordings(config.model, corpus))
    size = config.model.vocab_size
    if size not in (0, len(corpus.vocab)):
        remedy = "leave it out to take that"
        if config.train.init_from is not None:
            remedy = "give --data.tokenizer or --data.vocab as the model was trained with"
        raise ValueError(
            f"model.vocab_size={size} is not the size of the corpus's vocabulary, "
            f"{len(corpus.vocab)}; {remedy}"
        )
    model = replace(config.model, vocab_size=len(corpus.vocab))
    for name in ("reset_at", "completion_at"):
        model = replace(model, **{name: _number_of(name, config, corpus)})
    # At the end of the training it would be too late.
    for_tokens(config.generate.sampling, corpus.vocab)
    return replace(config, model=model)


def _number_of(name: str, config: Config, corpus: Corpus) -> int | None:
    """Return the ID of a token that both ``data`` and ``model`` may name."""
    symbol, number = getattr(config.data, name), getattr(config.model, name)
    if symbol is None:
        return number
    try:
        found = corpus.vocab.number_of(symbol)
    except ValueError as error:
        raise ValueError(f"data.{name}: {error}") from error
    if number not in (None, found):
        raise ValueError(
            f"model.{name}={number} is not the number of data.{name}={symbol!r}, which is {found}; "
            "leave it out to take that"
        )
    return found


def _fit_to_recordings(model: ModelConfig, corpus: FeatureCorpus) -> ModelConfig:
    """Return the settings with the number of classes; require the width and kind of the data."""
    if model.n_features != corpus.n_features:
        raise ValueError(
            f"model.n_features={model.n_features} is not the width of the inputs in "
            f"{corpus.folder}, {corpus.n_features}"
        )
    if corpus.are_real != (model.n_mixtures > 0):
        what = "real numbers: set model.n_mixtures" if corpus.are_real else "classes: set it to 0"
        raise ValueError(
            f"model.n_mixtures={model.n_mixtures}, and the targets in {corpus.folder} are {what}"
        )
    if corpus.are_real:
        return model
    if 0 < model.vocab_size < corpus.n_classes:
        raise ValueError(
            f"model.vocab_size={model.vocab_size}, and the targets in {corpus.folder} have class "
            f"{corpus.n_classes - 1}; leave it out to take {corpus.n_classes}"
        )
    return replace(model, vocab_size=model.vocab_size or corpus.n_classes)


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
        ValueError: The recipe does not fit the corpus or the memory of the device.
    """
    settings = config.train
    reader: Any = FeatureSegments if isinstance(corpus, FeatureCorpus) else Segments
    segments = reader(
        corpus.tokens("train"),
        settings.batch_size,
        longest_segment(settings),
        config.model.ext_len,
        world.rows(settings.batch_size),
        roll_seed=settings.seed if settings.roll else None,
        completions=config.model,
    )
    # Needed only at the end of the run, but validated before it.
    if len(corpus.split("valid")) < 2:
        raise ValueError(
            "the validation text has one token; to predict one, at least 2 are needed: give more "
            "text, or hold out more of it (data.valid_fraction)"
        )
    _require_training_targets(corpus, config)
    for name in ("valid", "test"):
        if corpus.n_tokens(name) > 1:
            _require_targets(name, corpus, config)
    if corpus.vocab is not None:
        _require_prompt(config.generate.prompt, corpus.vocab)
    if config.eval.dynamic == "rms" and isinstance(corpus, Corpus):
        _require_gradients(corpus, config)
    torch.manual_seed(settings.seed)
    model = build_model(config.model)
    if weights is not None:
        copy_weights(model, weights)
    model = model.to(device)
    model.recompute = settings.recompute
    average = new_average(model, settings)
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
        loss_scale=_initial_loss_scale(settings),
        has_varying_lengths=bool(settings.stages or settings.random_segment_len),
        # The test text may be another one when a run goes on.
        corpus={name: x for name, x in corpus.checksums.items() if name != "test"},
        validation=_validation(config),
    )


def compare_validations(config: Config, state: TrainState, say: Callable[[str], None]) -> None:
    """Forget the lowest validation loss of a resumed run where later ones are not comparable.

    Raises:
        ValueError: The learning rate depends on comparing them.
    """
    before, state.validation = state.validation, _validation(config)
    changed = "; ".join(
        f"eval.{name}: {before[name]}, {x}"
        for name, x in state.validation.items()
        if before.get(name, x) != x
    )
    if not changed:
        return
    differing = f"validation settings differ from the checkpoint's (there, here): {changed}"
    if config.train.schedule == "plateau":
        raise ValueError(
            f"{differing}. With train.schedule='plateau', the learning rate depends on comparing "
            "validation losses: give the same settings to go on there, or another --out"
        )
    state.best = math.inf
    say(
        f"{differing}. Their losses cannot be compared, so the next validation replaces "
        "model/best, even by a worse model: copy that folder to keep it"
    )


def _validation(config: Config) -> dict[str, int | None]:
    """Return the settings that the validation loss of a model on a text depends on."""
    settings = config.eval
    lengths = Lengths.of(config.model, **settings.lengths_after(config.train.segment_len))
    others = {name: getattr(settings, name) for name in ("batch_size", "max_steps", "window")}
    return {**lengths._asdict(), **others}


def _initial_loss_scale(settings: TrainConfig) -> float:
    if settings.precision != "float16":
        return 1.0
    return INITIAL_LOSS_SCALE if settings.loss_scale is None else settings.loss_scale


def _require_training_targets(corpus: Corpus | FeatureCorpus, config: Config) -> None:
    """Require that something is trained on; reads the data up to the first target."""
    split: Any = corpus.tokens("train")
    if isinstance(split, Recordings):
        parts = (slice(first, first + _BLOCK) for first in range(0, len(split), _BLOCK))
        if not any(split.counted(part).any() for part in parts):
            raise ValueError(
                "the train recordings have no target, as all are -100 or NaN: give some"
            )
    elif (symbol := config.model.completion_at) is not None and not config.train.prompt_loss_weight:
        # The last token has no target.
        last = len(split) - 1
        parts = (slice(first, min(first + _BLOCK, last)) for first in range(0, last, _BLOCK))
        if not any((split[part] == symbol).any() for part in parts):
            raise ValueError(
                f"the train text has no completion: the token completion_at={symbol} is not in it; "
                "give prompts and completions, or set train.prompt_loss_weight to learn from all"
            )


def _require_targets(name: str, corpus: Corpus | FeatureCorpus, config: Config) -> None:
    """Require that something counts in an evaluation, the last of which ends the run."""
    split: Any = corpus.split(name)
    settings, completion_at = config.eval, config.model.completion_at
    if isinstance(split, Recordings):
        counted, what = split.counted(), f"target of the {name} recordings"
        if not counted.any():
            raise ValueError(
                f"the {name} recordings have no target, as all are -100 or NaN: give some"
            )
    elif completion_at is None:
        return
    else:
        counted, what = in_completion(split[:-1], config.model), f"completion of the {name} text"
        if not counted.any():
            raise ValueError(
                f"the {name} text has no completion: the token completion_at={completion_at} is "
                "not in it; give prompts and completions as in the training text"
            )
    if settings.max_steps is None:
        return
    # Dynamic evaluation reads the text in one part.
    learns = settings.dynamic and isinstance(corpus, Corpus) and name == held_out(corpus)
    for batch_size in {settings.batch_size, 1} if learns else {settings.batch_size}:
        places = places_read(
            len(counted),
            batch_size=min(batch_size, len(counted)),
            segment_len=settings.lengths_after(config.train.segment_len)["segment_len"],
            max_steps=settings.max_steps,
        )
        if not counted[places].any():
            raise ValueError(
                f"eval.max_steps={settings.max_steps} reads no {what}: give a larger one"
            )


def _require_gradients(corpus: Corpus, config: Config) -> None:
    """Require a training text that dynamic evaluation, at the end of the run, can prepare with."""
    settings = config.eval
    segment_len = settings.lengths_after(config.train.segment_len)["segment_len"]
    try:
        segments_to_learn(
            corpus.tokens("train")[: settings.dynamic_tokens], config.model, segment_len
        )
    except ValueError as error:
        raise ValueError(
            f"eval.dynamic='rms' with eval.dynamic_tokens={settings.dynamic_tokens}: {error}"
        ) from error


def _require_prompt(text: str, vocab: Vocab) -> None:
    """Require a prompt for the sample at the end of a run."""
    try:
        prompt = vocab.encode(text)
    except ValueError as error:
        raise ValueError(f"generate.prompt={text!r}: {error}") from error
    if not prompt:
        raise ValueError(
            "generate.prompt is empty: the sample at the end needs a token to continue"
        )
