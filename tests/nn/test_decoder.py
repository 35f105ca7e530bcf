"""A token read by a decoder is a token read behind a memory."""

import random
from dataclasses import replace

import pytest
import torch
from tests.laws.conftest import CONFIG

from transformer_xl.config import ModelConfig
from transformer_xl.model import Decoder, TransformerXL, build_model
from transformer_xl.model.decoder import CachedDecoder, EagerDecoder, choose_step
from transformer_xl.model.segment import Lengths
from transformer_xl.model.steps import CapturedStep, CompiledStep
from transformer_xl.ops import native, reference, triton

B = 3
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "raw queries": {"norm_first": True, "quirks": ("raw_queries",)},
    "a pair of biases for each layer": {"tie_biases": False},
    "starting with zeros": {"start_memory": "zeros"},
    "clamped distances": {"clamp_len": 3},
    "limited attention": {"attn_len": 4},
    "attention limited to the memory": {"attn_len": 6},
    "no memory": {"mem_len": 0},
    "learned distances": {"attn_type": 1, "n_positions": 9},
    "embedding residuals": {"embedding_residual": True},
    "key offset": {"key_offset": True, "mem_len": 5},
    "scalable softmax, limited attention": {"scalable_softmax": 3, "attn_len": 5},
    "key offset, no memory": {"key_offset": True, "mem_len": 0},
    "key offset, its own key alone": {"key_offset": True, "attn_len": 1},
    "key offset, documents, limited attention": {"key_offset": True, "reset_at": 5, "attn_len": 4},
    "attention lengths by layer": {"layer_attn_lens": (2, 9), "scalable_softmax": 3},
    "attention lengths by layer, key offset": {"layer_attn_lens": (4, 3), "key_offset": True},
    "input recurrence": {"input_recurrence": True, "mem_len": 5},
    "input recurrence, no memory": {"input_recurrence": True, "mem_len": 0},
    "input recurrence, limited attention": {"input_recurrence": True, "attn_len": 1},
    "clusters": {"cutoffs": (5, 11), "div_val": 2},
}


KINDS = ["eager", "captured", "compiled"]
PROMPTS = [0, 2, 11]
# Each variant captured and in turn by another decoder, after each prompt, in turn forgotten; the
# compiled step has tests of its own.
PAIRS = [
    (variant, kind, PROMPTS[(row + column) % 3], [None, [1]][(row + column) % 2])
    for row, variant in enumerate(VARIANTS)
    for column, kind in enumerate(("captured", KINDS[row % 2 * 2]))
]
# Those whose model is called for each token.
CALLED = {
    "sinusoids of positions": {"attn_type": 2},
    "learned positions": {"attn_type": 3, "n_positions": 9},
}


@pytest.fixture(params=VARIANTS)
def model(request, device):
    return TransformerXL(replace(CONFIG, **VARIANTS[request.param])).double().eval().to(device)


@pytest.fixture(params=KINDS)
def kind(request, device, monkeypatch):
    """How the step of a decoder runs."""
    if request.param == "compiled":
        if device.type == "cuda":
            pytest.skip("the compiled step is for a CPU")
        require_native()
    elif request.param == "captured":
        # What is captured is called, by a CPU and in float64, which the kernel does not compute.
        monkeypatch.setattr(triton, "attend_step", attend_step)
    return request.param


def attend_step(
    q, k, v, keys, values, r, content_bias, position_bias, *, distance_bias, newest, n_seen
):
    """Do what the kernel of a captured step does, by attention to the keys in order."""
    capacity = keys.shape[2]
    for ring, new in ((keys, k), (values, v)):
        ring.index_copy_(2, newest, new.permute(2, 0, 1, 3))
    order = (newest + 1 + torch.arange(capacity, device=keys.device)) % capacity
    k, v = (ring.index_select(2, order).permute(1, 2, 0, 3) for ring in (keys, values))
    return reference.rel_attention(
        *(q, k, v, r, content_bias, position_bias),
        distance_bias=distance_bias,
        first_key=capacity - n_seen,
    )


def require_native():
    if native.library() is None:
        pytest.skip(str(native.reason_against(torch.device("cpu"), torch.float32)))


@pytest.fixture
def paper(device):
    return TransformerXL(CONFIG).double().eval().to(device)


def drawn(model, n):
    return torch.randint(model.config.vocab_size, (B, n), device=model.device)


@torch.no_grad()
def after_prompt(model, length, forgetful=None):
    mems = model.keep(model.start_memory(B))
    if length:
        _, mems = model.read(drawn(model, length), mems)
    return mems if forgetful is None else mems.reset(forgetful)


