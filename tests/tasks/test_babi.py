"""Stories and questions of bAbI: the facts before a question, and splits without common ones."""

from pathlib import Path

import pytest

from transformer_xl.tasks.babi import BABI_TASKS, Question, babi_stories, read_babi

SPLITS = ("train", "valid", "test")


def babi_questions(folder, task, split):
    return [x for story in babi_stories(folder, task)[split] for x in story]


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
    with pytest.raises(FileNotFoundError, match=r"has no qa1_\*_train.txt or .txt.gz"):
        babi_questions(tmp_path, "qa1", "train")


@pytest.mark.slow
def test_the_published_tasks_are_complete(shared: Path) -> None:
    folder = shared / "data" / "babi" / "en"
    for task in BABI_TASKS:
        train, valid, test = (babi_questions(folder, task, split) for split in SPLITS)
        assert len(test) == 1000
        assert not {*train, *valid} & {*test}
        assert len(train) > 750
        assert len(valid) > 70
