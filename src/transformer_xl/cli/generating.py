"""The command generate."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer_xl.cli.given import Folder, Given, nothing
from transformer_xl.cli.loading import (
    Weights,
    encoded_prompt,
    load_with_state,
    saved_at_end,
    start_of,
)
from transformer_xl.cli.out_files import PIECE_END, OutFiles
from transformer_xl.cli.printing import say, show
from transformer_xl.config import GenerateConfig
from transformer_xl.config.checks import require
from transformer_xl.config.music import MusicConfig
from transformer_xl.config.recipes import generation_of

if TYPE_CHECKING:
    from transformer_xl.data import Vocab
    from transformer_xl.model import LanguageModel


@dataclass(kw_only=True)
class Generate:
    """Generate text, streamed to the terminal, of any length.

    Sampling settings that are not given come from [generate] of the run's recipe, else from the
    defaults; those used are printed before the text. The same settings and seed give the same
    text here, with `txl serve` and in Python.

    Examples:
      txl generate runs/demo --prompt 'def main' --length 200
      txl generate runs/demo --length 0 --temperature 0.8 --top_p 0.95
      txl generate runs/demo --state session.safetensors --prompt 'class A'
      txl generate runs/demo --samples 8 --weights bfloat16 --json
      txl generate runs/chorales --out bach.mid bach.png
    """

    dir: Folder
    """A model folder, a run folder, or the name of a model (txl models)."""
    given: Annotated[Given[GenerateConfig], tyro.conf.OmitArgPrefixes] = field(
        default_factory=nothing
    )
    prompts: tuple[str, ...] = ()
    """Several prompts, continued as one batch, instead of the one prompt."""
    samples: int = 1
    """Samples of each prompt, generated as one batch. The seed of sample n is the first plus n."""
    mem_len: int | None = None
    """Memory length; None: as configured in the model."""
    weights: Weights = "float32"
    """Precision of the weights: quantized ones are faster; txl eval measures the loss."""
    any_size: bool = False
    """Load the model even if it takes more memory than the machine has, or more than 2 minutes."""
    state: Path | None = None
    """Resume from the memory in this file if it exists, and save the memory there at the end."""
    json: bool = False
    """Print one JSON object at the end instead of streaming the text."""
    out: tuple[Path, ...] = ()
    """Write prompt and text to these files instead of the terminal. For a model of music .mid and
    .midi are MIDI files, .png and .svg piano rolls, and generation stops where the piece ends, or
    after --length tokens; any other file is text. Of several texts each has its own: bach-1.mid,
    bach-2.mid."""
    force: bool = False
    """Overwrite existing files of --out."""
    music: Given[MusicConfig] = field(default_factory=nothing)

    @cached_property
    def settings(self) -> GenerateConfig:
        """Sampling settings: those of the folder, replaced by the given ones."""
        return generation_of(self.dir).changed(**self.given)

    @cached_property
    def files(self) -> OutFiles:
        """The files to write."""
        n_texts = max(1, len(self.prompts)) * max(1, self.samples)
        return OutFiles(self.out, n_texts, self.music, self.force)

    @property
    def _stops(self) -> tuple[str, ...]:
        stop = self.settings.stop
        return (*stop, PIECE_END) if self.files.has_music else stop

    def run(self) -> None:
        """Write text to the standard output, or to files."""
        self._check()
        from transformer_xl.inference.generate import generate, save_state, text_pieces

        model, vocab, state, checksum = load_with_state(
            self.dir, self.weights, self.state, any_size=self.any_size
        )
        self.files.require_vocab(vocab)
        if self.prompts or self.samples > 1:
            self._write_several(model, vocab)
            return
        text, seed, last_token = self.settings.prompt, self.settings.seed, []
        history: Any = ()
        if state is not None:
            # The recipe's prompt and seed are for the start of a text, not for one that resumes.
            text = text if "prompt" in self.given else ""
            if state.random is not None and "seed" not in self.given:
                seed = state.random
            last_token = [state.last_token]
            history = () if state.read is None else state.read
        prompt = [*last_token, *encoded_prompt(text, vocab)] or start_of(vocab)
        settings = self._announced(vocab, model, seed if isinstance(seed, int) else None)
        decoding = _decoding(model)
        mems = None if state is None else state.mems
        drawing = self._drawing(vocab)
        drawn = generate(model, prompt, mems=mems, seed=seed, history=history, **drawing)

        def save() -> None:
            if self.state:
                save_state(self.state, drawn, checksum)
                say(f"saved the memory to {self.state}; the same command resumes from it")

        with saved_at_end(save):
            pieces = text_pieces(drawn, vocab, self._stops, prompt)
            if self.json or self.out:
                found = {"prompt": text, "text": "".join(pieces), "settings": settings}
                self._say_looping([0] if drawn.is_looping else [])
                self._show(found | {"decoding": decoding}, [found])
                return
            sys.stdout.write(text)
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            self._say_looping([0] if drawn.is_looping else [])

    def _check(self) -> None:
        """Refuse contradicting options before anything is loaded."""
        is_several = bool(self.prompts) or self.samples > 1
        endless = "several texts need"
        if self.json or self.out:
            endless = "--json needs" if self.json else "--out needs"
        require(
            self.mem_len is None or self.mem_len >= 0, f"mem_len={self.mem_len} must be at least 0"
        )
        require(self.samples >= 1, f"samples={self.samples} must be at least 1")
        require(
            self.settings.length > 0 or not (self.json or self.out or is_several),
            f"length=0 generates without end: {endless} a --length above 0",
        )
        require(
            not (is_several and self.state),
            "--state saves the memory of one text: leave out --prompts and --samples",
        )
        require(
            not (self.prompts and "prompt" in self.given),
            "--prompt and --prompts: give one of them",
        )
        self.files.check(self.state)

    def _show(self, result: dict[str, Any], texts: list[dict[str, Any]]) -> None:
        """Write the files, if there are any, and print the JSON object."""
        if self.out:
            written = self.files.write(
                [(x["prompt"], x["text"]) for x in texts], result["settings"]
            )
            result |= {"files": written}
        if self.json:
            show(result, as_json=True)

    def _write_several(self, model: "LanguageModel", vocab: "Vocab") -> None:
        from transformer_xl.inference.generate import generate_batch, seed_of

        begins = self.prompts or (self.settings.prompt,)
        encoded = [encoded_prompt(text, vocab) or start_of(vocab) for text in begins]
        prompts = [ids for ids in encoded for _ in range(self.samples)]
        begins = [text for text in begins for _ in range(self.samples)]
        seed = self.settings.seed
        settings, decoding = self._announced(vocab, model, seed), _decoding(model)
        batch = generate_batch(model, prompts, seed=seed, **self._drawing(vocab))
        texts = batch.decode(vocab, self._stops)
        self._say_looping(batch.looping)
        found = [
            {"prompt": prompt, "text": text, "seed": seed_of(seed, n)}
            for n, (prompt, text) in enumerate(zip(begins, texts, strict=True))
        ]
        if self.json or self.out:
            self._show({"texts": found, "settings": settings, "decoding": decoding}, found)
            return
        for n, each in enumerate(found, 1):
            sys.stdout.write(f"--- {n} of {len(found)}, seed {each['seed']}\n")
            sys.stdout.write(f"{each['prompt']}{each['text']}\n")

    def _say_looping(self, texts: Collection[int]) -> None:
        """Say which texts were ended because they looped."""
        if not texts:
            return
        several = self.prompts or self.samples > 1
        which = ", ".join(str(text + 1) for text in sorted(texts))
        say(
            f"{f'texts {which}' if several else 'the text'} ended early: the "
            f"last {self.settings.loop_min_length} tokens or more repeat one sequence; --on_loop "
            "continue goes on, --on_loop break excludes the token that would repeat it"
        )

    def _announced(
        self, vocab: "Vocab", model: "LanguageModel", seed: int | None
    ) -> dict[str, Any]:
        """Return and print the sampling settings; seed None: a saved random state is used."""
        from transformer_xl.inference.generate import Sampler
        from transformer_xl.model.lengths import Lengths

        given = self.settings
        drawing = Sampler(**given.sampling, vocab_size=len(vocab), vocab=vocab).settings
        mem_len = Lengths.of(model.config, mem_len=self.mem_len).mem_len
        found = {**drawing, "seed": seed, "mem_len": mem_len, "weights": self.weights}
        known = (f"{name} {'none' if x is None else x}" for name, x in found.items())
        say(f"sampling with {', '.join(known)}")
        if not mem_len and model.remembers_positions:
            say(
                "mem_len=0: nothing is remembered, so each token is drawn from the one before it "
                "alone; give --mem_len, such as the context of the training"
            )
        return {**found, "length": given.length or None}

    def _drawing(self, vocab: "Vocab") -> dict[str, Any]:
        from transformer_xl.inference.generate import for_tokens

        lengths = {"length": self.settings.length or None, "mem_len": self.mem_len}
        return for_tokens(self.settings.sampling, vocab) | lengths


def _decoding(model: "LanguageModel") -> str:
    """Say how tokens are decoded and why; print it if another way would be faster."""
    from transformer_xl.model.stepper import choose_stepper

    kind, decoding = choose_stepper(model)
    if not kind.is_fast:
        say(f"decoding is slower than it could be: {decoding}")
    return decoding
