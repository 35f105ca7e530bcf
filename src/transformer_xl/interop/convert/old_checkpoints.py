"""Opening an old checkpoint: which kind it is, its tensors by the authors' names, its settings.

Kinds are told by content. What comes from a file is data and is never executed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl.interop.convert.inert import read_json
from transformer_xl.interop.convert.layouts import INV_FREQ
from transformer_xl.interop.convert.old_settings import Origin
from transformer_xl.interop.convert.pickles import Instance, UnreadableFile
from transformer_xl.interop.convert.tf_files import find_prefix, read_tensorflow
from transformer_xl.interop.convert.torch_files import module_tensors, read_torch
from transformer_xl.model.positions import frequencies

_MOST_WRAPPED = 4
_SLOTS = re.compile(r"/(Adam|Adam_1|Momentum|RMSProp|RMSProp_1|ExponentialMovingAverage)$")
_COUNTERS = re.compile(r"(^|/)(global_step|beta[12]_power|beta[12]_power_1)$")


@dataclass(kw_only=True)
class Checkpoint:
    """An old checkpoint, laid out before us."""

    path: Path
    """The file with the weights."""
    origin: Origin
    """Whose implementation wrote it."""
    tensors: dict[str, Tensor]
    """By the authors' names; most lie in the file and take no memory."""
    settings: dict[str, Any] = field(default_factory=dict)
    """By the authors' names; what the checkpoint says of itself."""
    vocab: object = None
    """The vocabulary, as far as it lies in the same file."""


def open_checkpoint(source: Path) -> Checkpoint:
    """Open a checkpoint of any of the old implementations.

    Args:
        source: A file, the prefix of a TensorFlow checkpoint, or a folder with one of them.

    Raises:
        FileNotFoundError: There is nothing.
        UnreadableFile: A file is damaged, or names what no checkpoint needs.
        ValueError: It is no Transformer-XL, or which of several is meant is not clear.
    """
    path = _weights_file(source)
    if path.suffix == ".safetensors":
        checkpoint = _huggingface(path, _read_safetensors(path))
    elif _is_tensorflow(path):
        checkpoint = _tensorflow(path)
    else:
        checkpoint = _from_torch(path, read_torch(path))
    checkpoint.settings = _settings_beside(path) | checkpoint.settings
    for name, x in checkpoint.tensors.items():
        if not x.is_floating_point():
            raise ValueError(f"{path}: {name} is of type {x.dtype}, and weights are real numbers")
    _check_frequencies(path, checkpoint.tensors.pop(INV_FREQ, None))
    return checkpoint


def _check_frequencies(path: Path, theirs: Tensor | None) -> None:
    """Compare what is computed here with what the file says."""
    if theirs is None:
        return
    ours = frequencies(2 * len(theirs)).double() if theirs.ndim == 1 else torch.empty(0)
    rounding = 4 * torch.finfo(theirs.dtype).eps
    if ours.shape != theirs.shape or not torch.allclose(
        theirs.double(), ours, rtol=rounding, atol=1e-6
    ):
        raise ValueError(
            f"{path}: {INV_FREQ} are not the frequencies of the paper, 10000^(-2m / d_model): "
            "the positions of this model are others"
        )


