"""Opening an old checkpoint: its format, its tensors by the authors' names, its settings.

Formats are detected from the content. Content of files is data and is never executed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from transformer_xl.errors import InputError
from transformer_xl.interop.convert.layouts import INV_FREQ
from transformer_xl.interop.convert.mapped_files import read_json, reading
from transformer_xl.interop.convert.old_settings import Origin
from transformer_xl.interop.convert.tf_files import read_tensorflow
from transformer_xl.interop.convert.torch_files import (
    Instance,
    attributes,
    module_tensors,
    read_pickled,
)

_NAMES = (
    *("model.safetensors", "pytorch_model.bin", "model.pt"),
    *("checkpoint_best.pt", "checkpoint_last.pt", "state_dict.pt"),
)
# Optimizer state and counters.
_NO_WEIGHT = re.compile(
    r"/((Adam|RMSProp)(_1)?|Momentum|ExponentialMovingAverage)$"
    r"|(^|/)(global_step|beta[12]_power(_1)?)$"
)


@dataclass
class Checkpoint:
    """An old checkpoint, translated to the authors' names."""

    path: Path
    """The file with the weights."""
    origin: Origin
    """The implementation that wrote it."""
    tensors: dict[str, Tensor]
    """Tensors by the authors' names; most are memory-mapped."""
    settings: dict[str, object] = field(default_factory=dict)
    """Settings by the authors' names, as far as the checkpoint has them."""
    vocab: object = None
    """The vocabulary, if it is in the same file."""


def open_checkpoint(source: Path) -> Checkpoint:
    """Open a checkpoint of any of the old implementations.

    Args:
        source: The file with the weights, or the folder; see :func:`find_weights`.

    Returns:
        The checkpoint. Its own settings precede those of files beside it.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: The source is not a checkpoint of a Transformer-XL.
        CheckpointError: A file is damaged.
    """
    path = find_weights(source)
    if path.suffix == ".safetensors":
        with reading(path):
            tensors = load_file(path)
        checkpoint = _from_huggingface(path, tensors)
    elif path.suffix == ".index":
        tensors, cutoffs = from_tensorflow(read_tensorflow(path))
        checkpoint = Checkpoint(
            path, "tensorflow", tensors, {"cutoffs": cutoffs} if cutoffs else {}
        )
    else:
        checkpoint = _from_torch(path, read_pickled(path))
    checkpoint.settings = _read_settings_beside(path) | checkpoint.settings
    for name, x in checkpoint.tensors.items():
        if not x.is_floating_point():
            raise InputError(f"{path}: {name} is of type {x.dtype}, and weights are real numbers")
    checkpoint.tensors.pop(INV_FREQ, None)
    return checkpoint


def find_weights(source: Path) -> Path:
    """Return the file with the weights; of TensorFlow, the index.

    Args:
        source: A file, the common prefix of the files of a TensorFlow checkpoint, or a folder.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: The folder does not hold one checkpoint.
    """
    if not source.is_dir():
        prefix = re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", source.name)
        index = source.with_name(f"{prefix}.index")
        if not (index.is_file() or source.is_file()):
            raise FileNotFoundError(f"{source} does not exist: give a checkpoint or its folder")
        return index if index.is_file() else source
    for name in _NAMES:
        if (source / name).is_file():
            return source / name
    suffixes = (".pt", ".bin", ".pth", ".index")
    candidates = sorted(x for x in source.iterdir() if x.suffix in suffixes)
    if len(candidates) > 1 and (source / "checkpoint").is_file():
        with (source / "checkpoint").open("rb") as file:
            text = file.read(1 << 16).decode("utf-8", "replace").replace("\\", "/")
        # TensorFlow's record of the last one, perhaps in a folder of another machine.
        last = re.search(r'^model_checkpoint_path:\s*"(?:[^"\n]*/)?([^"\n]+)"', text, re.MULTILINE)
        candidates = [x for x in candidates if last and x.name == f"{last[1]}.index"]
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(x.name for x in candidates[:5]) or "none of them"
    raise InputError(
        f"{source} should hold one checkpoint (model.pt, pytorch_model.bin, model.safetensors, "
        f"checkpoint_best.pt or a TensorFlow .index; not several shards, *.index.json) and holds "
        f"{names}: name the file"
    )


def _from_torch(path: Path, content: object) -> Checkpoint:
    """Return the checkpoint of a file of PyTorch, from what is pickled in it.

    Raises:
        InputError: The content is not a model.
    """
    if isinstance(content, Instance):
        return _from_module(path, content)
    if isinstance(content, dict):
        if "model_state" in content:
            return _from_nvidia(path, content)
        # The most frequent key in files saved by hand.
        for name in ("model", "state_dict", "model_state_dict"):
            if isinstance(content.get(name), dict | Instance):
                return _from_torch(path, content[name])
        tensors = _named_tensors(path, content)
        if any(name.startswith("transformer.layers.") for name in tensors):
            return _from_huggingface(path, tensors)
        return Checkpoint(path, "authors", tensors)
    raise InputError(f"{path} holds a {type(content).__name__}, not a model")


