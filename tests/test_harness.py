"""lm-evaluation-harness with the memory, on local tasks, without a network."""

import json
import math
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from transformer_xl.config import ModelConfig
from transformer_xl.data.making_vocab import train_vocab
from transformer_xl.data.vocab import Vocab, VocabKind
from transformer_xl.inference.evaluate import score
from transformer_xl.inference.generate import Sampling, generate
from transformer_xl.model import TransformerXL

# Read when the libraries are imported.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def harness() -> Any:
    pytest.importorskip("lm_eval", reason="needs pip install 'transformer-xl[eval]'")
    return import_module("transformer_xl.interop.harness").TransformerXLHarness


@pytest.fixture(scope="module")
def vocab(toy_text: Path) -> Vocab:
    return train_vocab("chars", [toy_text.read_text()])


@pytest.fixture(scope="module")
def folder(vocab: Vocab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=len(vocab), n_layer=2, n_head=2, d_model=16, d_inner=32, mem_len=64, dropout=0.0
    )
    model = TransformerXL(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    folder = tmp_path_factory.mktemp("harness")
    model.save_pretrained(folder, vocab)
    return folder


@pytest.fixture
def model(folder: Path) -> TransformerXL:
    return TransformerXL.from_pretrained(folder)


def _asked(*arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, each, number) for number, each in enumerate(arguments)]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_document_is_read_once_and_scored_as_by_our_own_score(
    harness: Any,
    folder: Path,
    model: TransformerXL,
    vocab: Vocab,
    toy_text: Path,
    batch_size: int,
) -> None:
    text = toy_text.read_text()
    documents = [text[:700], "", text[900:950], text[2000:2300], "a"]
    lm = harness(str(folder), batch_size=batch_size, segment_len=32)
    found = lm.loglikelihood_rolling(_asked(*((document,) for document in documents)))
    for total, document in zip(found, documents, strict=True):
        ids = vocab.encode("\n" + document)
        own = math.fsum(x for x in score(model, ids, segment_len=32) if x is not None)
        assert total == pytest.approx(own, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_continuations_are_scored_as_if_each_were_read_alone(
    harness: Any, folder: Path, model: TransformerXL, vocab: Vocab, batch_size: int
) -> None:
    contexts = ("the cat saw", "a dog", "", "the dog and the cat ran to the sea and")
    pairs = [(c, choice) for choice in (" a dog", " the sea.", " ran") for c in contexts]
    lm = harness(str(folder), batch_size=batch_size, segment_len=8)
    # Greedy continuations are found to be greedy.
    likeliest = [
        (
            c,
            vocab.decode(
                [*generate(model, vocab.encode(c), length=4, sampling=Sampling(temperature=0))]
            ),
        )
        for c in contexts[:2]
    ]
    found = lm.loglikelihood(_asked(*pairs, *likeliest))
    for (context, choice), (total, is_greedy) in zip([*pairs, *likeliest], found, strict=True):
        ids = vocab.encode((context or "\n") + choice)
        n = len(vocab.encode(choice))
        own = [x for x in score(model, ids, segment_len=1) if x is not None][-n:]
        assert total == pytest.approx(math.fsum(own), rel=1e-4)
        assert is_greedy == ((context, choice) in likeliest)


PAIRS = [
    ("the bec", "ause"),  # A token spans both.
    ("it was bec", "ause"),
    ("because:", "\n    return"),
    ("because:", "return"),
    ("because:\n    ", "return"),
    ("the ", "cat"),
    ("voil", "\u00e0"),
    ("bec", "ause"),
    ("", "\n"),
    ("", "the"),
]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
def test_a_continuation_is_the_rest_of_the_whole(
    harness: Any, tmp_path: Path, kind: VocabKind
) -> None:
    text = "it was because:\n    return the cat voil\u00e0\n" * 9
    vocab = train_vocab(kind, [text], {"bytes": None, "bpe": 320}.get(kind), ["unknown"])
    torch.manual_seed(2)
    config = ModelConfig(vocab_size=len(vocab), n_layer=1, n_head=2, d_model=8, d_inner=8)
    model = TransformerXL(config).eval()
    model.save_pretrained(tmp_path, vocab)
    lm = harness(str(tmp_path), batch_size=2)
    assert lm.eot_token_id == vocab.start_id
    found = lm.loglikelihood(_asked(*PAIRS))
    for (context, rest), (total, _) in zip(PAIRS, found, strict=True):
        first, whole = vocab.encode(context), vocab.encode(context + rest)
        n = next((n for n, x in enumerate(first) if x != whole[n]), len(first))
        if n == len(whole):
            # Two unknown words, of which one begins with the other.
            whole = first + vocab.encode(rest)
        read = whole if n else [vocab.start_id, *whole]
        own = [x for x in score(model, read) if x is not None][n - len(whole) :]
        assert total == pytest.approx(math.fsum(own), rel=1e-4)
        assert total < 0.0
    # The one that spells the next token has another probability than the others.
    assert len({x for x, _ in found[2:4]}) == 2
    if kind == "bpe":
        # A token does span both.
        assert len(vocab.encode("the because")) < len(vocab.encode("the bec"))
    for empty in ("", " ") if kind == "words" else ("",):
        for context in ("the", ""):
            with pytest.raises(ValueError, match=f"'{empty}' has no token in the {kind} vocab"):
                lm.loglikelihood(_asked(("the", "cat"), (context, empty)))


def test_texts_are_written_until_a_string_comes(
    harness: Any, folder: Path, model: TransformerXL, vocab: Vocab
) -> None:
    prompts = ("the cat saw", "a dog", "to")
    own = [
        vocab.decode(
            [*generate(model, vocab.encode(p), length=12, sampling=Sampling(temperature=0))]
        )
        for p in prompts
    ]
    stop = own[0][3]
    lm = harness(str(folder), batch_size=2)
    for until in ([], [stop]):
        settings = {"until": until, "max_gen_toks": 12, "do_sample": False}
        found = lm.generate_until(_asked(*((prompt, settings) for prompt in prompts)))
        assert found == [text.split(stop)[0] if until else text for text in own]
    drawn = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 2.0}
    first, second = (lm.generate_until(_asked(("the", drawn))) for _ in range(2))
    assert first == second


