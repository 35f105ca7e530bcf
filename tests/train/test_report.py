"""The report shows what exists, trusts nothing it shows, and needs nothing but itself."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from transformer_xl.config.files import replace_file
from transformer_xl.train import report
from transformer_xl.train.report import plot_curves, write_report

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
    return {
        "split": "test",
        "tokens": 1000,
        "nll": 1.5,
        "ppl": 4.48,
        "bits_per_token": 2.16,
        "bits_per_byte": bits_per_byte,
        "mem_len": mem_len,
        "segment_len": 64,
        "seconds": 1.0,
        "tokens_per_second": 1000.0,
    }


def write_json(path, content):
    path.write_text(json.dumps(content))


@pytest.fixture
def run_dir(tmp_path):
    run_dir = tmp_path / "my-run"
    run_dir.mkdir()
    records = [
        {
            "kind": "train",
            "step": step,
            "bits_per_token": 8 / step,
            "lr": 1e-3,
            "tokens_per_second": 5e4,
        }
        for step in range(1, 101)
    ]
    records += [{"kind": "valid", "step": step, "bits_per_token": 9 / step} for step in (50, 100)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_json(
        run_dir / "results.json",
        {
            "test": result(64, 1.8),
            "memory_curve": [result(256, 1.75), result(0, 2.25), result(64, 1.8)],
            "gzip_bits_per_byte": 2.0,
            "xz_bits_per_byte": 1.5,
        },
    )
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
        self.tags.append(tag)
        self.attributes += attrs
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
def test_a_whole_run_shows_all_its_parts(run_dir):
    page = read_page(run_dir)
    assert page.tags.count("svg") == 3
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
    assert "could not be read" not in page.text
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
    figures = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", figures)) <= {"#ffffff", "#000000"}
    used = set(re.findall(r"var\(--(\w+)\)", figures))
    assert used >= {"train", "valid", "memory", "gzip", "xz"}
    assert used <= set(re.findall(r"--(\w+):", html))
    # The same run gives the same bytes.
    assert write_report(run_dir).read_text() == html


def test_the_memory_table_grows_and_marks_the_training_length(run_dir):
    write_report(run_dir)
    html = (run_dir / "report.html").read_text()
    lengths = re.findall(r"<tr(.*?)><td>(.*?)</td><td>(\d\.\d{4})</td>", html)
    assert [row for row in lengths if row[2] in {"2.2500", "1.8000", "1.7500"}] == [
        ("", "0", "2.2500"),
        (' class="marked"', "64", "1.8000"),
        ("", "256", "1.7500"),
    ]


PARTS = ("metrics.jsonl", "results.json", "sample.json", "recipe.toml", "environment.json")


@pytest.mark.usefixtures("without_matplotlib")
def test_a_part_that_is_missing_is_left_out(run_dir):
    for missing in PARTS:
        content = (run_dir / missing).read_bytes()
        (run_dir / missing).unlink()
        assert "could not be read" not in read_page(run_dir).text, missing
        (run_dir / missing).write_bytes(content)


@pytest.mark.usefixtures("whole_reports")
def test_a_part_can_stand_alone(run_dir):
    contents = {name: (run_dir / name).read_bytes() for name in PARTS}
    for only in PARTS:
        for name in PARTS:
            (run_dir / name).unlink(missing_ok=True)
        (run_dir / only).write_bytes(contents[only])
        assert "could not be read" not in read_page(run_dir).text, only


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    assert "measured nothing yet" in read_page(tmp_path).text


@pytest.mark.usefixtures("without_matplotlib")
def test_a_part_that_is_broken_is_named_and_the_rest_is_shown(run_dir):
    for broken in PARTS:
        whole = (run_dir / broken).read_bytes()
        for content in (b"{", b"\xff\xfe\x00", b"[1, 2]\n[3]\n", b"[" * 100_000):
            (run_dir / broken).write_bytes(content + b"\n" + content)
            page = read_page(run_dir)
            assert f"{broken} could not be read" in page.text, content[:9]
            assert "my-run" in page.text, (broken, content[:9])
        (run_dir / broken).write_bytes(whole)


@pytest.mark.usefixtures("whole_reports")
def test_numbers_of_a_wrong_kind_do_no_harm(run_dir):
    for value in (None, "text", [], {}, True, 10**400, -1, float("nan")):
        wrong = dict.fromkeys(result(0, 0), value)
        results = {"test": wrong, "memory_curve": [wrong, value], "gzip_bits_per_byte": value}
        write_json(run_dir / "results.json", results)
        write_json(run_dir / "sample.json", {"prompt": value, "text": value, "settings": value})
        record = {
            "kind": "train",
            "step": 1,
            "bits_per_token": value,
            "lr": value,
            "tokens_per_second": value,
        }
        write_json(run_dir / "metrics.jsonl", record)
        read_page(run_dir)


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
def test_without_matplotlib_the_tables_are_there_and_how_to_install_it(run_dir, tmp_path):
    page = read_page(run_dir)
    assert "svg" not in page.tags
    assert page.tags.count("table") == 2
    assert ("open", None) in page.attributes
    assert "pip install 'transformer-xl[plot]'" in page.text
    with pytest.raises(RuntimeError, match=r"pip install 'transformer-xl\[plot\]'"):
        plot_curves(run_dir, tmp_path / "curves.png")


@pytest.mark.usefixtures("without_matplotlib")
def test_matplotlib_is_not_asked_for_where_nothing_is_to_be_drawn(tmp_path):
    assert "pip install" not in read_page(tmp_path).text


def test_bits_per_token_are_not_compared_with_bytes(run_dir):
    curve = [result(mem_len, None) for mem_len in (0, 64)]
    baseline = {"gzip_bits_per_byte": 2.0}
    write_json(run_dir / "results.json", {"test": curve[0], "memory_curve": curve, **baseline})
    page = read_page(run_dir)
    assert "gzip" not in page.text


@pytest.mark.usefixtures("with_matplotlib")
def test_the_picture_is_a_png_of_what_there_is(run_dir, tmp_path):
    both = plot_curves(run_dir, tmp_path / "new" / "curves.png").read_bytes()
    (run_dir / "results.json").unlink()
    one = plot_curves(run_dir, tmp_path / "one.png").read_bytes()
    assert both[:8] == one[:8] == b"\x89PNG\r\n\x1a\n"
    width = [int.from_bytes(picture[16:20]) for picture in (both, one)]
    assert width[0] == 2 * width[1]
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="to draw"):
        plot_curves(run_dir, tmp_path / "none.png")


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no run folder .*absent"):
        write_report(tmp_path / "absent")


def test_an_old_report_stays_whole_until_the_new_one_is(run_dir, monkeypatch):
    old = write_report(run_dir).read_bytes()

    def fail(path, content):
        replace_file(path / "not-a-folder", content)

    monkeypatch.setattr(report, "replace_file", fail)
    with pytest.raises(OSError, match="cannot write"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_bytes() == old


def test_without_compressors_the_first_sentence_is_about_the_model_alone(run_dir):
    results = json.loads((run_dir / "results.json").read_text())
    del results["gzip_bits_per_byte"], results["xz_bits_per_byte"]
    write_json(run_dir / "results.json", results)
    page = write_report(run_dir).read_text()
    assert "The model needs 1.800 bits for a byte of unseen text.<" in page
    assert "gzip -9" not in page