def _weights_file(source: Path) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        # What TensorFlow calls a checkpoint is the common beginning of the names of its files.
        if source.with_name(f"{source.name}.index").is_file():
            return source
        if source.exists():
            raise ValueError(f"{source} is neither a file nor a folder: give a checkpoint")
        raise FileNotFoundError(f"{source} does not exist: give a checkpoint or its folder")
    for name in (
        "model.safetensors",
        "pytorch_model.bin",
        "model.pt",
        "checkpoint_best.pt",
        "checkpoint_last.pt",
        "state_dict.pt",
    ):
        if (source / name).is_file():
            return source / name
    if (source / "checkpoint").is_file() or list(source.glob("*.index")):
        return find_prefix(source)
    if list(source.glob("*.index.json")):
        raise ValueError(
            f"{source} holds a model in several parts (*.index.json), which are not read: load it "
            "with transformers 4.37 and save it with max_shard_size='100GB'"
        )
    candidates = sorted(x for x in source.iterdir() if x.suffix in (".pt", ".bin", ".pth"))
    if len(candidates) == 1:
        return candidates[0]
    found = ", ".join(x.name for x in candidates[:5]) or "none of them"
    raise ValueError(
        f"{source} should hold one checkpoint (model.pt, pytorch_model.bin, model.safetensors, "
        f"checkpoint_best.pt or a TensorFlow .index) and holds {found}: name the file"
    )


def _is_tensorflow(path: Path) -> bool:
    if path.suffix in (".index", ".meta") or re.search(r"\.data-\d+-of-\d+$", path.name):
        return True
    return not path.exists()


def _from_torch(path: Path, content: object, depth: int = 0) -> Checkpoint:
    if depth > _MOST_WRAPPED:
        raise UnreadableFile(f"{path} holds one dictionary or module in another without an end")
    if isinstance(content, Instance):
        return _module(path, content, depth)
    if isinstance(content, dict):
        if "model_state" in content:
            return _nvidia(path, content)
        # What people save by hand most often.
        for name in ("model", "state_dict", "model_state_dict"):
            if isinstance(content.get(name), dict | Instance):
                return _from_torch(path, content[name], depth + 1)
        tensors = _named_tensors(path, content)
        if any(name.startswith("transformer.layers.") for name in tensors):
            return _huggingface(path, tensors)
        return Checkpoint(path=path, origin="authors", tensors=tensors)
    raise ValueError(f"{path} holds a {type(content).__name__} and no model")


def _named_tensors(path: Path, content: Mapping[Any, Any]) -> dict[str, Tensor]:
    tensors = {}
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, int | float | str | None):
            # What people keep beside the weights: the number of a step, a date.
            continue
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} holds {name!r} of type {type(value).__name__}, where a state dict has "
                "tensors by name: it is no model"
            )
        # DataParallel puts the model into a module of that name.
        tensors[name.removeprefix("module.")] = value
    if not tensors:
        raise ValueError(f"{path} holds no tensors: it is no model")
    return tensors


def _module(path: Path, module: Instance, depth: int) -> Checkpoint:
    """A whole pickled module, as the authors' train.py saves it."""
    state = _state(module)
    if (inner := _child(module, "module")) is not None:
        return _from_torch(path, inner, depth + 1)
    if "n_layer" not in state:
        raise ValueError(f"{path} holds a {module.kind} and no Transformer-XL")
    names = ("n_token", "n_layer", "n_head", "d_head", "d_model", "d_embed", "attn_type")
    lengths = ("tgt_len", "mem_len", "ext_len", "clamp_len", "same_length")
    settings = {name: state[name] for name in (*names, *lengths) if name in state}
    embedding = _state(_child(module, "word_emb"))
    settings |= {name: embedding[name] for name in ("cutoffs", "div_val") if name in embedding}
    if isinstance(cutoffs := settings.get("cutoffs"), list):
        settings["cutoffs"] = [x for x in cutoffs if x != settings.get("n_token")]
    layers = _child(module, "layers")
    first = None if layers is None else _child(layers, "0")
    attention = None if first is None else _child(first, "dec_attn")
    for owner, child, name, ours in (
        (attention, None, "pre_lnorm", "pre_lnorm"),
        (attention, "layer_norm", "eps", "layer_norm_epsilon"),
        (attention, "dropatt", "p", "dropatt"),
        (module, "drop", "p", "dropout"),
    ):
        place = owner if child is None or owner is None else _child(owner, child)
        if name in _state(place):
            settings[ours] = _state(place)[name]
    tensors = module_tensors(module)
    return Checkpoint(path=path, origin="authors", tensors=tensors, settings=_plain(settings))