def _named_tensors(path: Path, content: Mapping[Any, object]) -> dict[str, Tensor]:
    """Return the tensors of a state dict, without prefixes of DataParallel.

    Raises:
        InputError: The content is not a state dict.
    """
    tensors = {}
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, int | float | str | None):
            # Other values that people save with the weights: the number of a step, a date.
            continue
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{path} holds {name!r} of type {type(value).__name__}, where a state dict has "
                "tensors by name: it is not a model"
            )
        # DataParallel wraps the model in a module of that name.
        tensors[name.removeprefix("module.")] = value
    return tensors


def _from_module(path: Path, module: Instance) -> Checkpoint:
    """Return the checkpoint of a whole pickled module, as the authors' train.py saves it.

    Raises:
        InputError: The module is not a Transformer-XL.
    """
    if (inner := _child(module, "module")) is not None:
        return _from_torch(path, inner)
    state = attributes(module)
    if "n_layer" not in state:
        raise InputError(f"{path} holds a {module.kind}, not a Transformer-XL")
    settings = {name: state[name] for name in _MODULE_SETTINGS if name in state}
    attention = ("layers", "0", "dec_attn")
    for place, name, ours in (
        (("word_emb",), "cutoffs", "cutoffs"),
        (("word_emb",), "div_val", "div_val"),
        (attention, "pre_lnorm", "pre_lnorm"),
        ((*attention, "layer_norm"), "eps", "layer_norm_epsilon"),
        ((*attention, "dropatt"), "p", "dropatt"),
        (("drop",), "p", "dropout"),
    ):
        values = attributes(_child(module, *place))
        if name in values:
            settings[ours] = values[name]
    settings = _select_plain(settings)
    if isinstance(cutoffs := settings.get("cutoffs"), list):
        settings["cutoffs"] = [x for x in cutoffs if x != settings.get("n_token")]
    return Checkpoint(path, "authors", module_tensors(module), settings)


_MODULE_SETTINGS = (
    *("n_token", "n_layer", "n_head", "d_head", "d_model", "d_embed", "attn_type"),
    *("tgt_len", "mem_len", "ext_len", "clamp_len", "same_length"),
)


def _child(module: Instance, *names: str) -> Instance | None:
    """Return the submodule at a path of names; None if there is none."""
    child: object = module
    for name in names:
        child = attributes(attributes(child).get("_modules")).get(name)
    return child if isinstance(child, Instance) else None


def _from_nvidia(path: Path, content: dict[object, object]) -> Checkpoint:
    """Return the checkpoint of a file of NVIDIA's implementation."""
    tensors = {
        re.sub(r"^crit\.out_layers_(bias|weight)e?s\.(\d+)$", r"crit.out_layers.\2.\1", name): x
        for name, x in _named_tensors(path, attributes(content["model_state"])).items()
        # A copy of the projections of the embeddings, whether the softmax uses it or not.
        if not name.startswith("crit.shared_out_projs.")
    }
    settings = content.get("model_config")
    settings = _select_plain(
        settings if isinstance(settings, dict) else attributes(content.get("args"))
    )
    return Checkpoint(path, "nvidia", tensors, settings, content.get("vocab"))


