"""What a finished run shows: how well the model predicts, what it writes, and the report."""

import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from transformer_xl.config import Config, EvalConfig, GenerateConfig
from transformer_xl.config.device import autocast
from transformer_xl.data import Corpus, raw_split
from transformer_xl.inference.evaluate import Dynamic, Result, cost_of, evaluate_by, plan_dynamic
from transformer_xl.inference.generate import generate, text_pieces
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.lengths import Lengths
from transformer_xl.train.checkpoint import RESULTS_FILE, SAMPLE_FILE, RunFolder
from transformer_xl.train.metrics import reading
from transformer_xl.train.seen import MEMORY_FILE, READINGS, TOKENS, see_memory

REPORT_FILE = "report.html"
COMPARED_BYTES = 10_000
"""Least bytes of a text on which gzip and xz are compared with the model: for fewer, much of what
they write are their own headers and tables."""


def finish(
    config: Config,
    folder: RunFolder,
    corpus: Corpus,
    device: torch.device,
    say: Callable[[str], None],
    quiet: bool = False,
) -> dict[str, Any]:
    """Evaluate the best model of a run at every memory length, let it write, draw the report.

    What an earlier call with the same settings has written is returned as it is. How far it is
    with its texts is shown, unless it is to be ``quiet``.

    Returns:
        The contents of ``results.json``.
    """
    if (results := _read_results(config, folder, corpus)) is not None:
        say(f"the run is finished; report: {folder.path / REPORT_FILE}")
        for row in results["memory_curve"]:
            say(memory_line(row))
        return results
    model = load_model(folder.path / "model" / "best").to(device)
    split = held_out(corpus)
    ids = corpus.split(split)
    say(f"evaluating the best model on all of the {split} text")
    if cost := cost_of(config.eval, len(ids) - 1):
        say(f"eval.{cost}")

    def measure(mem_len: int | None, dynamic: Dynamic | None = None) -> dict[str, Any]:
        name = "a window" if mem_len is None else f"memory {mem_len:,}"
        with (
            autocast(config.train.precision, device),
            reading(model, len(ids) - 1, f"evaluating, {name}", quiet=quiet),
        ):
            result = evaluate_by(
                config.eval,
                model,
                ids,
                vocab=corpus.vocab,
                n_bytes=corpus.n_bytes(split),
                segment_len=config.train.segment_len,
                mem_len=mem_len,
                dynamic=dynamic,
            )
        return describe(split, result)

    lengths = Lengths.of(config.model, **config.eval.lengths_after(config.train.segment_len))
    chosen = None if config.eval.window else lengths.mem_len
    others = {*config.eval.mem_lens, config.model.mem_len}
    curve = []
    for mem_len in [None] if chosen is None else sorted({*others, chosen}):
        curve.append(measure(mem_len))
        say(memory_line(curve[-1]))
    results = {
        "settings": _settings(config),
        "test": next(row for row in curve if row["mem_len"] == (chosen or 0)),
        "memory_curve": curve,
    }
    if config.eval.dynamic:
        say(f"the same, learning from each segment after its score ({config.eval.dynamic})")
        with autocast(config.train.precision, device):
            dynamic = plan_dynamic(
                config.eval,
                model,
                lambda: corpus.split("train"),
                segment_len=config.train.segment_len,
            )
        results["dynamic"] = measure(chosen, dynamic)
        say(memory_line(results["dynamic"]))
    if corpus.vocab.token_bytes is not None:
        results |= _compressed(corpus, split, say)
    # The report is written last: where it is, the rest is, too.
    (folder.path / REPORT_FILE).unlink(missing_ok=True)
    folder.write_json(RESULTS_FILE, results)
    say("looking at what the memory does")
    folder.write_json(MEMORY_FILE, memory_figures(config, corpus, model, quiet=quiet))
    sample = _sample(config, corpus, model)
    folder.write_json(SAMPLE_FILE, sample)
    say(f"what it writes after {sample['prompt']!r}:\n\n{sample['prompt']}{sample['text']}\n")
    # Only here: what trains without a report, as a benchmark does, needs less to be installed.
    from transformer_xl.train.report import write_report

    say(f"report: {write_report(folder.path)}")
    return results


