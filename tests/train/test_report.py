"""The report shows a run, trusts no text that it shows, and needs nothing but itself."""

import json
import math
import re
import sys
from html.parser import HTMLParser

import pytest

from transformer_xl.train import figures
from transformer_xl.train.report import write_report

HOSTILE = "</pre><script>alert('1')</script> & \x00\x1b[31m \ud800 $body {x}"


@pytest.fixture
def with_matplotlib(whole_reports):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")


@pytest.fixture
def without_matplotlib(whole_reports, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def result(mem_len, bits_per_byte):
    about = {"split": "test", "mem_len": mem_len, "tokens_per_second": 1000.0}
    return {
        **about,
        "nll": 1.5,
        "ppl": 4.48,
        "bits_per_token": 2.16,
        "bits_per_byte": bits_per_byte,
    }


def write_json(path, content):
    path.write_text(json.dumps(content))


@pytest.fixture
def run_dir(tmp_path):
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()
    speeds = {"lr": 1e-3, "tokens_per_second": 5e4}
    records = [
        {"kind": "train", "step": step, "bits_per_token": 8 / step, **speeds}
        for step in range(1, 101)
    ]
    records += [{"kind": "valid", "step": step, "bits_per_token": 9 / step} for step in (50, 100)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    curve = [result(256, 1.75), result(0, 2.25), result(64, 1.8)]
    sizes = {"gzip_bits_per_byte": 2.0, "xz_bits_per_byte": 1.5}
    write_json(run_dir / "results.json", {"test": curve[2], "memory_curve": curve, **sizes})
    sample = {"prompt": "def f(", "text": "x):\n  pass", "settings": {"seed": 7}}
    write_json(run_dir / "sample.json", sample)
    (run_dir / "recipe.toml").write_text('[data]\nname = "shakespeare"\n[model]\nmem_len = 64\n')
    write_json(run_dir / "environment.json", {"torch": "2.13"})
    return run_dir


class Page(HTMLParser):
    """Reads a page and fails where its elements are not closed in order."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self):
        return "".join(self.texts)


def read_page(run_dir):
    assert write_report(run_dir) == run_dir / "report.html"
    return Page((run_dir / "report.html").read_text("utf-8"))


@pytest.mark.usefixtures("with_matplotlib")
def test_a_complete_run_shows_all_its_parts(run_dir):
    page = read_page(run_dir)
    assert page.tags.count("svg") == 2
    for part in (
        "my-run",
        "shakespeare · memory 64",
        "1.800 bits for a byte of unseen text: 10% less than gzip -9 and 20% more than xz -9e.",
        "bits per token, best validation, step 100",
        "memory in training",
        "def f(x):\n  pass",
        "seed 7",
        "mem_len = 64",
        '"torch": "2.13"',
    ):
        assert part in page.text
    # It asks for nothing outside itself.
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for name, value in page.attributes:
        if name in {"src", "href", "xlink:href"}:
            assert value.startswith("#")
    html = (run_dir / "report.html").read_text()
    assert "@import" not in html
    assert re.findall(r"url\((?!#)", html) == []
    # No two elements share an id, and each reference has its target.
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for _, value in page.attributes:
        for target in re.findall(r"^#(.*)$|url\(#(.*?)\)", value or ""):
            assert "".join(target) in ids
    # Figures follow the colors of the page.
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) <= {"#ffffff", "#000000"}
    used = set(re.findall(r"var\(--(\w+)\)", drawings))
    assert used >= {"train", "valid", "memory", "gzip", "xz"}
    assert used <= set(re.findall(r"--(\w+):", html))
    # The same run gives the same bytes.
    assert write_report(run_dir).read_text() == html


def test_the_memory_table_grows_and_marks_the_training_length(run_dir):
    write_report(run_dir)
    html = (run_dir / "report.html").read_text()
    lengths = re.findall(r"<tr([^>]*)>\s*<td>([^<]*)</td>\s*<td>(\d\.\d{4})</td>", html)
    assert [row for row in lengths if row[2] in {"2.2500", "1.8000", "1.7500"}] == [
        ("", "0", "2.2500"),
        (' class="marked"', "64", "1.8000"),
        ("", "256", "1.7500"),
    ]


@pytest.mark.usefixtures("with_matplotlib")
def test_hostile_text_stays_text(run_dir):
    hostile = result(0, 2.0) | {"split": HOSTILE}
    write_json(run_dir / "results.json", {"test": hostile, "memory_curve": [hostile]})
    sample = {"prompt": HOSTILE, "text": HOSTILE, "settings": {HOSTILE: HOSTILE}}
    write_json(run_dir / "sample.json", sample)
    write_json(run_dir / "environment.json", {HOSTILE: HOSTILE})
    toml_string = json.dumps(HOSTILE.replace("\ud800", ""))
    (run_dir / "recipe.toml").write_text(f"[data]\nname = {toml_string}\n")
    run_dir = run_dir.rename(run_dir.parent / "a<script>&b")
    page = read_page(run_dir)
    assert "script" not in page.tags
    assert "alert('1')" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f]", page.text)


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_tables_are_there_and_how_to_install_it(run_dir):
    page = read_page(run_dir)
    assert "svg" not in page.tags
    assert page.tags.count("table") == 1
    assert "pip install 'transformer-xl[plot]'" in page.text


def test_numbers_are_finite_and_bits_are_converted_from_older_names():
    record = {"a": 1, "b": math.nan, "c": math.inf, "d": "2", "e": True, "f": None, "g": 10**400}
    assert [figures.number(record, name) for name in "abcdefgh"] == [1.0, *[None] * 7]
    for record, bits in (
        ({"bits_per_token": 3.0, "bits": 2.0, "nll": 1.0}, 3.0),
        ({"bits": 3.0, "nll": 1.0}, 3.0),
        ({"nll": 2 * math.log(2)}, 2.0),
        ({"bpc": 1.5}, 1.5),
        ({}, None),
    ):
        assert figures.number(record, "bits_per_token") == bits, record
