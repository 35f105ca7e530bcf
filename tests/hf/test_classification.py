"""The classifier reads a document of any length and judges it by its end."""

import pytest
import torch


@pytest.fixture(scope="module")
def classifier(transformers, folder):
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, segment_len=16
    )


@pytest.fixture(scope="module")
def ids(vocab, text):
    return torch.tensor([vocab.encode(text[start : start + 90]) for start in (0, 500, 900)])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("gradient", [True, False])
def test_a_padded_document_is_judged_as_if_it_were_alone(classifier, ids, side, gradient):
    lengths = (90, 37, 3)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        mask[row, slice(90 - n, 90) if side == "left" else slice(0, n)] = 1
    with torch.set_grad_enabled(gradient):
        found = classifier(ids.masked_fill(mask == 0, 999), attention_mask=mask).logits
        for row in range(3):
            alone = classifier(ids[row : row + 1, mask[row] == 1]).logits
            torch.testing.assert_close(found[row : row + 1], alone)


def test_a_document_may_come_in_parts(classifier, ids):
    with torch.no_grad():
        whole = classifier(ids[:, :80])
        first = classifier(ids[:, :48])
        last = classifier(ids[:, 48:80], past_key_values=first.past_key_values)
    torch.testing.assert_close(last.logits, whole.logits)
    assert last.past_key_values.get_seq_length() == 80


def test_a_gradient_reaches_the_last_piece_and_leaves_the_softmax_alone(classifier, ids):
    vectors = classifier.get_input_embeddings()(ids).detach().requires_grad_()
    loss = classifier(inputs_embeds=vectors, labels=torch.tensor([0, 1, 2])).loss
    loss.backward()
    reached = vectors.grad.abs().sum((0, 2)) > 0
    assert reached[-16:].all()
    assert not reached[:-16].any()
    unused = {name for name, x in classifier.named_parameters() if not x.requires_grad}
    assert unused == {"transformer.softmax.bias"}
    classifier.zero_grad()


def test_the_folder_of_a_classifier_loads_again_and_as_what_it_was(
    transformers, classifier, folder, tmp_path, ids
):
    classifier.save_pretrained(tmp_path)
    again, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"]
    torch.testing.assert_close(again(ids).logits, classifier(ids).logits)
    writer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    # As far as pieces of 16 tokens, which it was saved with, see as much.
    torch.testing.assert_close(writer(ids[:, :64]).logits, before(ids[:, :64]).logits)


def test_pipelines_judge(transformers, classifier, tokenizer, texts):
    judge = transformers.pipeline("text-classification", model=classifier, tokenizer=tokenizer)
    alone = [judge(text)[0] for text in texts]
    many = judge(texts, batch_size=4)
    assert [x["label"] for x in many] == [x["label"] for x in alone]
    assert [x["score"] for x in many] == pytest.approx([x["score"] for x in alone], abs=1e-5)


def test_an_empty_document_is_refused(classifier, ids):
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ValueError, match="row 1 has no token"):
        classifier(ids, attention_mask=mask)
