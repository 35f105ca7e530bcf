"""One token at a time in a ring is one token at a time behind a memory."""

from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.nn import TransformerXL
from transformer_xl.nn.decoding import Decoder

B = 3
CONFIG = ModelConfig(
    vocab_size=23,
    n_layer=2,
    n_head=2,
    d_model=12,
    d_inner=20,
    mem_len=6,
    dropout=0.0,
    init_std=0.4,
    proj_init_std=0.4,
)
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
    "clusters": {"cutoffs": (5, 11), "div_val": 2},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=VARIANTS)
def model(request, device):
    return TransformerXL(replace(CONFIG, **VARIANTS[request.param])).double().eval().to(device)


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


@torch.no_grad()
def one_by_one(model, mems, tokens, **lengths):
    found = []
    for token in tokens.T:
        hidden, mems = model.read(token[:, None].contiguous(), mems, **lengths)
        found.append(hidden[:, 0])
    return torch.stack(found), mems


def read(decoder, tokens):
    return torch.stack([decoder.read(token) for token in tokens.T])


def assert_same_memory(one, other):
    one, other = one.state_dict(), other.state_dict()
    for name in ("keys", "values"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-12)
    forgotten = [
        None if x is None or not x.any() else x for x in (one["forgotten"], other["forgotten"])
    ]
    torch.testing.assert_close(*forgotten)


@pytest.mark.parametrize("prompt", [0, 2, 11])
@pytest.mark.parametrize("forgetful", [None, [1]])
def test_a_token_gets_the_hidden_states_that_it_gets_behind_a_memory(model, prompt, forgetful):
    mems = after_prompt(model, prompt, forgetful)
    # Three times around the ring and a little further.
    tokens = drawn(model, 3 * (model.config.mem_len + 1) + 2)
    expected, after = one_by_one(model, mems, tokens)
    decoder = Decoder(model, mems)
    torch.testing.assert_close(read(decoder, tokens), expected, rtol=0, atol=1e-12)
    assert_same_memory(decoder.memory(), after)


@pytest.mark.parametrize(
    "lengths", [{"mem_len": 4}, {"mem_len": 9, "attn_len": 5}, {"clamp_len": 2}], ids=str
)
def test_lengths_may_be_others_than_the_configured(paper, lengths):
    mems = after_prompt(paper, 11).last(4)
    tokens = drawn(paper, 25)
    expected, after = one_by_one(paper, mems, tokens, **lengths)
    decoder = Decoder(paper, mems, **lengths)
    torch.testing.assert_close(read(decoder, tokens), expected, rtol=0, atol=1e-12)
    assert_same_memory(decoder.memory(), after)


@pytest.mark.parametrize("read_before", [0, 3, 16])
def test_the_model_and_a_decoder_take_turns(paper, read_before):
    tokens = drawn(paper, 30)
    mems = after_prompt(paper, 2)
    expected, _ = one_by_one(paper, mems, tokens)
    decoder = Decoder(paper, mems)
    found = [decoder.read(token) for token in tokens.T[:read_before]]
    middle, mems = one_by_one(paper, decoder.memory(), tokens[:, read_before : read_before + 5])
    decoder = Decoder(paper, mems)
    found = [*found, *middle, *(decoder.read(token) for token in tokens.T[read_before + 5 :])]
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-12)


def test_a_stream_that_is_reset_begins_anew_and_no_other_does(paper):
    mems = after_prompt(paper, 11)
    tokens = drawn(paper, 24)
    first, behind = one_by_one(paper, mems, tokens[:, :5])
    second, behind = one_by_one(paper, behind.reset([0, 2]), tokens[:, 5:])
    decoder = Decoder(paper, mems)
    torch.testing.assert_close(read(decoder, tokens[:, :5]), first, rtol=0, atol=1e-12)
    decoder.reset([0, 2])
    torch.testing.assert_close(read(decoder, tokens[:, 5:]), second, rtol=0, atol=1e-12)
    assert_same_memory(decoder.memory(), behind)


def test_a_reset_stream_is_one_that_never_read(paper):
    decoder = Decoder(paper, after_prompt(paper, 11))
    decoder.reset(torch.tensor([False, True, False], device=paper.device))
    tokens = drawn(paper, 9)
    fresh, _ = one_by_one(paper, paper.keep(paper.start_memory(B)), tokens)
    torch.testing.assert_close(read(decoder, tokens)[:, 1], fresh[:, 1], rtol=0, atol=1e-12)


