"""The command eval."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer_xl.cli.given import (
    Given,
    GivenWithLengths,
    PrintsResult,
    ReadsModel,
    nothing,
    refuse_others,
)
from transformer_xl.cli.loading import (
    corpus_of,
    evaluation_of,
    load,
    name_of,
    read_text,
    require_readable,
    say_if_unmeasured,
    tokenize,
)
from transformer_xl.cli.printing import exclude, show
from transformer_xl.config import Config, DataConfig, EvalConfig, recipe_of, require

if TYPE_CHECKING:
    from transformer_xl.data import Corpus, Vocab
    from transformer_xl.model import LanguageModel


@dataclass(kw_only=True)
class Eval(ReadsModel, PrintsResult):
    """Evaluate a model on a text: loss, perplexity, bits per byte, with any memory length.

    --eval.dynamic evaluates dynamically: a gradient step on each segment after it was scored; the
    stored model does not change. --eval.window evaluates with a sliding window and no memory.
    --eval.mem_lens evaluates with each of these memory lengths as well; those of the recipe apply
    to the end of its training only. --eval.ngram_cache mixes the predictions with counts of the
    text read so far, and of the training text.

    Examples:
      txl eval runs/demo --eval.split test
      txl eval runs/demo --mem_len 1024 --json
      txl eval runs/demo --eval.mem_lens 0 64 256 1024
      txl eval runs/demo notes.txt
      txl eval runs/demo --eval.split test --eval.ngram_cache training
      txl eval models/wt103 --file wiki.test.tokens --prepared
      txl eval runs/demo --weights int8
      txl eval runs/demo --eval.dynamic rms --eval.dynamic_lr 1e-4 --eval.dynamic_decay 0.001
      txl eval runs/demo --file notes.txt --eval.window 128 --batch_size 16
    """

    place: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = None
    """The text to evaluate, as with --file."""
    prepared: bool = False
    """The text of --file is split into words by spaces already, as wiki.test.tokens is."""
    file: Path | None = None
    """Evaluate this text instead of the corpus of the run; - reads the standard input."""
    eval: GivenWithLengths[EvalConfig] = field(default_factory=nothing)
    data: Given[DataConfig] = field(default_factory=nothing)

    def __post_init__(self) -> None:
        self.file = self.file or self.place

    @cached_property
    def recipe(self) -> Config | None:
        """The recipe of the run, if there is one."""
        return recipe_of(self.dir)

    @cached_property
    def settings(self) -> EvalConfig:
        """Settings of the evaluation: those of the command line, else those of the recipe.

        The ``mem_lens`` of the recipe are for the end of its training, its ``ngram_cache`` is for
        its validation and test text. For windows and dynamic evaluation, settings of the recipe
        without effect are dropped.
        """
        settings = evaluation_of(self.dir, self.recipe)
        window, dynamic, split = (
            self.eval.get(x, getattr(settings, x)) for x in ("window", "dynamic", "split")
        )
        without_effect = {
            ("mem_lens",): True,
            # The training text says nothing of another one, and may be gone.
            ("ngram_cache",): self.file is not None or split == "train",
            ("segment_len", "mem_len", "ext_len", "max_steps"): window is not None,
            ("batch_size",): dynamic is not None,
            ("ext_len",): dynamic is not None,
            ("dynamic_lr", "dynamic_decay"): dynamic is None,
            ("dynamic_eps", "dynamic_tokens"): dynamic != "rms",
        }
        dropped = {x for names, is_dropped in without_effect.items() if is_dropped for x in names}
        names = {each.name for each in fields(EvalConfig)} - dropped
        # In one call: settings of the recipe and of the command line are validated together.
        return EvalConfig(**{name: getattr(settings, name) for name in names} | self.eval)

    @cached_property
    def text(self) -> DataConfig:
        """The corpus of the run, with the settings of the command line."""
        return replace(self.recipe.data if self.recipe else DataConfig(), **self.data)

    def run(self) -> None:
        """Evaluate and print."""
        self._check()
        from transformer_xl.config import Precision
        from transformer_xl.inference.evaluate import (
            Result,
            evaluate_by,
            plan_dynamic,
            plan_ngram_cache,
        )
        from transformer_xl.model import SEGMENT_LEN, Lengths
        from transformer_xl.train import Progress

        recipe = self.recipe
        model, vocab, ids, n_bytes = self._opened()
        segment_len = recipe.train.segment_len if recipe else SEGMENT_LEN
        lengths = self.settings.lengths_after(segment_len)
        configured = Lengths.of(model.config, **lengths).mem_len
        mem_lens = sorted({*self.settings.mem_lens, configured})
        if not (self.settings.window or self.settings.mem_lens):
            say_if_unmeasured(self.dir, model, configured)
        # Quantized weights determine the precision of the computation.
        precision = recipe.train.precision if recipe and self.weights == "float32" else "float32"
        rows, training = {}, partial(lambda of: self._corpus(of).split("train"), vocab)
        ngram_cache = plan_ngram_cache(self.settings, len(ids), training)
        for mem_len in mem_lens:
            settings, name, how = self.settings, "a window", None
            if settings.window is None:
                settings, name = replace(settings, mem_len=mem_len), f"memory {mem_len:,}"
            sizes: dict[str, Any] = {"n_bytes": n_bytes, "segment_len": segment_len}
            sizes["ngram_cache"] = ngram_cache
            with Precision(precision, model.device).autocast():
                if vocab is not None:
                    how = plan_dynamic(settings, model, training, segment_len=segment_len)
                with Progress.reading(model, len(ids) - 1, f"evaluating, {name}"):
                    result = evaluate_by(settings, model, ids, vocab=vocab, how=how, **sizes)
            rows[mem_len] = result.row(str(self.file or settings.split))
        curve = [*rows.values()] if self.settings.mem_lens else []
        more = {"memory_curve": curve} if curve and self.json else {}
        show(rows[configured] | more, as_json=self.json)
        if not self.json:
            for row in curve:
                print(Result.line(row))

    def _check(self) -> None:
        """Check that no option is without effect, before any work is done."""
        settings, file = self.settings, self.file
        window, dynamic = settings.window, settings.dynamic
        require(
            self.place in (None, file),
            f"{self.place} and --file {file} are two texts: leave out one of them",
        )
        exclude(file=file, eval__split="split" in self.eval)
        exclude(eval__window=window, eval__segment_len=settings.segment_len)
        exclude(eval__dynamic=dynamic, weights=self.weights != "float32")
        # A dynamic evaluation reads one stream.
        exclude(eval__dynamic=dynamic, eval__batch_size=settings.batch_size != 1)
        if file:
            require_readable(file)
            if dynamic != "rms" and settings.ngram_cache != "training":
                why = (
                    "--file is the text; --eval.dynamic rms and --eval.ngram_cache training alone "
                    "read the training text, too"
                )
                refuse_others(self.data, "data.", ("raw",), why)
        require(bool(file) or not self.prepared, "--prepared describes the text of --file")
        if self.text.vocab == "features":
            of_text = {"file": file, "eval.window": window, "eval.dynamic": dynamic}
            of_text["eval.ngram_cache"] = settings.ngram_cache
            for name, value in (of_text | {"weights": self.weights != "float32"}).items():
                require(not value, f"--{name} is for text: {self.dir} was trained on recordings")

    def _opened(self) -> tuple["LanguageModel", "Vocab | None", Any, int]:
        """Return the model, its vocabulary, and the text or recordings with the bytes of a text."""
        if self.text.vocab == "features":
            from transformer_xl.config import pick_device, prepare_process
            from transformer_xl.data import open_corpus
            from transformer_xl.model import load_model

            prepare_process()
            model = load_model(self.dir).to(pick_device())
            return model, None, open_corpus(self.text).split(self.settings.split), 0
        model, vocab = load(self.dir, self.weights)
        if self.file is None:
            corpus, split = self._corpus(vocab), self.settings.split
            return model, vocab, corpus.split(split), corpus.n_bytes(split)
        require(
            not self.prepared or vocab.kind in ("words", "integers", "imported"),
            f"--prepared has no effect with a vocabulary of kind {vocab.kind}",
        )
        remedy = "--data.raw True reads every byte as it is"
        text = read_text(self.file, vocab, is_raw=self.text.raw, remedy=remedy)
        encode = partial(vocab.encode_lines, prepared=self.prepared)
        ids = tokenize(name_of(self.file), text, vocab, encode)
        return model, vocab, ids, len(text.encode("utf-8", "surrogateescape"))

    def _corpus(self, vocab: "Vocab") -> "Corpus":
        remedy = "the text the model was trained on with --data.path, or any text with --file"
        return corpus_of(self.text, vocab, self.dir, remedy)
