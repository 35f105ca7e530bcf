"""Prompts that are learned (PEFT): vectors before the text, and keys and values in the memory."""

import pytest
import torch

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

IDS = torch.arange(2 * 9).view(2, 9) % 7
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
WAYS = {
    "prefix": {"peft_type": "PREFIX_TUNING"},
    "prefix by a network": {
        "peft_type": "PREFIX_TUNING",
        "prefix_projection": True,
        "encoder_hidden_size": 16,
    },
    "prompt": {"peft_type": "PROMPT_TUNING"},
}


def _tuned(model, way, n=4):
    torch.manual_seed(3)
    config = peft.get_peft_config({**WAYS[way], "task_type": "CAUSAL_LM", "num_virtual_tokens": n})
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("segment_len", [64, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_is_learned_saved_and_written_after(
    transformers, folder, tmp_path, way, segment_len
):
    base = transformers.AutoModelForCausalLM
    model = _tuned(base.from_pretrained(folder, segment_len=segment_len), way)
    labels = torch.full_like(IDS, 3).masked_fill(MASK == 0, -100)
    given = {"input_ids": IDS, "attention_mask": MASK}
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.Adam(trained, 0.05)
    losses = []
    for _ in range(12):
        loss = model(**given, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    model.eval()
    settings = {"max_new_tokens": 6, "do_sample": False}
    written = model.generate(**given, **settings)
    assert written.shape == (2, 15)
    with torch.no_grad():
        whole = torch.cat([MASK, torch.ones(2, 6, dtype=torch.int64)], 1)
        logits = model(input_ids=written, attention_mask=whole).logits
    if segment_len == 64:
        # What is written step by step is what one call predicts.
        assert torch.equal(logits[:, -7:-1].argmax(-1), written[:, 9:])
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base.from_pretrained(folder), tmp_path).eval()
    if segment_len == 64:
        assert torch.equal(again.generate(**given, **settings), written)


def test_a_prefix_is_a_memory_of_keys_and_values(transformers, language_model):
    with torch.no_grad():
        cache = language_model(IDS[:, :4]).past_key_values
        expected = language_model(IDS[:, 4:], past_key_values=cache)
    prefix = transformers.DynamicCache()
    for layer, (k, v) in enumerate(zip(*cache.mems.by_name(), strict=True)):
        prefix.update(k.transpose(0, 1), v.transpose(0, 1), layer)
    for has_graph in (False, True):
        with torch.set_grad_enabled(has_graph):
            found = language_model(IDS[:, 4:], past_key_values=prefix)
        torch.testing.assert_close(found.logits, expected.logits)
        assert found.past_key_values.seen == 9
    # After a step the weights are others, and so would be the keys of the segment.
    with pytest.raises(ValueError, match="needs fixed weights"):
        language_model(IDS, past_key_values=found.past_key_values)


def test_the_gradient_of_a_prefix_is_that_of_its_numbers(transformers, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").double()
    torch.manual_seed(2)
    numbers = torch.randn(2, 2, 2, 2, 3, 8, dtype=torch.float64, requires_grad=True)

    def loss(x):
        prefix = transformers.DynamicCache()
        for layer, (k, v) in enumerate(x):
            prefix.update(k, v, layer)
        return model(IDS[:, :4], past_key_values=prefix, labels=IDS[:, :4]).loss

    loss(numbers).backward()
    assert numbers.grad is not None
    direction = torch.randn_like(numbers)
    with torch.no_grad():
        slope = (loss(numbers + 1e-5 * direction) - loss(numbers - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close(slope, (numbers.grad * direction).sum(), rtol=1e-6, atol=1e-8)


def test_a_prefix_that_does_not_fit_is_refused(transformers, folder, any_folder):
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"a prefix of 4 tokens is longer .*\(mem_len=3\)"):
        _tuned(load(folder, mem_len=3), "prefix")(IDS)
    for settings in ({"attn_type": 2}, {"kind": "gpt"}, {"kind": "lstm", "d_inner": 2048}):
        model = load(any_folder(**settings, **({"n_head": 8} if "d_inner" in settings else {}))[1])
        with pytest.raises(ValueError, match="does not fit the model: PrefixTuningConfig"):
            _tuned(model, "prefix")(IDS)
    model = load(any_folder(input_recurrence=True)[1])
    with pytest.raises(ValueError, match="input_recurrence=True: a prefix of keys"):
        _tuned(model, "prefix")(IDS)
