"""The commands that look at how well a model predicts: eval and report."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from transformer_xl.cli.models import (
    Weights,
    encoded_text,
    load,
    read_text,
    recipe_of,
    require_text,
)
from transformer_xl.cli.output import say, show
from transformer_xl.cli.runs import Value
from transformer_xl.config import Config, DataConfig, EvalConfig

if TYPE_CHECKING:
    from transformer_xl.data import Vocab
    from transformer_xl.evaluate import Dynamic
    from transformer_xl.nn import TransformerXL


@dataclass(kw_only=True)
class Eval:
    """Measure how well a model predicts a text, with any memory length.

    With --eval.dynamic it learns from each segment after its score, which the stored model never
    sees. With --eval.window it has no memory: each token is predicted from a window read anew.
    """

    examples: ClassVar = (
        "txl eval runs/demo --eval.split test",
        "txl eval runs/demo --eval.mem_len 1024 --json",
        "txl eval runs/demo --file notes.txt",
        "txl eval models/wt103 --preset wt103-large --file wiki.test.tokens",
        "txl eval runs/demo --weights int8",
        "txl eval runs/demo --eval.dynamic rms --eval.dynamic_lr 1e-4 --eval.dynamic_decay 0.001",
        "txl eval runs/demo --file notes.txt --eval.window 128 --eval.batch_size 16",
    )
    takes: ClassVar = "DIR"

    dir: tyro.conf.Suppress[Path] = Path()
    preset: str | None = None
    """The lengths with which a model was published, such as wt103-large, on prepared text."""
    prepared: bool = False
    """The text of --file is cut into words by spaces already, as wiki.test.tokens is."""
    file: Path | None = None
    """Evaluate this text instead of the corpus of the run; - reads the standard input."""
    weights: Weights = "float32"
    """Precision of the weights; what float32 computes in is what the recipe says."""
    by_position: bool = False
    """Add the loss by place in the segment, and by distance from the start of a text."""
    json: bool = False
    """Print the result as one JSON object on the last line."""
    eval: Annotated[EvalConfig, Value] = field(default_factory=EvalConfig)
    data: Annotated[DataConfig, Value] = field(default_factory=DataConfig)

    def run(self) -> None:
        """Evaluate and print."""
        self._check()
        from transformer_xl.device import autocast, pick_device
        from transformer_xl.evaluate import evaluate, token_bytes_in
        from transformer_xl.train.finish import describe

        settings = self.eval
        device = pick_device()
        model, vocab = load(self.dir, device, self.weights)
        recipe = recipe_of(self.dir)
        segment_len = settings.segment_len or (recipe.train.segment_len if recipe else 128)
        # Compact weights say themselves what is computed in.
        precision = recipe.train.precision if recipe and self.weights == "float32" else "float32"
        lengths = settings.lengths
        if settings.window is not None:
            # Those of the recipe; a window has nothing to remember.
            lengths |= {"mem_len": None, "ext_len": None}
        ids, n_bytes = self._tokens(vocab)
        with autocast(precision, device):
            dynamic = self._dynamic(model, vocab, segment_len)
            result = evaluate(
                model,
                ids,
                segment_len=segment_len,
                batch_size=1 if dynamic else settings.batch_size,
                token_bytes=token_bytes_in(vocab, ids, n_bytes),
                window=settings.window,
                dynamic=dynamic,
                **lengths,
            )
            found = describe(str(self.file or settings.split), result)
            places = self._by_position(model, ids, segment_len) if self.by_position else {}
        if self.json:
            show(found | places, as_json=True)
            return
        show(found, as_json=False)
        _show_places(places)

    def _check(self) -> None:
        """Refuse, before any work, what cannot go together."""
        settings = self.eval
        if self.file:
            require_text(self.file)
        if settings.dynamic and self.weights != "float32":
            raise ValueError(
                f"--eval.dynamic {settings.dynamic} with --weights {self.weights}: weights in "
                "fewer bits cannot learn; leave out one of them"
            )
        if settings.dynamic == "rms" and not self.data.is_given:
            raise ValueError(
                f"--eval.dynamic rms learns from the training text how large gradients are, and "
                f"{self.dir} is a model without the recipe of its run: give the text with "
                "--data.path, or use --eval.dynamic sgd"
            )

    def _dynamic(
        self, model: "TransformerXL", vocab: "Vocab", segment_len: int
    ) -> "Dynamic | None":
        from transformer_xl.evaluate import plan_dynamic

        return plan_dynamic(
            self.eval, model, lambda: self._corpus(vocab).split("train"), segment_len=segment_len
        )

    def _by_position(self, model: "TransformerXL", ids: Any, segment_len: int) -> dict[str, Any]:
        from transformer_xl.train.seen import TOKENS, loss_by_position

        settings = self.eval
        mem_len = model.config.mem_len if settings.mem_len is None else settings.mem_len
        return loss_by_position(
            model,
            ids[: TOKENS + 1],
            segment_len=segment_len,
            mem_len=mem_len,
            attn_len=settings.attn_len,
            clamp_len=settings.clamp_len,
            batch_size=settings.batch_size,
        )

    def _tokens(self, vocab: "Vocab") -> tuple[Any, int]:
        """Return the text in symbols, and how many bytes it has."""
        if self.file:
            text = read_text(self.file, vocab)
            prepared = self.prepared or bool(self.preset)
            ids = encoded_text(self.file, text, vocab, prepared=prepared)
            return ids, len(text.encode("utf-8", "surrogateescape"))
        if not self.data.is_given:
            raise ValueError(
                f"{self.dir} is a model without the recipe of its run, which says on what text it "
                "was trained: give any text with --file, or the run folder instead"
            )
        corpus, split = self._corpus(vocab), self.eval.split
        return corpus.split(split), corpus.n_bytes(split)

    def _corpus(self, vocab: "Vocab") -> Any:
        from transformer_xl.data import prepare

        corpus = prepare(self.data, say)
        if corpus.vocab.hash != vocab.hash:
            raise ValueError(
                f"the vocabulary of the corpus is not the one of the model in {self.dir}: give "
                "the text the model was trained on with --data.path, or any text with --file"
            )
        return corpus


def _show_places(found: dict[str, Any]) -> None:
    """Print the means over spans of places."""
    if not found:
        return
    start = found["from_start"]
    curves = [(f"in the segment, memory {x['mem_len']}", x["spans"]) for x in found["in_segment"]]
    curves.append((f"from the start, memory {start['mem_len']}", start["spans"]))
    for name, spans in curves:
        print(f"\n{name}")
        for span in spans:
            places = f"{span['first']} to {span['last']}"
            print(f"{places:20} {span['nll']:.4f}")


@dataclass(kw_only=True)
class Report:
    """Draw the report of a run again; measure what its memory does where that is missing."""

    examples: ClassVar = ("txl report runs/demo", "txl report runs/old --measure")
    takes: ClassVar = "DIR"

    dir: tyro.conf.Suppress[Path] = Path()
    measure: bool = False
    """Measure anew what the memory does, with the lengths of --eval."""
    eval: Annotated[EvalConfig, Value] = field(default_factory=EvalConfig)
    data: Annotated[DataConfig, Value] = field(default_factory=DataConfig)

    def run(self) -> None:
        """Measure what is missing, and draw."""
        from transformer_xl.train.report import write_report
        from transformer_xl.train.seen import MEMORY_FILE

        recipe = recipe_of(self.dir)
        if recipe is None:
            raise ValueError(f"{self.dir} is no run folder: it has no recipe.toml")
        if self.measure:
            self._look(recipe)
        elif not (self.dir / MEMORY_FILE).exists():
            try:
                self._look(recipe)
            except (OSError, ValueError, RuntimeError) as error:
                say(f"what its memory does is not measured: {error}")
        print(write_report(self.dir))

    def _look(self, recipe: Config) -> None:
        from transformer_xl.checkpoint import RunFolder
        from transformer_xl.data import prepare
        from transformer_xl.device import pick_device
        from transformer_xl.train.finish import look
        from transformer_xl.train.seen import MEMORY_FILE

        say("looking at what the memory does")
        config = replace(recipe, eval=self.eval, data=self.data)
        model, vocab = load(self.dir, pick_device(), "float32")
        corpus = prepare(config.data, say)
        if corpus.vocab.hash != vocab.hash:
            raise ValueError(
                f"the vocabulary of the corpus is not the one of the model in {self.dir}: give "
                "the text the model was trained on with --data.path"
            )
        RunFolder(self.dir).write_json(MEMORY_FILE, look(config, corpus, model))
