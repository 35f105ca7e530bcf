"""Prompts that are learned (PEFT): vectors before the text."""

import pytest
import torch

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

IDS = torch.arange(2 * 9).view(2, 9) % 7
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0


def _tuned(model, peft_type):
    torch.manual_seed(3)
    settings = {"peft_type": peft_type, "task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    return peft.get_peft_model(model, peft.get_peft_config(settings))


@pytest.mark.parametrize("segment_len", [64, 4])
def test_a_prompt_is_learned_saved_and_written_after(transformers, folder, tmp_path, segment_len):
    base = transformers.AutoModelForCausalLM
    model = _tuned(base.from_pretrained(folder, segment_len=segment_len), "PROMPT_TUNING")
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


def test_prefix_tuning_raises_an_error(language_model):
    model = _tuned(language_model, peft_type="PREFIX_TUNING")
    with pytest.raises(TypeError, match=r"in place of prefix tuning, .* use prompt tuning or LoRA"):
        model(IDS)
