"""What an artefact holds and computes, in numbers that a JSON file can hold."""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_xl import TransformerXL, WithMemory, evaluate, generate, load_recipe, train
from transformer_xl.apps.compress.contents import made_here
from transformer_xl.config.device import describe_machine
from transformer_xl.data import Corpus
from transformer_xl.inference.generate import Sampling
from transformer_xl.train import loop
from transformer_xl.train.checkpoint.checkpoints import read_about, read_whole

SAMPLE = "the cat saw a dog\nand ran to the sea\n"
SEGMENT = 8
N_GREEDY = 24


def machine() -> dict[str, Any]:
    """Return what decides the last digits of a sum on this machine."""
    about = describe_machine()
    instructions = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    return {
        "made_by": made_here(),
        "processor": about["processor"],
        "instructions": " ".join(instructions),
    }


def digest(x: Tensor) -> str:
    """Return a digest of a tensor: its type, its shape and its bits."""
    about = f"{x.dtype} {tuple(x.shape)}\n".encode()
    bits = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(about + bits.tobytes()).hexdigest()[:24]


def digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the digests of tensors by name."""
    return {name: digest(x) for name, x in sorted(tensors)}


def raw_digests(path: Path) -> dict[str, str]:
    """Return the digests of a safetensors file, read without any library."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    names = {"F32": "float32", "F64": "float64", "F16": "float16", "BF16": "bfloat16"}
    names |= {"U8": "uint8", "I64": "int64"}
    found = {}
    for name, about in sorted(header.items()):
        start, stop = (8 + length + x for x in about["data_offsets"])
        kind = f"torch.{names[about['dtype']]} {tuple(about['shape'])}\n".encode()
        found[name] = hashlib.sha256(kind + content[start:stop]).hexdigest()[:24]
    return found


def describe_corpus(folder: Path) -> dict[str, Any]:
    """Return what a prepared corpus holds."""
    corpus = Corpus(folder)
    ids = corpus.vocab.encode(SAMPLE)
    return {
        "vocab": {"size": len(corpus.vocab), "hash": corpus.vocab.hash, "kind": corpus.vocab.kind},
        "splits": {
            name: hashlib.sha256(corpus.split(name).tobytes()).hexdigest()
            for name in ("train", "valid", "test")
        },
        "n_bytes": {name: corpus.n_bytes(name) for name in ("train", "valid", "test")},
        "ids": list(ids),
        "decoded": corpus.vocab.decode(ids),
    }


def describe_model(model: TransformerXL) -> dict[str, Any]:
    """Return the settings of a model, its weights, and what it computes."""
    weights = digests(model.named_parameters())
    model = model.double()
    V = model.config.vocab_size
    tokens = torch.tensor([_tokens(V, 50)])
    result = evaluate(model, tokens[0], WithMemory(segment_len=SEGMENT, batch_size=1))
    with torch.no_grad():
        first = model(tokens[:, :20])
        log_probs = model(tokens[:, 20:21], first.mems).log_probs
    assert log_probs is not None
    return {
        "settings": json.loads(json.dumps(asdict(model.config))),
        "weights": weights,
        "nll": result.nll,
        "log_probs": log_probs.flatten()[: min(V, 8)].tolist(),
        "greedy": greedy(model, prompt_of(model)),
    }


def prompt_of(model: TransformerXL) -> list[int]:
    """Return the tokens that a model goes on from in :func:`describe_model`."""
    return _tokens(model.config.vocab_size, 9)


def _tokens(vocab_size: int, n: int) -> list[int]:
    return [(7 * k * k + 3 * k) % vocab_size for k in range(n)]


def greedy(model: TransformerXL, prompt: list[int], mems: Any = None) -> list[int]:
    """Return the likeliest continuation."""
    return list(
        generate(model, prompt, length=N_GREEDY, mems=mems, sampling=Sampling(temperature=0))
    )


def finish_run(run: Path, corpus: Path) -> dict[str, Any]:
    """Train a run to its end; return what it ends with."""
    config = load_recipe(run / "recipe.toml")
    config = replace(config, data=replace(config.data, corpus=str(corpus)))
    with replaced("finish", lambda *about: {}):
        train(config, run, quiet=True)
    (checkpoint,) = (run / "checkpoints").iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    about = read_about(checkpoint)
    return {
        "weights": read_whole(checkpoint, ""),
        "metrics": [
            {
                # As version 0.1.0 called it.
                "bits" if name == "bits_per_token" else name: line[name]
                for name in ("kind", "step", "bits", "bits_per_token", "nll", "lr")
                if name in line
            }
            for line in lines
        ],
        "segments": about["segments"],
        "best": about["best"],
    }


@contextmanager
def replaced(name: str, function: Any) -> Iterator[None]:
    """Put another function into the training loop."""
    before = getattr(loop, name)
    setattr(loop, name, function)
    try:
        yield
    finally:
        setattr(loop, name, before)
