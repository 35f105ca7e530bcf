"""Music as integers: what they mean, and the settings with which they become notes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from transformer_xl.config.checks import Range, check


@dataclass(frozen=True, kw_only=True, slots=True)
class MusicConfig:
    """How integers become notes: voices, duration of a step, instrument."""

    voices: Annotated[int, Range(ge=1, le=15)] = 4
    """Voices of a step: so many integers, one after the other, are heard at once."""
    steps_per_quarter: Annotated[int, Range(ge=1, le=64)] = 4
    """Steps of a quarter note; 4: a step is a sixteenth note, and 16 are a bar of 4/4."""
    tempo: Annotated[float, Range(ge=4, le=1000)] = 80.0
    """Quarter notes per minute, of a MIDI file."""
    program: Annotated[int, Range(ge=1, le=128)] = 20
    """Instrument of a MIDI file by its General MIDI number, from 1: 1 is a piano, 20 a church
    organ, 53 a choir."""

    def __post_init__(self) -> None:
        check(self, "music")

    @staticmethod
    def is_midi(path: Path) -> bool:
        """Whether a file is a MIDI file, by the end of its name."""
        return path.suffix.lower() in (".mid", ".midi")
