"""What turns the tokens of a text into words."""

import pytest
import torch

from transformer_xl.apps.serve.texts import Text, make_writer
from transformer_xl.data import train_vocab
from transformer_xl.data.vocab import StreamDecoder
from transformer_xl.inference.generate import Sampler, Sampling, TextWriter


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


def test_a_history_is_made_only_where_a_setting_needs_it():
    vocab = train_vocab("bytes", [])
    for settings, is_made in (({}, False), ({"on_loop": "end"}, True), ({"min_p": 0.1}, False)):
        sampler = Sampler(Sampling(**settings), vocab=vocab)
        writer = make_writer(vocab, (), (), [97])
        text = Text((97,), None, (), writer, torch.Generator(), sampler, 9, print)
        text.add(98)
        assert text.reason_to_end == ""
        assert ("history" in vars(text)) is is_made
