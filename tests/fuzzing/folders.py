"""Folders for ``fuzzing.py``: of ``convert``, of ``read_vocab``, and models that write."""

import hashlib
import json
import pickle
import random
import shutil
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mutations import ANYWHERE, Mutation, mutations, write_tensorflow

import transformer_xl as txl
from transformer_xl.errors import TxlError
from transformer_xl.inference.generate import from_pretrained, generate
from transformer_xl.interop.convert import convert
from transformer_xl.interop.convert.layouts import entries
from transformer_xl.interop.convert.vocabularies import find_vocab, read_vocab

WORDS = [*(f"w{i}" for i in range(18)), "<eos>", "<unk>"]
SETTINGS = {"n_token": 20, "n_layer": 2, "d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 12}
SETTINGS |= {"d_embed": 8, "mem_len": 4, "tgt_len": 4, "ext_len": 0, "clamp_len": -1}
SETTINGS |= {"attn_type": 0, "same_length": False, "pre_lnorm": False, "cutoffs": [], "div_val": 1}
PERMITTED = (RuntimeError, ValueError, FileNotFoundError)
ABSURD = (None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "x", "\ud800")
ABSURD += ([], {}, [None], [0, 0], [[]], {"a": {}}, ["<eos>"], [5, 12], "1" * 30)


def is_permitted(error: Exception) -> bool:
    """Tell whether a person who gives a damaged file may see such an error."""
    # RecursionError and others are kinds of RuntimeError.
    kinds = TxlError | FileNotFoundError
    return type(error) in PERMITTED or isinstance(error, kinds)


def convert_folder(place: Path) -> None:
    """Convert a folder into another, which is removed."""
    made = place.with_name("made")
    shutil.rmtree(made, ignore_errors=True)
    convert(place, made)
    shutil.rmtree(made)


def write_text(place: Path) -> None:
    """Load the model of a folder, and write three tokens."""
    model, vocab = from_pretrained(place)
    list(generate(model, vocab.encode("w1"), length=3, seed=1))


FOLDER_READERS: dict[str, Callable[[Path], Any]] = {
    "convert": convert_folder,
    "vocabulary": lambda place: read_vocab(find_vocab(place) or place),
    "model": write_text,
}


def setting(draw: random.Random, content: bytes) -> bytes:
    """Write something over a value of a JSON file, leave one out, or give one another name."""
    whole = json.loads(content)
    place = whole
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw.choice(list(keys))
        if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.3:
            break
        place = place[key]
    if (how := draw.randrange(8)) == 0:
        del place[key]
    elif how == 1 and isinstance(place, dict):
        place[draw.choice(("", "1" * 5000, "n_layer", str(key) + "x"))] = place.pop(key)
    else:
        place[key] = draw.choice(ABSURD)
    return json.dumps(whole).encode()


def header(draw: random.Random, content: bytes) -> bytes:
    """Change the header of a safetensors file; its length is right."""
    end = 8 + int.from_bytes(content[:8], "little")
    mutation = draw.choice([setting, setting, *ANYWHERE])
    changed = mutation(draw, content[8:end])
    return struct.pack("<Q", len(changed)) + changed + content[end:]


def folder_mutations(path: Path, content: bytes) -> list[Mutation]:
    """Return the changes that fit a file of a folder."""
    if path.suffix == ".json":
        return [*ANYWHERE, *[setting] * 12]
    if path.suffix == ".safetensors":
        return [*ANYWHERE, *[header] * 6]
    if path.suffix == ".txt":
        return ANYWHERE
    return mutations("tensorflow" if path.suffix == ".index" else "torch", content)


def seal(folder: Path, draw: random.Random) -> None:
    """Make the hash of a vocabulary right, so that other checks are reached, too."""
    path = folder / "vocab.json"
    if draw.random() < 0.2 or not path.is_file():
        return
    try:
        about = json.loads(path.read_bytes())
        definition = (folder / "tokenizer.json").read_bytes()
        named = f"{about['kind']}\n"
        if about["kind"] == "imported":
            named += json.dumps(about["rules"], sort_keys=True) + "\n"
        about["hash"] = hashlib.sha256(named.encode() + definition).hexdigest()
        path.write_text(json.dumps(about))
    except Exception:  # noqa: BLE001
        return  # It is damaged too much for that.


def model_of_tensorflow() -> dict[str, torch.Tensor]:
    """Return the variables of a model of two layers."""
    names = {"adaptive_embed/lookup_table": torch.randn(20, 8)}
    names |= {"adaptive_softmax/bias": torch.randn(20)}
    names |= {f"r_{x}_bias": torch.randn(2, 4) for x in "wr"}
    shapes = {"rel_attn/qkv/kernel": (8, 24), "rel_attn/r/kernel": (8, 8)}
    shapes |= {"rel_attn/o/kernel": (8, 8), "ff/layer_1/kernel": (8, 12), "ff/layer_1/bias": (12,)}
    shapes |= {"ff/layer_2/kernel": (12, 8), "ff/layer_2/bias": (8,)}
    for part in ("rel_attn", "ff"):
        shapes |= {f"{part}/LayerNorm/{x}": (8,) for x in ("gamma", "beta")}
    for n in range(2):
        names |= {f"layer_{n}/{part}": torch.randn(shape) for part, shape in shapes.items()}
    return {f"transformer/{name}": x for name, x in names.items()}


def folder_seeds(root: Path) -> list[tuple[str, Path]]:
    """Make a folder of each kind; return what reads it, and each of its files."""
    config = txl.ModelConfig(
        vocab_size=len(WORDS), n_layer=2, d_model=8, n_head=2, d_inner=12, mem_len=4
    )
    torch.manual_seed(0)
    ours = root / "ours"
    model = txl.TransformerXL(config)
    model.save_pretrained(ours)
    vocab = txl.data.train_vocab("words", ["".join(f"{word} " for word in WORDS[:18])], None, ["q"])
    vocab.save(ours)
    table = entries(config, clusters="natural", biases_in_layers=False)
    theirs = {x.theirs: model.state_dict()[x.ours][x.part] for x in table}
    for name, file, settings in (
        ("authors", "state_dict.pt", {"model_kwargs": SETTINGS}),
        ("hf", "pytorch_model.bin", {"model_type": "transfo-xl", "vocab_size": 20} | SETTINGS),
    ):
        (root / name).mkdir()
        torch.save(OrderedDict(theirs), root / name / file)
        (root / name / "config.json").write_text(json.dumps(settings))
    (root / "hf" / "vocab.txt").write_text("\n".join(WORDS))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        tokens = {"eos_token": "<eos>", "unk_token": "<unk>"}
        (root / "hf" / name).write_text(json.dumps(tokens))
    numbers = {word: number for number, word in enumerate(WORDS)}
    torch.save({"sym2idx": numbers, "idx2sym": WORDS}, root / "hf" / "vocab.bin")
    shutil.copytree(root / "hf", root / "safe")
    weights = torch.load(root / "hf" / "pytorch_model.bin", weights_only=True)
    (root / "safe" / "pytorch_model.bin").unlink()
    from safetensors.torch import save_file

    save_file({name: x.clone() for name, x in weights.items()}, root / "safe" / "model.safetensors")
    (root / "safe" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "added_tokens_decoder": {"18": {"content": "<eos>"}}})
    )
    write_tensorflow(root / "tf", model_of_tensorflow())
    (root / "tf" / "config.json").write_text(json.dumps(SETTINGS))
    found = [
        ("convert", path)
        for name in ("authors", "hf", "safe", "tf")
        for path in sorted((root / name).iterdir())
    ]
    numbered = OrderedDict((word, i) for i, word in enumerate(WORDS))
    state = {"idx2sym": WORDS, "sym2idx": numbered, "unk_idx": 19, "lower_case": False}
    for name in ("vocab.txt", "vocab.pkl", "vocab.bin"):
        folder = root / name.replace(".", "_")
        folder.mkdir()
        shutil.copy(root / "safe" / "tokenizer_config.json", folder)
        if name == "vocab.txt":
            (folder / name).write_text("\n".join(WORDS))
        elif name == "vocab.pkl":
            (folder / name).write_bytes(pickle.dumps(state, 2))
        else:
            torch.save(state, folder / name)
        found += [("vocabulary", path) for path in sorted(folder.iterdir())]
    found += [("model", path) for path in sorted(ours.iterdir())]
    return found
