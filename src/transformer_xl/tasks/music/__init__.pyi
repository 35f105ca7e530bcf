from .reading import mido_package, read_midi
from .writing import (
    has_marks,
    midi,
    midi_prompt,
    pieces_of,
    require_pitches,
    text_of,
    write_music,
    write_pieces,
)

__all__ = [
    "has_marks",
    "midi",
    "midi_prompt",
    "mido_package",
    "pieces_of",
    "read_midi",
    "require_pitches",
    "text_of",
    "write_music",
    "write_pieces",
]
