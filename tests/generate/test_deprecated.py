"""Settings by name, as before ``Sampling`` and ``Searching``, work for one version."""

import re
from dataclasses import FrozenInstanceError

import pytest

from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.generate import (
    Sampling,
    Searching,
    Session,
    beam_search,
    generate,
    generate_batch,
)

GREEDY = Sampling(temperature=0, repetition_penalty=1.5)
NAMED = {"temperature": 0, "repetition_penalty": 1.5}


def warns(call, argument):
    """Expect a deprecation that names the new form."""
    old = argument.partition("(")[2].removesuffix(")")
    message = f"{call}(..., {old}) is deprecated: use {call}(..., {argument})"
    return pytest.warns(DeprecationWarning, match=f"^{re.escape(message)}$")


@pytest.fixture
def session(model):
    vocab = train_vocab("words", [" ".join(str(n) for n in range(30))])
    session = Session(model, vocab, seed=1)
    session.write([1, 2, 3])
    return session


def test_settings_of_sampling_by_name_draw_the_same_and_warn(model, session):
    new = "sampling=Sampling(temperature=0, repetition_penalty=1.5)"
    with warns("generate", new) as caught:
        found = list(generate(model, [1], length=9, **NAMED))
    assert found == list(generate(model, [1], GREEDY, length=9))
    with warns("generate_batch", new) as of_batch:
        batch = generate_batch(model, [[1], [2, 3]], length=9, **NAMED)
    assert list(batch) == list(generate_batch(model, [[1], [2, 3]], GREEDY, length=9))
    expected = "".join(session.fork().generate(9, GREEDY))
    with warns("Session.generate", new) as of_session:
        assert "".join(session.generate(9, **NAMED)) == expected
    assert {each.filename for each in [*caught, *of_batch, *of_session]} == {__file__}


def test_settings_of_a_search_by_name_find_the_same_and_warn(model):
    expected = beam_search(model, [[1]], Searching(beam_size=3, stop_tokens=[7]), length=5)
    with warns("beam_search", "searching=Searching(beam_size=3, stop_tokens=[7])") as caught:
        found = beam_search(model, [[1]], length=5, beam_size=3, stop_tokens=[7])
    assert caught[0].filename == __file__
    assert [x.tokens for x in found[0]] == [x.tokens for x in expected[0]]


def test_settings_by_name_beside_the_value_are_named(model):
    with pytest.raises(TypeError, match=r"generate\(\) got sampling and top_k=3: give all of them"):
        generate(model, [1], GREEDY, top_k=3)
    with pytest.raises(TypeError, match="got searching and n_best=1"):
        beam_search(model, [[1]], Searching(), length=5, n_best=1)


def test_a_wrong_name_is_told_from_a_setting(model, session):
    for call in (generate, session.generate):
        with pytest.raises(TypeError, match=r"'lenght' is no setting .* did you mean 'length'"):
            call(*([] if call == session.generate else [model, [1]]), lenght=3)
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        Sampling(temperatur=1)
    with pytest.raises(TypeError, match="did you mean 'beam_size'"):
        Searching(beamsize=1)


def test_settings_are_values():
    sampling = Sampling(temperature=2, dry_multiplier=1, dry_sequence_breakers=[3, 1])
    assert hash(sampling) == hash(
        Sampling(temperature=2.0, dry_multiplier=1.0, dry_sequence_breakers=(3, 1))
    )
    assert sampling != Sampling(temperature=2)
    for settings, name in ((sampling, "top_k"), (Searching(), "n_best")):
        with pytest.raises(FrozenInstanceError):
            setattr(settings, name, 1)
