"""bAbI questions in books: all facts, in order; the length that was asked for; nothing twice."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from transformer_xl.studies.babi import (
    BABI_TASKS,
    Books,
    Question,
    babi_questions,
    book_files,
    book_sentences,
    evaluation_samples,
    fitting,
    hide,
    read_babi,
    training_samples,
    utf8_size,
    write_samples,
)

SPLITS = ("train", "valid", "test")


@pytest.fixture
def books(book_folder) -> dict[str, Books]:
    return {split: Books(paths) for split, paths in book_files(book_folder).items()}


def test_a_question_has_the_facts_of_its_story_before_it(tmp_path: Path) -> None:
    path = tmp_path / "qa1_x_train.txt"
    path.write_text(
        "1 Mary moved to the hall.\n2 John went out.\n3 Where is Mary? \thall\t1\n4 Mary sat.\n"
        "5 Where is John?\tout\t2\n1 Ann sat.\n2 What did Ann carry?\tmilk,apple\t1\n"
    )
    facts = ("Mary moved to the hall.", "John went out.")
    assert read_babi(path) == [
        [
            Question(facts, "Where is Mary?", "hall"),
            Question((*facts, "Mary sat."), "Where is John?", "out"),
        ],
        [Question(("Ann sat.",), "What did Ann carry?", "milk,apple")],
    ]


@pytest.mark.parametrize("text", ["Mary sat.\n", "2 Mary sat.\n", "1 Mary sat.\n\n"])
def test_a_line_that_is_none_of_babi_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "qa1_x_train.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"qa1_x_train.txt: line [12], '.*', is none of bAbI"):
        read_babi(path)


@pytest.mark.parametrize("task", ["qa1", "qa3"])
def test_no_question_is_in_two_splits(task: str, babi_folder: Path) -> None:
    train, valid, test = (set(babi_questions(babi_folder, task, split)) for split in SPLITS)
    assert train
    assert valid
    assert not train & valid
    assert not (train | valid) & test
    # The story that both files have is left out of training, and all others are there.
    in_file = {
        x for path in babi_folder.glob(f"{task}_*_train*") for y in read_babi(path) for x in y
    }
    assert in_file & test
    assert train | valid == in_file - test


def test_qa10_is_not_taken_for_qa1(babi_folder: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / f"qa10_x_{part}.txt").write_text("1 Ann sat.\n2 Who?\tAnn\t1\n")
    with pytest.raises(FileNotFoundError, match=r"has no qa1_\*_test.txt or .txt.gz"):
        babi_questions(tmp_path, "qa1", "train")


def test_sentences_are_whole_and_on_one_line() -> None:
    text = (
        "CHAPTER I\n\nMr. Oak, aged\n40, slept. \"Wake up!\" cried J. Elm.  'Why?'\nHe said "
        "so... and left.\n\n(It rained.) Then\n\n"
    )
    assert book_sentences(text) == [
        "Mr. Oak, aged 40, slept.",
        '"Wake up!" cried J. Elm.',
        "'Why?'",
        "He said so... and left.",
        "(It rained.)",
    ]


def test_each_book_is_in_one_split(book_folder: Path, books: dict[str, Books]) -> None:
    files = book_files(book_folder)
    names = {split: [path.name for path in paths] for split, paths in files.items()}
    assert names == {"train": ["8.txt", "9.txt"], "valid": ["70.txt"], "test": ["100.txt"]}
    sentences = [set(books[split].sentences) for split in SPLITS]
    assert sum(map(len, sentences)) == len(set.union(*sentences))


@pytest.mark.parametrize("length", [0, 500, 1000, 5000])
def test_all_facts_are_there_in_order_between_whole_sentences(length, babi_folder, books) -> None:
    questions, test = babi_questions(babi_folder, "qa1", "test"), books["test"]
    samples = evaluation_samples(questions, test, length, 30, seed=3)
    asked = set(questions)
    for sample in samples:
        facts = tuple(sample.sentences[place] for place in sample.facts)
        assert Question(facts, sample.question, sample.answer) in asked
        others = [x for n, x in enumerate(sample.sentences) if n not in sample.facts]
        if not length:
            assert not others
            continue
        # Sentences that follow one another in the books, the first after the last.
        cycle = test.sentences * 3
        assert any(
            cycle[n : n + len(others)] == others
            for n, x in enumerate(test.sentences)
            if x == others[0]
        )
        longest = max(len(x) + 1 for x in test.sentences)
        assert length - longest < utf8_size(sample.text) <= length
    if length == 5000:
        # The first fact is not always near the beginning, nor the last one near the end.
        places = np.array([[x.facts[0], x.facts[-1]] for x in samples]) / len(samples[0].sentences)
        assert places[:, 0].max() > 0.4
        assert places[:, 1].min() < 0.7


def test_lengths_are_those_of_the_vocabulary(babi_folder, book_folder) -> None:
    words = Books(book_files(book_folder)["test"], lambda text: len(text.split()))
    questions = babi_questions(babi_folder, "qa1", "test")
    longest = max(len(x.split()) for x in words.sentences)
    for sample in evaluation_samples(questions, words, 300, 20):
        assert 300 - longest < len(sample.text.split()) <= 300


def test_only_questions_whose_facts_fit_are_asked(babi_folder, books) -> None:
    questions = babi_questions(babi_folder, "qa3", "test")
    fit = fitting(questions, 400)
    assert 0 < len(fit) < len(questions) == len(fitting(questions, 0))
    samples = evaluation_samples(questions, books["test"], 400, len(questions))
    assert sorted((x.question, x.answer) for x in samples) == sorted(x[1:] for x in fit)
    draw = np.random.default_rng(0)
    rest = next(x for x in questions if x not in fit)
    with pytest.raises(ValueError, match=r"length=400 is less than the .* tokens of the facts"):
        hide(rest, books["test"], 400, draw)
    with pytest.raises(ValueError, match="no question has its facts in length=10 tokens"):
        evaluation_samples(questions, books["test"], 10, 5)


def test_the_same_seed_gives_the_same_samples_and_more_begin_with_the_same(
    babi_folder, books
) -> None:
    questions = babi_questions(babi_folder, "qa1", "test")
    few, more = (evaluation_samples(questions, books["test"], 700, n, seed=5) for n in (4, 9))
    assert more[:4] == few
    assert evaluation_samples(questions, books["test"], 700, 4, seed=6) != few
    assert len({(*x.facts, x.question, x.answer) for x in more}) > 1


def test_training_text_has_only_questions_and_books_for_training(
    babi_folder, books, tmp_path
) -> None:
    tasks = ("qa1", "qa3")
    questions = {task: babi_questions(babi_folder, task, "train") for task in tasks}
    known = {x for task in tasks for x in questions[task]}
    samples = training_samples(questions, books["train"], (0, 300, 2000))
    drawn = [next(samples) for _ in range(400)]
    for sample in drawn:
        facts = tuple(sample.sentences[place] for place in sample.facts)
        assert Question(facts, sample.question, sample.answer) in known
        others = {x for n, x in enumerate(sample.sentences) if n not in sample.facts}
        assert others <= set(books["train"].sentences)
        assert not others & set(books["test"].sentences)
    assert {len(x.facts) > 10 for x in drawn} == {True, False}
    paths, sizes = [tmp_path / "a", tmp_path / "b"], []
    for path, n in zip(paths, (3000, 9000), strict=True):
        again = training_samples(questions, books["train"], (0, 300, 2000))
        sizes.append(write_samples(path, n, again, books["train"]))
    short, long = (path.read_text() for path in paths)
    assert [len(short), len(long)] == sizes
    assert long.startswith(short)
    assert short.splitlines()[0] + "\n" == drawn[0].line
    assert drawn[0].line.endswith(f"{drawn[0].question}\t {drawn[0].answer}.\n")
    assert all(x.line.count("\t") == x.line.count("\n") == 1 for x in drawn)
    assert drawn[0].prompt == "\n" + drawn[0].line.removesuffix(f" {drawn[0].answer}.\n")


def test_a_length_that_is_named_more_often_is_drawn_more_often(babi_folder, books) -> None:
    questions = {"qa1": babi_questions(babi_folder, "qa1", "train")}
    samples = training_samples(questions, books["train"], (0, 900, 0, 0))
    without = sum(len(x.facts) == len(x.sentences) for x in islice(samples, 400))
    assert without == pytest.approx(300, abs=40)


def test_what_cannot_be_drawn_is_named(babi_folder, books, tmp_path) -> None:
    questions = {"qa3": babi_questions(babi_folder, "qa3", "train")}
    with pytest.raises(ValueError, match="no question of qa3 has its facts in 10 tokens"):
        training_samples(questions, books["train"], (5, 10))
    with pytest.raises(ValueError, match="seed=-1 must be at least 0"):
        training_samples(questions, books["train"], (0,), seed=-1)
    with pytest.raises(ValueError, match=r"questions=\{\}: give those"):
        training_samples({}, books["train"], (0,))
    with pytest.raises(FileNotFoundError, match="has 0 books"):
        book_files(tmp_path)


@pytest.mark.slow
def test_the_published_tasks_are_complete(shared: Path) -> None:
    folder = shared / "data" / "babi" / "en"
    for task in BABI_TASKS:
        train, valid, test = (babi_questions(folder, task, split) for split in SPLITS)
        assert len(test) == 1000
        assert not {*train, *valid} & {*test}
        assert len(train) > 750
        assert len(valid) > 70
