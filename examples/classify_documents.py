"""A classifier of your own documents, of any length: learn, measure what the memory does, use it.

    python examples/classify_documents.py train letters/ --out letters-model
    python examples/classify_documents.py train letters/ --out letters-model --begin runs/demo
    python examples/classify_documents.py predict letters-model new/*.txt

`letters/` has a folder for each class, and in it its documents, as UTF-8 text:

    letters/invoice/1.txt  letters/invoice/2.txt  ...  letters/reminder/1.txt  ...

Every fifth document of each class is kept for the measurement, and two classifiers of the same size
are trained on the others alike: one with the memory, one that reads every segment by itself and
says the class at the last. The first is saved, in a folder for `AutoModelForSequenceClassification`
and `pipeline("text-classification")` of transformers. Needs `pip install 'transformer-xl[hf]'`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging

# Makes transformers read and write our folders.
from transformer_xl import hf
from transformer_xl.data import Vocab, load_vocab, train_vocab
from transformer_xl.inference.classify import Fit, LongDocumentClassifier, accuracy, fit
from transformer_xl.model.pretrained import find_model_folder

KEPT_APART = 5
FRESH: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "d_model": 64,
    "d_inner": 128,
    "norm_first": True,
    "final_norm": True,
    "init_std": 0.1,
    "dropout": 0.0,
    # Without it, what is told far back is lost after n_layer segments.
    "enhanced_recurrence": True,
}
"""The model that begins without any training; it reads bytes."""


def documents(folder: Path, vocab: Vocab) -> tuple[list[str], list[Tensor], list[int]]:
    """Read the documents of every class; return the classes, the documents and their labels.

    Raises:
        SystemExit: There are fewer than two classes, or too few documents; one is empty or no text.
    """
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if len(classes) < 2:
        raise SystemExit(f"{folder} has {len(classes)} folders: there must be one for each class")
    texts, labels = [], []
    for label, name in enumerate(classes):
        files = sorted(path for path in (folder / name).iterdir() if path.is_file())
        if len(files) < KEPT_APART:
            raise SystemExit(
                f"{folder / name} has {len(files)} documents: at least {KEPT_APART}, of which one "
                "is kept for the measurement"
            )
        texts += [tokens_of(path, vocab) for path in files]
        labels += [label] * len(files)
    return classes, texts, labels


def tokens_of(path: Path, vocab: Vocab) -> Tensor:
    """Read a document.

    Raises:
        SystemExit: It is empty, or no text in UTF-8.
    """
    try:
        tokens = vocab.encode(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path} is no UTF-8 at byte {error.start}: convert it") from None
    if not len(tokens):
        raise SystemExit(f"{path} is empty: take it away")
    return torch.as_tensor(tokens)


def beginning(
    begin: Path | None, vocab: Vocab, classes: Sequence[str], segment_len: int, mem_len: int
) -> Any:
    """Return a classifier of transformers that has not learned to classify yet."""
    settings: dict[str, Any] = {
        "segment_len": segment_len,
        "mem_len": mem_len,
        "id2label": dict(enumerate(classes)),
        "label2id": {name: n for n, name in enumerate(classes)},
    }
    if begin is not None:
        folder = find_model_folder(begin)
        return AutoModelForSequenceClassification.from_pretrained(folder, **settings)
    config = hf.TransformerXLConfig(vocab_size=len(vocab), **FRESH, **settings)
    return AutoModelForSequenceClassification.from_config(config)


def reader(model: Any) -> LongDocumentClassifier:
    """Return what learns: the model and its head as they are, read segment by segment."""
    config = model.config
    classifier = LongDocumentClassifier(
        model.transformer, model.num_labels, segment_len=config.segment_len
    )
    classifier.head = model.score
    return classifier


def train(arguments: argparse.Namespace) -> None:
    """Train with the memory and without, measure both, and save the first."""
    if arguments.out.exists() and any(arguments.out.iterdir()):
        raise SystemExit(f"{arguments.out} exists and is not empty: choose another folder")
    begin = arguments.begin
    vocab = load_vocab(find_model_folder(begin)) if begin else train_vocab("bytes", [])
    classes, texts, labels = documents(arguments.folder, vocab)
    n_before = [labels[:place].count(label) for place, label in enumerate(labels)]
    held = [place for place, n in enumerate(n_before) if n % KEPT_APART == KEPT_APART - 1]
    learned = sorted({*range(len(texts))} - {*held})
    lengths = sorted(len(text) for text in texts)
    print(
        f"{len(classes)} classes, {len(learned)} documents to learn from and {len(held)} to measure"
        f" with; the longest has {lengths[-1]:,} tokens, one in the middle "
        f"{lengths[len(lengths) // 2]:,}, a segment {arguments.segment_len:,}"
    )
    settings = Fit(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        lr=arguments.lr if arguments.lr else 5e-4 if begin else 5e-3,
        seed=arguments.seed,
    )
    found = {}
    for way, mem_len in (("without the memory", 0), ("with the memory", arguments.segment_len)):
        torch.manual_seed(arguments.seed)
        model = beginning(begin, vocab, classes, arguments.segment_len, mem_len)
        classifier = reader(model)
        fit(
            classifier,
            [texts[place] for place in learned],
            [labels[place] for place in learned],
            settings,
            lambda epoch, loss, way=way: print(f"{way}, epoch {epoch}: loss {loss:.3f}"),
        )
        found[way] = accuracy(
            classifier, [texts[place] for place in held], [labels[place] for place in held]
        )
    # The one with the memory came last.
    model.save_pretrained(arguments.out)
    vocab.save(arguments.out)
    for way, share in found.items():
        print(f"{share:7.1%} of {len(held)} documents are told right {way}")
    print(f"{arguments.out} is written; python {__file__} predict {arguments.out} FILE ... uses it")


@torch.no_grad()
def predict(arguments: argparse.Namespace) -> None:
    """Print a line of JSON for every file: its class, and the probabilities of all."""
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model).eval()
    vocab = load_vocab(arguments.model)
    for path in arguments.files:
        shares = model(tokens_of(path, vocab)[None]).logits.softmax(-1)[0].tolist()
        names = [model.config.id2label[n] for n in range(len(shares))]
        by_class = dict(zip(names, shares, strict=True))
        label = max(by_class, key=by_class.__getitem__)
        print(json.dumps({"file": str(path), "label": label, "probabilities": by_class}))


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    learn = verbs.add_parser("train", help="learn from a folder of documents")
    learn.add_argument("folder", type=Path, help="holds a folder of documents for each class")
    learn.add_argument("--out", type=Path, required=True, help="a new folder for the classifier")
    learn.add_argument("--begin", type=Path, help="a trained model or run folder to begin with")
    learn.add_argument("--segment_len", type=int, default=128, help="tokens read at once")
    learn.add_argument("--epochs", type=int, default=10, help="how often each document is read")
    learn.add_argument("--batch_size", type=int, default=8, help="documents side by side")
    learn.add_argument("--lr", type=float, help="largest learning rate; 0.005, with --begin 0.0005")
    learn.add_argument("--seed", type=int, default=0)
    learn.set_defaults(run=train)
    use = verbs.add_parser("predict", help="say the classes of files")
    use.add_argument("model", type=Path, help="what train has written")
    use.add_argument("files", type=Path, nargs="+")
    use.set_defaults(run=predict)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