def test_what_a_decoder_was_made_from_stays_as_it_was(paper):
    mems = after_prompt(paper, 11)
    before = {name: x.clone() for name, x in mems.state_dict().items() if x is not None}
    read(Decoder(paper, mems), drawn(paper, 10))
    for name, x in before.items():
        assert torch.equal(mems.state_dict()[name], x)


def test_writing_reads_what_it_wrote(model):
    def pick(hidden, number):
        # A place on the cumulated distribution.
        sums = model.softmax.log_probs(hidden).exp().cumsum(-1)
        point = number[:, None] * sums[:, -1:]
        return torch.searchsorted(sums, point)[:, 0]

    mems = after_prompt(model, 4)
    numbers = torch.rand(9, B, dtype=torch.float64)
    token = drawn(model, 1)[:, 0]
    last, behind, expected = token, mems, []
    for number in numbers.to(model.device):
        hidden, behind = one_by_one(model, behind, last[:, None])
        expected.append(last := pick(hidden[0], number))
    decoder = Decoder(model, mems)
    first = decoder.write(token, numbers[:4], pick)
    second = decoder.write(first[-1], numbers[4:], pick)
    assert torch.equal(torch.cat([first, second]), torch.stack(expected))
    assert_same_memory(decoder.memory(), behind)


def test_half_precision_stays_what_it_is(device):
    torch.manual_seed(0)
    model = TransformerXL(CONFIG).bfloat16().eval().to(device)
    mems = after_prompt(model, 4)
    tokens = drawn(model, 9)
    expected, _ = one_by_one(model, mems, tokens)
    found = read(Decoder(model, mems), tokens)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_nothing(paper):
    if paper.device.type == "cpu":
        pytest.skip("a processor waits for itself")
    decoder = Decoder(paper, after_prompt(paper, 11))
    token = drawn(paper, 1)[:, 0]
    decoder.read(token)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.read(token)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attn_type", [2, 3])
def test_absolute_positions_are_refused(attn_type):
    rows = {"n_positions": 9} if attn_type == 3 else {}
    model = TransformerXL(replace(CONFIG, attn_type=attn_type, **rows)).eval()
    mems = TransformerXL(CONFIG).eval()
    with pytest.raises(ValueError, match=f"attn_type={attn_type} has absolute positions"):
        Decoder(model, mems.keep(mems.start_memory(B)))


def test_tokens_that_are_not_one_for_each_stream_are_refused(tiny_config):
    model = TransformerXL(tiny_config).eval()
    with torch.no_grad():
        decoder = Decoder(model, model.keep(model.start_memory(2)))
    with pytest.raises(ValueError, match=r"shape \(1,\) must be one for each of the 2 streams"):
        decoder.read(torch.tensor([1]))
    decoder.reset([])
    assert decoder.read(torch.tensor([1, 2])).shape == (2, 16)


@pytest.mark.parametrize("name", ["mem_len", "attn_len", "clamp_len"])
def test_a_length_that_the_model_refuses_is_refused(name):
    model = TransformerXL(CONFIG).eval()
    least = 1 if name == "attn_len" else 0
    with pytest.raises(ValueError, match=f"{name}={least - 1} must be at least {least}"):
        Decoder(model, model.keep(model.start_memory(B)), **{name: least - 1})


@pytest.mark.parametrize("variant", ["post-norm", "clusters"])
@pytest.mark.parametrize("token", [-1, 23, 77])
@torch.no_grad()
def test_a_token_outside_the_vocabulary_is_refused_and_leaves_no_trace(variant, token):
    model = TransformerXL(replace(CONFIG, **VARIANTS[variant])).eval()
    decoder, other = (Decoder(model, model.keep(model.start_memory(B))) for _ in range(2))
    with pytest.raises(IndexError):
        decoder.read(torch.tensor([0, token, 1]))
    tokens = torch.tensor([3, 4, 5])
    assert torch.equal(decoder.read(tokens), other.read(tokens))
    assert_same_memory(decoder.memory(), other.memory())
