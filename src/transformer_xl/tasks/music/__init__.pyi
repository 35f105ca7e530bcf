from .reading import mido_package, read_midi
from .writing import (
    has_marks,
    joined,
    midi,
    pieces_of,
    require_pitches,
    text_of,
    write_music,
)

__all__ = [
    "has_marks",
    "joined",
    "midi",
    "mido_package",
    "pieces_of",
    "read_midi",
    "require_pitches",
    "text_of",
    "write_music",
]
