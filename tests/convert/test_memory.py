"""What a pickle may take of memory."""

import pickle
from io import BytesIO

import pytest

from transformer_xl.interop.convert.pickles import UnreadableFile, load_pickle

NAMED = b"ca.vocabulary\nV\n\x94"
GREEDY = {
    "sets": b"\x8f" * (1 << 20),
    "lists": b"]" * (1 << 20),
    "marks": b"(" * (1 << 20),
    "remembered": b"N" + b"\x94" * (2 << 20),
    "objects": NAMED + b"h\x00)\x81" * (1 << 18),
    "called": NAMED + b"h\x00)R" * (1 << 18),
    "marked objects": b"(ia.vocabulary\nV\n" * (1 << 17),
}


# Each takes what is allowed before it is refused; these take longest.
LONG = {"lists", "marks", "objects"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in LONG)) for x in GREEDY]
)
def test_what_takes_far_more_memory_than_the_file_is_refused(name: str) -> None:
    with pytest.raises(UnreadableFile, match="MB of memory, which no checkpoint needs"):
        load_pickle(BytesIO(b"\x80\x04" + GREEDY[name] + b"."))


@pytest.mark.parametrize("protocol", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_vocabulary_larger_than_the_lower_limit_of_memory_is_read(protocol: int) -> None:
    words = [f"w{i}" for i in range(150_000)]
    numbers = {word: i for i, word in enumerate(words)}
    vocab = {"counter": dict(numbers), "idx2sym": words, "sym2idx": numbers}
    assert load_pickle(BytesIO(pickle.dumps(vocab, protocol))) == vocab
