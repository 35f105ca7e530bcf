"""Is an adapter as good as training all weights? LoRA by PEFT against full fine-tuning.

    txl train demo --out runs/lora-base --train.minutes None --train.steps 1500
    python benchmarks/lora.py runs/lora-base/model/best tinyshakespeare/input.txt --json lora.json

A model is fine-tuned on another text than it was trained on, once with all of its weights and once
with adapters alone, as docs/transformers.md shows them: rank 8, on the maps of the feed-forward
networks, the embedding and the softmax. The first 90 % of the text are trained on, tokens of the
next 5 % choose the learning rate, tokens of the last 5 % are what is reported.

Rules: both ways read the same segments in the same order, several streams side by side, each with
its memory carried from segment to segment; both have AdamW without weight decay, the same warm-up,
the same decay to zero, the same clipping, and as many learning rates to choose from, with one seed.
Then each learns with its best rate once for every seed, which shifts the text and draws the
adapters. Each adapter is saved and loaded into the model anew: it must predict the same, bit for
bit. What is compared is how far each way lowers the loss of the model as it was. Runs that the file
of --json holds already are not made again.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from result_file import write_result_file
from transformers import AutoModelForCausalLM
from turns import circumstances

import transformer_xl.hf  # noqa: F401
from transformer_xl.config.device import keep_freed_memory
from transformer_xl.data import Segments, load_vocab
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.model import TransformerXL

RATES = {"full": (3e-4, 1e-3, 3e-3, 1e-2), "lora": (1e-3, 3e-3, 1e-2, 3e-2)}
SPLIT = 0.9, 0.95


def loaded(arguments: argparse.Namespace, way: str) -> Any:
    """Load the model to be fine-tuned; with new adapters, if that is the way."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    if way == "full":
        return model
    modules = arguments.modules
    return get_peft_model(
        model,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=arguments.rank,
            lora_alpha=arguments.alpha,
            alpha_pattern={"embedding": arguments.embedding_alpha},
            target_modules=modules[0] if len(modules) == 1 else modules,
        ),
    )


def network(model: Any) -> TransformerXL:
    """Return the network inside, with its adapters."""
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return inner.transformer


def rate(step: int, steps: int) -> float:
    """Return the learning rate of an update, as a share of the highest."""
    warmup = steps // 10
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def tuned(
    arguments: argparse.Namespace, way: str, lr: float, seed: int, text: torch.Tensor
) -> tuple[Any, dict[str, Any]]:
    """Fine-tune the model; return it, and what is known of the run."""
    torch.manual_seed(seed)
    model = loaded(arguments, way)
    inner = network(model).train()
    weights = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    segments = Segments(text.numpy(), arguments.batch_size, arguments.segment_len, roll_seed=seed)
    mems, losses, began = None, [], time.perf_counter()
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * rate(step, arguments.steps)
        tokens, targets = segments.next_segment()
        out = inner(tokens, mems, targets)
        mems = out.mems
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    return model, {
        "way": way,
        "lr": lr,
        "seed": seed,
        "trained": sum(x.numel() for x in weights),
        "train_nll": sum(losses[-20:]) / len(losses[-20:]),
        "seconds": round(time.perf_counter() - began, 1),
    }


def nll(arguments: argparse.Namespace, model: Any, text: torch.Tensor) -> float:
    """Return the loss over a text, read with memory."""
    how = WithMemory(segment_len=arguments.segment_len, batch_size=arguments.batch_size)
    return evaluate(network(model), text, how).nll


@torch.no_grad()
def comes_back(arguments: argparse.Namespace, model: Any, text: torch.Tensor) -> bool:
    """Whether the adapter of a model, saved and loaded, predicts the same bits."""
    read = text[None, : arguments.segment_len]
    expected = network(model.eval())(read).log_probs
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(loaded(arguments, "full"), folder).eval()
    return torch.equal(network(again)(read).log_probs, expected)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("text", type=Path, help="what to fine-tune on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--segment_len", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=32)
    parser.add_argument("--embedding_alpha", type=int, default=8)
    parser.add_argument("--modules", nargs="+", default=MODULES, help="what has adapters")
    parser.add_argument("--held_out", type=int, default=10_000, help="tokens of it, at most, twice")
    parser.add_argument("--ways", nargs="+", choices=RATES, default=[*RATES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()

    vocab = load_vocab(arguments.model)
    ids = torch.as_tensor(vocab.encode(arguments.text.read_text()))
    train, valid, test = ids.tensor_split([int(share * len(ids)) for share in SPLIT])
    valid, test = valid[: arguments.held_out], test[: arguments.held_out]
    base = loaded(arguments, "full")
    content: dict[str, Any] = {
        **circumstances(),
        "settings": {
            name: getattr(arguments, name)
            for name in (
                "steps",
                "batch_size",
                "segment_len",
                "rank",
                "alpha",
                "embedding_alpha",
                "modules",
                "held_out",
            )
        },
        "tokens": {"train": len(train), "valid": len(valid), "test": len(test)},
        "parameters": sum(x.numel() for x in base.parameters()),
        "base": {"valid": nll(arguments, base, valid), "test": nll(arguments, base, test)},
        "rows": [],
    }

    if arguments.json and arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        same = ("settings", "tokens", "parameters", "base")
        if any(before[name] != json.loads(json.dumps(content[name])) for name in same):
            parser.error(f"{arguments.json} holds what was found with other settings")
        content["rows"] = before["rows"]

    def run(way: str, lr: float, seed: int) -> dict[str, Any]:
        for row in content["rows"]:
            if (row["way"], row["lr"], row["seed"]) == (way, lr, seed):
                return row
        model, row = tuned(arguments, way, lr, seed, train)
        row["valid"], row["test"] = (nll(arguments, model, part) for part in (valid, test))
        if way == "lora":
            row["comes_back"] = comes_back(arguments, model, test)
        content["rows"].append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            write_result_file(arguments.json, content)
        return row

    print(json.dumps({name: content[name] for name in ("tokens", "parameters", "base")}))
    means = {}
    for way in arguments.ways:
        tried = [run(way, lr, 0) for lr in RATES[way]]
        best = min(tried, key=lambda row: row["valid"])["lr"]
        rows = [run(way, best, seed) for seed in range(arguments.seeds)]
        means[way] = best, sum(row["test"] for row in rows) / len(rows)
    start = content["base"]["test"]
    if len(means) == 2:
        content["share"] = (start - means["lora"][1]) / (start - means["full"][1])
    if arguments.json:
        write_result_file(arguments.json, content)
    print("| way | weights trained | best rate | test, nats a token | lowered by |")
    print("|---|---|---|---|---|")
    print(f"| as it was | | | {start:.4f} | |")
    for way, (lr, mean) in means.items():
        trained = next(row["trained"] for row in content["rows"] if row["way"] == way)
        share = trained / content["parameters"]
        print(f"| {way} | {trained:,} ({share:.1%}) | {lr:g} | {mean:.4f} | {start - mean:.4f} |")
    if "share" in content:
        print(f"LoRA lowers the loss by {content['share']:.1%} of what full fine-tuning does.")


MODULES = ["inner", "outer", "embedding", "softmax"]

if __name__ == "__main__":
    main()
