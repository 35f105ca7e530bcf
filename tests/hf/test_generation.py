"""``generate`` on a matrix of ways to search, with and without the cache, padded and alone."""

from typing import Any

import pytest
import torch

import transformer_xl as txl
from transformer_xl.inference.generate import Sampling

N = 12
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
}
KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "remembering as much as it sees": {"mem_len": 6, "attn_len": 6},
    "learned distances": {"attn_type": 1, "n_positions": 20},
    "adaptive": {"cutoffs": (5, 10), "div_val": 2, "d_embed": 8, "tie_projections": True},
    "untied": {"tie_embeddings": False, "tie_biases": False, "clamp_len": 7},
    "pre-norm": {"norm_first": True, "final_norm": True, "norm": "rms", "activation": "swiglu"},
    "with zeros before": {"start_memory": "zeros", "mem_len": 48},
    "LSTM": {"kind": "lstm", "n_head": 8, "d_inner": 2048},
    "without memory": {"mem_len": 0},
}
HANDS_IN = (
    "all tokens",
    "all and their mask",
    "new tokens",
    "new and their mask",
    "new and a mask",
)


def _written(model, batch, **settings):
    torch.manual_seed(3)
    out = model.generate(**batch, max_new_tokens=N, pad_token_id=0, **settings)
    return out[:, batch["input_ids"].shape[1] :]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_writes_the_same_with_cache_and_padding(
    transformers, tokenizer, any_folder, texts, kind
):
    own, folder = any_folder(**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    batch = tokenizer(texts[:3], padding=True, return_tensors="pt")
    for way in ("beams", "greedy"):
        written = _written(model, batch, **WAYS[way])
        assert torch.equal(written, _written(model, batch, use_cache=False, **WAYS[way]))
        for row, text in zip(written, texts[:3], strict=True):
            alone = _written(model, tokenizer(text, return_tensors="pt"), **WAYS[way])
            assert torch.equal(row, alone[0])
        # What stands in the padding does not matter, be it no symbol at all.
        ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 10_000)
        assert torch.equal(written, _written(model, {**batch, "input_ids": ids}, **WAYS[way]))
    if kind != "without memory":
        ids = tokenizer(texts[0])["input_ids"]
        assert written[0].tolist() == [
            *txl.generate(own, ids, length=N, sampling=Sampling(temperature=0))
        ]


# Each pair of what is handed in, how long it is and a way to search.
@pytest.mark.parametrize(
    ("hands_in", "more", "way"),
    [
        (hands_in, more, ("greedy", "beams")[(row + column) % 2])
        for row, hands_in in enumerate(HANDS_IN)
        for column, more in enumerate((" and the dog", 4 * " and the dog"))
    ],
)
def test_memory_goes_out_and_in_again(language_model, tokenizer, texts, way, hands_in, more):
    ids = tokenizer(texts[0], return_tensors="pt")["input_ids"]
    more = tokenizer(more, return_tensors="pt")["input_ids"]
    first = language_model.generate(
        ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True
    )
    cache, whole = first.past_key_values, torch.cat([first.sequences, more], 1)
    # It has not read the token that was written last.
    assert cache.get_seq_length() == ids.shape[1] + 4
    given = {"input_ids": whole if hands_in.startswith("all") else whole[:, cache.seen :]}
    if hands_in.endswith("mask"):
        is_own = hands_in.endswith("their mask")
        given["attention_mask"] = torch.ones_like(given["input_ids"] if is_own else whole)
    expected = _written(language_model, {"input_ids": whole}, **WAYS[way])
    for _ in range(2):
        # What was handed in stays as it was, so that it can be gone on from twice.
        found = _written(language_model, given, past_key_values=cache, **WAYS[way])
        assert torch.equal(found, expected)


def test_rows_of_a_batch_go_on_with_their_own_memories(language_model, tokenizer, texts):
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    cache = language_model(**batch).past_key_values
    more = tokenizer([" the", " a cat saw", " sea", " ran to"], padding=True, return_tensors="pt")
    mask = torch.cat([batch["attention_mask"], more["attention_mask"]], 1)
    found = language_model(more["input_ids"], attention_mask=mask, past_key_values=cache)
    for row, added in enumerate([" the", " a cat saw", " sea", " ran to"]):
        ids = tokenizer(texts[row] + added, return_tensors="pt")["input_ids"]
        torch.testing.assert_close(found.logits[row, -1], language_model(ids).logits[0, -1])


def test_what_cannot_be_is_refused(language_model, transformers, tokenizer):
    ids = tokenizer("the cat", return_tensors="pt")["input_ids"]
    with pytest.raises(TypeError, match="past_key_values is a DynamicCache"):
        language_model(ids, past_key_values=transformers.DynamicCache())
    cache = language_model(ids).past_key_values
    with pytest.raises(ValueError, match="give at least one"):
        language_model.generate(
            ids, past_key_values=cache, attention_mask=torch.ones_like(ids), max_new_tokens=2
        )
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        language_model.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=2)
    long = torch.cat([ids] * 40, 1)
    full = language_model(long).past_key_values
    with pytest.raises(ValueError, match=r"tokens_to_remove=-1 must be .* tokens, only \d+ are"):
        full.crop(-1)
    with pytest.raises(ValueError, match="attention_mask of shape"):
        language_model(ids, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        language_model()


@torch.no_grad()
def test_a_cropped_cache_is_that_of_the_shorter_text(language_model, tokenizer):
    ids = tokenizer("the cat sat on", return_tensors="pt")["input_ids"]
    expected = language_model(ids).logits[:, -1]
    for n in (0, 1, 2):
        cache = language_model(ids).past_key_values
        cache.crop(-n)
        assert cache.get_seq_length() == ids.shape[1] - n
        if n:
            found = language_model(ids[:, -n:], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(found, expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=rf"tokens_to_remove={wrong} must be from 0 to 0"):
            cache.crop(wrong)


def test_rows_padded_on_the_right_go_on_behind_their_text(language_model, tokenizer, texts):
    left, right = (
        tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
        for side in ("left", "right")
    )
    expected = _written(language_model, left, **WAYS["greedy"])
    assert torch.equal(_written(language_model, right, **WAYS["greedy"]), expected)


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
    how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 3}
    how["pad_token_id"] = tokenizer.pad_token_id
    written = other.generate(**batch, **how)
    for row, text in zip(written, texts, strict=True):
        alone = other.generate(**tokenizer(text, return_tensors="pt"), **how)[0]
        assert tokenizer.decode(row, skip_special_tokens=True) == tokenizer.decode(
            alone, skip_special_tokens=True
        )
