"""What tests of tasks share: files in the format of bAbI."""

import gzip
import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def babi_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in the format of bAbI: ``qa1``, and ``qa3`` with longer stories, compressed.

    The first story of each test file is in the training file, too.
    """
    folder, draw = tmp_path_factory.mktemp("babi"), random.Random(0)

    def story(n_facts: int) -> str:
        lines, where = [], {}
        for _ in range(n_facts // 2):
            for _ in range(2):
                who, place = (
                    draw.choice(["Mary", "John", "Ann"]),
                    draw.choice(["hall", "park", "bar"]),
                )
                where[who] = place
                lines.append(f"{who} went to the {place}.")
            asked = draw.choice([*where])
            lines.append(f"Where is {asked}? \t{where[asked]}\t1")
        return "".join(f"{number} {line}\n" for number, line in enumerate(lines, 1))

    for name, n_facts in (("qa1_one-fact", 10), ("qa3_three-facts", 60)):
        tests = [story(n_facts) for _ in range(8)]
        trained = [story(n_facts) for _ in range(19)]
        trained.insert(4, tests[0])
        (folder / f"{name}_train.txt").write_text("".join(trained))
        with gzip.open(folder / f"{name}_test.txt.gz", "wt") as file:
            file.write("".join(tests))
    return folder
