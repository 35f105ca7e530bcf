"""Inputs of any length and shape, read in pieces: the same as our own model reads."""

import pytest
import torch


@pytest.fixture(scope="module")
def ids(vocab, text):
    return torch.tensor([vocab.encode(text[:100]), vocab.encode(text[900:1000])])


def test_inputs_that_cannot_be_are_refused(language_model, ids, refused):
    with refused(r"input_ids of shape \(100,\) must be \(texts, length\)"):
        language_model(ids[0])
    with refused(r"inputs_embeds of shape \(2, 16\) must be .* width\)"):
        language_model(inputs_embeds=torch.zeros(2, 16))


def test_a_tuple_is_returned_where_it_is_configured(transformers, folder, ids):
    for name in ("AutoModel", "AutoModelForCausalLM", "AutoModelForTokenClassification"):
        model = getattr(transformers, name).from_pretrained(folder, return_dict=False)
        assert type(model(ids)) is tuple
        assert type(model(ids, return_dict=True)) is not tuple


@pytest.mark.parametrize("segment_len", [7, 64])
def test_a_long_input_is_read_in_pieces_with_memory(transformers, folder, model, ids, segment_len):
    pieces = transformers.AutoModelForCausalLM.from_pretrained(folder, segment_len=segment_len)
    mems, expected = None, []
    for piece in ids.split(segment_len, 1):
        out = model(piece, mems)
        mems = out.mems
        expected.append(out.log_probs)
    with torch.no_grad():
        torch.testing.assert_close(pieces(ids).logits, torch.cat(expected, 1))
        # Padded on either side, each row is cut at the same places.
        mask = torch.ones_like(ids)
        mask[0, :30] = 0
        mask[1, 55:] = 0
        padded = pieces(ids, attention_mask=mask).logits
        torch.testing.assert_close(padded[0, 30:], pieces(ids[:1, 30:]).logits[0])
        torch.testing.assert_close(padded[1, :55], pieces(ids[1:, :55]).logits[0])
        for kept in (1, 40):
            few = pieces(ids, attention_mask=mask, logits_to_keep=kept).logits
            torch.testing.assert_close(few, padded[:, -kept:])


def test_vectors_are_read_in_place_of_tokens(language_model, ids):
    vectors = language_model.get_input_embeddings()(ids)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    found = language_model(inputs_embeds=vectors, attention_mask=mask).logits
    expected = language_model(ids, attention_mask=mask).logits
    torch.testing.assert_close(found[mask == 1], expected[mask == 1])
    written = [
        language_model.generate(**given, attention_mask=mask, max_new_tokens=5, do_sample=False)
        for given in ({"inputs_embeds": vectors}, {"input_ids": ids})
    ]
    assert torch.equal(written[0], written[1][:, ids.shape[1] :])


def test_the_loss_is_ours_shifted_by_one(language_model, model, ids):
    labels = ids.clone()
    labels[0, :40] = -100
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    labels[1, :30] = -100
    alone = model(ids[1:, 30:-1], targets=ids[1:, 31:]).nll
    whole = model(ids[:1, :-1], targets=ids[:1, 1:]).nll[0, 39:]
    nll = torch.cat([whole, alone[0]])
    found = language_model(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(found.loss, nll.mean())
    counted = language_model(ids, attention_mask=mask, labels=labels, num_items_in_batch=11)
    torch.testing.assert_close(counted.loss, nll.sum() / 11)
    assert found.logits.shape == (2, 100, model.config.vocab_size)
