"""The end of a run: the best model is evaluated, writes a sample, and the report is drawn."""

import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from transformer_xl.config import Config, EvalConfig, GenerateConfig, autocast
from transformer_xl.data import Corpus, FeatureCorpus, raw_split
from transformer_xl.inference.evaluate import Dynamic, Result, cost_of, evaluate_by, plan_dynamic
from transformer_xl.inference.generate import (
    Sampling,
    Searching,
    beam_search,
    for_tokens,
    generate,
    text_pieces,
)
from transformer_xl.model import LanguageModel, Lengths, any_size, load_model
from transformer_xl.train.checkpoint import RESULTS_FILE, SAMPLE_FILE, RunFolder
from transformer_xl.train.metrics import reading
from transformer_xl.train.seen import MEMORY_FILE, READINGS, TOKENS, see_memory

REPORT_FILE = "report.html"
COMPARED_BYTES = 10_000
"""Least bytes of a text on which gzip and xz are compared with the model: for fewer, much of what
they write are their own headers and tables."""


class Results(dict[str, Any]):
    """The results of a training, as ``results.json`` holds them; ``repr`` gives its figures."""

    def __repr__(self) -> str:
        lines = [memory_line(row) for row in self["memory_curve"]]
        if (learned := self.get("dynamic")) is not None:
            lines.append(f"learning from each segment after its score ({learned.get('dynamic')}):")
            lines.append(memory_line(learned))
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
    if (results := _read_results(config, folder, corpus)) is not None:
        say(f"the run is finished; report: {folder.path / REPORT_FILE}")
        say(repr(results))
        return results
    # The program has written it itself.
    with any_size():
        model = load_model(folder.path / "model" / "best").to(device)
    split, settings, segment_len = held_out(corpus), config.eval, config.train.segment_len
    ids = corpus.split(split)
    part = "all" if settings.max_steps is None else f"{settings.max_steps:,} segments"
    say(f"evaluating the best model on {part} of the {split} text")
    if cost := cost_of(settings, len(ids) - 1):
        say(f"eval.{cost}")
    text: dict[str, Any] = {"vocab": corpus.vocab, "n_bytes": corpus.n_bytes(split)}

    def measure(mem_len: int | None, dynamic: Dynamic | None = None) -> dict[str, Any]:
        evaluation = settings if mem_len is None else replace(settings, mem_len=mem_len)
        name = "a window" if mem_len is None else f"memory {mem_len:,}"
        progress = reading(model, len(ids) - 1, f"evaluating, {name}", quiet=quiet)
        with autocast(config.train.precision, device), progress:
            how: dict[str, Any] = {"segment_len": segment_len, "how": dynamic}
            return describe(split, evaluate_by(evaluation, model, ids, **text, **how))

    lengths = Lengths.of(config.model, **settings.lengths_after(segment_len))
    chosen = None if settings.window else lengths.mem_len
    mem_lens = {*settings.mem_lens, config.model.mem_len, chosen} if chosen is not None else {None}
    rows = {mem_len: measure(mem_len) for mem_len in sorted(mem_lens, key=lambda n: n or 0)}
    results = Results(
        settings=_settings(config.eval, config.generate),
        checksum=corpus.checksums[split],
        test=rows[chosen],
        memory_curve=[*rows.values()],
    )
    if isinstance(corpus, Corpus):
        if settings.dynamic:
            say(f"the same, learning from each segment after its score ({settings.dynamic})")
            with autocast(config.train.precision, device):
                train = partial(corpus.split, "train")
                plan = plan_dynamic(settings, model, train, segment_len=segment_len)
            results["dynamic"] = measure(chosen, plan)
        # Compressors store all of the text, prompts included.
        if corpus.vocab.token_bytes is not None and model.config.completion_at is None:
            results |= _compressed(corpus, split, say)
    # The report is written last: where it is, the rest is, too.
    (folder.path / REPORT_FILE).unlink(missing_ok=True)
    folder.write_json(RESULTS_FILE, results)
    if isinstance(corpus, Corpus):
        say("looking at what the memory does")
        folder.write_json(MEMORY_FILE, memory_figures(config, corpus, model, quiet=quiet))
        sample = _sample(config, corpus, model)
        folder.write_json(SAMPLE_FILE, sample)
        say(f"what it writes after {sample['prompt']!r}:\n\n{sample['prompt']}{sample['text']}\n")
    else:
        say("recordings: the report has no section on the memory, and no sample")
    # Only here: what trains without a report, as a benchmark does, needs less to be installed.
    from transformer_xl.train.report import write_report

    say(f"report: {write_report(folder.path)}")
    # Last, as this is what the training was for.
    say(repr(results))
    return results


