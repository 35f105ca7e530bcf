"""Models that come with the package, in transformers: by name, in float32, with adapters."""

from importlib import import_module

import pytest
import torch

from transformer_xl import from_pretrained, shipped_path

PROMPT = "the cat saw a d"


@pytest.fixture
def hf(shipped):
    return import_module("transformer_xl.hf")


def test_our_classes_take_a_name(hf, shipped):
    model, vocab = from_pretrained("toy")
    for name in ("toy", "toy-1", shipped / "toy-1", str(shipped / "toy-1")):
        tokenizer = hf.TransformerXLTokenizer.from_pretrained(name)
        assert tokenizer.vocab.hash == vocab.hash
        assert hf.TransformerXLConfig.from_pretrained(name).to_model_config() == model.config
        loaded = hf.TransformerXLForCausalLM.from_pretrained(name)
        own = loaded.transformer.named_weights()
        assert all(own[x].equal(weight) for x, weight in model.named_weights().items())
        with torch.no_grad():
            ids = torch.tensor([vocab.encode(PROMPT)])
            expected = model.head.log_probs(model.read(ids)[0])
            found = loaded(ids).logits.log_softmax(-1)
        torch.testing.assert_close(found, expected)


def test_automatic_classes_take_the_folder_of_a_name(hf, transformers):
    model = transformers.AutoModelForCausalLM.from_pretrained(shipped_path("toy"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(shipped_path("toy"))
    assert isinstance(model, hf.TransformerXLForCausalLM)
    # Training needs float32, although the file is in bfloat16.
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    found = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=5)
    assert tokenizer.decode(found[0]).startswith(PROMPT)
    half = transformers.AutoModelForCausalLM.from_pretrained(shipped_path("toy"), dtype="bfloat16")
    assert {x.dtype for x in half.parameters()} == {torch.bfloat16}
