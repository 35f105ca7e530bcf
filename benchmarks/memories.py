"""Memory lengths that differ by layer, and compressed memories, against one plain memory.

    python benchmarks/memories.py english --data wikitext-2 --steps 400 --json memories.json

The training of a shipped model goes on with a text, once for each way and seed, in the same steps
from the same weights. Then the held-out text is read in streams, and losses are counted where all
memories are full.

A way is one of
  plain:M        M positions in each layer (the model as it is)
  layers:M,M,... M positions in each layer, the lowest first (Rae and Razavi, 2020, arXiv
                 2007.03356)
  mean:M+CxR     the Compressive Transformer (Rae et al., 2020, arXiv 1911.05507): M positions, and
  max:M+CxR      C compressed ones, each of which replaces the R positions that left the memory
  conv:M+CxR     together, by their mean, their maximum or a learned convolution, which is trained
                 by the attention-reconstruction loss alone. Positions are those of the keys in
                 their order, compressed ones first.

The cost of a step is CPU time on one thread, which other programs on the machine change little.
Windows by layer, as the package has them, are measured with ``--model.layer_attn_lens`` instead.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from result_file import write_result_file
from torch import Tensor, nn
from turns import circumstances

from transformer_xl.config import DataConfig, TrainConfig
from transformer_xl.config.device import keep_freed_memory
from transformer_xl.data import Segments, prepare
from transformer_xl.model import load_model
from transformer_xl.model.positions import Positions, encoding_of
from transformer_xl.model.segment import View
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.train.optim import Optimizer, lr_scale

SKIPPED = 1_024
"""Positions at the start of each stream that are read and not counted."""


class Way(NamedTuple):
    """The memory of a model."""

    kind: str
    mem_lens: tuple[int, ...]
    """Positions in each layer; one number: in all."""
    compressed: int = 0
    """Compressed positions in each layer."""
    rate: int = 1
    """Positions that a compressed one replaces."""

    @classmethod
    def of(cls, name: str) -> "Way":
        """Parse the name of a way."""
        kind, _, sizes = name.partition(":")
        if kind in ("plain", "layers"):
            return cls(kind, tuple(int(x) for x in sizes.split(",")))
        mem_len, _, rest = sizes.partition("+")
        compressed, _, rate = rest.partition("x")
        return cls(kind, (int(mem_len),), int(compressed), int(rate))

    def mem_len(self, layer: int) -> int:
        """Return the memory length of a layer."""
        return self.mem_lens[layer if len(self.mem_lens) > 1 else 0]


class State(NamedTuple):
    """The memory of all streams, for each layer."""

    recent: list[Tensor]
    compressed: list[Tensor]
    # What a forward pass asks of a memory.
    forgotten: None = None
    length: int = 0
    join: None = None

    def with_capacity(self, T: int, mem_len: int) -> "State":
        """Return the memory: it has no capacity."""
        return self


class Varied(TransformerXL):
    """Transformer-XL with the memory of a way, and without documents, padding or ``attn_len``.

    Attributes:
        way: The way.
        reconstruction: The attention-reconstruction loss of the last segment; a convolution only.
    """

    way = Way("plain", (0,))
    reconstruction: Any = 0.0

    def use(self, way: Way) -> None:
        """Choose the way; a convolution begins as the mean."""
        self.way = way
        if way.kind == "conv":
            D, rate = self.config.d_model, way.rate
            self.compressors = nn.ModuleList(
                nn.Conv1d(D, D, rate, stride=rate, bias=False) for _ in self.layers
            )
            for each in self.compressors:
                with torch.no_grad():
                    each.weight.copy_(torch.eye(D)[:, :, None].expand(-1, -1, rate) / rate)

    def start_memory(self, batch_size: int, mem_len: int | None = None) -> Any:
        """Return an empty memory of the way."""
        weight = self.layers[0].attention_norm.weight
        empty = weight.new_zeros(batch_size, 0, self.config.d_model)
        return State(*([empty] * self.config.n_layer for _ in range(2)))

    def require_readable(self, segment: Any, mems: Any, lengths: Any) -> None:
        """Require nothing: the memories are those of this program."""

    def _read(self, x: Tensor, memory: Any, view: View) -> tuple[Tensor, Any]:
        T, self.reconstruction = x.shape[1], 0.0
        lengths_of = zip(memory.compressed, memory.recent, strict=True)
        sizes = [c.shape[1] + m.shape[1] + T for c, m in lengths_of]
        encoding = self.dropped_input(encoding_of(self, max(sizes), view.clamp_len))
        biases = self.content_bias[0], self.position_bias[0]
        after = State([], [])
        for n, layer in enumerate(self.layers):
            recent, compressed = memory.recent[n], memory.compressed[n]
            past = torch.cat([compressed, recent], 1) if compressed.shape[1] else recent
            own = Positions(layer.attention.position_keys(encoding[-sizes[n] :]), *biases)
            joined = torch.cat([recent.to(x.dtype), x.detach()], 1)
            given, x = x, layer(x, past, own)
            kept = self.way.mem_len(n)
            left = max(joined.shape[1] - kept, 0)
            after.recent.append(joined[:, left:])
            if self.way.compressed and (blocks := left // self.way.rate):
                old = joined[:, : blocks * self.way.rate]
                new = self._compressed(n, old)
                if self.way.kind == "conv" and self.training:
                    self.reconstruction += self._reconstruction(layer, given.detach(), old, new)
                compressed = torch.cat([compressed, new.detach()], 1)[:, -self.way.compressed :]
            after.compressed.append(compressed)
        return self.final_norm(x), after

    def _compressed(self, n: int, old: Tensor) -> Tensor:
        if self.way.kind == "conv":
            return self.compressors[n](old.mT).mT
        blocks = old.unflatten(1, (-1, self.way.rate))
        return blocks.mean(2) if self.way.kind == "mean" else blocks.amax(2)

    def _reconstruction(self, layer: Any, x: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return how far attention to the compressed positions is from that to the old ones.

        By content alone, and with gradients for the compression only, as in the paper.
        """
        own = {name: w.detach() for name, w in layer.named_parameters()}

        def normalized(y: Tensor) -> Tensor:
            weight, bias = own["attention_norm.weight"], own["attention_norm.bias"]
            return F.layer_norm(y, weight.shape, weight, bias, self.config.norm_eps)

        def projected(y: Tensor, part: int) -> Tensor:
            heads = F.linear(normalized(y), own["attention.qkv_proj.weight"].chunk(3)[part])
            heads = heads.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2)
            if part == 2 or layer.attention.q_norm is None:
                return heads
            name = "attention.q_norm.weight" if part == 0 else "attention.k_norm.weight"
            return F.rms_norm(heads, heads.shape[-1:], own[name], self.config.norm_eps)

        q = projected(x, 0)
        seen = [
            F.scaled_dot_product_attention(q, projected(each, 1), projected(each, 2))
            for each in (old, new)
        ]
        return F.mse_loss(seen[1], seen[0].detach())


