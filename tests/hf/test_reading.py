"""Inputs of any length and shape, read in pieces: the same as our own model reads."""

import pytest
import torch


@pytest.fixture(scope="module")
def ids(vocab, text):
    return torch.tensor([vocab.encode(text[:100]), vocab.encode(text[900:1000])])


@pytest.fixture(scope="module")
def classifier(transformers, folder):
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)


def test_logits_are_our_log_probabilities(language_model, model, ids):
    torch.testing.assert_close(language_model(ids).logits, model(ids).log_probs)


def test_inputs_that_cannot_be_are_refused(language_model, ids, refused):
    with refused(r"input_ids of shape \(100,\) must be \(texts, length\)"):
        language_model(ids[0])
    with refused(r"inputs_embeds of shape \(2, 16\) must be .* width\)"):
        language_model(inputs_embeds=torch.zeros(2, 16))
    with pytest.raises(ValueError, match="logits_to_keep=-2 must be 0"):
        language_model(ids, logits_to_keep=-2)


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


def test_which_logits_are_kept(language_model, ids):
    place = torch.tensor([3, 50, 51])
    found = language_model(ids, logits_to_keep=place).logits
    torch.testing.assert_close(found, language_model(ids).logits[:, place])


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
    assert language_model(ids, labels=labels, skip_logits=True).logits is None


def test_arguments_of_packed_rows_are_those_of_position_ids(
    transformers, language_model, tokenizer, texts
):
    rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    pack = transformers.DataCollatorWithFlattening
    plain = language_model(**pack()(rows))
    batch = pack(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    assert torch.equal(language_model(**batch).loss, plain.loss)
    count = [len(row["input_ids"]) - 1 for row in rows]
    alone = [
        language_model(torch.tensor([x["input_ids"]]), labels=torch.tensor([x["input_ids"]]))
        for x in rows
    ]
    mean = sum(x.loss * n for x, n in zip(alone, count, strict=True)) / sum(count)
    torch.testing.assert_close(plain.loss, mean)
    del batch["position_ids"]
    with pytest.raises(ValueError, match="documents of a packed row are found by position_ids"):
        language_model(**batch)


def test_position_ids_that_begin_anew_begin_a_document(language_model, ids):
    positions = torch.cat([torch.arange(60), torch.arange(40)])[None]
    packed = language_model(ids[:1], position_ids=positions, labels=ids[:1])
    first, second = (language_model(x, labels=x) for x in (ids[:1, :60], ids[:1, 60:]))
    torch.testing.assert_close(packed.logits[:, :60], first.logits)
    torch.testing.assert_close(packed.logits[:, 60:], second.logits)
    torch.testing.assert_close(packed.loss, (59 * first.loss + 39 * second.loss) / 98)


def test_what_is_refused_comes_with_another_way(language_model, classifier, ids):
    for model in (language_model, classifier):
        with pytest.raises(NotImplementedError, match=r"head_mask.*zeros in the columns.*o_proj"):
            model(ids, head_mask=torch.ones(2, 2))
        assert model(ids, head_mask=None).logits is not None
        with pytest.raises(NotImplementedError, match=r"cannot be replaced.*copy other numbers"):
            model.set_input_embeddings(torch.nn.Embedding(15, 16))
