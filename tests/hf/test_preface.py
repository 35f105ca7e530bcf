"""The preface of a model, which `generate` of transformers reads before texts that begin."""

import pytest
import torch

from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.model import load_model

N = 12


@pytest.fixture(params=[{}, {"mem_len": 5}, {"kind": "gpt", "mem_len": 24}], ids=str)
def pair(transformers, any_folder, tmp_path, request):
    """A model with a preface, longer than one memory and shorter than another, and its wrapper."""
    model, _ = any_folder(**request.param)
    model.preface = (3, 5, 2, 7, 1, 4, 4)
    model.save_pretrained(tmp_path / "with")
    wrapper = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "with")
    return model, wrapper, tmp_path


def ours(model, prompt):
    return [*prompt, *generate(model, prompt, length=N, sampling=Sampling(temperature=0))]


def test_it_writes_what_generate_writes(pair):
    model, wrapper, _ = pair
    prompts = [[2, 6, 1], [5]]
    expected = [ours(model, prompt) for prompt in prompts]
    for prompt, text in zip(prompts, expected, strict=True):
        how = {"max_new_tokens": N, "do_sample": False}
        assert wrapper.generate(torch.tensor([prompt]), **how)[0].tolist() == text
    # Rows that are padded on the left begin after it, too.
    batch, mask = torch.tensor([[2, 6, 1], [0, 0, 5]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    found = wrapper.generate(batch, attention_mask=mask, max_new_tokens=N, do_sample=False)
    assert found[0].tolist() == expected[0]
    assert found[1, 2:].tolist() == expected[1]
    # The model itself reads nothing before its inputs.
    cold = wrapper(torch.tensor([[2, 6, 1]])).logits
    assert torch.equal(cold, model(torch.tensor([[2, 6, 1]])).log_probs)


def test_it_is_saved_and_can_be_switched_off(transformers, pair):
    model, wrapper, place = pair
    wrapper.save_pretrained(place / "again")
    assert load_model(place / "again").preface == model.preface
    auto = transformers.AutoModelForCausalLM
    without = auto.from_pretrained(place / "with", preface=None)
    model.preface = ()
    for prompt in ([2, 6, 1], [5]):
        found = without.generate(torch.tensor([prompt]), max_new_tokens=N, do_sample=False)
        assert found[0].tolist() == ours(model, prompt)


def test_it_goes_with_the_tokens_that_it_has(pair, caplog):
    model, wrapper, place = pair
    largest = max(model.preface)
    for size, kept in ((largest + 4, True), (largest + 1, True), (largest, False)):
        wrapper.resize_token_embeddings(size)
        wrapper.save_pretrained(place / "smaller")
        assert load_model(place / "smaller").preface == (model.preface if kept else ())
        wrapper.generate(torch.tensor([[2, 6, 1]]), max_new_tokens=1)
        assert ("beyond the new vocabulary of 7" in caplog.text) is not kept
