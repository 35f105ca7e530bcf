from .batch import Generation, GenerationBatch, generate, generate_batch
from .history import History, joined
from .prompts import PROMPT_SEGMENT, prompt_lengths, text_start
from .random_numbers import seed_of
from .sampler import Sampler
from .sampling import Sampling
from .session import REWINDABLE, Session, from_pretrained
from .state import State, rewindable_after
from .text_writer import TextWriter, prompt_for

__all__ = [
    "PROMPT_SEGMENT",
    "REWINDABLE",
    "Generation",
    "GenerationBatch",
    "History",
    "Sampler",
    "Sampling",
    "Session",
    "State",
    "TextWriter",
    "from_pretrained",
    "generate",
    "generate_batch",
    "joined",
    "prompt_for",
    "prompt_lengths",
    "rewindable_after",
    "seed_of",
    "text_start",
]