def windowed(model, **lengths):
    return Lengths.of(model.config, **lengths).windowed(model.config)


@torch.no_grad()
def one_by_one(model, mems, tokens, **lengths):
    found, lengths = [], windowed(model, **lengths).arguments
    for token in tokens.T:
        hidden, mems = model.read(token[:, None].contiguous(), mems, **lengths)
        found.append(hidden[:, 0])
    return torch.stack(found), mems


def decoder_of(model, mems, kind=None, **lengths):
    """Create a decoder whose step runs in a certain way. None: the fastest of this machine."""
    lengths = windowed(model, **lengths)
    if kind is None:
        return Decoder.of(model, lengths, mems)
    if kind == "compiled" and (reason := CompiledStep.reason_against(model, model.dtype)):
        pytest.skip(reason)
    if kind == "eager":
        return EagerDecoder(model, lengths, model.keep(mems))
    step = CompiledStep if kind == "compiled" else CapturedStep
    return CachedDecoder(model, lengths, mems, step)


def read(decoder, tokens):
    return torch.stack([decoder(token) for token in tokens.T])


def without_forgotten(x, forgotten):
    """With a key offset, a ring has lost a part of the last position before a document."""
    if forgotten is None:
        return x
    is_forgotten = torch.arange(x.shape[-2], device=x.device) < forgotten[:, None]
    return x.masked_fill(is_forgotten[..., None], 0)


def assert_same_memory(one, other):
    one, other = one.state_dict(), other.state_dict()
    for name in ("keys", "values"):
        seen, also_seen = (without_forgotten(x[name], x["forgotten"]) for x in (one, other))
        torch.testing.assert_close(seen, also_seen, rtol=0, atol=1e-12)
    forgotten = [
        None if x is None or not x.any() else x for x in (one["forgotten"], other["forgotten"])
    ]
    torch.testing.assert_close(*forgotten)


@pytest.mark.parametrize(
    ("model", "kind", "prompt", "forgetful"), PAIRS, indirect=["model", "kind"]
)
def test_a_token_gets_the_hidden_states_that_it_gets_behind_a_memory(
    model, prompt, forgetful, kind
):
    mems = after_prompt(model, prompt, forgetful)
    # Three times around the ring and a little further.
    tokens = drawn(model, 3 * (model.config.mem_len + 1) + 2)
    expected, after = one_by_one(model, mems, tokens)
    decoder = decoder_of(model, mems, kind)
    torch.testing.assert_close(read(decoder, tokens), expected, rtol=0, atol=1e-12)
    assert_same_memory(decoder.memory(), after)


def test_lengths_may_be_others_than_the_configured(paper, kind):
    mems = after_prompt(paper, 11).last(4)
    tokens = drawn(paper, 25)
    for lengths in ({"mem_len": 4}, {"mem_len": 9, "attn_len": 5}, {"clamp_len": 2}):
        expected, after = one_by_one(paper, mems, tokens, **lengths)
        decoder = decoder_of(paper, mems, kind, **lengths)
        torch.testing.assert_close(
            read(decoder, tokens), expected, rtol=0, atol=1e-12, msg=str(lengths)
        )
        assert_same_memory(decoder.memory(), after)


def test_of_a_longer_memory_the_newest_positions_are_kept(paper, kind):
    mems, tokens = after_prompt(paper, 11), drawn(paper, 6)
    for mem_len in (0, 4):
        expected, after = one_by_one(paper, mems.last(mem_len), tokens, mem_len=mem_len)
        decoder, other = (decoder_of(paper, x, kind, mem_len=mem_len) for x in (mems, mems))
        torch.testing.assert_close(read(decoder, tokens), expected, rtol=0, atol=1e-12)
        for row in range(B):
            other.put(row, mems.select([row]))
        torch.testing.assert_close(read(other, tokens), expected, rtol=0, atol=1e-12)
        assert_same_memory(other.memory(), after)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_of_the_kernels_is_that_of_the_model(variant):
    # In float32, as the kernels do not compute float64.
    model = TransformerXL(replace(CONFIG, **VARIANTS[variant])).eval().cuda()
    for streams in (3, 9):
        tokens = torch.randint(23, (streams, 20), device="cuda")
        with torch.no_grad():
            _, mems = model.read(tokens, model.keep(model.start_memory(streams)))
        mems = mems.reset([1])
        decoder = decoder_of(model, mems)
        assert decoder.kind == "captured"
        expected, _ = one_by_one(model, mems, tokens)
        torch.testing.assert_close(
            read(decoder, tokens), expected, rtol=1e-4, atol=1e-4, msg=f"{streams} streams"
        )


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_nothing(paper):
    if paper.device.type == "cpu":
        pytest.skip("a processor waits for itself")
    paper = paper.float()
    decoder = decoder_of(paper, after_prompt(paper, 11), "captured")
    token = drawn(paper, 1)[:, 0]
    decoder(token)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder(token)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("variant", ["post-norm", "clusters"])
