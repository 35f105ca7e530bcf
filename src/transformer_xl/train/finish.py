"""What a finished run shows: how well the model predicts, what it writes, and the report."""

import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from transformer_xl.checkpoint import RunFolder
from transformer_xl.config import Config, EvalConfig, GenerateConfig
from transformer_xl.data import Corpus, raw_split
from transformer_xl.device import autocast
from transformer_xl.evaluate import Dynamic, Result, evaluate, plan_dynamic, token_bytes_in
from transformer_xl.generate import generate, text_pieces
from transformer_xl.nn import TransformerXL, load_model
from transformer_xl.train.metrics import reading
from transformer_xl.train.seen import MEMORY_FILE, READINGS, TOKENS, see_memory

RESULTS_FILE = "results.json"
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
    if (results := _read_results(config, folder)) is not None:
        say(f"the run is finished; report: {folder.path / REPORT_FILE}")
        for row in results["memory_curve"]:
            say(_line(row))
        return results
    model = load_model(folder.path / "model" / "best").to(device)
    split = held_out(corpus)
    ids = corpus.split(split)
    token_bytes = token_bytes_in(corpus.vocab, ids, corpus.n_bytes(split))
    say(f"evaluating the best model on all of the {split} text")

    segment_len = config.eval.segment_len or config.train.segment_len

    def measure(mem_len: int | None, dynamic: Dynamic | None = None) -> dict[str, Any]:
        name = f"evaluating, memory {config.model.mem_len if mem_len is None else mem_len:,}"
        with (
            autocast(config.train.precision, device),
            reading(model, len(ids) - 1, name, quiet=quiet),
        ):
            result = evaluate(
                model,
                ids,
                segment_len=segment_len,
                batch_size=1 if dynamic else config.eval.batch_size,
                token_bytes=token_bytes,
                dynamic=dynamic,
                **{**config.eval.lengths, "mem_len": mem_len},
            )
        return describe(split, result)

    longest = [] if config.eval.mem_len is None else [config.eval.mem_len]
    mem_lens = sorted({*config.eval.mem_lens, *longest, config.model.mem_len})
    curve = []
    for mem_len in mem_lens:
        curve.append(measure(mem_len))
        say(_line(curve[-1]))
    chosen = config.model.mem_len if config.eval.mem_len is None else config.eval.mem_len
    results = {
        "settings": _settings(config),
        "test": next(row for row in curve if row["mem_len"] == chosen),
        "memory_curve": curve,
    }
    if config.eval.dynamic:
        say(f"the same, learning from each segment after its score ({config.eval.dynamic})")
        with autocast(config.train.precision, device):
            dynamic = plan_dynamic(
                config.eval, model, lambda: corpus.split("train"), segment_len=segment_len
            )
        results["dynamic"] = measure(chosen, dynamic)
        say(_line(results["dynamic"]))
    if token_bytes is not None:
        results |= _compressed(corpus, split, say)
    # The report is written last: where it is, the rest is, too.
    (folder.path / REPORT_FILE).unlink(missing_ok=True)
    folder.write_json(RESULTS_FILE, results)
    say("looking at what the memory does")
    folder.write_json(MEMORY_FILE, look(config, corpus, model, quiet=quiet))
    sample = _sample(config, corpus, model)
    folder.write_json("sample.json", sample)
    say(f"what it writes after {sample['prompt']!r}:\n\n{sample['prompt']}{sample['text']}\n")
    # Only here: what trains without a report, as a benchmark does, needs less to be installed.
    from transformer_xl.train.report import write_report

    say(f"report: {write_report(folder.path)}")
    return results


def held_out(corpus: Corpus) -> str:
    """Name the split that says how good a model is: test, or valid where there is no test text."""
    return "test" if corpus.n_tokens("test") > 1 else "valid"


def look(
    config: Config, corpus: Corpus, model: TransformerXL, *, quiet: bool = False
) -> dict[str, Any]:
    """Return what ``memory.json`` holds of a run (:mod:`transformer_xl.train.seen`)."""
    split = held_out(corpus)
    ids = corpus.split(split)
    segment_len = config.eval.segment_len or config.train.segment_len
    n_tokens = READINGS * min(len(ids) - 1, TOKENS)
    with (
        autocast(config.train.precision, model.device),
        reading(model, n_tokens, "what the memory does", quiet=quiet),
    ):
        seen = see_memory(model, ids, corpus.vocab, config.eval, segment_len)
    return {"split": split, **seen}


def _settings(config: Config) -> dict[str, Any]:
    # By way of JSON, to be compared with what was read from a file.
    return json.loads(
        json.dumps({"eval": asdict(config.eval), "generate": asdict(config.generate)})
    )


def _read_results(config: Config, folder: RunFolder) -> dict[str, Any] | None:
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
        return results if settings == _settings(config) else None
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


def _line(row: dict[str, Any]) -> str:
    line = f"memory {row['mem_len']:>5,}: {row['nll']:.4f} nats, perplexity {row['ppl']:,.2f}"
    if "bits_per_byte" in row:
        line += f", {row['bits_per_byte']:.4f} bits per byte"
    return line + f"   ({row['tokens']:,} tokens, {row['tokens_per_second']:,.0f} a second)"


def _sample(config: Config, corpus: Corpus, model: TransformerXL) -> dict[str, Any]:
    settings = config.generate
    draw = {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    prompt = corpus.vocab.encode(settings.prompt)
    tokens = generate(model, prompt, length=settings.length, seed=settings.seed, **draw)
    text = "".join(text_pieces(tokens, corpus.vocab, prompt=prompt))
    return {"prompt": settings.prompt, "text": text, "settings": {**draw, "seed": settings.seed}}
