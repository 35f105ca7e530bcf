"""Files that txl generate writes: text, music and piano rolls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_xl.cli.given import refuse_others
from transformer_xl.cli.printing import say
from transformer_xl.config import (
    MIDI_SUFFIXES,
    MUSIC_SUFFIXES,
    MusicConfig,
    replace_file,
    require,
    require_new_file,
)
from transformer_xl.errors import DataError

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
    """The files of one command. Each suffix says what is written; unknown ones are for text.

    Args:
        paths: The files of ``--out``.
        n_texts: Number of texts; of several, each gets files of its own.
        music: Settings of music that are not defaults.
        force: Whether existing files are overwritten.
    """

    paths: tuple[Path, ...]
    n_texts: int
    music: dict[str, Any]
    force: bool

    def _has(self, suffixes: Sequence[str]) -> bool:
        return any(path.suffix.lower() in suffixes for path in self.paths)

    @property
    def has_music(self) -> bool:
        """Whether there are MIDI files or piano rolls, which end with the piece."""
        return self._has(MUSIC_SUFFIXES)

    def of_text(self, n: int) -> list[Path]:
        """Return the files of text ``n``: of several texts, with its number, from 1."""
        if self.n_texts == 1:
            return list(self.paths)
        return [path.with_name(f"{path.stem}-{n + 1}{path.suffix}") for path in self.paths]

    def check(self, state: Path | None, midi: Path | None) -> None:
        """Check that the files can be written and that all settings have an effect.

        Args:
            state: The file of a memory to resume from, if any.
            midi: The file with the music that is continued, if any.

        Raises:
            OSError: A file exists and is not to be overwritten, or cannot be written.
            RuntimeError: A library is missing.
            SettingsError: A setting has no effect.
        """
        require(
            not self.force or bool(self.paths), "--force overwrites the files of --out: give it"
        )
        if not self._has(MIDI_SUFFIXES):
            refuse_others(self.music, "music.", _OF_STEPS, "it is for --out FILE.mid or .midi")
        if not self.has_music and midi is None:
            why = "it is for --midi, and for --out FILE.mid, .midi, .png or .svg"
            refuse_others(self.music, "music.", (), why)
        require(
            not (self.has_music and state),
            f"--state {state} may resume within a step of a piece, so that voices would be "
            "exchanged: leave it out, or write a text file",
        )
        require(
            not self.paths or self.n_texts <= MOST_FILES,
            f"--out writes a file for each of {self.n_texts:,} texts, at most {MOST_FILES:,}: "
            "write fewer, or leave out --out",
        )
        # Two names may be those of one file.
        files = [path.resolve() for path in (*self.paths, *([state] if state else []))]
        for path in self.paths:
            require(str(path) != "-", "--out - is no file: without --out, the text is printed")
            is_once = files.count(path.resolve()) == 1
            require(is_once, f"--out {path} is given twice, or the file of --state")
        for n in range(self.n_texts if self.paths else 0):
            for path in self.of_text(n):
                require_new_file(path, force=self.force)
        if self.has_music:
            from transformer_xl.tasks.music import library_of

            for path in self.paths:
                if (suffix := path.suffix.lower()) in MUSIC_SUFFIXES:
                    library_of(suffix)

    def require_vocab(self, vocab: "Vocab") -> None:
        """Require a model of music, whose tokens are pitches, if music is written.

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
            DataError: A text is no music.
        """
        # Each word of a text of music is a token.
        has_ended = [len(text.split()) < settings["length"] for _, text in texts]
        if self.has_music and not all(has_ended):
            say(
                f"{has_ended.count(False)} of {len(texts)} pieces had not ended after length="
                f"{settings['length']} tokens: a larger --length lets them end"
            )
        names: list[str] = []
        problems: list[str] = []
        for n, (prompt, text) in enumerate(texts):
            music = [path for path in self.of_text(n) if path.suffix.lower() in MUSIC_SUFFIXES]
            for path in self.of_text(n):
                if path not in music:
                    # Bytes of a prompt that are not UTF-8 are surrogates, and are restored.
                    content = f"{prompt}{text}\n".encode("utf-8", "surrogateescape")
                    replace_file(path, content)
                    names.append(str(path))
            try:
                if music:
                    self._write_music(music, prompt + text, has_ended[n])
                    names += map(str, music)
            except ValueError as error:
                problems.append(f"{' and '.join(map(str, music))} not written: {error}")
        if names:
            say(f"wrote {', '.join(names)}")
        if problems:
            raise DataError("; ".join(problems))
        return names

    def _write_music(self, paths: list[Path], text: str, has_ended: bool) -> None:
        from transformer_xl.tasks.music import joined, pieces_of, write_music

        settings, files = MusicConfig(**self.music), " and ".join(map(str, paths))

        def tell(problem: str) -> None:
            say(f"{files}: {problem}")

        pieces = pieces_of(text, settings.voices, tell, has_ended=has_ended)
        for path in paths:
            write_music(path, joined(pieces), settings, force=self.force)
