"""Tokens that are taken back: assisted generation, prompt lookup, cropped memories, chunks."""

from typing import Any

import pytest
import torch

N = 26
KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    # The text outgrows the memory: what left it comes back.
    "a short memory": {"mem_len": 9},
    "a short attention": {"mem_len": 12, "attn_len": 7},
    "learned distances": {"attn_type": 1, "n_positions": 20, "mem_len": 20},
    "with zeros before": {"start_memory": "zeros", "mem_len": 11},
    "GPT": {"kind": "gpt", "mem_len": 24},
}
SETTINGS = {"max_new_tokens": N, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def ids():
    torch.manual_seed(4)
    return torch.randint(15, (1, 8)).repeat(1, 3)[:, :8]


@pytest.fixture
def pair(transformers, folder, any_folder):
    """Makes a model, and another one that agrees with it now and then."""

    def make(**settings):
        _, other = any_folder(**settings)
        model = transformers.AutoModelForCausalLM.from_pretrained(other)
        assistant = transformers.AutoModelForCausalLM.from_pretrained(other)
        torch.manual_seed(6)
        with torch.no_grad():
            for x in assistant.parameters():
                x.add_(torch.randn_like(x) * 0.05)
        return model, assistant

    return make


@pytest.mark.parametrize("way", ["assistant", "prompt lookup"])
@pytest.mark.parametrize("kind", KINDS)
def test_assisted_generation_writes_what_greedy_generation_writes(pair, ids, kind, way):
    model, assistant = pair(**KINDS[kind])
    greedy = model.generate(ids, **SETTINGS)
    how = {"assistant_model": assistant} if way == "assistant" else {"prompt_lookup_num_tokens": 5}
    found = model.generate(ids, **SETTINGS, **how)
    assert torch.equal(found.sequences, greedy.sequences)
    # Its memory goes on like any other.
    mems = [out.past_key_values.mems for out in (found, greedy)]
    assert len(mems[0]) == len(mems[1]) <= model.config.mem_len
    more = torch.cat([found.sequences[:, -1:], ids], 1)
    with torch.no_grad():
        logits = [
            model(more, past_key_values=out.past_key_values).logits for out in (found, greedy)
        ]
    torch.testing.assert_close(*logits)


def test_assisted_generation_does_not_change_the_memory_that_it_continues(pair, ids):
    model, _ = pair(mem_len=9)
    with torch.no_grad():
        cache = model(ids).past_key_values
        before = model(ids, past_key_values=cache).logits
        whole = torch.cat([ids, ids], 1)
        model.generate(whole, past_key_values=cache, prompt_lookup_num_tokens=2, **SETTINGS)
        assert cache.get_seq_length() == ids.shape[1]
        assert torch.equal(model(ids, past_key_values=cache).logits, before)


def test_an_assistant_that_agrees_saves_calls(pair, ids, monkeypatch):
    model, _ = pair()
    calls, forward = [], model.forward
    monkeypatch.setattr(
        model, "forward", lambda *x, **named: (calls.append(1), forward(*x, **named))[1]
    )
    assistant = pair()[0]
    # It is not sure of what it writes.
    assistant.generation_config.assistant_confidence_threshold = 0.0
    model.generate(ids, assistant_model=assistant, **SETTINGS | {"max_new_tokens": 40})
    assert len(calls) <= 4


def test_chunks_of_a_prompt_write_the_same(language_model, tokenizer):
    prompt = tokenizer("the cat saw a dog and ran to the sea", return_tensors="pt")
    greedy = language_model.generate(**prompt, **SETTINGS).sequences
    for size in (5, 64):
        found = language_model.generate(**prompt, **SETTINGS, prefill_chunk_size=size)
        assert torch.equal(found.sequences, greedy)


def test_beams_over_chunks_reorder_the_memory(language_model, tokenizer):
    prompt = tokenizer(["the cat saw a dog", "dog"], padding=True, return_tensors="pt")
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    expected = language_model.generate(**prompt, **settings)
    found = language_model.generate(**prompt, **settings, prefill_chunk_size=4)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("is_recording", [False, True])
@pytest.mark.parametrize("has_keys", [False, True])
def test_a_cropped_memory_is_that_of_the_text_before(pair, has_keys, is_recording):
    torch.manual_seed(8)
    # Read in two calls: longer than the memory only if it is recorded.
    model, _ = pair(mem_len=9 if is_recording else 64, attn_len=5)
    ids = torch.randint(15, (2, 40))
    with torch.set_grad_enabled(not has_keys):
        cache = model(ids[:, :20]).past_key_values
        if is_recording:
            cache = model(ids[:, :4]).past_key_values
            cache.activate_past_recording()
            cache = model(ids[:, 4:20], past_key_values=cache).past_key_values
        cache = model(ids[:, 20:], past_key_values=cache).past_key_values
        for left in (38, 23, 20):
            cache.crop(left - cache.get_seq_length())
            assert cache.get_seq_length() == left
            expected = model(ids[:, :left]).past_key_values
            found = model(ids[:, :6], past_key_values=cache).logits
            right = model(ids[:, :6], past_key_values=expected).logits
            torch.testing.assert_close(found, right)


@pytest.mark.slow
def test_what_cannot_be_taken_back_is_refused(transformers, pair, any_folder, ids):
    model, _ = pair(mem_len=5)
    cache = model(ids).past_key_values
    with pytest.raises(ValueError, match=r"have left the memory \(mem_len=5\).*activate_past_rec"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="tokens_to_remove=3 must be 0 or the negative number"):
        cache.crop(3)
    with pytest.raises(ValueError, match="tokens_to_remove=-9 must be 0 or the negative"):
        cache.crop(-9)
    cache.crop(0)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    positions = torch.arange(ids.shape[1]).expand_as(ids) % 6
    for given in ({"attention_mask": mask}, {"position_ids": positions}):
        cache = pair()[0](ids, **given).past_key_values
        with pytest.raises(ValueError, match="without padding and starts of documents"):
            cache.crop(-1)
    for settings, message in (
        ({"kind": "lstm", "n_head": 8, "d_inner": 2048}, "of a single state"),
        ({"mem_len": 0}, "needs a cache"),
        ({"reset_at": 3}, "or of documents"),
    ):
        other = transformers.AutoModelForCausalLM.from_pretrained(any_folder(**settings)[1])
        with pytest.raises(ValueError, match=message):
            other.generate(ids, max_new_tokens=2, prompt_lookup_num_tokens=3)
    _, folder = any_folder(kind="lstm", n_head=8, d_inner=2048)
    lstm = transformers.AutoModelForCausalLM.from_pretrained(folder)
    cache = lstm(ids).past_key_values
    with pytest.raises(ValueError, match="from which no token can be removed"):
        cache.crop(-1)


@pytest.mark.parametrize("way", ["read", "written"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_memory_that_was_reset_begins_a_text(pair, ids, kind, way):
    model, _ = pair(**KINDS[kind])
    with torch.no_grad():
        if way == "read":
            cache = model(ids.repeat(2, 3)).past_key_values
        else:
            cache = model.generate(ids.repeat(2, 1), **SETTINGS).past_key_values
        cache.reset()
        assert cache.seen == 0
        for given in (ids[:, :3], ids.flip(1)):
            begun = model(given.repeat(2, 1), past_key_values=cache)
            torch.testing.assert_close(begun.logits[1:], model(given).logits)
            cache = begun.past_key_values
            cache.reset()
