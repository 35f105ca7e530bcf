"""What a neural cache, or kNN-LM over a stream's own past, is worth: no training, one stream.

    python benchmarks/nearest.py runs/words --json nearest.json
    python benchmarks/nearest.py english --data wikitext-2 --json nearest.json
    python benchmarks/nearest.py python-code --files networkx/algorithms --mem_lens 512 2048

For each model and kind of cache, temperature and share are chosen on the first tokens of the
validation text of its run or of ``--data`` (with ``--files``, on the first tokens of these files);
then the test text (what follows in these files) is scored with the cache and without it, in nats
per token, with the shortest memory and, for the last kind, with longer ones; and with the default
settings of the package, on which nothing was tuned. The cache remembers
the output of the layers at each position and the token that followed:

    p(w) = (1 - share) p_model(w) + share sum_i [x_(i+1) = w] softmax_i(similarity(h_t, h_i))

With ``dot`` and a window this is the neural cache (Grave et al., 2017, arXiv 1612.04426); with
``l2`` and the k nearest, kNN-LM (Khandelwal et al., 2020, arXiv 1911.00172) whose datastore is the
past of the stream. The similarity is divided by the width of the model.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from result_file import write_result_file
from torch import Tensor
from turns import circumstances

from transformer_xl.config import DataConfig
from transformer_xl.config.device import keep_freed_memory
from transformer_xl.config.knn import KnnConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import load_vocab, prepare
from transformer_xl.inference.generate import generate
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.pretrained import find_model_folder
from transformer_xl.model.reading import read
from transformer_xl.model.segment import Lengths
from transformer_xl.train.checkpoint import RECIPE_FILE

ROWS = 256
"""Positions whose similarities are computed at once."""
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


class Cache(NamedTuple):
    """How the past is searched."""

    similarity: str
    """``dot`` or ``l2``."""
    window: int | None
    """How many of the last positions; None: all."""
    nearest: int | None
    """How many of them count, the most similar ones; None: all."""
    sharpness: float
    """Factor of the similarity, the inverse of the temperature."""


KINDS = [
    ("dot", 500, None), ("dot", None, None), ("l2", 500, None), ("l2", 2_000, 64),
    ("l2", None, None), ("l2", 10_000, 8), ("l2", 10_000, 64),
]  # fmt: skip
SHARPNESS = {"dot": (4.0, 16.0, 64.0), "l2": (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)}


class Past(NamedTuple):
    """A text as a model has read it."""

    hidden: Tensor
    """Outputs of the layers, (N, D)."""
    targets: Tensor
    """The token after each position."""
    nll: Tensor
    """-log p of it, in nats."""
    seconds: float


@torch.no_grad()
def as_read(model: LanguageModel, text: Any, segment_len: int, mem_len: int | None) -> Past:
    """Read a text in one stream."""
    ids = torch.as_tensor(text.astype("int64") if hasattr(text, "astype") else text)
    lengths = Lengths.of(model.config, segment_len=segment_len, mem_len=mem_len, ext_len=0)
    began = time.process_time()
    mems = model.keep(model.start_memory(1, lengths.mem_len))
    pieces = read(model, ids[None, :-1], lengths, mems, targets=ids[None, 1:])
    found = [(x.hidden[0], x.nll[0]) for x in pieces if x.nll is not None]
    hidden, nll = (torch.cat([each[n] for each in found]) for n in (0, 1))
    return Past(hidden.float(), ids[1:], nll.double(), time.process_time() - began)


@torch.no_grad()
def found(past: Past, caches: list[Cache], first: int = 0) -> Tensor:
    """Return the probability that each cache gives to each target from ``first`` on."""
    hidden, targets = past.hidden, past.targets
    N, D = hidden.shape
    squares = hidden.square().sum(1)
    made = torch.zeros(len(caches), N, dtype=torch.float64)
    for start in range(first, N, ROWS):
        stop = min(start + ROWS, N)
        products = hidden[start:stop] @ hidden[:stop].T
        l2 = (2 * products - squares[:stop] - squares[start:stop, None]) / D
        position = torch.arange(stop)
        age = torch.arange(start, stop)[:, None] - position
        is_same = targets[:stop] == targets[start:stop, None]
        for n, (similarity, window, nearest, sharpness) in enumerate(caches):
            score = (products / D if similarity == "dot" else l2) * sharpness
            hidden_ones = age <= 0 if window is None else (age <= 0) | (age > window)
            score = score.masked_fill(hidden_ones, -torch.inf)
            if nearest is not None and nearest < stop:
                least = score.topk(nearest, 1).values[:, -1:]
                score = score.masked_fill(score < least, -torch.inf)
            # The first position of a stream has no past.
            mass = score.sub(score.amax(1, True).clamp(min=-1e30)).exp()
            total = mass.sum(1)
            share = (mass * is_same).sum(1) / total.clamp(min=1e-30)
            made[n, start:stop] = share.double()
    return made[:, first:]


def mixed(nll: Tensor, probability: Tensor, share: float) -> Tensor:
    """Return -log p of the mixture."""
    return -((1 - share) * (-nll).exp() + share * probability).log()


def texts(name: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return the text to choose settings on, and the one to measure."""
    n, more = arguments.tuned_on, arguments.tokens
    if arguments.files:
        vocab = load_vocab(find_model_folder(name))
        files = sorted(arguments.files.rglob("*.py"))
        ids = torch.tensor(vocab.encode("".join(x.read_text("utf-8") for x in files)))
        return ids[:n], ids[n : n + more]
    if arguments.data:
        data = DataConfig(name=arguments.data, path=arguments.path, tokenizer=name)
    else:
        data = load_recipe(Path(name) / RECIPE_FILE).data
    corpus = prepare(data, print)
    return corpus.split("valid")[:n], corpus.split("test")[:more]


def measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Choose the settings of a model, and measure them."""
    model = load_model(name).eval()
    tuned_on, test = texts(name, arguments)
    mem_lens = arguments.mem_lens or [model.config.mem_len]
    segment_len, rows = arguments.segment_len, []
    past = as_read(model, tuned_on, segment_len, mem_lens[0])
    for kind in KINDS:
        caches = [Cache(*kind, sharpness) for sharpness in SHARPNESS[kind[0]]]
        for cache, probability in zip(caches, found(past, caches), strict=True):
            nll = {share: float(mixed(past.nll, probability, share).mean()) for share in SHARES}
            share = min(nll, key=nll.__getitem__)
            rows.append((nll[share], cache, share))
        best = min((row for row in rows if row[1][:3] == kind), key=lambda row: row[0])
        print(name, best, f"plain {float(past.nll.mean()):.4f}", flush=True)
    chosen = [min((x for x in rows if x[1][:3] == k), key=lambda x: x[0]) for k in KINDS]
    results, plain, searches = [], {}, []
    for mem_len in mem_lens:
        past = as_read(model, test, segment_len, mem_len)
        plain[str(mem_len)] = round(float(past.nll.mean()), 4)
        # With the longer memories, the last kind only.
        some = chosen if mem_len == mem_lens[0] else chosen[-1:]
        knn = KnnConfig()
        default = Cache("l2", knn.window, knn.k, 1 / knn.temperature)
        some = [*some, (None, default, knn.share)]
        began = time.process_time()
        made = found(past, [cache for _, cache, _ in some])
        searches.append((time.process_time() - began) / len(some))
        for (_, cache, share), probability in zip(some, made, strict=True):
            change = mixed(past.nll, probability, share) - past.nll
            # The error of the mean over blocks of 1,000 tokens, which depend on one another less.
            blocks = change[: len(change) // 1_000 * 1_000].view(-1, 1_000).mean(1)
            error = float(blocks.std() / math.sqrt(len(blocks)))
            row = cache._asdict() | {"share": share, "change": round(float(change.mean()), 4)}
            results.append(row | {"error": round(error, 4), "mem_len": mem_len})
    return {
        "model": str(name), "tuned_on": len(tuned_on), "tokens": len(test) - 1, "plain": plain,
        "caches": [" ".join(f"{key}={x}" for key, x in row.items()) for row in results],
        "reading_seconds": round(past.seconds, 1),
        "searching_seconds": round(searches[-1], 1),
    }  # fmt: skip


def writing(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return CPU milliseconds of a written token, without kNN-LM and with a full window."""
    model, (prompt, _) = load_model(name).eval(), texts(name, arguments)
    found = {}
    for key, knn in (("plain", None), ("knn", KnnConfig(window=len(prompt) - 1))):
        drawn = generate(model, prompt, length=200, seed=1, knn=knn)
        next(drawn)
        began = time.process_time()
        n = sum(1 for _ in drawn)
        found[key] = round(1_000 * (time.process_time() - began) / n, 2)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="run folders, or names of shipped models")
    parser.add_argument(
        "--files", type=Path, help="a folder of Python source, in place of a corpus"
    )
    parser.add_argument("--data", help="a known corpus, in place of that of the run")
    parser.add_argument("--path", help="a local copy of it")
    parser.add_argument("--tuned_on", type=int, default=10_000, help="tokens to choose settings on")
    parser.add_argument("--tokens", type=int, default=30_000, help="of the test text, at most")
    parser.add_argument("--segment_len", type=int, default=128)
    parser.add_argument("--mem_lens", type=int, nargs="+", help="None: as configured")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        rows.append(measured(name, arguments) | {"writing_ms": writing(name, arguments)})
        print(json.dumps(rows[-1], indent=1), flush=True)
        if arguments.json:
            content = {**circumstances(), "rows": rows}
            write_result_file(arguments.json, content)


if __name__ == "__main__":
    main()
