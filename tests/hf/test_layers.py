"""Hidden states and attention weights of the layers, and what the other classes return."""

from typing import Any

import pytest
import torch

from transformer_xl.model.positions import encoding_of

KINDS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "pre-norm": {"norm_first": True, "final_norm": True},
    "learned distances": {"attn_type": 1, "n_positions": 20},
    "absolute": {"attn_type": 2},
    "own lengths": {"layer_attn_lens": (5, 9)},
}
WANTED = {"output_hidden_states": True, "output_attentions": True}


@pytest.fixture(scope="module")
def ids():
    torch.manual_seed(1)
    return torch.randint(15, (2, 12))


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_weights_are_those_that_the_output_is_made_of(
    transformers, any_folder, ids, kind
):
    own, folder = any_folder(**KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    plain = model(ids)
    out = model(ids, **WANTED)
    torch.testing.assert_close(out.logits, plain.logits)
    config = own.config
    assert len(out.hidden_states) == config.n_layer + 1
    torch.testing.assert_close(out.hidden_states[0], own.embedding(ids) + _added(own, ids))
    torch.testing.assert_close(model.transformer.head.log_probs(out.hidden_states[-1]), out.logits)
    for weights, right in zip(out.attentions, own.attention_weights(ids), strict=True):
        torch.testing.assert_close(weights, right)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, config.n_head, 12))
        assert not weights.triu(1).any()
    # They are part of the graph, so that relevance can be traced through them.
    for x in (*out.hidden_states, *out.attentions):
        x.retain_grad()
    out.logits[..., 0].sum().backward()
    assert all(bool(x.grad.any()) for x in (*out.hidden_states[:-1], *out.attentions))


def _added(own, ids):
    """What absolute positions add to the first layer's input."""
    if own.config.attn_type != 2:
        return 0.0
    return encoding_of(own, ids.shape[1], own.config.clamp_len)


def test_weights_reach_into_the_memory(language_model, ids):
    with torch.no_grad():
        whole = language_model(ids, **WANTED)
        memory = language_model(ids[:, :8]).past_key_values
        after = language_model(ids[:, 8:], past_key_values=memory, **WANTED)
    for weights, right in zip(after.attentions, whole.attentions, strict=True):
        torch.testing.assert_close(weights, right[:, :, 8:])
    for x, right in zip(after.hidden_states, whole.hidden_states, strict=True):
        torch.testing.assert_close(x, right[:, 8:])


def test_features_are_the_last_hidden_states(transformers, folder, language_model, tokenizer, ids):
    model = transformers.AutoModel.from_pretrained(folder)
    out = model(ids, **WANTED)
    expected = language_model(ids, **WANTED)
    torch.testing.assert_close(out.last_hidden_state, expected.hidden_states[-1])
    assert out.past_key_values.seen == 12
    for name in ("hidden_states", "attentions"):
        for x, right in zip(out[name], expected[name], strict=True):
            torch.testing.assert_close(x, right)
    extractor = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    assert torch.tensor(extractor("the cat")).shape == (1, 7, 16)
    # The softmax has no part in them, and is kept.
    trained = [name for name, x in model.named_parameters() if x.requires_grad]
    assert "transformer.softmax.bias" not in trained
    assert "transformer.embedding.weight" in trained


@pytest.fixture
def tagger(transformers, folder):
    torch.manual_seed(2)
    return transformers.AutoModelForTokenClassification.from_pretrained(folder, num_labels=3)


def test_tokens_are_classified_by_themselves_and_their_past(
    transformers, folder, tagger, ids, tmp_path
):
    features = transformers.AutoModel.from_pretrained(folder)
    out = tagger(ids, **WANTED)
    torch.testing.assert_close(out.logits, tagger.score(features(ids).last_hidden_state))
    torch.testing.assert_close(tagger(ids[:, :5]).logits, out.logits[:, :5])
    tagger.save_pretrained(tmp_path)
    again = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids).logits, out.logits)


def test_the_loss_of_tokens_counts_those_with_a_label(tagger, ids):
    labels, mask = ids % 3, torch.ones_like(ids)
    labels[0, :5] = -100
    mask[1, 8:] = 0
    logits = tagger(ids, attention_mask=mask).logits
    counted = (labels != -100) & (mask == 1)
    expected = torch.nn.functional.cross_entropy(logits[counted], labels[counted])
    found = tagger(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(found.loss, expected)
    whole = tagger(ids, attention_mask=mask, labels=labels, num_items_in_batch=50).loss
    torch.testing.assert_close(whole, expected * counted.sum() / 50)
    found.loss.backward()
    assert all(x.grad is not None for x in tagger.parameters() if x.requires_grad)


def test_what_layers_cannot_return_is_refused_with_another_way(
    transformers, folder, any_folder, ids
):
    pieces = transformers.AutoModelForCausalLM.from_pretrained(folder, segment_len=5)
    with pytest.raises(ValueError, match=r"12 tokens in segments of 5.*segment_len=12"):
        pieces(ids, output_attentions=True)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(ValueError, match="AutoModel returns them"):
        classifier(ids, output_hidden_states=True)
    _, other = any_folder(kind="lstm", n_head=8, d_inner=2048)
    lstm = transformers.AutoModelForCausalLM.from_pretrained(other)
    for name in WANTED:
        with pytest.raises(ValueError, match="kind='lstm' has no"):
            lstm(ids, **{name: True})
