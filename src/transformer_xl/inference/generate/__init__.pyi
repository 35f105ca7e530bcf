from .batch import (
    Generation,
    GenerationBatch,
    generate,
    generate_batch,
    seed_of,
)
from .beams import Hypothesis, Searching, beam_search
from .history import History
from .prompts import (
    PROMPT_SEGMENT,
    require_texts,
    selected,
    text_start,
)
from .sampler import Sampler, breaker_tokens, for_tokens
from .sampling import Sampling
from .session import (
    Mark,
    Session,
    from_pretrained,
)
from .state import (
    State,
    load_state,
    save_state,
    write_state,
)
from .text_writer import TextWriter, prompt_for, text_pieces

__all__ = [
    "PROMPT_SEGMENT",
    "Generation",
    "GenerationBatch",
    "History",
    "Hypothesis",
    "Mark",
    "Sampler",
    "Sampling",
    "Searching",
    "Session",
    "State",
    "TextWriter",
    "beam_search",
    "breaker_tokens",
    "for_tokens",
    "from_pretrained",
    "generate",
    "generate_batch",
    "load_state",
    "prompt_for",
    "require_texts",
    "save_state",
    "seed_of",
    "selected",
    "text_pieces",
    "text_start",
    "write_state",
]
