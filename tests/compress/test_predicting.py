"""One piece or many: the same numbers, but for rounding far below what coding sees."""

import json
from dataclasses import replace

import pytest
import torch

from transformer_xl.apps.compress.arithmetic import MARGIN, STEPS
from transformer_xl.apps.compress.predicting import Predictor, fingerprint, reproducible
from transformer_xl.config import ModelConfig
from transformer_xl.model import TransformerXL, load_model

KINDS = {
    "paper": {},
    "clamped": {"clamp_len": 4, "attn_len": 6},
    "sinusoids": {"attn_type": 2},
    "learned-absolute": {"attn_type": 3, "n_positions": 12},
    "enhanced": {"enhanced_recurrence": True},
    "adaptive": {"cutoffs": (20, 90), "div_val": 2},
    "embedding-residual": {"norm_first": True, "embedding_residual": True},
    "recurrence-without-memory": {"input_recurrence": True, "mem_len": 0},
    "key-offset": {"key_offset": True, "scalable_softmax": 3, "qk_norm": True},
    "lengths-by-layer": {"layer_attn_lens": (3, 20), "key_offset": True, "attn_len": 12},
    "gpt": {"kind": "gpt"},
    "lstm": {"kind": "lstm", "n_head": 8, "d_inner": 2048, "mem_len": 0, "n_layer": 2},
}


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
def test_pieces_of_any_length_give_the_same_numbers(changed, settings):
    model = changed(**settings)
    tokens = torch.randint(256, (3, 50))

    def read(*lengths):
        predictor = Predictor(model, 3, model.config.mem_len)
        return torch.cat([predictor.read(piece) for piece in tokens.split(lengths, 1)], 1)

    whole = read(50)
    assert whole.dtype == torch.float64
    for pieces in ([1] * 50, [7, 1, 30, 12]):
        # In steps of the grid, and a hundredth of what it can bear.
        error = (read(*pieces) - whole).abs().max().item() * STEPS
        assert error < MARGIN / 100


def test_a_fingerprint_is_that_of_everything_that_decides(model, tiny):
    torch.manual_seed(1)
    same, own = TransformerXL(tiny), fingerprint(model, "v")
    assert fingerprint(same, "v") == own
    assert fingerprint(model, "w") != own
    with torch.no_grad():
        same.softmax.bias[3] += 1e-6
    assert fingerprint(same, "v") != own
    other = TransformerXL(replace(tiny, clamp_len=3))
    other.load_state_dict(model.state_dict())
    assert fingerprint(other, "v") != own


def test_an_archive_knows_a_model_that_was_stored_with_a_setting_that_changes_nothing(tmp_path):
    sizes = {"vocab_size": 5, "n_layer": 1, "n_head": 2, "d_model": 4, "d_inner": 4}
    model = TransformerXL(ModelConfig(**sizes, attn_type=2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    model.save_pretrained(tmp_path)
    # As conversion wrote it, and what an archive then had for the model.
    content = json.loads((tmp_path / "config.json").read_text()) | {"tie_biases": False}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = load_model(tmp_path)
    assert fingerprint(found, "v").hex() == "a6c0ebce8956ee0a0517c507f1221bf6"
    assert fingerprint(model, "v") != fingerprint(found, "v")


def test_memory_is_not_filled_and_settings_are_restored():
    details = torch.utils.deterministic
    before = details.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    with reproducible(1):
        assert torch.are_deterministic_algorithms_enabled()
        assert not details.fill_uninitialized_memory
    after = details.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    assert after == before
