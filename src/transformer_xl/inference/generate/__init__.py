"""Text generation, at a constant cost per token."""

from transformer_xl.inference.generate.batch import (
    Generation,
    GenerationBatch,
    generate,
    generate_batch,
    random_numbers,
    seed_of,
)
from transformer_xl.inference.generate.beams import Hypothesis, Searching, beam_search
from transformer_xl.inference.generate.history import History
from transformer_xl.inference.generate.sampler import Sampler, breaker_tokens, for_tokens
from transformer_xl.inference.generate.sampling import Sampling
from transformer_xl.inference.generate.session import (
    Mark,
    Session,
    from_pretrained,
    open_folder,
)
from transformer_xl.inference.generate.state import (
    State,
    largest_state,
    load_state,
    save_state,
    write_state,
)
from transformer_xl.inference.generate.text_writer import TextWriter, text_pieces

__all__ = [
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
    "largest_state",
    "load_state",
    "open_folder",
    "random_numbers",
    "save_state",
    "seed_of",
    "text_pieces",
    "write_state",
]
