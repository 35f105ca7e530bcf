"""A session is its tokens: however it was cut, saved, forked or rewound."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file

from transformer_xl import Session, State
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.inference.generate.sampler import Sampler
from transformer_xl.model import TransformerXL, build_model
from transformer_xl.model.quantizing import compact
from transformer_xl.model.reading import Reader
from transformer_xl.model.segment import Lengths

pytestmark = pytest.mark.usefixtures("one_thread")

BYTES = train_vocab("bytes", [])
TEXT = "The memory is a value: it can be saved, forked, and gone back to. "
KINDS = {
    "relative": {},
    "learned": {"attn_type": 1, "n_positions": 9},
    "narrow": {"attn_len": 3},
    "key offset": {"key_offset": True, "scalable_softmax": 3, "input_recurrence": True},
    "zeros": {"start_memory": "zeros"},
    "absolute": {"attn_type": 2},
    "lstm": {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0},
}


def made(tiny_config, **options):
    torch.manual_seed(0)
    config = replace(tiny_config, vocab_size=256, init_std=0.3)
    return build_model(replace(config, **options)).eval()


@pytest.fixture
def folder(tiny_config, tmp_path):
    (tmp_path / "model").mkdir()
    made(tiny_config).save_pretrained(tmp_path / "model", BYTES)
    return tmp_path / "model"


@pytest.fixture
def session(folder):
    return Session.open(folder, seed=1)


def written(session, length, sampling=None, **settings):
    return "".join(session.generate(length, sampling, **settings))


@pytest.fixture
def short_segments(monkeypatch):
    """Sessions read segments of 64 tokens at most."""
    module = import_module("transformer_xl.inference.generate.prompts")
    monkeypatch.setattr(module, "PROMPT_SEGMENT", 64)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("kind", ["relative", "learned", "narrow", "key offset", "zeros", "lstm"])
def test_every_token_sees_the_same_however_the_text_came(tiny_config, kind):
    model = made(tiny_config, **KINDS[kind]).double()
    whole = Session(model, BYTES).write(TEXT * 3, scored=True)
    for size in (5, 31, 150):
        session, found, rest = Session(model, BYTES), [], TEXT * 3
        while rest:
            found += session.write(rest[:size], scored=True)
            rest = rest[size:]
        assert found[1:] == pytest.approx(whole[1:], abs=1e-10)
    # Of as many keys as a session remembers; an LSTM has none.
    attn_len = None if kind == "lstm" else Lengths.of(model.config).windowed(model.config).attn_len
    how = WithMemory(segment_len=50, attn_len=attn_len)
    nll = evaluate(model, list((TEXT * 3).encode()), how).nll
    assert -sum(whole[1:]) / len(whole[1:]) == pytest.approx(nll, abs=1e-10)


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("kind", ["relative", "learned", "narrow", "key offset", "zeros", "lstm"])
def test_what_is_generated_counts_as_what_is_read(tiny_config, kind):
    session = Session(made(tiny_config, **KINDS[kind]).double(), BYTES, seed=2)
    session.write(TEXT)
    reader = session.fork()
    reader.write([*session._drawn(40, Sampler(None, 256), None)])
    assert session.score(TEXT) == pytest.approx(reader.score(TEXT), abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_session_goes_on_with_the_same_bits(tiny_config, tmp_path, kind):
    model = made(tiny_config, **KINDS[kind])
    (tmp_path / "model").mkdir()
    model.save_pretrained(tmp_path / "model", BYTES)
    session = Session.open(tmp_path / "model", seed=5)
    sizes = set()
    for text in ("T", "he", TEXT, TEXT * 9):
        session.write(text)
        session.save(tmp_path / "state")
        sizes.add((tmp_path / "state").stat().st_size)
        again = Session.load(tmp_path / "model", tmp_path / "state")
        assert again.score(TEXT) == session.score(TEXT)
        assert written(again.fork(), 20) == written(session.fork(), 20)
        assert again.nbytes == session.nbytes
        assert sum(x.nbytes for x in load_file(tmp_path / "state").values()) == session.nbytes
    # Not a byte depends on how long the session has been.
    assert len(sizes) == 1
    assert sizes.pop() - session.nbytes < 1000


@pytest.mark.parametrize(
    ("options", "weights", "n_bytes"),
    [
        # 2 x 3 layers x 5 positions x 16 numbers of 4 bytes.
        ({}, "float32", 2 * 3 * 5 * 16 * 4),
        ({}, "bfloat16", 2 * 3 * 5 * 16 * 2),
        ({"attn_type": 2}, "float32", 3 * 5 * 16 * 4),
        ({"input_recurrence": True}, "float32", 2 * 3 * 5 * 16 * 4 + 5 * 16 * 4),
        (KINDS["lstm"], "float32", 3 * 2 * 16 * 4),
    ],
    ids=str,
)
def test_the_bytes_of_a_state_are_those_of_the_formula(tiny_config, options, weights, n_bytes):
    model = compact(made(tiny_config, **options), weights)
    # And the last 4,096 tokens, and random numbers.
    assert Session(model, BYTES, rewindable=0).nbytes == n_bytes + 4 * 4096 + 5056


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("where", ["reading", "at the end"])
def test_an_interrupt_leaves_the_session_as_it_was(folder, monkeypatch, where):
    session = Session.open(folder, seed=1)
    session.write(TEXT)
    written(session, 3)
    alone, calls = session.fork(), []
    owner, name = {"reading": (Reader, "_read"), "at the end": (State, "__post_init__")}[where]
    original = getattr(owner, name)

    def interrupted(self, *given):
        calls.append(1)
        if len(calls) == (2 if where == "reading" else 1):
            raise KeyboardInterrupt
        return original(self, *given)

    long = list((TEXT * 4).encode())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.write(long)
    assert session.score(TEXT) == alone.score(TEXT)
    assert session.write(long, scored=True) == alone.write(long, scored=True)
    settings = {"seed": 2, "sampling": Sampling(repetition_penalty=3.0)}
    assert written(session, 9, **settings) == written(alone, 9, **settings)


def test_a_state_is_a_point_to_come_back_to(session):
    session.write(TEXT)
    state = session.state
    first = written(session, 30)
    session.write(TEXT * 3)
    second = session.state
    session.state = state
    assert written(session, 30) == first
    session.state = second
    session.state = state
    assert written(session, 30) == first
    assert (session.state.n_tokens, state.n_tokens) == (len(TEXT) + 30, len(TEXT))
    # A fork goes its own way.
    fork = session.fork()
    fork.write("something else entirely")
    assert fork.score(TEXT) != session.score(TEXT)


def completing(tiny_config, folder):
    """Return a folder with a model that writes the second byte of └, which is the third, too."""
    model = made(tiny_config)
    with torch.no_grad():
        model.softmax.bias[0x94] = 100.0
    folder.mkdir()
    model.save_pretrained(folder, BYTES)
    return folder


def test_a_character_is_whole_wherever_a_call_ends_within_it(tiny_config, tmp_path):
    session = Session.open(completing(tiny_config, tmp_path / "└"), seed=1)
    begun = "└".encode()[:1]
    for read in (list(begun), [*TEXT.encode(), *begun]):
        session.write(read)
        # The call that completes the character returns it.
        assert written(session, 1) == ""
        fork = session.fork()
        session.save(tmp_path / "state")
        again = Session.load(tmp_path / "└", tmp_path / "state")
        assert written(session, 1) == written(fork, 1) == written(again, 1) == "└"
        drawn = generate(session.model, list(begun), length=2)
        next(drawn)
        assert drawn.decode(BYTES) == "└"


def test_it_stops_before_a_stop_string_and_has_read_it(session):
    session.write(TEXT)
    text = written(session.fork(), 60)
    stop = text[20:22]
    fork = session.fork()
    assert written(fork, 60, stop=[stop]) == text[: text.index(stop)]
    other = session.fork()
    assert "".join(written(other, text.index(stop) + 2)).endswith(stop)
    assert fork.score(TEXT) == other.score(TEXT)


@pytest.mark.parametrize(
    "go_on",
    [
        lambda session: session.write("abc"),
        lambda session: session.rewind(0),
        lambda session: session.generate(2),
    ],
    ids=["write", "rewind", "generate"],
)
def test_a_generation_ends_once_the_session_went_on(session, go_on):
    session.write(TEXT)
    for n_before in (0, 1):
        pieces = session.generate(20)
        begun = [next(pieces) for _ in range(n_before)]
        go_on(session)
        with pytest.raises(RuntimeError, match=r"went on in another way: call generate\(\) again"):
            next(pieces)
        assert len(begun) == n_before
    # A call that raises an error ends nothing.
    pieces = session.generate(20)
    with pytest.raises(ValueError, match="a stop string is empty"):
        session.generate(stop=[""])
    assert len("".join(pieces)) > 0


def test_what_cannot_be_is_named(session, folder, tiny_config, tmp_path):
    with pytest.raises(ValueError, match="nothing was read yet, so there is no state"):
        session.save(tmp_path / "state")
    letters = train_vocab("chars", ["".join(map(chr, range(48, 48 + len(BYTES))))])
    with pytest.raises(ValueError, match="no token of the vocabulary begins a text: write"):
        Session(session.model, letters).generate(3)
    # The token that an empty prompt stands for.
    drawn = generate(session.model, [10], length=5, seed=3).decode(BYTES)
    assert "".join(session.fork().generate(5, seed=3)) == drawn
    session.write("a")
    with pytest.raises(ValueError, match="length=-1 must be at least 0"):
        session.generate(length=-1)
    with pytest.raises(ValueError, match="mem_len=-1 must be at least 0"):
        Session.open(folder, mem_len=-1)
    with pytest.raises(ValueError, match="token 256 is outside the vocabulary"):
        session.write([256])
    other = Session(made(tiny_config), BYTES)
    other.write("a")
    with pytest.raises(ValueError, match="this model comes from no folder"):
        other.save(tmp_path / "state")


def test_a_state_is_compared_with_the_weights_that_were_loaded(
    session, folder, tmp_path, monkeypatch
):
    session.write(TEXT)
    session.save(tmp_path / "state")
    module = import_module("transformer_xl.inference.generate.session")
    load = module.from_pretrained

    def replaced(*given):
        found = load(*given)
        # A training run puts a better model there meanwhile.
        TransformerXL(session.model.config).save_pretrained(folder, BYTES)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, "from_pretrained", replaced)
        again = Session.load(folder, tmp_path / "state")
    assert written(again, 9) == written(session, 9)
    with pytest.raises(ValueError, match="was made by another model"):
        Session.load(folder, tmp_path / "state")
