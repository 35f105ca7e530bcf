"""Programs that ``torch.export`` and ``torch.compile`` make compute what the model computes."""

from typing import Any

import pytest
import torch

KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "adaptive": {"cutoffs": (5, 10), "div_val": 2, "d_embed": 8},
    "absolute": {"attn_type": 3, "n_positions": 80},
}
T = 10
IDS = torch.arange(2 * T).view(2, T) % 7
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
MASK[1, 8:] = 0
POSITIONS = torch.cat([torch.arange(5), torch.arange(5)]).expand(2, -1)
GIVEN = {
    "tokens alone": {},
    "a mask": {"attention_mask": MASK},
    "positions": {"position_ids": POSITIONS},
    "both": {"attention_mask": MASK, "position_ids": POSITIONS},
}


def _compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="eager")


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("the paper's", name) for name in GIVEN), ("adaptive", "both"), ("absolute", "both")],
)
def test_masks_and_positions_are_exported_and_compiled_in_one_graph(
    transformers, any_folder, kind, name
):
    given = GIVEN[name]
    _, folder = any_folder(n_layer=1, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(IDS, **given)
        alone = {"input_ids": IDS, "use_cache": False, **given}
        program = torch.export.export(model, (), alone).module()
        torch.testing.assert_close(program(**alone).logits, expected.logits)
        found = _compiled(model)(IDS, **given)
        torch.testing.assert_close(found.logits, expected.logits)
        assert found.past_key_values.seen == T
        # Keys and values are for fixed weights: compiled code returns hidden states.
        again = model(IDS[:, :3], past_key_values=found.past_key_values).logits
        after = model(IDS[:, :3], past_key_values=expected.past_key_values).logits
        torch.testing.assert_close(again, after)


@pytest.mark.compile
@pytest.mark.slow
def test_a_loss_is_compiled_in_one_graph_with_its_gradients(language_model):
    given, found = GIVEN["both"], []
    for call in (language_model, _compiled(language_model)):
        language_model.zero_grad()
        for named in ({}, {"num_items_in_batch": torch.tensor(7)}):
            out = call(IDS, labels=IDS, **given, **named)
            out.loss.backward()
            found.append(out.loss.detach())
        found += [x.grad.clone() for x in language_model.parameters()]
    language_model.zero_grad()
    half = len(found) // 2
    torch.testing.assert_close(found[:half], found[half:])


@pytest.mark.compile
@pytest.mark.slow
def test_one_program_reads_batches_and_lengths_of_any_size(language_model):
    B, length = torch.export.Dim("B"), torch.export.Dim("length", min=2, max=64)
    sizes = {0: B, 1: length}
    with torch.no_grad():
        program = torch.export.export(
            language_model,
            (),
            {"input_ids": IDS, "attention_mask": MASK, "use_cache": False},
            dynamic_shapes={"input_ids": sizes, "attention_mask": sizes, "use_cache": None},
        ).module()
        for n in (3, 33, 64):
            ids = torch.arange(3 * n).view(3, n) % 7
            mask = torch.ones_like(ids)
            mask[1, :2] = 0
            found = program(input_ids=ids, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(found, language_model(ids, attention_mask=mask).logits)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("has_keys", [False, True])
def test_the_cache_goes_through_compiled_code_and_comes_out(language_model, has_keys):
    with torch.set_grad_enabled(not has_keys):
        cache = language_model(IDS, attention_mask=MASK).past_key_values
    assert cache.mems.has_keys == has_keys
    with torch.no_grad():
        expected = language_model(IDS, past_key_values=cache)
        found = _compiled(language_model)(IDS, past_key_values=cache)
        torch.testing.assert_close(found.logits, expected.logits)
        assert found.past_key_values.seen == 2 * T
        with pytest.raises(Exception, match="TransformerXLCache"):
            torch.export.export(language_model, (), {"input_ids": IDS, "past_key_values": cache})
