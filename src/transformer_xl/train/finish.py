"""What a finished run shows: how well the model predicts, what it writes, and the report."""

import gzip
import json
import lzma
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from transformer_xl.config import Config, EvalConfig, GenerateConfig
from transformer_xl.config.device import autocast
from transformer_xl.config.recipes import load_recipe
from transformer_xl.data import Corpus, raw_split
from transformer_xl.data.features import FeatureCorpus
from transformer_xl.inference.evaluate import Dynamic, Result, cost_of, evaluate_by, plan_dynamic
from transformer_xl.inference.generate import (
    Sampling,
    Searching,
    beam_search,
    for_tokens,
    generate,
    text_pieces,
)
from transformer_xl.model import LanguageModel, load_model
from transformer_xl.model.limits import any_size
from transformer_xl.model.segment import Lengths
from transformer_xl.train.checkpoint import RECIPE_FILE, RESULTS_FILE, SAMPLE_FILE, RunFolder
from transformer_xl.train.metrics import reading
from transformer_xl.train.seen import MEMORY_FILE, READINGS, TOKENS, see_memory

REPORT_FILE = "report.html"
COMPARED_BYTES = 10_000
"""Least bytes of a text on which gzip and xz are compared with the model: for fewer, much of what
they write are their own headers and tables."""


class Results(dict[str, Any]):
    """What a training has found, as ``results.json`` holds it; ``repr`` gives its figures."""

    def __repr__(self) -> str:
        return "\n".join(figure_lines(self))


def figure_lines(results: Mapping[str, Any]) -> list[str]:
    """Write the figures with which a training ends, a line each."""
    lines = [memory_line(row) for row in results["memory_curve"]]
    if (learned := results.get("dynamic")) is not None:
        lines.append(f"learning from each segment after its score ({learned.get('dynamic')}):")
        lines.append(memory_line(learned))
    end = "_bits_per_byte"
    packed = {name.removesuffix(end): x for name, x in results.items() if name.endswith(end)}
    if packed:
        lines.append("   ".join(f"{name}: {x:.4f} bits per byte" for name, x in packed.items()))
    return lines


