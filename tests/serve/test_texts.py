"""What turns the tokens of a text into words."""

import pytest

from transformer_xl.apps.serve.texts import make_writer
from transformer_xl.data import train_vocab
from transformer_xl.data.vocab import StreamDecoder
from transformer_xl.inference.generate import TextWriter


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_long_prompt_does_not_hold_up_what_makes_its_writer(kind, monkeypatch):
    vocab = train_vocab(kind, ["the sun € and\nthe sea"])
    pushed, ids = [], vocab.encode("the sun € and\n" * 10_000)
    original = StreamDecoder.push
    monkeypatch.setattr(
        StreamDecoder, "push", lambda self, token: pushed.append(token) or original(self, token)
    )
    dash = vocab.encode("the sun € and")[7:]
    for prompt in (ids, [*ids, *vocab.encode("the sun €")[:9]]):
        writers = make_writer(vocab, (), (), prompt), TextWriter(vocab, (), prompt)
        texts = [
            "".join(writer.push(token) for token in dash) + writer.flush() for writer in writers
        ]
        assert texts[0] == texts[1]
    make_writer(vocab, (), (), ids)
    assert len(pushed) < 4 * len(ids)
    pushed.clear()
    make_writer(vocab, (), (), ids)
    assert len(pushed) <= 1024