def trained(model: Varied, text: Any, seed: int, arguments: argparse.Namespace) -> float:
    """Train a model; return the CPU seconds of a step, without the first ones."""
    settings = TrainConfig(
        steps=max(arguments.steps, 1), optimizer="muon", lr=arguments.lr,
        muon_lr=arguments.muon_lr, beta2=0.98, schedule="constant_cooldown",
        warmup_steps=min(50, arguments.steps // 10), cooldown_fraction=0.5,
        precision=arguments.precision,
    )  # fmt: skip
    optimizer = Optimizer(model, settings)
    segments = Segments(text, arguments.batch_size, arguments.segment_len, roll_seed=seed)
    mems, model, seconds = None, model.train(), []
    for step in range(arguments.steps):
        began = time.process_time()
        tokens, targets = segments.next_segment()
        with autocast(arguments):
            out = model(tokens, mems, targets)
        mems = out.mems
        (out.nll.mean() + model.reconstruction).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(lr_scale(settings, step, arguments.steps))
        seconds.append(time.process_time() - began)
    filled = sorted(seconds[len(seconds) // 2 :])
    return filled[len(filled) // 2] if filled else 0.0


def autocast(arguments: argparse.Namespace) -> Any:
    """Compute in the precision of the arguments."""
    return torch.autocast("cpu", torch.bfloat16, enabled=arguments.precision == "bfloat16")


@torch.no_grad()
def held_out(model: Varied, text: Any, arguments: argparse.Namespace) -> list[float]:
    """Return the mean loss of each stream of the held-out text, in bits per token."""
    model.eval()
    B, n = arguments.streams, arguments.tokens // arguments.streams
    text = torch.as_tensor(text[: B * n + 1].astype("int64"))
    tokens, targets = (text[k : k + B * n].view(B, n) for k in (0, 1))
    mems, losses = None, []
    for start in range(0, n, arguments.segment_len):
        some = slice(start, start + arguments.segment_len)
        with autocast(arguments):
            out = model(tokens[:, some], mems, targets[:, some])
        mems = out.mems
        losses.append(out.nll)
    nll = torch.cat(losses, 1)[:, SKIPPED:].double().mean(1) / math.log(2)
    return nll.tolist()


def measured(name: str, way: str, seed: int, corpus: Any, arguments: Any) -> dict[str, Any]:
    """Train and measure a way."""
    torch.manual_seed(seed)
    shipped = load_model(name)
    model = Varied(shipped.config)
    model.load_state_dict(shipped.state_dict())
    model.use(Way.of(way))
    seconds = trained(model, corpus.split("train"), seed, arguments)
    row = {"way": way, "seed": seed, "seconds_per_step": round(seconds, 4)}
    streams = held_out(model, corpus.split(arguments.split), arguments)
    return row | {"bits": round(sum(streams) / len(streams), 4)}


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table: for each way the mean over the seeds, and what it costs."""
    lines = ["| memory | bits per token, by seed | CPU seconds of a step |", "|---|---|---|"]
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        cost = sum(row["seconds_per_step"] for row in own) / len(own)
        bits = ", ".join(f"{row['bits']:.4f}" for row in own)
        lines.append(f"| {way} | {bits} | {cost:.3f} |")
    return lines


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="the name of a shipped model")
    add("--data", default="python-stdlib", help="the corpus")
    add("--path", help="a local copy of it")
    add("--ways", nargs="+", default=["plain:256", "mean:128+128x4"])
    add("--seeds", type=int, nargs="+", default=[1, 2])
    add("--steps", type=int, default=1_000)
    add("--batch_size", type=int, default=16)
    add("--segment_len", type=int, default=64)
    add("--lr", type=float, default=3e-3)
    add("--muon_lr", type=float, default=0.02)
    add("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    add("--split", choices=["valid", "test"], default="valid")
    add("--tokens", type=int, default=131_072, help="of the held-out text")
    add("--streams", type=int, default=16, help="in which it is read")
    add("--json", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    more = {"split_by": "file"} if arguments.data == "python-stdlib" else {}
    more["tokenizer"] = arguments.model
    corpus = prepare(DataConfig(name=arguments.data, path=arguments.path, **more), print)
    rows = []
    for seed, way in product(arguments.seeds, arguments.ways):
        rows.append(measured(arguments.model, way, seed, corpus, arguments))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.json:
            content = {**circumstances(), "rows": rows}
            write_result_file(arguments.json, content)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
