"""`txl generate` and the preface of a model."""

from transformer_xl.config.recipes import generation_of
from transformer_xl.inference.generate import Sampling, Session, from_pretrained


def test_the_command_names_the_preface_and_goes_without_it(txl):
    words = ["generate", "english", "--prompt", "The river", "--length", 8]
    found = txl(*words, "--json")
    assert "preface 196 tokens (--no_preface: without)" in found.err
    model, vocab = from_pretrained("english")
    sampling = Sampling(**generation_of("english").sampling)
    session = Session(model, vocab)
    session.write("The river")
    assert found.json["text"] == "".join(session.generate(8, sampling, seed=1))
    without = txl(*words, "--json", "--no_preface")
    assert "preface" not in without.err
    assert without.json["text"] != found.json["text"]


def test_more_texts_than_fit_are_refused_at_once(txl, trained):
    for words in (["--samples", 10**8], ["--prompts", *"ab" * 5, "--samples", 10**8]):
        found = txl("generate", trained, "--length", 10, *words)
        assert found.code == 2
        assert "texts=1" in found.err
        assert "or generate fewer texts at once" in found.err
