"""Conversion of old checkpoints to model folders.

Nothing in a file is ever executed: a name in a pickle is looked up in a closed table or refused.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from transformer_xl.config import EvalConfig, ModelConfig, new_folder
from transformer_xl.data import Vocab
from transformer_xl.errors import CheckpointError, InputError
from transformer_xl.interop.convert.layouts import entries, read_weights
from transformer_xl.interop.convert.old_checkpoints import Checkpoint, open_checkpoint
from transformer_xl.interop.convert.old_settings import (
    DEFAULTS,
    SETTABLE,
    model_config,
)
from transformer_xl.interop.convert.published import published_evaluation
from transformer_xl.interop.convert.vocabularies import find_vocab, read_vocab, vocab_from_object
from transformer_xl.model import ModelFolder, TransformerXL

__all__ = ["SETTABLE", "convert"]

_Say = Callable[[str], None]


def convert(
    source: Path | str,
    folder: Path | str,
    *,
    settings: Mapping[str, object] | None = None,
    vocab: Path | str | None = None,
    say: _Say = lambda text: None,
) -> Path:
    """Turn an old checkpoint into a model folder.

    The format of the source is detected from its content: the authors' ``model.pt`` (a whole
    module, in the zip or the older format of torch) or state dict, a TensorFlow checkpoint,
    NVIDIA's ``checkpoint_*.pt``, or a Hugging Face folder.

    Args:
        source: The file, the prefix of a TensorFlow checkpoint, or the folder.
        folder: The folder to write; it must not exist yet, or be empty.
        settings: Settings that the source lacks, by the authors' names: ``n_head``, ``mem_len``,
            ``tgt_len``, ``ext_len``, ``clamp_len``, ``same_length``, ``pre_lnorm``, ``cutoffs``,
            ``layer_norm_epsilon``.
        vocab: The file with the vocabulary, if it is not in the same folder as the source.
        say: Called with messages for the user.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: There is no source, or no vocabulary that is given.
        FileExistsError: The folder is not empty.
        CheckpointError: The source is damaged or hostile.
        InputError: The source is not a Transformer-XL or lacks settings.

    Example:
        >>> from transformer_xl import ModelConfig, TransformerXL
        >>> config = ModelConfig(vocab_size=10, n_layer=1, d_model=16, n_head=2, d_inner=16)
        >>> weights = TransformerXL(config).state_dict()
        >>> table = entries(config, clusters="natural", biases_in_layers=False)
        >>> torch.save({x.theirs: weights[x.ours][x.part] for x in table}, "model.pt")
        >>> folder = convert("model.pt", "new", settings={"mem_len": 8, "pre_lnorm": False})
        >>> sorted(path.name for path in folder.iterdir())
        ['config.json', 'model.safetensors']
    """
    # Absolute, because temporary files beside the folder need its name, also for ".".
    folder = Path(folder).absolute()
    if vocab is not None and not Path(vocab).exists():
        raise FileNotFoundError(f"{vocab} does not exist: give the file with the vocabulary")
    with new_folder(folder) as unfinished:
        _convert(Path(source), unfinished, dict(settings or {}), vocab, say)
    say(f"{folder} is written")
    return folder


def _convert(
    source: Path,
    folder: Path,
    settings: dict[str, object],
    vocab: Path | str | None,
    say: _Say,
) -> None:
    if unknown := sorted(settings.keys() - set(SETTABLE)):
        raise InputError(f"settings has {unknown[0]!r}; there are {', '.join(SETTABLE)}")
    checkpoint = open_checkpoint(source)
    checkpoint.settings |= settings
    config = model_config(checkpoint.origin, checkpoint.tensors, checkpoint.settings)
    weights = _weights(checkpoint, config)
    n_bytes = sum(x.nbytes for x in weights.values())
    n_parameters = sum(x.numel() for x in weights.values())
    say(
        f"{checkpoint.path}: {n_parameters:,} parameters ({n_bytes / 1e6:,.0f} MB) as written by "
        f"{_ORIGINS[checkpoint.origin]}"
    )
    evaluation = _evaluation(checkpoint, config, settings.get("tgt_len"), say)
    about = {
        "origin": {"format": checkpoint.origin, "settings": checkpoint.settings},
        "eval": dataclasses.asdict(evaluation),
    }
    for name, default in DEFAULTS[checkpoint.origin].items():
        if checkpoint.settings.get(name) is None:
            say(f"the checkpoint does not say {name}; taken as {default}, the default there")
    vocabulary = _vocabulary(checkpoint, vocab, config.vocab_size, say)
    if wide := [name for name, x in weights.items() if x.dtype == torch.float64]:
        weights |= {name: weights[name].float() for name in wide}
        say("float64 weights are rounded to float32, in which a model folder has them")
    ModelFolder(folder).write(config, weights, about)
    if vocabulary is not None:
        vocabulary.save(folder)


def _vocabulary(
    checkpoint: Checkpoint, vocab: Path | str | None, size: int, say: _Say
) -> Vocab | None:
    """Return the vocabulary of a file, of one beside the checkpoint, or of the checkpoint."""
    path = find_vocab(checkpoint.path.parent) if vocab is None else Path(vocab)
    if path is not None:
        vocabulary = read_vocab(path, size=size)
    elif checkpoint.vocab is not None:
        path = checkpoint.path
        vocabulary = vocab_from_object(checkpoint.vocab, path, size=size)
    else:
        say("no vocabulary in its folder: give it as --vocab FILE to evaluate and to generate")
        return None
    if len(vocabulary) == size:
        return vocabulary
    problem = f"the vocabulary in {path} has {len(vocabulary):,} symbols and the model {size:,}"
    if vocab is not None:
        raise InputError(f"{problem}: they do not belong together")
    say(f"{problem}: left out")
    return None


_ORIGINS = {
    "authors": "the authors' PyTorch code",
    "nvidia": "NVIDIA's PyTorch code",
    "huggingface": "Hugging Face transformers",
    "tensorflow": "the authors' TensorFlow code",
}


def _weights(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in TransformerXL(config).named_parameters()}
    table = entries(
        config,
        clusters="reversed" if checkpoint.origin in ("authors", "nvidia") else "natural",
        biases_in_layers=any(name.endswith("dec_attn.r_w_bias") for name in checkpoint.tensors),
    )
    # A small file can refer to one tensor a million times.
    beginning = checkpoint.path.name.removesuffix("index")
    files = [x for x in checkpoint.path.parent.iterdir() if x.name.startswith(beginning)]
    n_bytes = sum(file.stat().st_size for file in files)
    needed = sum(shape.numel() for shape in shapes.values())
    if needed > n_bytes:
        raise CheckpointError(
            f"{checkpoint.path} has {n_bytes:,} bytes and claims {needed:,} weights: it is damaged"
        )
    weights: dict[str, Tensor] = {}
    for name, x in read_weights(checkpoint.tensors, table, shapes).items():
        # Tensors that are tied in the file but not by the settings are copied.
        is_taken = any(x.data_ptr() == other.data_ptr() for other in weights.values())
        weights[name] = x.clone() if is_taken and x.is_contiguous() else x.contiguous()
    return weights


def _evaluation(
    checkpoint: Checkpoint, config: ModelConfig, tgt_len: object, say: _Say
) -> EvalConfig:
    """Set the lengths of evaluation with which the checkpoint was published, or those given."""
    is_pytorch = checkpoint.origin not in ("tensorflow", "nvidia")
    published = published_evaluation(config, is_pytorch=is_pytorch)
    name, evaluation = published or ("", EvalConfig(split="test"))
    segment_len = tgt_len if published else checkpoint.settings.get("tgt_len")
    is_length = isinstance(segment_len, int) and segment_len > 0
    if is_length:
        evaluation = dataclasses.replace(evaluation, segment_len=segment_len)
    if name:
        but = f", but segments of {segment_len} tokens, as given" if is_length else ""
        say(f"this is {name}: txl eval uses the lengths it was published with{but}")
    return evaluation