@pytest.fixture
def tasks(tmp_path: Path, toy_text: Path) -> Path:
    """Two tasks in files: a perplexity, and a choice."""
    text = toy_text.read_text()
    data = {
        "roll": [{"text": text[:400]}, {"text": text[1000:1150]}],
        "choose": [
            {"q": "the cat saw a", "choices": ["dog", "sea"], "answer": n % 2} for n in range(4)
        ],
    }
    said = {
        "roll": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
        },
        "choose": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{q}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
    }
    for name, task in said.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in data[name]))
        task |= {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / f"{name}.jsonl")}},
            "test_split": "test",
            "metadata": {"version": 1},
        }
        # What is JSON is YAML.
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    return tmp_path


@pytest.mark.slow
def test_the_harness_runs_local_tasks(
    harness: Any,
    folder: Path,
    model: TransformerXL,
    vocab: Vocab,
    toy_text: Path,
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    del harness
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tasks / "cache"))
    results = simple_evaluate(
        model="transformer-xl",
        model_args=f"pretrained={folder},segment_len=64",
        tasks=["roll", "choose"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=2,
        device="cpu",
        bootstrap_iters=0,
    )["results"]
    text = toy_text.read_text()
    documents = text[:400], text[1000:1150]
    nats = -sum(
        math.fsum(x for x in score(model, vocab.encode("\n" + text), segment_len=64) if x)
        for text in documents
    )
    bits = nats / math.log(2) / sum(len(document.encode()) for document in documents)
    assert results["roll"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert results["choose"]["acc,none"] == 0.5


def test_wrong_settings_are_refused(harness: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size='auto'"):
        harness(str(folder), batch_size="auto")
    with pytest.raises(ValueError, match="segment_len=0"):
        harness(str(folder), segment_len=0)
    with pytest.raises(FileNotFoundError):
        harness(str(tmp_path))
    config = ModelConfig(n_features=2, n_mixtures=3, n_layer=1, n_head=1, d_model=8, d_inner=8)
    TransformerXL(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the model reads real vectors"):
        harness(str(tmp_path))
