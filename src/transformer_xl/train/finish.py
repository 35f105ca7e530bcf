"""The end of a run: the best model is evaluated, writes a sample, and the report is drawn."""

import gzip
import json
import lzma
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from transformer_xl.config import Config, Precision
from transformer_xl.data import Corpus, FeatureCorpus
from transformer_xl.inference.evaluate import Result, evaluate_by, plan_ngram_cache
from transformer_xl.inference.generate import Sampling, TextWriter, generate
from transformer_xl.model import LanguageModel, Lengths, MemoryLimitError, any_size, load_model
from transformer_xl.train.checkpoint.run_folder import RESULTS_FILE, SAMPLE_FILE, RunFolder
from transformer_xl.train.metrics import Progress

REPORT_FILE = "report.html"


class Results(dict[str, Any]):
    """The results of a training, as ``results.json`` holds them; ``repr`` gives its figures."""

    def __repr__(self) -> str:
        lines = [Result.line(row) for row in self["memory_curve"]]
        end = "_bits_per_byte"
        packed = {name.removesuffix(end): x for name, x in self.items() if name.endswith(end)}
        if packed:
            lines.append("   ".join(f"{name}: {x:.4f} bits per byte" for name, x in packed.items()))
        return "\n".join(lines)


def finish(
    config: Config,
    folder: RunFolder,
    corpus: Corpus | FeatureCorpus,
    device: torch.device,
    say: Callable[[str], None],
    quiet: bool = False,
) -> Results:
    """Evaluate the best model of a run at every memory length, generate a text, draw the report.

    Results of an earlier call with the same settings and text are returned as they are. Progress
    bars are shown unless ``quiet``.

    Returns:
        The contents of ``results.json``.
    """
    report, split = folder.path / REPORT_FILE, corpus.held_out
    # What the results depend on beside the model; by way of JSON, as a file holds it.
    about = {"eval": asdict(config.eval), "generate": asdict(config.generate)}
    origin = json.loads(json.dumps({"settings": about, "checksum": corpus.checksums[split]}))
    # Damaged results, and those of an earlier version, are measured again.
    with suppress(OSError, ValueError, KeyError, TypeError):
        results = Results(json.loads((folder.path / RESULTS_FILE).read_text(encoding="utf-8")))
        if report.is_file() and {name: results[name] for name in origin} == origin:
            say(f"the run is finished; report: {report}")
            say(repr(results))
            return results
    # The program has written it itself.
    with any_size():
        model = load_model(folder.path / "model" / "best").to(device)
    settings, segment_len = config.eval, config.train.segment_len
    ids = corpus.split(split)
    part = "all" if settings.max_steps is None else f"{settings.max_steps:,} segments"
    say(f"evaluating the best model on {part} of the {split} text")
    vocab, n_bytes = corpus.vocab, corpus.n_bytes(split)
    ngram_cache = None
    if isinstance(corpus, Corpus):
        try:
            ngram_cache = plan_ngram_cache(settings, len(ids), lambda: corpus.split("train"))
        except MemoryLimitError as error:
            say(f"without the n-gram cache: {error}")
    more = {"vocab": vocab, "n_bytes": n_bytes, "segment_len": segment_len}

    def measure(mem_len: int | None) -> dict[str, Any]:
        evaluation = settings if mem_len is None else replace(settings, mem_len=mem_len)
        name = "a window" if mem_len is None else f"memory {mem_len:,}"
        progress = Progress.reading(model, len(ids) - 1, f"evaluating, {name}", quiet=quiet)
        with Precision(config.train.precision, device).autocast(), progress:
            cache = ngram_cache if mem_len == chosen else None
            result = evaluate_by(evaluation, model, ids, ngram_cache=cache, **more)
        return result.row(split)

    lengths = Lengths.of(config.model, **settings.lengths_after(segment_len))
    chosen = None if settings.window else lengths.mem_len
    mem_lens = {*settings.mem_lens, config.model.mem_len, chosen} if chosen is not None else {None}
    rows = {mem_len: measure(mem_len) for mem_len in sorted(mem_lens, key=lambda n: n or 0)}
    results = Results(**origin, test=rows[chosen], memory_curve=[*rows.values()])
    if len(rows) > 1:
        n_parameters = sum(p.numel() for p in model.parameters())
        folder.write_card("best", config.model, vocab, n_parameters, [*rows.values()])
    # Compressors store all of the text, prompts included.
    is_all_counted = model.config.completion_at is None
    if isinstance(corpus, Corpus) and is_all_counted and corpus.vocab.token_bytes is not None:
        results |= _compressed(corpus, split, say)
    # The report is written last: where it is, the rest is, too.
    report.unlink(missing_ok=True)
    folder.write_json(RESULTS_FILE, results)
    if isinstance(corpus, Corpus):
        sample = _sample(config, corpus, model)
        folder.write_json(SAMPLE_FILE, sample)
        say(f"what it writes after {sample['prompt']!r}:\n\n{sample['prompt']}{sample['text']}\n")
    # Only here: what trains without a report, as a benchmark does, needs less to be installed.
    from transformer_xl.train.report import write_report

    say(f"report: {write_report(folder.path)}")
    # Last, as this is what the training was for.
    say(repr(results))
    return results


def _compressed(corpus: Corpus, split: str, say: Callable[[str], None]) -> dict[str, float]:
    """Return the bits per byte of general compressors, where the bytes of the text are known."""
    try:
        text = corpus.raw(split)
    except ValueError as error:
        say(f"no comparison with gzip and xz: {error}")
        return {}
    sizes = {
        "gzip": len(gzip.compress(text, 9, mtime=0)),
        "xz": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {f"{name}_bits_per_byte": 8 * size / len(text) for name, size in sizes.items()}


def _sample(config: Config, corpus: Corpus, model: LanguageModel) -> dict[str, object]:
    settings, vocab, length = config.generate, corpus.vocab, config.generate.length
    prompt = vocab.encode(settings.prompt)
    sampling = Sampling(**settings.sampling)
    tokens = generate(model, prompt, sampling, length=length, seed=settings.seed)
    text = "".join(TextWriter(vocab, settings.stop, prompt).pieces(tokens))
    how = {**settings.sampling, "seed": settings.seed}
    return {"prompt": settings.prompt, "text": text, "settings": how}
