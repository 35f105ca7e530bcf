"""Where generated rows end and begin: stop strings, padding behind the end, empty prompts."""

import pytest
import torch

GREEDY = {"max_new_tokens": 24, "do_sample": False}


def test_rows_padded_on_the_right_go_on_behind_their_text(language_model, tokenizer, texts):
    expected = language_model.generate(
        **tokenizer(texts, padding=True, return_tensors="pt"), **GREEDY
    )
    right = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    assert torch.equal(language_model.generate(**right, **GREEDY), expected)


def test_padding_needs_a_mask(language_model, tokenizer, texts, any_folder, transformers):
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids = batch["input_ids"]
    message = r"input_ids hold 15, and the model has 15 tokens, 0 to 14: if .* attention_mask"
    for call in (language_model, language_model.generate):
        with pytest.raises(ValueError, match=message):
            call(ids)
    with pytest.raises(ValueError, match="input_ids hold -100"):
        language_model(torch.tensor([[-100]]))
    with pytest.raises(ValueError, match=message):
        language_model.generate(ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="a prompt is empty"):
        language_model.generate(ids, attention_mask=torch.zeros_like(ids))
    # A model without a memory reads the whole text for each token.
    other = transformers.AutoModelForCausalLM.from_pretrained(any_folder(mem_len=0)[1])
    how = {**GREEDY, "eos_token_id": 3, "pad_token_id": tokenizer.pad_token_id}
    written = other.generate(**batch, **how)
    for row, text in zip(written, texts, strict=True):
        alone = other.generate(**tokenizer(text, return_tensors="pt"), **how)[0]
        assert tokenizer.decode(row, skip_special_tokens=True) == tokenizer.decode(
            alone, skip_special_tokens=True
        )