def finish(
    config: Config,
    folder: RunFolder,
    corpus: Corpus | FeatureCorpus,
    device: torch.device,
    say: Callable[[str], None],
    quiet: bool = False,
) -> Results:
    """Evaluate the best model of a run at every memory length, let it write, draw the report.

    What an earlier call with the same settings and text has written is returned as it is. How far
    it is with its texts is shown, unless it is to be ``quiet``.

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

    def measure(mem_len: int | None, dynamic: Dynamic | None = None) -> dict[str, Any]:
        evaluation = settings if mem_len is None else replace(settings, mem_len=mem_len)
        name = "a window" if mem_len is None else f"memory {mem_len:,}"
        with (
            autocast(config.train.precision, device),
            reading(model, len(ids) - 1, f"evaluating, {name}", quiet=quiet),
        ):
            result = evaluate_by(
                evaluation,
                model,
                ids,
                vocab=corpus.vocab,
                n_bytes=corpus.n_bytes(split),
                segment_len=segment_len,
                how=dynamic,
            )
        return describe(split, result)

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
    if settings.dynamic and isinstance(corpus, Corpus):
        say(f"the same, learning from each segment after its score ({settings.dynamic})")
        with autocast(config.train.precision, device):
            train = partial(corpus.split, "train")
            plan = plan_dynamic(settings, model, train, segment_len=segment_len)
        results["dynamic"] = measure(chosen, plan)
    # Compressors store all of the text, prompts included.
    if (
        isinstance(corpus, Corpus)
        and corpus.vocab.token_bytes is not None
        and model.config.completion_at is None
    ):
        results |= _compressed(corpus, split, say)
    # The report is written last: where it is, the rest is, too.
    (folder.path / REPORT_FILE).unlink(missing_ok=True)
    folder.write_json(RESULTS_FILE, results)
    if isinstance(corpus, Corpus):
        _look_and_write(config, folder, corpus, model, say, quiet)
    else:
        say("recordings: the report has no section on the memory, and no sample")
    # Only here: what trains without a report, as a benchmark does, needs less to be installed.
    from transformer_xl.train.report import write_report

    say(f"report: {write_report(folder.path)}")
    # Last, as this is what the training was for.
    say(repr(results))
    return results


def _look_and_write(
    config: Config,
    folder: RunFolder,
    corpus: Corpus,
    model: LanguageModel,
    say: Callable[[str], None],
    quiet: bool,
) -> None:
    """Measure what the memory does, and generate a text."""
    say("looking at what the memory does")
    folder.write_json(MEMORY_FILE, memory_figures(config, corpus, model, quiet=quiet))
    sample = _sample(config, corpus, model)
    folder.write_json(SAMPLE_FILE, sample)
    say(f"what it writes after {sample['prompt']!r}:\n\n{sample['prompt']}{sample['text']}\n")


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
    with (
        autocast(config.train.precision, model.device),
        reading(model, n_tokens, "what the memory does", quiet=quiet),
    ):
        seen = see_memory(model, ids, corpus.vocab, config.eval, config.train.segment_len)
    return {"split": split, **seen}


def _settings(evaluation: EvalConfig, generation: GenerateConfig) -> dict[str, Any]:
    # By way of JSON, to be compared with what was read from a file.
    return json.loads(json.dumps({"eval": asdict(evaluation), "generate": asdict(generation)}))


def _read_results(
    config: Config, folder: RunFolder, corpus: Corpus | FeatureCorpus
) -> Results | None:
    """Return the results of a run that was finished before with these settings and this text."""
    if not (folder.path / REPORT_FILE).is_file():
        return None
    try:
        results = Results(json.loads((folder.path / RESULTS_FILE).read_text(encoding="utf-8")))
        # A setting that came later has had its default before.
        settings = _settings(EvalConfig(), GenerateConfig())
        for section, values in results["settings"].items():
            settings[section] |= values
        if settings != _settings(config.eval, config.generate):
            return None
        if "checksum" in results:
            is_same_text = results["checksum"] == corpus.checksums[held_out(corpus)]
        else:
            # Of an earlier version: the text is that of the recipe, unless another one is given.
            recipe = load_recipe(folder.path / RECIPE_FILE, is_stored=True)
            is_same_text = recipe.data == config.data
        if not is_same_text:
            return None
        for row in (results["test"], results.get("dynamic", {}), *results["memory_curve"]):
            # What older runs call bpc is bits per token, whatever the tokens are.
            if "bits_per_token" not in row and "bpc" in row:
                row["bits_per_token"] = row["bpc"]
                if corpus.vocab is None or corpus.vocab.kind != "chars":
                    del row["bpc"]
        return results
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _compressed(corpus: Corpus, split: str, say: Callable[[str], None]) -> dict[str, float]:
    """Return what general compressors make of the text; nothing where that would say nothing."""
    try:
        if (n_bytes := corpus.n_bytes(split)) < COMPARED_BYTES:
            raise ValueError(
                f"the {split} text has {n_bytes:,} bytes, and {COMPARED_BYTES:,} are needed for it "
                "to mean anything"
            )
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
    prompt = corpus.vocab.encode(settings.prompt)
    if searching := settings.searching:
        search = Searching(**searching, stop=settings.stop)
        ((best,),) = beam_search(
            model, [prompt], search, length=settings.length, vocab=corpus.vocab
        )
        return {"prompt": settings.prompt, "text": best.text, "settings": searching}
    sampling = Sampling(**for_tokens(settings.sampling, corpus.vocab))
    tokens = generate(model, prompt, sampling, length=settings.length, seed=settings.seed)
    text = "".join(text_pieces(tokens, corpus.vocab, settings.stop, prompt))
    draw = {**settings.sampling, "seed": settings.seed}
    return {"prompt": settings.prompt, "text": text, "settings": draw}
