"""The command generate."""

import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from transformer_xl.cli.given import Given, PrintsResult, ReadsModel, nothing, refuse_others
from transformer_xl.cli.loading import (
    load_with_state,
    require_readable,
    save_at_end,
    start_of,
    tokenize_prompt,
)
from transformer_xl.cli.out_files import files_of, of_music, write_texts
from transformer_xl.cli.printing import exclude, say, show
from transformer_xl.config import (
    GenerateConfig,
    MusicConfig,
    generation_of,
    recipe_of,
    require,
)

if TYPE_CHECKING:
    from transformer_xl.data import Vocab
    from transformer_xl.inference.generate import State
    from transformer_xl.model import LanguageModel


@dataclass(kw_only=True)
class Generate(ReadsModel, PrintsResult):
    """Generate text, streamed to the terminal, of any length.

    Sampling settings that are not given come from [generate] of the run's recipe, else from the
    defaults; those that differ from the defaults are printed before the text. The same settings
    and seed give the same text here, with `txl serve` and in Python.

    Examples:
      txl generate runs/demo --prompt 'def main' --length 200
      txl generate runs/demo --length 0 --temperature 0.8 --top_p 0.95
      txl generate runs/demo --state session.safetensors --prompt 'class A'
      txl generate runs/demo --samples 8 --weights bfloat16 --json
      txl generate runs/chorales --out bach.mid
      txl generate runs/chorales --midi begun.mid --out continued.mid
    """

    given: Annotated[Given[GenerateConfig], tyro.conf.OmitArgPrefixes] = field(
        default_factory=nothing
    )
    prompts: tuple[str, ...] = ()
    """Several prompts, continued as one batch, instead of the one prompt."""
    midi: Path | None = None
    """Continue the music of this MIDI file instead of a prompt, of any program. Drums are left out;
    notes beyond the voices are counted. --music.voices and --music.steps_per_quarter say how it is
    read."""
    samples: int = 1
    """Samples of each prompt, generated as one batch. The seed of sample n is the first plus
    n."""
    mem_len: int | None = None
    """Memory length; None: as configured in the model."""
    preface: bool = True
    """Read the preface of the model, if it has one, into the memory before the prompt."""
    state: Path | None = None
    """Resume from the state in this file if it exists, and save the state there at the end."""
    rewind: int = 0
    """Take back so many of the last tokens of --state first, 256 at least."""
    out: tuple[Path, ...] = ()
    """Write prompt and text to these files instead of the terminal. For a model of music .mid and
    .midi are MIDI files, and generation stops where the piece ends, or after --length tokens; any
    other file is text. Of several texts each has its own: bach-1.mid, bach-2.mid."""
    force: bool = False
    """Overwrite existing files of --out."""
    music: Given[MusicConfig] = field(default_factory=nothing)

    @cached_property
    def settings(self) -> GenerateConfig:
        """Sampling settings: those of the command line, else those of the folder."""
        return generation_of(self.dir).changed(**self.given)

    @property
    def _stops(self) -> tuple[str, ...]:
        # A line of music is a piece.
        return (*self.settings.stop, "\n") if of_music(self.out) else self.settings.stop

    @property
    def _is_several(self) -> bool:
        """Whether more than one text is written."""
        return bool(self.prompts) or self.samples > 1

    def run(self) -> None:
        """Write text to the standard output, or to files."""
        self._check()
        model, vocab, state, checksum = load_with_state(self.dir, self.weights, self.state)
        if of_music(self.out):
            from transformer_xl.tasks.music import require_pitches

            require_pitches(vocab)
        if not self.preface:
            model.preface = ()
        if self._is_several:
            self._draw_several(model, vocab)
        else:
            self._draw(model, vocab, state, checksum)

    def _check(self) -> None:
        """Check that the options fit each other, before anything is loaded."""
        # Settings out of range are refused now, not after the model was loaded.
        _ = MusicConfig(**self.music)
        require(self.rewind >= 0, f"rewind={self.rewind} must be at least 0")
        require(
            not self.rewind or (self.state is not None and self.state.exists()),
            "--rewind takes back tokens of a --state that exists",
        )
        require(self.samples >= 1, f"samples={self.samples} must be at least 1")
        ended = {"--json": self.json, "--out": self.out, "several texts": self._is_several}
        endless = next((name for name, is_set in ended.items() if is_set), None)
        require(
            endless is None or self.settings.length > 0,
            f"length=0 generates without end, and {endless} needs a --length above 0",
        )
        # A state holds the memory of one text.
        exclude(state=self.state, prompts=self.prompts, midi=self.midi)
        exclude(state=self.state, samples=self.samples > 1)
        require(not self.force or bool(self.out), "--force overwrites the files of --out: give it")
        exclude(prompt="prompt" in self.given, prompts=self.prompts, midi=self.midi)
        # It may resume within a step of a piece, so that voices would be exchanged.
        exclude(state=self.state, out=of_music(self.out))
        if self.midi is not None:
            require_readable(self.midi)
        if not of_music(self.out):
            # What the music that is continued needs.
            steps = ("voices", "steps_per_quarter") if self.midi else ()
            why = "it is for --out FILE.mid or .midi" + ", and for --midi" * (not steps)
            refuse_others(self.music, "music.", steps, why)
        if self.state is not None:
            is_other = self.state.resolve() not in [path.resolve() for path in self.out]
            require(is_other, f"--state {self.state} is a file of --out, too")
        _ = self._files

    @cached_property
    def _files(self) -> list[list[Path]]:
        """The files of each text, which can be written."""
        n_texts = max(1, len(self.prompts)) * self.samples
        return files_of(self.out, n_texts, force=self.force)

    def _texts(self, vocab: "Vocab") -> tuple[str, ...]:
        """Return the texts to continue."""
        if self.midi is None:
            return self.prompts or (self.settings.prompt,)
        from transformer_xl.tasks.music import midi_prompt

        return (midi_prompt(self.midi, MusicConfig(**self.music), vocab, say),)

    def _tokenize(self, text: str, vocab: "Vocab") -> list[int]:
        """Return the tokens of a prompt; those of a piece of music are after an end."""
        recipe = recipe_of(self.dir)
        is_raw = recipe is not None and recipe.data.raw
        ids = tokenize_prompt(text, vocab, is_raw=is_raw)
        # A piece begins where one ends; a prompt may stand anywhere in a text.
        return ids if self.midi is None else [*start_of(vocab), *ids]

    def _batch(self, model: "LanguageModel", vocab: "Vocab") -> tuple[list[str], list[list[int]]]:
        """Return the prompts as texts and as tokens, each as many times as there are samples."""
        from transformer_xl.model import Lengths

        texts, copies = self._texts(vocab), self.samples
        # Before there are lists of so many.
        mem_len = Lengths.of(model.config, mem_len=self.mem_len).mem_len
        model.require_capacity(mem_len, len(texts) * copies, self.settings.length or None)
        prompts = [self._tokenize(text, vocab) or start_of(vocab) for text in texts]
        copied = [text for text in texts for _ in range(copies)]
        return copied, [ids for ids in prompts for _ in range(copies)]

    def _draw(
        self, model: "LanguageModel", vocab: "Vocab", state: "State | None", checksum: str
    ) -> None:
        """Write one text as it is drawn."""
        from transformer_xl.inference.generate import REWINDABLE, TextWriter, generate

        (text,), seed = self._texts(vocab), self.settings.seed
        if state is not None:
            state = state.rewind(self.rewind)
            # The prompt of the recipe is for the start of a text, not for one that resumes.
            text = text if "prompt" in self.given else ""
            if state.random is not None and "seed" not in self.given:
                seed = state.random
        prompt = self._tokenize(text, vocab) or ([] if state else start_of(vocab))
        drawing, used = self._drawing(vocab)
        # None: a random state that was saved.
        used["seed"] = seed if isinstance(seed, int) else None
        about = self._said(used, model)
        n = REWINDABLE if self.state else 0
        drawn = generate(model, prompt, state=state, seed=seed, rewindable=n, **drawing)

        def save() -> None:
            if self.state:
                drawn.state.save(self.state, checksum)
                say(f"saved the state to {self.state}; the same command resumes from it")

        with save_at_end(save):
            goes_on = self.state is not None
            writer = TextWriter(vocab, self._stops, prompt, state.tokens if state else ())
            pieces = writer.pieces(drawn, goes_on=goes_on)
            if self.json or self.out:
                self._show([{"prompt": text, "text": "".join(pieces)}], about)
            else:
                for piece in chain([text], pieces, ["\n"]):
                    sys.stdout.write(piece)
                    sys.stdout.flush()

    def _draw_several(self, model: "LanguageModel", vocab: "Vocab") -> None:
        """Write several texts that are drawn as one batch."""
        from transformer_xl.inference.generate import generate_batch, seed_of

        texts, prompts = self._batch(model, vocab)
        seed = self.settings.seed
        drawing, used = self._drawing(vocab)
        about = self._said(used | {"seed": seed}, model)
        batch = generate_batch(model, prompts, seed=seed, **drawing)
        both = zip(texts, batch.decode(vocab, self._stops), strict=True)
        written = [
            {"prompt": prompt, "text": text, "seed": seed_of(seed, n)}
            for n, (prompt, text) in enumerate(both)
        ]
        self._show(written, about)

    def _show(self, texts: list[dict[str, Any]], about: dict[str, Any]) -> None:
        """Write the files, if there are any, and print the texts, or the JSON object."""
        result = ({"texts": texts} if self._is_several else texts[0]) | about
        if self.out:
            options = {"length": self.settings.length, "force": self.force}
            music = MusicConfig(**self.music)
            result["files"] = write_texts(self._files, texts, music, **options)
        if self.json:
            show(result, as_json=True)
        if self.json or self.out:
            return
        for n, text in enumerate(texts, 1):
            if self._is_several:
                sys.stdout.write(f"--- {n} of {len(texts)}, seed {text['seed']}\n")
            sys.stdout.write(f"{text['prompt']}{text['text']}\n")

    def _said(self, used: dict[str, Any], model: "LanguageModel") -> dict[str, Any]:
        """Return the settings and how tokens are decoded; print the settings that differ."""
        from transformer_xl.model import Lengths, choose_step

        mem_len = Lengths.of(model.config, mem_len=self.mem_len).mem_len
        defaults = {**asdict(GenerateConfig()), "mem_len": model.config.mem_len}
        defaults |= {"weights": "float32", "seed": None, "preface": 0}
        # A text that goes on from a memory begins without one.
        preface = 0 if self.state and self.state.exists() else len(model.preface)
        settings = {**used, "mem_len": mem_len, "weights": self.weights, "preface": preface}
        shown = [f"{name} {x}" for name, x in settings.items() if x != defaults.get(name)]
        if preface:
            shown[-1] += " tokens (--no_preface: without)"
        say(f"sampling with {', '.join(shown) or 'the defaults'}")
        settings["length"] = self.settings.length or None
        return {"settings": settings, "decoding": choose_step(model)[1]}

    def _drawing(self, vocab: "Vocab") -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of generation, and its settings as they are printed."""
        from transformer_xl.inference.generate import Sampler, Sampling

        settings = self.settings
        sampling = Sampling(**settings.sampling)
        used = Sampler(sampling, len(vocab)).settings
        drawing: dict[str, Any] = {"sampling": sampling}
        drawing |= {"length": settings.length or None, "mem_len": self.mem_len}
        return drawing, used
