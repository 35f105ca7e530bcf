import pytest
import torch

from transformer_xl.model import TransformerXL, build_model, load_model
from transformer_xl.model.lstm import LSTMModel

KINDS = {"transformer_xl": TransformerXL, "lstm": LSTMModel}


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_names_the_class_of_its_model(tiny_config, of_kind, kind, tmp_path):
    model = build_model(of_kind(tiny_config, kind)).eval()
    assert type(model) is KINDS[kind]
    model.save_pretrained(tmp_path)
    tokens = torch.randint(31, (2, 5))
    for load in (load_model, TransformerXL.from_pretrained):
        found = load(tmp_path)
        assert type(found) is KINDS[kind]
        assert not found.training
        assert torch.equal(found(tokens).log_probs, model(tokens).log_probs)


def test_a_model_of_another_kind_is_not_built(tiny_config, of_kind):
    with pytest.raises(ValueError, match="kind='lstm' is no Transformer-XL"):
        TransformerXL(of_kind(tiny_config, "lstm"))
