"""Files that txl generate writes: text, music and piano rolls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.given import refuse_others
from transformer_xl.cli.printing import say
from transformer_xl.config.checks import require
from transformer_xl.config.files import replace_file, require_new_file
from transformer_xl.config.music import MIDI_SUFFIXES, MUSIC_SUFFIXES, MusicConfig

if TYPE_CHECKING:
    from transformer_xl.data import Vocab

MOST_FILES = 10_000
"""Files that ``--out`` writes, at most."""
PIECE_END = "\n"
"""The text that ends a piece of music: a line."""
_OF_STEPS = ("voices", "steps_per_quarter")
"""Settings of music that say how a text becomes steps, and a MIDI file a text."""


@dataclass(frozen=True)
class OutFiles:
    """The files of one command. Each suffix says what is written; unknown ones are for text."""

    paths: tuple[Path, ...]
    """The files as they were given."""
    n_texts: int
    """Number of texts; of several, each gets files of its own."""
    music: dict[str, Any]
    """Given settings of music."""
    force: bool
    """Whether existing files are overwritten."""

    @property
    def _suffixes(self) -> set[str]:
        return {path.suffix.lower() for path in self.paths}

    @property
    def has_music(self) -> bool:
        """Whether there are MIDI files or piano rolls, which end with the piece."""
        return not self._suffixes.isdisjoint(MUSIC_SUFFIXES)

    def of_text(self, n: int) -> list[Path]:
        """Return the files of text ``n``: of several texts, with its number, from 1."""
        if self.n_texts == 1:
            return list(self.paths)
        return [path.with_name(f"{path.stem}-{n + 1}{path.suffix}") for path in self.paths]

    def check(self, state: Path | None, midi: Path | None) -> None:
        """Refuse files that cannot be written, and settings without effect.

        Args:
            state: The file of a memory to resume from, if any.
            midi: The file with the music that is continued, if any.

        Raises:
            OSError: A file exists and is not to be overwritten, or cannot be written.
            ValueError: A library is missing.
            ValueError: A setting has no effect.
        """
        require(
            not (self.force and not self.paths),
            "--force overwrites the files of --out: give it, or leave out --force",
        )
        has_midi = not self._suffixes.isdisjoint(MIDI_SUFFIXES)
        if not has_midi:
            why = "it is for --out FILE.mid or .midi"
            refuse_others(self.music, "music.", _OF_STEPS, why)
        if not self.has_music and midi is None:
            why = "it is for --midi, and for --out FILE.mid, .midi, .png or .svg"
            refuse_others(self.music, "music.", (), why)
        require(
            not (self.has_music and state),
            f"--state {state} may resume within a step of a piece, so that voices would be "
            "exchanged: leave it out, or write a text file",
        )
        for path in self.paths:
            require(
                str(path) != "-",
                "--out - is no file: without --out, the text goes to the terminal or a pipe",
            )
            same = [str(x) for x in self.paths if x.resolve() == path.resolve()]
            require(len(same) == 1, f"--out {' '.join(same)} is given twice: give it once")
        require(
            not self.paths or self.n_texts <= MOST_FILES,
            f"--out writes a file for each of {self.n_texts:,} texts, at most {MOST_FILES:,}: "
            "write fewer, or leave out --out",
        )
        for n in range(self.n_texts if self.paths else 0):
            for path in self.of_text(n):
                require(
                    state is None or path.resolve() != state.resolve(),
                    f"--out {path} is the file of --state: give the memory another file",
                )
                require_new_file(path, force=self.force)
        if self.has_music:
            from transformer_xl.tasks.music import library_of

            for suffix in self._suffixes.intersection(MUSIC_SUFFIXES):
                library_of(suffix)

    def require_vocab(self, vocab: "Vocab") -> None:
        """Refuse music for a model with tokens other than pitches.

        Raises:
            ValueError: It has others.
        """
        if self.has_music:
            from transformer_xl.tasks.music import require_pitches

            require_pitches(vocab)

    def write(self, texts: Sequence[tuple[str, str]], settings: Mapping[str, Any]) -> list[str]:
        """Write prompts with their texts; return the names of the files.

        If some cannot be written, the others are.

        Args:
            texts: Each prompt, and the text after it.
            settings: How they were sampled; ``length`` is the most tokens of each.

        Raises:
            OSError: A file cannot be written.
            ValueError: A text is no music.
        """
        if self.has_music:
            n_cut = sum(not _has_ended(text, settings) for _, text in texts)
            if n_cut:
                say(
                    f"{n_cut} of {len(texts)} pieces had not ended after length="
                    f"{settings['length']} tokens: a larger --length lets them end"
                )
        names: list[str] = []
        problems: list[ValueError] = []
        for n, (prompt, text) in enumerate(texts):
            paths = self.of_text(n)
            for path in paths:
                if path.suffix.lower() not in MUSIC_SUFFIXES:
                    # Bytes of a prompt that are not UTF-8 are surrogates, and are restored.
                    content = f"{prompt}{text}\n".encode("utf-8", "surrogateescape")
                    replace_file(path, content)
                    names.append(str(path))
            music = [path for path in paths if path.suffix.lower() in MUSIC_SUFFIXES]
            if music:
                try:
                    self._write_music(music, prompt + text, _has_ended(text, settings))
                except ValueError as error:
                    problems.append(error)
                else:
                    names += map(str, music)
        if names:
            say(f"wrote {', '.join(names)}")
        if problems:
            raise ValueError("; ".join(map(str, problems))) from problems[0]
        return names

    def _write_music(self, paths: list[Path], text: str, has_ended: bool) -> None:
        from transformer_xl.tasks.music import joined, pieces_of, write_music

        settings, named = MusicConfig(**self.music), " and ".join(map(str, paths))
        try:
            pieces = pieces_of(
                text,
                settings.voices,
                lambda problem: say(f"{named}: {problem}"),
                has_ended=has_ended,
            )
        except ValueError as error:
            raise ValueError(f"{named} not written: {error}") from error
        for path in paths:
            write_music(path, joined(pieces), settings, force=self.force)


def _has_ended(text: str, settings: Mapping[str, Any]) -> bool:
    """Whether a piece ended before it had the most tokens."""
    # Each word of such a text is a token.
    return len(text.split()) < settings["length"]