@torch.no_grad()
def test_a_token_outside_the_vocabulary_is_refused_and_leaves_no_trace(variant, kind):
    model = TransformerXL(replace(CONFIG, **VARIANTS[variant])).eval()
    decoder, other = (decoder_of(model, model.start_memory(B), kind) for _ in range(2))
    for token in (-1, 23, 77):
        with pytest.raises(ValueError, match="is outside the vocabulary"):
            decoder(torch.tensor([0, token, 1]))
    tokens = torch.tensor([3, 4, 5])
    assert torch.equal(decoder(tokens), other(tokens))
    assert_same_memory(decoder.memory(), other.memory())


@pytest.mark.parametrize("settings", [*CALLED.values(), {"kind": "lstm"}], ids=str)
@pytest.mark.parametrize("prompt", [0, 11])
@torch.no_grad()
def test_a_model_without_keys_is_called(settings, prompt):
    lstm = ModelConfig(kind="lstm", vocab_size=23, n_layer=2, d_model=12, dropout=0.0)
    config = lstm if "kind" in settings else replace(CONFIG, **settings)
    model = build_model(config).double().eval()
    mems = model.start_memory(B)
    if prompt:
        _, mems = model.read(drawn(model, prompt), mems)
    tokens = drawn(model, 15)
    expected, after = one_by_one(model, mems, tokens)
    decoder = decoder_of(model, mems)
    assert isinstance(decoder, EagerDecoder)
    torch.testing.assert_close(read(decoder, tokens), expected, rtol=0, atol=1e-12)
    assert torch.equal(decoder.memory().state_dict()["states"], after.state_dict()["states"])


def test_the_decoder_is_chosen_by_the_machine(paper, monkeypatch):
    lengths, mems = Lengths.of(paper.config), paper.start_memory(B)
    if paper.device.type == "cuda":
        assert Decoder.of(paper, lengths, mems).kind == "eager"  # The kernel computes no float64.
        paper, mems = paper.float(), mems.to(dtype=torch.float32)
        assert Decoder.of(paper, lengths, mems).kind == "captured"
        return
    has_library = native.library() is not None
    assert Decoder.of(paper, lengths, mems).kind == ("compiled" if has_library else "eager")
    monkeypatch.setattr(native, "library", lambda: None)
    assert Decoder.of(paper, lengths, mems).kind == "eager"
    assert "no compiled step" in choose_step(paper)[1]


@torch.no_grad()
def test_reading_moves_nothing_until_the_state_is_taken(paper, kind):
    paper.config = replace(CONFIG, reset_at=5)
    decoder, other = (decoder_of(paper, after_prompt(paper, 0), kind) for _ in range(2))
    tokens = drawn(paper, 30)
    tokens[1, 9] = tokens[2, 20] = 5
    for token in tokens.T:
        hidden, state = decoder.read(token)
        again, _ = decoder.read(token)
        assert torch.equal(hidden, again)
        decoder.state = state
        assert torch.equal(other(token), hidden)
    assert_same_memory(decoder.memory(), other.memory())


@pytest.mark.parametrize("prompt", [0, 11])
@torch.no_grad()
def test_streams_are_reordered_by_rows(paper, kind, prompt):
    model, mems = paper, after_prompt(paper, prompt, [1])
    decoder = decoder_of(model, mems, kind)
    tokens = drawn(model, 9)
    read(decoder, tokens[:, :4])
    before = decoder.memory()
    _, behind = one_by_one(model, mems, tokens[:, :4])
    for rows in ([2, 0, 1], [1], [0, 0, 2, 1, 1], torch.tensor([2, 2])):
        chosen = decoder.select(rows)
        later = tokens[torch.as_tensor(rows), 4:]
        hidden, expected = one_by_one(model, behind.select(rows), later)
        torch.testing.assert_close(read(chosen, later), hidden, rtol=0, atol=1e-12, msg=f"{rows}")
        for row in range(len(rows)):
            one, other = chosen.memory([row]), expected.select([row])
            assert_same_memory(one.seen(), other.seen())
        # Neither moves the other.
        assert_same_memory(decoder.memory(), before)


