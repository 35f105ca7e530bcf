"""The command generate."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from transformer_xl.cli.given import Folder, Given, nothing
from transformer_xl.cli.loading import Weights, encoded_prompt, ended_by_signals, load
from transformer_xl.cli.printing import say, show
from transformer_xl.config import GenerateConfig
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
    """

    examples: ClassVar = (
        "txl generate runs/demo --prompt 'def main' --length 200",
        "txl generate runs/demo --length 0 --temperature 0.8 --top_p 0.95",
        "txl generate runs/demo --state session.safetensors --prompt 'class A'",
        "txl generate runs/demo --samples 8 --weights bfloat16 --json",
    )

    dir: Folder
    """A model folder or run folder."""
    given: Annotated[Given[GenerateConfig], tyro.conf.OmitArgPrefixes] = field(
        default_factory=nothing
    )
    prompts: tuple[str, ...] = ()
    """Several prompts, continued as one batch, instead of the one prompt."""
    samples: int = 1
    """Samples of each prompt, generated as one batch. The seed of sample n is the first plus n."""
    stop: tuple[str, ...] = ()
    """Stop strings: a text ends before the first of them."""
    mem_len: int | None = None
    """Memory length; None: as configured in the model."""
    weights: Weights = "float32"
    """Precision of the weights: quantized ones are faster; txl eval measures the loss."""
    state: Path | None = None
    """Resume from the memory in this file if it exists, and save the memory there at the end."""
    json: bool = False
    """Print one JSON object at the end instead of streaming the text."""

    @cached_property
    def settings(self) -> GenerateConfig:
        """Sampling settings: those of the folder, replaced by the given ones."""
        return replace(generation_of(self.dir), **self.given)

    def run(self) -> None:
        """Write text to the standard output."""
        from transformer_xl.config.device import pick_device

        self._check()
        loaded = self._weights_checksum()
        model, vocab = load(self.dir, pick_device(), self.weights)
        if self.prompts or self.samples > 1:
            self._write_several(model, vocab)
        else:
            self._write_one(model, vocab, loaded)

    def _check(self) -> None:
        if self.mem_len is not None and self.mem_len < 0:
            raise ValueError(f"mem_len={self.mem_len} must be at least 0")
        if self.samples < 1:
            raise ValueError(f"samples={self.samples} must be at least 1")
        if not all(self.stop):
            raise ValueError(
                "--stop: a stop string is empty, so every text would be empty; leave it out"
            )
        is_several = bool(self.prompts) or self.samples > 1
        if not self.settings.length and (self.json or is_several):
            what = "--json" if self.json else "several texts"
            needs = "needs" if self.json else "need"
            raise ValueError(f"length=0 generates without end: {what} {needs} a --length above 0")
        if is_several and self.state:
            raise ValueError(
                "--state saves the memory of one text: leave out --prompts and --samples"
            )
        if self.prompts and "prompt" in self.given:
            raise ValueError("--prompt and --prompts: give one of them")

    def _weights_checksum(self) -> str:
        """Return the checksum of the weights; a running training may replace the file later."""
        from transformer_xl.model.pretrained import (
            find_model_folder,
            weights_checksum,
            weights_path,
        )

        return weights_checksum(weights_path(find_model_folder(self.dir))) if self.state else ""

    def _write_one(self, model: "LanguageModel", vocab: "Vocab", weights: str) -> None:
        from transformer_xl.inference.generate import generate, load_state, save_state, text_pieces

        text, prompt, mems = self.settings.prompt, [], None
        seed: Any = self.settings.seed
        if self.state and self.state.exists():
            state = load_state(self.state, weights, model)
            mems = state.mems
            # The recipe's prompt and seed are for the start of a text, not for one that resumes.
            text = text if "prompt" in self.given else ""
            if state.random is not None and "seed" not in self.given:
                seed = state.random
            prompt = [state.last_token]
        prompt += encoded_prompt(text, vocab)
        settings = self._settings(model, seed if isinstance(seed, int) else None)
        drawn = generate(model, prompt, mems=mems, seed=seed, **self._drawing())
        with ended_by_signals():
            try:
                self._write(text, text_pieces(drawn, vocab, self.stop, prompt), settings)
            finally:
                if self.state:
                    save_state(self.state, drawn, weights)
                    say(f"saved the memory to {self.state}; the same command resumes from it")

    def _write(self, prompt: str, pieces: Iterator[str], settings: dict[str, Any]) -> None:
        if self.json:
            found = {"prompt": prompt, "text": "".join(pieces), "settings": settings}
            show(found, as_json=True)
            return
        sys.stdout.write(prompt)
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")

    def _write_several(self, model: "LanguageModel", vocab: "Vocab") -> None:
        from transformer_xl.inference.generate import generate_batch, seed_of

        begins = self.prompts or (self.settings.prompt,)
        prompts = [ids for text in begins for ids in [encoded_prompt(text, vocab)] * self.samples]
        begins = [text for text in begins for _ in range(self.samples)]
        seed = self.settings.seed
        settings = self._settings(model, seed)
        batch = generate_batch(model, prompts, seed=seed, **self._drawing())
        texts = batch.decode(vocab, self.stop)
        found = [
            {"prompt": prompt, "text": text, "seed": seed_of(seed, n)}
            for n, (prompt, text) in enumerate(zip(begins, texts, strict=True))
        ]
        if self.json:
            show({"texts": found, "settings": settings}, as_json=True)
            return
        for n, each in enumerate(found, 1):
            sys.stdout.write(f"--- {n} of {len(found)}, seed {each['seed']}\n")
            sys.stdout.write(f"{each['prompt']}{each['text']}\n")

    def _settings(self, model: "LanguageModel", seed: int | None) -> dict[str, Any]:
        """Return and print the sampling settings; seed None: a saved random state is used."""
        from transformer_xl.inference.generate import Sampler
        from transformer_xl.model.lengths import Lengths

        given = self.settings
        cuts = given.temperature, given.top_k, given.top_p
        drawing = Sampler(*cuts, model.config.vocab_size).settings
        mem_len = Lengths.of(model.config, mem_len=self.mem_len).mem_len
        found = {**drawing, "seed": seed, "mem_len": mem_len, "weights": self.weights}
        known = (f"{name} {'none' if x is None else x}" for name, x in found.items())
        say(f"sampling with {', '.join(known)}")
        return {**found, "length": given.length or None}

    def _drawing(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "length": settings.length or None,
            "temperature": settings.temperature,
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "mem_len": self.mem_len,
        }
