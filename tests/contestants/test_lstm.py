from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL, build_model
from transformer_xl.studies.models.lstm import LSTMModel

CONFIG = ModelConfig(kind="lstm", vocab_size=31, n_layer=3, d_model=12, mem_len=0, dropout=0.0)


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


def test_dropout_is_on_only_while_training() -> None:
    model = LSTMModel(replace(CONFIG, dropout=0.5))
    tokens = torch.randint(31, (2, 9))
    assert not torch.equal(model(tokens).hidden, model(tokens).hidden)
    model.eval()
    assert torch.equal(model(tokens).hidden, model(tokens).hidden)


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