def held_out(corpus: Corpus) -> str:
    """Name the split that says how good a model is: test, or valid where there is no test text."""
    return "test" if corpus.n_tokens("test") > 1 else "valid"


def memory_figures(
    config: Config, corpus: Corpus, model: LanguageModel, *, quiet: bool = False
) -> dict[str, Any]:
    """Return what ``memory.json`` holds of a run (:mod:`transformer_xl.train.seen`)."""
    split = held_out(corpus)
    ids = corpus.split(split)
    n_tokens = READINGS * min(len(ids) - 1, TOKENS)
    with (
        autocast(config.train.precision, model.device),
        reading(model, n_tokens, "what the memory does", quiet=quiet),
    ):
        seen = see_memory(model, ids, corpus.vocab, config.eval, config.train.segment_len)
    return {"split": split, **seen}


def _settings(config: Config) -> dict[str, Any]:
    # By way of JSON, to be compared with what was read from a file.
    return json.loads(
        json.dumps({"eval": asdict(config.eval), "generate": asdict(config.generate)})
    )


def _rename(row: dict[str, Any], is_character: bool) -> None:
    """Name what older runs call bpc: bits per token, whatever the tokens are."""
    if "bits_per_token" not in row and "bpc" in row:
        row["bits_per_token"] = row["bpc"] if is_character else row.pop("bpc")


def _read_results(config: Config, folder: RunFolder, corpus: Corpus) -> dict[str, Any] | None:
    """Return the results of a run that was finished before with these settings."""
    if not (folder.path / REPORT_FILE).is_file():
        return None
    try:
        results = json.loads((folder.path / RESULTS_FILE).read_text(encoding="utf-8"))
        # A setting that came later has had its default before.
        defaults = {"eval": asdict(EvalConfig()), "generate": asdict(GenerateConfig())}
        settings = json.loads(json.dumps(defaults))
        for section, values in results["settings"].items():
            settings[section] |= values
        if settings != _settings(config):
            return None
        is_character = corpus.vocab.kind == "chars"
        for row in (results["test"], results.get("dynamic", {}), *results["memory_curve"]):
            _rename(row, is_character)
        return results
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _compressed(corpus: Corpus, split: str, say: Callable[[str], None]) -> dict[str, float]:
    """Return what general compressors make of the text; nothing where that would say nothing."""
    n_bytes = corpus.n_bytes(split)
    if n_bytes < COMPARED_BYTES:
        say(
            f"no comparison with gzip and xz: the {split} text has {n_bytes:,} bytes, and "
            f"{COMPARED_BYTES:,} are needed for it to mean anything"
        )
        return {}
    try:
        text = raw_split(corpus, split)
    except ValueError as error:
        say(f"no comparison with gzip and xz: {error}")
        return {}
    sizes = {
        "gzip": len(gzip.compress(text, 9)),
        "xz": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }
    found = {f"{name}_bits_per_byte": 8 * size / len(text) for name, size in sizes.items()}
    say("   ".join(f"{name.split('_')[0]}: {x:.4f} bits per byte" for name, x in found.items()))
    return found


def describe(split: str, result: Result) -> dict[str, Any]:
    """Return a result as it is printed and stored; what is not known is left out."""
    values = {"split": split, **asdict(result)}
    return {
        key: value
        for key, value in values.items()
        if value is not None or key in ("attn_len", "clamp_len")
    }


def memory_line(row: dict[str, Any]) -> str:
    """Write a result, of whatever memory, in a line."""
    name = f"window {row['window']:>5,}" if "window" in row else f"memory {row['mem_len']:>5,}"
    line = f"{name}: {row['nll']:.4f} nats, perplexity {row['ppl']:,.2f}"
    if "bits_per_byte" in row:
        line += f", {row['bits_per_byte']:.4f} bits per byte"
    return line + f"   ({row['tokens']:,} tokens, {row['tokens_per_second']:,.0f} a second)"


def _sample(config: Config, corpus: Corpus, model: LanguageModel) -> dict[str, Any]:
    settings = config.generate
    draw = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    prompt = corpus.vocab.encode(settings.prompt)
    tokens = generate(model, prompt, length=settings.length, seed=settings.seed, **draw)
    text = "".join(text_pieces(tokens, corpus.vocab, prompt=prompt))
    return {"prompt": settings.prompt, "text": text, "settings": {**draw, "seed": settings.seed}}
