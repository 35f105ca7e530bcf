"""PEFT on the class of transformers: trained, saved, loaded, switched."""

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")

# What PEFT asks transformers in an old way, which PEFT knows itself.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

TARGETS = ["qkv_proj", "o_proj", "inner", "outer", "softmax"]


@pytest.fixture
def base(transformers, folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def lora():
    torch.manual_seed(1)
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=TARGETS, init_lora_weights=False
    )


@pytest.fixture
def tokens(vocab, text):
    return torch.tensor([vocab.encode(text[:40]), vocab.encode(text[300:340])])


def test_what_is_generated_is_that_of_the_merged_model(base, lora, tokens):
    settings = {"max_new_tokens": 12, "do_sample": False}
    plain = base.generate(tokens, **settings)
    model = peft.get_peft_model(base, lora).eval()
    found = model.generate(input_ids=tokens, **settings)
    without_cache = model.generate(input_ids=tokens, use_cache=False, **settings)
    with model.disable_adapter():
        assert torch.equal(model.generate(input_ids=tokens, **settings), plain)
    assert not torch.equal(found, plain)
    assert torch.equal(without_cache, found)
    # Merged in the tied table, the adapter of the head would act on the embedding, too.
    own = model.get_base_model().transformer
    own.softmax.base_layer.weight = nn.Parameter(own.softmax.base_layer.weight.detach().clone())
    assert torch.equal(model.merge_and_unload().generate(tokens, **settings), found)


def test_adapters_that_transformers_adds_are_saved_alone(
    transformers, base, lora, folder, tokens, tmp_path
):
    base.add_adapter(lora)
    expected = base.eval()(tokens).logits
    base.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    again.load_adapter(str(tmp_path))
    assert torch.equal(again.eval()(tokens).logits, expected)