@pytest.mark.parametrize("mem_len", [0, 6, 100])
@torch.no_grad()
def test_streams_come_and_go_by_rows(device, kind, mem_len):
    model = TransformerXL(replace(CONFIG, mem_len=mem_len)).double().eval().to(device)
    generator = torch.Generator().manual_seed(mem_len)
    alone = [model.keep(model.start_memory(1)) for _ in range(B)]
    decoder = decoder_of(model, model.start_memory(B), kind)
    for step in range(45):
        if step % 11 == 0:
            # Another stream, with a past of its own.
            row, n = (int(torch.randint(most, (), generator=generator)) for most in (B, 130))
            alone[row] = model.keep(model.start_memory(1))
            if n % 5:
                text = torch.randint(23, (1, n), generator=generator).to(device)
                _, alone[row] = model.read(text, alone[row])
            decoder.put(row, alone[row])
        row = step % B
        if step % 29 == 7:
            decoder.reset([row])
            alone[row] = alone[row].reset([0])
        token = torch.randint(23, (B,), generator=generator).to(device)
        hidden = decoder(token)
        for n in range(B):
            expected, alone[n] = model.read(token[n : n + 1, None], alone[n])
            torch.testing.assert_close(hidden[n : n + 1], expected[:, 0], rtol=0, atol=1e-11)
        assert_same_memory(decoder.memory([row]).seen(), alone[row].seen())


@torch.no_grad()
def test_the_ring_is_no_larger_than_the_texts_need():
    require_native()
    model = TransformerXL(replace(CONFIG, mem_len=1000)).eval()
    decoder = decoder_of(model, model.start_memory(2), "compiled")
    tokens = torch.zeros(2, 1001, dtype=torch.int64)
    assert decoder.capacity == 64
    read(decoder, tokens[:, :600])
    assert 600 < decoder.capacity <= 1200
    read(decoder, tokens)
    assert decoder.capacity == 1000 + 512 + 2
    for _ in range(152):
        # Short texts: when it is full, it becomes smaller.
        decoder.reset([0, 1])
        read(decoder, tokens[:, :10])
    assert decoder.capacity < 100


@pytest.mark.parametrize("variant", ["paper", "key offset", "input recurrence"])
@torch.no_grad()
def test_forks_and_rewound_decoders_go_on_as_those_that_read_nothing_else(variant, kind):
    """Whatever is done in which order; to the last bit, but where the model is called."""
    settings = VARIANTS.get(variant, {}) | {"mem_len": 6, "reset_at": 5}
    model = TransformerXL(replace(CONFIG, **settings)).double().eval()
    window = windowed(model)
    lengths = {"mem_len": 6 + 8, "attn_len": window.attn_len}
    numbers = random.Random(variant)
    # With each the number of tokens down to which it can be rewound.
    texts = [(decoder_of(model, model.start_memory(1), kind, **lengths), [], [0])]
    for _ in range(150):
        decoder, text, least = numbers.choice(texts)
        action = numbers.choice(("read", "read", "fork", "rewind"))
        if action == "read":
            for _ in range(numbers.randrange(1, 12)):
                token = numbers.randrange(23)
                text.append((token, decoder(torch.tensor([token]))))
                is_cut = len(text) > 6 + 8
                least[0] = max(least[0], is_cut * (len(text) - 8), (token == 5) * len(text))
        elif action == "fork":
            other = decoder.fork()
            if kind == "compiled":
                assert other.tensors is decoder.tensors
            texts = [*texts[-3:], (other, [*text], [*least])]
        elif n := numbers.randrange(len(text) - least[0] + 1):
            decoder.rewind(n)
            del text[-n:]
    for decoder, text, _ in texts:
        alone = decoder_of(model, model.start_memory(1), kind, **lengths)
        for token, hidden in text:
            expected = alone(torch.tensor([token]))
            assert torch.allclose(hidden, expected, rtol=0, atol=1e-12)
            if kind == "compiled":
                assert torch.equal(hidden, expected)
        assert_same_memory(decoder.memory().last(6), alone.memory().last(6))


@torch.no_grad()
def test_a_document_that_begins_in_a_fork_leaves_the_other_as_it_is(kind):
    model = TransformerXL(replace(CONFIG, key_offset=True, reset_at=5, mem_len=6)).double().eval()
    one, alone = (decoder_of(model, model.start_memory(1), kind) for _ in range(2))
    for token in (1, 2, 3):
        one(torch.tensor([token]))
        alone(torch.tensor([token]))
    other = one.fork()
    one(torch.tensor([5]))
    for token in (7, 8):
        assert torch.equal(other(torch.tensor([token])), alone(torch.tensor([token])))
