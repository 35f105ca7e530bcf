"""An LSTM computes its equations, and reads a text as it does at once; tests/laws, too."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.laws.conftest import LSTM_SIZES, lstm

from transformer_xl.config import ModelConfig
from transformer_xl.inference.evaluate import WithMemory, evaluate
from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.model import LanguageModel, Memory, TransformerXL, build_model, load_model
from transformer_xl.studies.models.lstm import LSTMModel

CONFIG = ModelConfig(kind="lstm", vocab_size=31, n_layer=3, d_model=12, mem_len=0, dropout=0.0)
V = 23
EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def trained() -> LanguageModel:
    """As after a training, in float64."""
    return lstm()


@pytest.fixture
def model() -> LSTMModel:
    model = build_model(CONFIG).eval()
    assert isinstance(model, LSTMModel)
    return model


@torch.no_grad()
def test_it_computes_the_equations_of_an_lstm() -> None:
    config = replace(CONFIG, n_layer=1, vocab_size=7)
    model = LSTMModel(config).eval()
    lstm, D = model.lstm, config.d_model
    tokens = torch.tensor([[3, 1, 6]])
    h, c = torch.zeros(D), torch.zeros(D)
    for token in tokens[0]:
        x = model.embedding.weight[token] * D**0.5
        gates = lstm.weight_ih_l0 @ x + lstm.bias_ih_l0 + lstm.weight_hh_l0 @ h + lstm.bias_hh_l0
        i, f, g, o = gates.split(D)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    out = model(tokens)
    torch.testing.assert_close(out.hidden[0, -1], h)
    torch.testing.assert_close(out.mems.states[0][0, 0], torch.cat([h, c]))
    torch.testing.assert_close(
        out.log_probs[0, -1], (model.embedding.weight @ h + model.softmax.bias).log_softmax(0)
    )


def test_forget_gates_begin_open() -> None:
    model = LSTMModel(CONFIG)
    D = CONFIG.d_model
    for layer in range(CONFIG.n_layer):
        both = model.lstm.get_parameter(f"bias_ih_l{layer}")[D : 2 * D]
        both = both + model.lstm.get_parameter(f"bias_hh_l{layer}")[D : 2 * D]
        assert torch.equal(both, torch.ones(D))


def test_what_does_not_fit_is_refused(model: LSTMModel, tiny_config: ModelConfig) -> None:
    tokens = torch.randint(31, (2, 4))
    with pytest.raises(ValueError, match="ext_len=1"):
        LSTMModel(replace(CONFIG, ext_len=1))
    with pytest.raises(ValueError, match="the memory holds 3 streams and the segment 2"):
        model(tokens, model.start_memory(3))
    with pytest.raises(ValueError, match="must be \\(streams, length\\)"):
        model(tokens[:, :0])
    with pytest.raises(ValueError, match="vocab_size=0"):
        LSTMModel(replace(CONFIG, vocab_size=0))
    with pytest.raises(ValueError, match="is no LSTM"):
        LSTMModel(tiny_config)
    with pytest.raises(ValueError, match="is no Transformer-XL"):
        TransformerXL(CONFIG)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_needs_no_processor_of_its_own(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformer_xl.ops.products.has_bfloat16", lambda: False)
    model = build_model(CONFIG)
    tokens = torch.randint(31, (2, 12))
    exact = model(tokens, targets=tokens)
    with torch.autocast("cpu", dtype):
        out = model(tokens, targets=tokens)
        padded = model(tokens, targets=tokens, lengths=torch.tensor([12, 7]))
    # The layers are computed in float32, the softmax is not.
    torch.testing.assert_close(out.mems.state_dict(), exact.mems.state_dict())
    torch.testing.assert_close(out.nll, exact.nll, atol=0.05, rtol=0.05)
    torch.testing.assert_close(padded.nll[0], out.nll[0])
    out.loss.backward()


@torch.no_grad()
def test_padded_rows_are_read_as_they_are_alone(trained: LanguageModel) -> None:
    past, tokens = torch.randint(V, (4, 3)), torch.randint(V, (4, 6))
    lengths = torch.tensor([6, 0, 2, 6])
    mems = trained(past).mems
    found = trained(tokens, mems, lengths=lengths)
    for row, n in enumerate(lengths.tolist()):
        before, after = mems.select([row]), found.mems.select([row])
        if n:
            alone = trained(tokens[[row], :n], before)
            torch.testing.assert_close(found.log_probs[[row], :n], alone.log_probs, **EXACT)
            before = alone.mems
        torch.testing.assert_close(after.seen().states, before.seen().states, **EXACT)


@torch.no_grad()
def test_documents_are_read_as_they_are_alone(trained: LanguageModel) -> None:
    mems = trained(torch.randint(V, (2, 3))).mems
    tokens, starts = torch.randint(V, (2, 8)), torch.zeros(2, 8, dtype=torch.bool)
    starts[0, [0, 4]] = starts[1, 5] = True
    found = trained(tokens, mems, starts=starts).log_probs
    for row, cut, before in ((0, 4, None), (1, 5, mems.select([1]))):
        first, second = tokens[[row], :cut], tokens[[row], cut:]
        torch.testing.assert_close(found[[row], :cut], trained(first, before).log_probs, **EXACT)
        torch.testing.assert_close(found[[row], cut:], trained(second).log_probs, **EXACT)


@torch.no_grad()
def test_a_memory_is_kept_and_reset(trained: LanguageModel) -> None:
    past, tokens = torch.randint(V, (3, 5)), torch.randint(V, (3, 4))
    mems = trained(past).mems
    before = [x.clone() for x in mems.states]
    expected = trained(tokens, mems).log_probs
    for part in tokens.split(1, 1):
        trained(part, mems)
    # What is read does not change the memory that is given.
    torch.testing.assert_close(mems.states, tuple(before), rtol=0, atol=0)
    saved = Memory.from_state_dict(mems.state_dict())
    turned = trained(tokens[[2, 0, 1]], saved.select([2, 0, 1])).log_probs
    torch.testing.assert_close(turned, expected[[2, 0, 1]], **EXACT)
    reset = trained(tokens, mems.reset([1])).log_probs
    torch.testing.assert_close(reset[[0, 2]], expected[[0, 2]], **EXACT)
    torch.testing.assert_close(reset[1], trained(tokens).log_probs[1], **EXACT)


def test_no_gradient_enters_the_memory_and_all_weights_learn(trained: LanguageModel) -> None:
    tokens, starts = torch.randint(V, (2, 9)), torch.zeros(2, 8, dtype=torch.bool)
    starts[0, [3, 4]] = True
    trained.train()
    first = trained(tokens[:, :-1], targets=tokens[:, 1:])
    assert not any(state.requires_grad for state in first.mems.states)
    trained(tokens[:, :-1], first.mems, tokens[:, 1:], starts=starts).loss.backward()
    missing = [name for name, p in trained.named_parameters() if p.grad is None or not p.grad.any()]
    assert not missing


def test_gradients_cross_the_start_of_another_document(trained: LanguageModel) -> None:
    tokens = torch.randint(V, (2, 8))
    vectors = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[0, 4] = True
    whole = trained(None, None, tokens, inputs_embeds=vectors).loss
    (expected,) = torch.autograd.grad(whole, vectors)
    cut = trained(None, None, tokens, inputs_embeds=vectors, starts=starts).loss
    (found,) = torch.autograd.grad(cut, vectors)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-6)


def test_it_learns_and_evaluates_and_writes() -> None:
    config = ModelConfig(kind="lstm", **LSTM_SIZES | {"vocab_size": 5})
    model, text = LSTMModel(config), torch.arange(400) % 5
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(text[None, :40], targets=text[None, 1:41]).loss.backward()
        optimizer.step()
    model.eval()
    assert evaluate(model, text, WithMemory(segment_len=16)).nll < 0.1
    assert evaluate(model, text, WithMemory(segment_len=7, batch_size=3, mem_len=20)).nll < 0.1
    drawn = generate(model, [0, 1, 2], length=6, sampling=Sampling(temperature=0))
    assert list(drawn) == [3, 4, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "change", [{"cutoffs": (10, 20), "div_val": 2}, {"d_embed": 6}, {"tie_embeddings": False}]
)
def test_a_folder_holds_it(change: dict[str, object], tmp_path: Path) -> None:
    model, tokens = LSTMModel(replace(CONFIG, **change)).eval(), torch.randint(V, (2, 9))
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).log_probs, model(tokens).log_probs)


def test_read_text_is_not_taken_back(trained: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"ext_len=2: a model of kind=.* cannot take back"):
        trained.read(torch.randint(V, (2, 4)), ext_len=2)