def _state(instance: Instance | None) -> dict[str, Any]:
    state = None if instance is None else instance.state
    return state if isinstance(state, dict) else {}


def _child(module: Instance, name: str) -> Instance | None:
    modules = _state(module).get("_modules")
    modules = modules.entries if isinstance(modules, Instance) else modules
    child = modules.get(name) if isinstance(modules, dict) else None
    return child if isinstance(child, Instance) else None


def _nvidia(path: Path, content: dict[Any, Any]) -> Checkpoint:
    if not isinstance(content["model_state"], dict):
        raise ValueError(f"{path}: its model_state is no state dict")
    tensors = {}
    for name, x in _named_tensors(path, content["model_state"]).items():
        name = re.sub(r"^crit\.out_layers_biases\.(\d+)$", r"crit.out_layers.\1.bias", name)
        name = re.sub(r"^crit\.out_layers_weights\.(\d+)$", r"crit.out_layers.\1.weight", name)
        # The projections of the embeddings once more, whether the softmax uses them or not.
        if not name.startswith("crit.shared_out_projs."):
            tensors[name] = x
    settings = content.get("model_config")
    arguments = content.get("args")
    if not isinstance(settings, dict):
        settings = _state(arguments) if isinstance(arguments, Instance) else arguments
    return Checkpoint(
        path=path,
        origin="nvidia",
        tensors=tensors,
        settings=_plain(settings if isinstance(settings, dict) else {}),
        vocab=content.get("vocab"),
    )


def _huggingface(path: Path, tensors: Mapping[str, Tensor]) -> Checkpoint:
    named = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    for bias in ("r_w_bias", "r_r_bias"):
        in_layers = [
            name for name in named if re.fullmatch(rf"layers\.\d+\.dec_attn\.{bias}", name)
        ]
        # safetensors keeps one name of a bias that all layers share, whichever that is.
        if len(in_layers) == 1 and "layers.1.dec_attn.o_net.weight" in named:
            named.setdefault(bias, named.pop(in_layers[0]))
    return Checkpoint(path=path, origin="huggingface", tensors=named)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UnreadableFile(f"{path} is damaged or no safetensors file: {error}") from error


def _tensorflow(path: Path) -> Checkpoint:
    prefix = find_prefix(path)
    tensors, cutoffs = from_tensorflow(read_tensorflow(prefix))
    settings = {"cutoffs": cutoffs} if cutoffs else {}
    index = prefix.with_name(prefix.name + ".index")
    return Checkpoint(path=index, origin="tensorflow", tensors=tensors, settings=settings)


def from_tensorflow(variables: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[int]]:
    """Bring TensorFlow variables to the authors' PyTorch names; leave the optimizer's out.

    Returns:
        The tensors; and where clusters begin, if all of them share one table.

    Raises:
        ValueError: A variable is none of a Transformer-XL.
    """
    tensors: dict[str, Tensor] = {}
    biases: dict[int, Tensor] = {}
    for name, x in variables.items():
        if _SLOTS.search(name) or _COUNTERS.search(name):
            continue
        ours = _tensorflow_name(name)
        if ours is None:
            raise ValueError(f"the checkpoint holds {name}, which no Transformer-XL has")
        if name.endswith(("/kernel", "/proj_W", "/proj")) and x.ndim == 2:
            # Seen from the other side, not copied.
            x = x.T
        if ours in ("r_w_bias", "r_r_bias") and x.ndim == 3:
            tensors |= {f"layers.{n}.dec_attn.{ours}": own for n, own in enumerate(x)}
        elif match := re.fullmatch(r"crit\.out_layers\.(\d+)\.bias", ours):
            biases[int(match[1])] = x
        else:
            tensors[ours] = x
    cutoffs = []
    if len(biases) > 1 and "word_emb.emb_layers.1.weight" not in tensors:
        # One table of embeddings has its biases in one piece with the authors' PyTorch.
        parts = [x.flatten() for _, x in sorted(biases.items())]
        cutoffs = list(accumulate(len(x) for x in parts))[:-1]
        biases = {0: torch.cat(parts)}
    return tensors | {f"crit.out_layers.{i}.bias": x for i, x in biases.items()}, cutoffs