def _from_huggingface(path: Path, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Return the checkpoint of tensors by the names of transformers."""
    named = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    for bias in ("r_w_bias", "r_r_bias"):
        pattern = re.compile(rf"layers\.\d+\.dec_attn\.{bias}")
        in_layers = [name for name in named if pattern.fullmatch(name)]
        # safetensors keeps one arbitrary name of a bias that all layers share.
        if len(in_layers) == 1 and "layers.1.dec_attn.o_net.weight" in named:
            named.setdefault(bias, named.pop(in_layers[0]))
    return Checkpoint(path, "huggingface", named)


def from_tensorflow(variables: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[int]]:
    """Rename TensorFlow variables to the authors' PyTorch names, without those of the optimizer.

    Args:
        variables: Tensors by the names of TensorFlow.

    Returns:
        Tensors by the authors' PyTorch names, and the cutoffs; no cutoffs if each cluster has an
        embedding table, or there is one.

    Raises:
        InputError: A variable is not one of a Transformer-XL.
    """
    tensors: dict[str, Tensor] = {}
    biases: dict[int, Tensor] = {}
    for name, x in variables.items():
        if _NO_WEIGHT.search(name):
            continue
        for pattern, replacement in _TENSORFLOW_NAMES:
            if match := re.fullmatch(rf"(?:.*/)?transformer/{pattern}", name):
                ours = match.expand(replacement).replace("..", ".0.")
                ours = ours.replace("gamma", "weight").replace("beta", "bias")
                break
        else:
            raise InputError(f"the checkpoint holds {name}, which no Transformer-XL has")
        if name.endswith(("/kernel", "/proj_W", "/proj")) and x.ndim == 2:
            # Transposed as a view.
            x = x.T
        if ours in ("r_w_bias", "r_r_bias") and x.ndim == 3:
            tensors |= {f"layers.{n}.dec_attn.{ours}": bias for n, bias in enumerate(x)}
        elif match := re.fullmatch(r"crit\.out_layers\.(\d+)\.bias", ours):
            biases[int(match[1])] = x
        else:
            tensors[ours] = x
    cutoffs = []
    if len(biases) > 1 and "word_emb.emb_layers.1.weight" not in tensors:
        # With a single embedding table the authors' PyTorch has all biases in one tensor.
        parts = [x.flatten() for _, x in sorted(biases.items())]
        cutoffs = list(accumulate(len(x) for x in parts))[:-1]
        biases = {0: torch.cat(parts)}
    return tensors | {f"crit.out_layers.{i}.bias": x for i, x in biases.items()}, cutoffs


# Where there is one table, it is the first: two dots become ".0.".
_TENSORFLOW_NAMES = (
    (r"adaptive_embed/(?:cutoff_(\d+)/)?lookup_table", r"word_emb.emb_layers.\1.weight"),
    (r"adaptive_embed/cutoff_(\d+)/proj_W", r"word_emb.emb_projs.\1"),
    (r"adaptive_embed/proj_W", r"word_emb.emb_projs.0"),
    (r"adaptive_softmax/(?:cutoff_(\d+)/b|bias)", r"crit.out_layers.\1.bias"),
    (r"adaptive_softmax/cutoff_(\d+)/proj", r"crit.out_projs.\1"),
    (r"adaptive_softmax/cutoff_0/cluster_W", r"crit.cluster_weight"),
    (r"adaptive_softmax/cutoff_0/cluster_b", r"crit.cluster_bias"),
    (r"(r_w_bias|r_r_bias)", r"\1"),
    (r"layer_(\d+)/rel_attn/(qkv|r|o)/kernel", r"layers.\1.dec_attn.\2_net.weight"),
    (r"layer_(\d+)/rel_attn/LayerNorm/(gamma|beta)", r"layers.\1.dec_attn.layer_norm.\2"),
    (r"layer_(\d+)/ff/layer_1/kernel", r"layers.\1.pos_ff.CoreNet.0.weight"),
    (r"layer_(\d+)/ff/layer_2/kernel", r"layers.\1.pos_ff.CoreNet.3.weight"),
    (r"layer_(\d+)/ff/layer_1/(bias)", r"layers.\1.pos_ff.CoreNet.0.\2"),
    (r"layer_(\d+)/ff/layer_2/(bias)", r"layers.\1.pos_ff.CoreNet.3.\2"),
    (r"layer_(\d+)/ff/LayerNorm/(gamma|beta)", r"layers.\1.pos_ff.layer_norm.\2"),
)


def _read_settings_beside(path: Path) -> dict[str, object]:
    """Read the settings in the JSON files beside the weights of a checkpoint.

    Those of ``config.json`` precede those of ``corpus-info.json``. Of a file that has no settings
    of a model, only the cutoffs of the vocabulary are used.

    Args:
        path: The file with the weights.

    Returns:
        Settings by the authors' names; empty if there are no such files.

    Raises:
        CheckpointError: A file is damaged.
    """
    settings: dict[str, object] = {}
    # The later file replaces settings of the earlier one.
    for name in ("corpus-info.json", "config.json"):
        file = path.with_name(name)
        if not file.is_file():
            continue
        content = read_json(file)
        # The settings of a model are at the top level, or in one of the objects.
        objects = [attributes(x) for x in (content, *content.values())]
        models = [x for x in objects if {"n_layer", "d_model"} <= x.keys()]
        if models:
            settings |= _select_plain(models[0])
        elif "cutoffs" in content:
            settings |= _select_plain({"cutoffs": content["cutoffs"]})
    return settings


def _select_plain(settings: Mapping[Any, object]) -> dict[str, object]:
    """Return the values that can be settings: numbers, texts, None, and lists of them.

    A file can have anything under any name.
    """

    def is_plain(value: object) -> bool:
        if isinstance(value, int):
            return abs(value) < 1 << 63
        return value is None or isinstance(value, float | str)

    return {
        name: value
        for name, value in settings.items()
        if isinstance(name, str)
        and all(map(is_plain, value if isinstance(value, list | tuple) else [value]))
    }