def held_out(corpus: Corpus | FeatureCorpus) -> str:
    """Name the split that says how good a model is: test, or valid where there is no test text."""
    return "test" if corpus.n_tokens("test") > 1 else "valid"


def memory_figures(
    config: Config, corpus: Corpus, model: LanguageModel, *, quiet: bool = False
) -> dict[str, Any]:
    """Return what ``memory.json`` holds of a run (:mod:`transformer_xl.train.seen`)."""
    split = held_out(corpus)
    ids = corpus.split(split)
    n_tokens = READINGS * min(len(ids) - 1, TOKENS)
    progress = reading(model, n_tokens, "what the memory does", quiet=quiet)
    with autocast(config.train.precision, model.device), progress:
        figures = see_memory(model, ids, config.eval, config.train.segment_len)
    return {"split": split, **figures}


def _settings(evaluation: EvalConfig, generation: GenerateConfig) -> dict[str, Any]:
    # By way of JSON, to be compared with what was read from a file.
    return json.loads(json.dumps({"eval": asdict(evaluation), "generate": asdict(generation)}))


def _read_results(
    config: Config, folder: RunFolder, corpus: Corpus | FeatureCorpus
) -> Results | None:
    """Return the results of a run that was finished before with these settings and this text.

    None for what is damaged, and for what earlier versions wrote with other names or without a
    checksum: it is measured again.
    """
    if not (folder.path / REPORT_FILE).is_file():
        return None
    try:
        results = Results(json.loads((folder.path / RESULTS_FILE).read_text(encoding="utf-8")))
        # A setting that came later has had its default before.
        settings = _settings(EvalConfig(), GenerateConfig())
        for section, values in results["settings"].items():
            settings[section] |= values
        is_same = settings == _settings(config.eval, config.generate)
        is_same &= results["checksum"] == corpus.checksums[held_out(corpus)]
        is_current = all("bits_per_token" in x for x in (results["test"], *results["memory_curve"]))
        return results if is_same and is_current else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _compressed(corpus: Corpus, split: str, say: Callable[[str], None]) -> dict[str, float]:
    """Return the bits per byte of general compressors; nothing where they would say nothing."""
    if (n_bytes := corpus.n_bytes(split)) < COMPARED_BYTES:
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
        "gzip": len(gzip.compress(text, 9, mtime=0)),
        "xz": len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {f"{name}_bits_per_byte": 8 * size / len(text) for name, size in sizes.items()}


def describe(split: str, result: Result) -> dict[str, Any]:
    """Return a result as it is printed and stored, without what is unknown."""
    values = {"split": split, **asdict(result)}
    always = "attn_len", "clamp_len"
    return {name: x for name, x in values.items() if x is not None or name in always}


def memory_line(row: dict[str, Any]) -> str:
    """Write a result, of whatever memory, in a line."""
    name = f"window {row['window']:>5,}" if "window" in row else f"memory {row['mem_len']:>5,}"
    line = f"{name}: {row['nll']:.4f} nats, perplexity {row['ppl']:,.2f}"
    if "bits_per_byte" in row:
        line += f", {row['bits_per_byte']:.4f} bits per byte"
    return line + f"   ({row['tokens']:,} tokens, {row['tokens_per_second']:,.0f} a second)"


def _sample(config: Config, corpus: Corpus, model: LanguageModel) -> dict[str, Any]:
    settings, vocab, length = config.generate, corpus.vocab, config.generate.length
    prompt = vocab.encode(settings.prompt)
    if how := settings.searching:
        search = Searching(**how, stop=settings.stop)
        ((best,),) = beam_search(model, [prompt], search, length=length, vocab=vocab)
        text = best.text
    else:
        sampling = Sampling(**for_tokens(settings.sampling, vocab))
        tokens = generate(model, prompt, sampling, length=length, seed=settings.seed)
        text = "".join(text_pieces(tokens, vocab, settings.stop, prompt))
        how = {**settings.sampling, "seed": settings.seed}
    return {"prompt": settings.prompt, "text": text, "settings": how}
