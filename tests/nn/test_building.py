from dataclasses import replace

import pytest
import torch

from transformer_xl.config import ModelConfig, TransformerXLConfig
from transformer_xl.model import TransformerXL, build_model, load_model, register_model
from transformer_xl.studies.models.lstm import LSTMModel

KINDS = {"transformer_xl": TransformerXL, "lstm": LSTMModel}


def test_a_model_of_another_kind_is_not_built(tiny_config, of_kind):
    with pytest.raises(ValueError, match="kind='lstm' is no Transformer-XL"):
        TransformerXL(of_kind(tiny_config, "lstm"))


def test_a_subclass_elsewhere_takes_over_no_kind(tiny_config, of_kind, tmp_path):
    # Defined here, and so after the models of the package, as that of a user is.
    class Repeated(TransformerXL):
        kind = "transformer_xl"

    class Other(TransformerXL):
        kind = "lstm"

    class Unnamed(TransformerXL):
        pass

    for kind, expected in KINDS.items():
        model = build_model(of_kind(tiny_config, kind))
        assert type(model) is expected
        model.save_pretrained(tmp_path / kind)
        for load in (load_model, TransformerXL.from_pretrained):
            assert type(load(tmp_path / kind)) is expected
    # Only they themselves build them.
    folder = tmp_path / "transformer_xl"
    tokens = torch.randint(31, (2, 5))
    for own in (Repeated, Unnamed):
        found = own.from_pretrained(folder)
        assert type(found) is own
        assert not found.training
        assert torch.equal(found(tokens).log_probs, load_model(folder)(tokens).log_probs)
    with pytest.raises(ValueError, match="kind='lstm' is no Transformer-XL"):
        Unnamed.from_pretrained(tmp_path / "lstm")


def test_a_registered_kind_is_built_saved_and_loaded(tiny_config, tmp_path):
    class Registered(TransformerXL):
        kind = "registered"

    with pytest.raises(ValueError, match=r"model\.kind=.registered. is unknown; choose from"):
        replace(tiny_config, kind="registered")
    register_model("registered", Registered)
    register_model("registered", Registered)
    config = replace(tiny_config, kind="registered", norm_first=True)
    model = build_model(config).eval()
    model.save_pretrained(tmp_path)
    found, tokens = load_model(tmp_path), torch.randint(31, (2, 5))
    assert type(found) is Registered
    assert torch.equal(found(tokens).log_probs, model(tokens).log_probs)
    # Its settings are those of a Transformer-XL.
    assert isinstance(found.config, TransformerXLConfig)
    for kind, settings_of, message in (
        ("lstm", "lstm", "is one of this package"),
        ("another", "registered", "is no kind of this package"),
    ):
        with pytest.raises(ValueError, match=message):
            register_model(kind, lambda config: model, settings_of)
    with pytest.raises(ValueError, match=r"model\.kind=.another. is unknown"):
        ModelConfig(kind="another")
