"""Where the time of the tests goes: tables of what pytest has printed with ``--durations=0``.

    PYTEST_ADDOPTS="--durations=0 --durations-min=0.02" make test > test.log
    python benchmarks/suite_times.py test.log

Each test counts with its setup and teardown. Imports and the collection of tests are in none.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

LINE = re.compile(r"([0-9.]+)s (?:call|setup|teardown) +tests/((\S+?)(?:/\S+)?\.py::.+?) *$")


def seconds(text: str) -> tuple[Counter[str], Counter[str]]:
    """Return the seconds of each test and of each folder of tests."""
    tests: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for found in filter(None, map(LINE.match, text.splitlines())):
        tests[found[2]] += float(found[1])
        folders[found[3].removesuffix(".py")] += float(found[1])
    return tests, folders


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("logs", nargs="+", type=Path, help="what pytest printed")
    parser.add_argument("--slowest", type=int, default=60, help="how many tests to list")
    given = parser.parse_args()
    for log in given.logs:
        text = log.read_text("utf-8", "replace")
        tests, folders = seconds(text)
        ends = re.findall(r"^=+ (\d.* in [0-9.]+s.*?) =+$", text, re.M)
        print(f"\n## {log.stem}\n\n{'; '.join(ends)}; {tests.total():,.0f} s in tests\n")
        for title, found in (("folder", folders), ("test", tests)):
            print(f"| s | {title} |\n|---:|---|")
            for name, total in found.most_common(given.slowest):
                shown = name.replace("|", "\\|")
                print(f"| {total:.2f} | {shown} |")
            print()


if __name__ == "__main__":
    main()