_TENSORFLOW_NAMES = (
    (r"adaptive_embed/cutoff_(\d+)/lookup_table", r"word_emb.emb_layers.\1.weight"),
    (r"adaptive_embed/cutoff_(\d+)/proj_W", r"word_emb.emb_projs.\1"),
    (r"adaptive_embed/lookup_table", r"word_emb.emb_layers.0.weight"),
    (r"adaptive_embed/proj_W", r"word_emb.emb_projs.0"),
    (r"adaptive_softmax/cutoff_(\d+)/b", r"crit.out_layers.\1.bias"),
    (r"adaptive_softmax/cutoff_(\d+)/proj", r"crit.out_projs.\1"),
    (r"adaptive_softmax/cutoff_0/cluster_W", r"crit.cluster_weight"),
    (r"adaptive_softmax/cutoff_0/cluster_b", r"crit.cluster_bias"),
    (r"adaptive_softmax/bias", r"crit.out_layers.0.bias"),
    (r"(r_w_bias|r_r_bias)", r"\1"),
    (r"layer_(\d+)/rel_attn/(qkv|r|o)/kernel", r"layers.\1.dec_attn.\2_net.weight"),
    (r"layer_(\d+)/rel_attn/LayerNorm/gamma", r"layers.\1.dec_attn.layer_norm.weight"),
    (r"layer_(\d+)/rel_attn/LayerNorm/beta", r"layers.\1.dec_attn.layer_norm.bias"),
    (r"layer_(\d+)/ff/layer_1/kernel", r"layers.\1.pos_ff.CoreNet.0.weight"),
    (r"layer_(\d+)/ff/layer_1/bias", r"layers.\1.pos_ff.CoreNet.0.bias"),
    (r"layer_(\d+)/ff/layer_2/kernel", r"layers.\1.pos_ff.CoreNet.3.weight"),
    (r"layer_(\d+)/ff/layer_2/bias", r"layers.\1.pos_ff.CoreNet.3.bias"),
    (r"layer_(\d+)/ff/LayerNorm/gamma", r"layers.\1.pos_ff.layer_norm.weight"),
    (r"layer_(\d+)/ff/LayerNorm/beta", r"layers.\1.pos_ff.layer_norm.bias"),
)


def _tensorflow_name(name: str) -> str | None:
    """Return the authors' PyTorch name of a TensorFlow variable."""
    for theirs, ours in _TENSORFLOW_NAMES:
        if match := re.fullmatch(rf"(?:.*/)?transformer/{theirs}", name):
            return match.expand(ours)
    return None


def _settings_beside(path: Path) -> dict[str, Any]:
    """Read ``config.json`` and ``corpus-info.json`` in the folder of a checkpoint."""
    found: dict[str, Any] = {}
    for name in ("corpus-info.json", "config.json"):
        file = path.parent / name
        if file.is_file():
            found |= _constructor_arguments(read_json(file))
    return found


def _constructor_arguments(content: dict[str, Any]) -> dict[str, Any]:
    """Find the arguments of a model in a file: on top, or in one of its objects."""
    for place in (content, *content.values()):
        if isinstance(place, dict) and "n_layer" in place and "d_model" in place:
            return _plain(place)
    return _plain({name: content[name] for name in ("cutoffs",) if name in content})


def _plain(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Keep what can be a setting; a file may hold anything under any name."""
    return {
        name: value
        for name, value in settings.items()
        if isinstance(name, str)
        and all(_is_plain(x) for x in (value if isinstance(value, list | tuple) else [value]))
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return value is None or isinstance(value, float | str)
