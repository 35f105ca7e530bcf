"""How a text is to be coded: what was set, and what follows for a model and a text."""

from dataclasses import dataclass

from transformer_xl.apps.compress.header import Coding, Learning
from transformer_xl.apps.compress.layout import Layout
from transformer_xl.apps.compress.predicting import fingerprint
from transformer_xl.apps.compress.requirements import too_much
from transformer_xl.config.checks import require
from transformer_xl.model import LanguageModel
from transformer_xl.model.lengths import Lengths

RAM = 4.0
"""Gigabytes that coding may take unless more are allowed."""
EXACT_FREQUENCIES = True
"""Archives are portable with these; format 1 was made without them."""

_EACH = 1 << 14
_MOST_NUMBERS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a text is coded.

    Raises:
        ValueError: A setting is out of range.
    """

    streams: int | None = None
    """Parts coded side by side: more are faster, and each begins without a past. None: one for
    16,384 symbols, and at most 256, or 32 where the model learns, or as many as RAM is for."""
    segment_len: int | None = None
    """Symbols of each part in a round, after which a model may learn. None: 64, or 32 where it
    learns, or fewer where the vocabulary is large."""
    mem_len: int | None = None
    """Remembered positions. None: as the model was trained."""
    learn: bool = False
    """Learn from every round after it was coded."""
    lr: float | None = None
    """Largest learning rate. None: 0.005 for a fresh model, 0.0005 for a trained one."""
    seed: int = 0
    """Of the weights of a fresh model."""
    ram: float = RAM
    """Gigabytes of RAM that may be taken, beside the model and the text; who restores the file
    needs as many."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("streams", 1, 1 << 12),
            ("segment_len", 1, 1 << 16),
            ("mem_len", 0, 1 << 16),
            ("lr", 1e-9, 1e3),
            ("seed", 0, (1 << 63) - 1),
            ("ram", 0.001, 1e6),
        ):
            value = getattr(self, name)
            require(
                value is None or least <= value <= most,
                f"{name}={value} must be from {least} to {most}",
            )
        require(self.learn or self.lr is None, f"lr={self.lr} needs learn: nothing learns without")


def plan(
    model: LanguageModel,
    vocab_hash: str,
    n_tokens: int,
    settings: Settings,
    learning: Learning | None,
) -> Coding:
    """Return how a text is to be cut and read, in as many parts as the settings have RAM for.

    Raises:
        ValueError: The settings take more of it than they allow.
    """
    V = model.config.vocab_size
    require(V > 1, f"a vocabulary of {V} symbols leaves nothing to code")
    most, segment_len = (32, 32) if learning else (256, 64)
    streams = settings.streams or min(most, max(1, n_tokens // _EACH))
    streams = min(streams, n_tokens)
    mem_len = Lengths.of(model.config, mem_len=settings.mem_len).mem_len
    model_hash = fingerprint(model, vocab_hash)

    def cut(streams: int) -> tuple[Coding, str | None]:
        fitting = max(1, _MOST_NUMBERS // (streams * V))
        layout = Layout(n_tokens, streams, settings.segment_len or min(segment_len, fitting))
        coding = Coding(
            model=model_hash,
            n_tokens=n_tokens,
            streams=streams,
            segment_len=layout.segment_len,
            # More than a part has is never remembered.
            mem_len=min(mem_len, layout.length),
            learning=learning,
            exact_frequencies=EXACT_FREQUENCIES,
        )
        return coding, too_much(model.config, coding, settings.ram)

    coding, problem = cut(streams)
    while problem and settings.streams is None and streams > 1:
        streams //= 2
        coding, problem = cut(streams)
    require(problem is None, f"{problem}; choose a smaller one of them, or allow more ram")
    return coding
