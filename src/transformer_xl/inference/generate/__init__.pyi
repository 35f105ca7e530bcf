from .batch import Generation, GenerationBatch, generate, generate_batch, seed_of
from .history import History
from .prompts import PROMPT_SEGMENT, prompt_lengths, text_start
from .sampler import Sampler
from .sampling import Sampling
from .session import Mark, Session, from_pretrained
from .state import State, load_state, save_state
from .text_writer import TextWriter, prompt_for

__all__ = [
    "PROMPT_SEGMENT",
    "Generation",
    "GenerationBatch",
    "History",
    "Mark",
    "Sampler",
    "Sampling",
    "Session",
    "State",
    "TextWriter",
    "from_pretrained",
    "generate",
    "generate_batch",
    "load_state",
    "prompt_for",
    "prompt_lengths",
    "save_state",
    "seed_of",
    "text_start",
]
