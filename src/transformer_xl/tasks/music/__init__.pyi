from .reading import read_midi
from .writing import (
    Note,
    has_marks,
    joined,
    library_of,
    midi,
    notes_of,
    piano_roll,
    pieces_of,
    require_pitches,
    text_of,
    write_music,
)

__all__ = [
    "Note",
    "has_marks",
    "joined",
    "library_of",
    "midi",
    "notes_of",
    "piano_roll",
    "pieces_of",
    "read_midi",
    "require_pitches",
    "text_of",
    "write_music",
]
