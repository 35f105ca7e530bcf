"""Answers in long texts: who knows the rule is right, and the score is that of BABILong."""

import re
from pathlib import Path

import pytest

from transformer_xl.config import ModelConfig
from transformer_xl.data import train_vocab
from transformer_xl.model import build_model
from transformer_xl.studies.babi import Books, babi_questions, book_files, evaluation_samples
from transformer_xl.studies.babilong import answer_samples, is_right

VOCAB = train_vocab("bytes", [])
ASKED = re.compile(rb"Where is (\w+)\?\t([ \w]*)$")


def oracle(known: list[int]) -> int:
    """Write where somebody went last."""
    text = bytes(known)
    found = ASKED.search(text[-40:])
    if found is None:
        return ord(".")
    went = re.findall(rb"%s went to the (\w+)\." % found[1], text)
    answer = b" %s." % (went[-1] if went else b"nowhere")
    return answer[len(found[2])]


@pytest.fixture
def samples(babi_folder: Path, book_folder: Path):
    questions = babi_questions(babi_folder, "qa1", "test")
    books = Books(book_files(book_folder)["test"])
    return lambda length, n: evaluation_samples(questions, books, length, n)


def test_the_target_counts_as_part_of_the_first_sentence() -> None:
    for output, target, right in (
        ("bathroom", "bathroom", True),
        (" The Bathroom. Then more", "bathroom", True),
        (" garden. The bathroom.", "bathroom", False),
        ("", "bathroom", False),
        (" bath room.", "bathroom", False),
        (" milk,football.", "milk,football", True),
        (" football,milk.", "milk,football", False),
        (" Fred.", "Fred", True),
        ("nobody knows.", "no", True),
    ):
        assert is_right(output, target) == right, output


@pytest.mark.parametrize("length", [0, 400, 900])
def test_who_knows_the_rule_is_always_right(ruled, samples, length) -> None:
    model = ruled(oracle, vocab_size=256, mem_len=1000)
    found = answer_samples(model, VOCAB, samples(length, 9), batch_size=4, segment_len=97)
    assert found.accuracy == 1
    assert found.n_samples == 9
    assert not length or length - 60 < found.n_tokens <= length + 1
    assert found.outputs == tuple(f" {x.answer}" for x in samples(length, 9))


def test_facts_beyond_the_memory_are_not_found(ruled, samples) -> None:
    model = ruled(oracle, vocab_size=256, mem_len=60)
    found = answer_samples(model, VOCAB, samples(400, 9), segment_len=1)
    assert found.accuracy < 0.7
    assert " nowhere" in found.outputs


def test_who_always_says_the_same_is_right_as_often_as_the_answer(ruled, samples) -> None:
    def hall(known: list[int]) -> int:
        written = bytes(known).rpartition(b"\t")[2]
        return b" hall."[len(written)] if len(written) < 6 else 0

    chosen = samples(0, 30)
    found = answer_samples(ruled(hall, vocab_size=256, mem_len=500), VOCAB, chosen)
    share = [x.answer for x in chosen].count("hall") / 30
    assert found.accuracy == share <= found.most_frequent


def test_samples_that_are_read_together_get_the_same_answers(samples, small) -> None:
    sizes = {"vocab_size": 256, "n_layer": 2, "d_model": 16, "mem_len": 20}
    # Tied, the most likely token would be the last one again and again.
    model = small(ModelConfig(**sizes, init_std=0.5, tie_embeddings=False))
    chosen = [*samples(0, 4), *samples(150, 1)]
    found = [
        answer_samples(model, VOCAB, chosen, batch_size=n, segment_len=64, answer_len=5)
        for n in (1, 2, 5)
    ]
    assert found[0] == found[1] == found[2]
    assert len({*found[0].outputs}) > 1
    assert model.training


def test_a_segment_has_no_effect_where_all_tokens_see_as_many(samples) -> None:
    # What a GPT without a memory in training is measured with.
    config = ModelConfig(
        kind="gpt", vocab_size=256, n_layer=2, n_head=2, d_model=16, mem_len=0, init_std=0.5
    )
    model, chosen = build_model(config).double(), samples(150, 2)
    found = [
        answer_samples(
            model, VOCAB, chosen, segment_len=n, mem_len=19, attn_len=20, answer_len=6
        ).outputs
        for n in (1, 7, 64)
    ]
    assert found[0] == found[1] == found[2]
    assert len({*found[0]}) > 1


def test_what_does_not_fit_is_named(ruled, samples) -> None:
    model = ruled(oracle, vocab_size=300, mem_len=5)
    with pytest.raises(ValueError, match="vocabulary of 300 tokens and this one has 256"):
        answer_samples(model, VOCAB, samples(0, 1))
    model = ruled(oracle, vocab_size=256, mem_len=5)
    with pytest.raises(ValueError, match="no samples"):
        answer_samples(model, VOCAB, [])
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        answer_samples(model, VOCAB, samples(0, 1), batch_size=0)
    with pytest.raises(ValueError, match="mem_len=0: nothing is remembered"):
        answer_samples(ruled(oracle, vocab_size=256, mem_len=0), VOCAB, samples(0, 1))
