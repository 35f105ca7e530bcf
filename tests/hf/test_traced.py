"""Programs that ``torch.export`` and ``torch.compile`` make compute what the model computes."""

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

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
        program = torch.export.export(model, (), {"input_ids": IDS, **given}).module()
        for found in (program(input_ids=IDS, **given), _compiled(model)(IDS, **given)):
            torch.testing.assert_close(found.logits, expected.logits)
            assert found.past_key_values.seen == T
            # Keys and values are for fixed weights: a program returns hidden states.
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
            {"input_ids": IDS, "attention_mask": MASK},
            dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
        ).module()
        for n in (3, 33, 64):
            ids = torch.arange(3 * n).view(3, n) % 7
            mask = torch.ones_like(ids)
            mask[1, :2] = 0
            found = program(input_ids=ids, attention_mask=mask).logits
            torch.testing.assert_close(found, language_model(ids, attention_mask=mask).logits)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("has_keys", [False, True])
def test_the_cache_goes_through_a_program_and_comes_out(language_model, has_keys):
    with torch.set_grad_enabled(not has_keys):
        cache = language_model(IDS, attention_mask=MASK).past_key_values
    assert cache.mems.has_keys == has_keys
    with torch.no_grad():
        given = {"input_ids": IDS, "past_key_values": cache}
        program = torch.export.export(language_model, (), given).module()
        expected = language_model(**given)
        for found in (program(**given), _compiled(language_model)(**given)):
            torch.testing.assert_close(found.logits, expected.logits)
            assert found.past_key_values.seen == 2 * T


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_cache_is_a_pytree(language_model, has_keys):
    with torch.set_grad_enabled(not has_keys):
        cache = language_model(IDS, attention_mask=MASK).past_key_values
    leaves, spec = pytree.tree_flatten(cache)
    again = pytree.tree_unflatten(leaves, spec)
    assert again.seen == T
    assert again.batch_size == 2
    with torch.no_grad():
        found = language_model(IDS, past_key_values=again).logits
        torch.testing.assert_close(found, language_model(IDS, past_key_values=cache).logits)
    halves = pytree.tree_map(lambda x: x.half() if x is not None and x.ndim > 1 else x, cache)
    assert halves.mems.tensors[0].dtype == torch.float16


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_exporter_of_transformers_takes_masks_and_the_cache(language_model):
    dynamo = pytest.importorskip("transformers.exporters.exporter_dynamo")
    exporter, settings = dynamo.DynamoExporter(), dynamo.DynamoConfig()
    with torch.no_grad():
        cache = language_model(IDS, attention_mask=MASK).past_key_values
    for given in (
        {"input_ids": IDS, "attention_mask": MASK},
        {"input_ids": IDS[:, :1], "past_key_values": cache},
    ):
        assert exporter.export(language_model, given, settings) is not None
