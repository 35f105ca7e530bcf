"""Documents of any length: read whole, whatever stands beside them."""

import pytest
import torch
from torch.nn import functional as F

from transformer_xl.config import ModelConfig
from transformer_xl.inference.classify import Fit, LongDocumentClassifier, accuracy, fit
from transformer_xl.model import TransformerXL

_LENGTHS = (23, 1, 8, 16, 7, 40)
pytestmark = pytest.mark.usefixtures("one_thread")


def _classifier(segment_len=8, **settings):
    torch.manual_seed(0)
    config = {"vocab_size": 20, "n_layer": 2, "n_head": 2, "d_model": 16, "d_inner": 32}
    config |= {"mem_len": 8, "dropout": 0.0, "init_std": 0.3, **settings}
    found = LongDocumentClassifier(TransformerXL(ModelConfig(**config)), 3, segment_len=segment_len)
    torch.nn.init.normal_(found.head.weight)
    return found.double().eval()


def _documents():
    return [torch.randint(20, (length,)) for length in _LENGTHS]


def test_a_document_is_classified_as_it_would_be_alone():
    classifier, documents = _classifier(), _documents()
    together = classifier(documents)
    alone = torch.cat([classifier([document]) for document in documents])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(classifier(documents), alone, rtol=1e-10, atol=1e-10)


def test_where_a_document_is_cut_does_not_matter():
    documents = _documents()
    whole, cut = (_classifier(n, mem_len=40)(documents) for n in (40, 8))
    torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-10)


def test_every_segment_is_read_and_said():
    readings = list(_classifier().read(_documents()))
    assert [len(rows) for rows, _, _ in readings] == [6, 3, 2, 1, 1]
    ended = torch.cat([rows[is_whole] for rows, _, is_whole in readings])
    assert ended.tolist() == [1, 2, 4, 3, 0, 5]


@pytest.mark.parametrize(("mem_len", "reaches"), [(8, True), (0, False)])
def test_the_beginning_counts_only_with_a_memory(mem_len, reaches):
    classifier = _classifier(mem_len=mem_len)
    document = torch.randint(20, (16,))
    other = document.clone()
    other[0] = (document[0] + 1) % 20
    found = classifier([document, other])
    assert torch.equal(found[0], found[1]) != reaches


def test_gradients_stay_in_their_segment():
    classifier = _classifier()
    document = torch.arange(16)
    *_, last = classifier.read([document])
    F.cross_entropy(last.logits, torch.tensor([1])).backward()
    weight = classifier.model.embedding.weight.grad
    assert weight is not None
    assert not weight[:8].any()
    assert weight[8:16].any(1).all()


def _marked(n, seed=1, lengths=(17, 33)):
    """The class is told by a mark at the start; the rest is noise."""
    generator = torch.Generator().manual_seed(seed)
    documents, labels = [], torch.randint(3, (n,), generator=generator)
    for label in labels.tolist():
        length = int(torch.randint(*lengths, (1,), generator=generator))
        document = torch.randint(3, 20, (length,), generator=generator)
        document[int(torch.randint(0, 5, (1,), generator=generator))] = label
        documents.append(document)
    return documents, labels


@pytest.mark.slow
def test_what_is_far_back_is_learned():
    settings = {"d_model": 32, "d_inner": 64, "init_std": 0.1, "mem_len": 8, "dropout": 0.0}
    settings |= {"enhanced_recurrence": True, "norm_first": True, "final_norm": True}
    torch.manual_seed(0)
    model = TransformerXL(ModelConfig(vocab_size=20, n_layer=2, n_head=2, **settings))
    classifier = LongDocumentClassifier(model, 3, segment_len=8)
    losses: list[float] = []
    fit(
        classifier,
        *_marked(800),
        Fit(epochs=4, batch_size=32, lr=5e-3),
        lambda epoch, loss: losses.append(loss),
    )
    assert losses[3] < losses[0] / 5
    # Of three classes, and none of the last segments holds a mark.
    assert accuracy(classifier, *_marked(200, seed=2)) > 0.95


def test_fitting_repeats_itself_and_rests():
    documents, labels = _marked(12)
    both = [_classifier().float() for _ in range(2)]
    for classifier in both:
        fit(classifier, documents, labels, Fit(epochs=2, batch_size=5))
        assert not classifier.training
    for a, b in zip(*(x.parameters() for x in both), strict=True):
        assert torch.equal(a, b)


def test_labels_may_be_a_list():
    documents, labels = _documents(), [n % 2 for n in range(len(_documents()))]
    said = []
    for given in (labels, torch.tensor(labels)):
        classifier = _classifier()
        fit(classifier, documents, given, Fit(epochs=1), lambda _, loss: said.append(loss))
        said.append(accuracy(classifier, documents, given))
    assert said[:2] == said[2:]
    for wrong in (-1, 9):
        with pytest.raises(ValueError, match=f"label {wrong} is no class"):
            fit(_classifier(), documents[:1], [wrong])


def test_documents_with_the_label_minus_100_teach_nothing():
    documents, labels = _documents(), torch.tensor([0, 1, -100, 2, -100, 1])
    labelled = [n for n, label in enumerate(labels.tolist()) if label != -100]
    found = []
    for rows in ([*range(6)], labelled):
        some, own = [documents[row] for row in rows], labels[rows]
        classifier, losses = _classifier().float(), []
        settings = Fit(epochs=1, batch_size=6)
        fit(classifier, some, own, settings, lambda _, x, losses=losses: losses.append(x))
        found.append((losses[0], accuracy(classifier, some, own), classifier.head.weight))
    torch.testing.assert_close(found[0], found[1])


def test_what_cannot_be_is_named():
    classifier = _classifier()
    with pytest.raises(ValueError, match="document 1 is empty"):
        classifier([torch.tensor([1]), torch.empty(0, dtype=torch.int64)])
    with pytest.raises(ValueError, match="n_classes=1"):
        LongDocumentClassifier(classifier.model, 1)
    with pytest.raises(ValueError, match="segment_len=0"):
        LongDocumentClassifier(classifier.model, 2, segment_len=0)
    with pytest.raises(ValueError, match="every_segment=2"):
        Fit(every_segment=2)
    for documents, labels, message in (
        (_documents(), [-100] * 6, "all labels are -100: one at least must be a class"),
        (_documents(), [1] * 7, "6 documents and 7 labels: one for each"),
        ([], [], "0 documents and 0 labels"),
    ):
        for measured in (fit, accuracy):
            with pytest.raises(ValueError, match=message):
                measured(classifier, documents, labels)
