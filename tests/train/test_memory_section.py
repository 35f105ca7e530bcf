"""The part of the report on the memory: only what is well formed is shown, and all of it."""

import copy
import json
import re

import pytest

from transformer_xl.train import memory_section
from transformer_xl.train.report import write_report

SPANS = [{"first": 1, "last": 1, "nll": 3.25}, {"first": 2, "last": 5, "nll": 2.5}]
SHARES = [
    {"first": 0, "last": 0, "shares": [0.75, 0.5]},
    {"first": 1, "last": 3, "shares": [0.25, 0.5]},
]
SEEN = {
    "split": "test",
    "tokens": 1234,
    "segment_len": 5,
    "mem_len": 7,
    "in_segment": [{"mem_len": 0, "spans": SPANS}, {"mem_len": 7, "spans": SPANS}],
    "from_start": {"mem_len": 7, "pieces": 41, "spans": SPANS},
    "attention": {
        "nll": 1.25,
        "nll_without_memory": 4.5,
        "texts": ["far", " <b>", "near", "nearer"],
        "predicted": "\n",
        "shares": [0.0, 0.01, 0.25, 0.74],
        "direct": SHARES,
        "through": SHARES,
    },
}


@pytest.fixture
def written(tmp_path):
    def write(seen):
        (tmp_path / "memory.json").write_text(json.dumps(seen))
        return write_report(tmp_path).read_text("utf-8")

    return write


def changed(path, value):
    seen = copy.deepcopy(SEEN)
    *above, last = path
    place = seen
    for key in above:
        place = place[key]
    place[last] = value
    return seen


@pytest.mark.usefixtures("whole_reports")
def test_all_parts_are_on_the_page(written):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    page = written(SEEN)
    assert page.count("<svg") == 3
    assert "the first 1,234 tokens of the test text" in page.lower()
    assert "the mean of 41 pieces" in page
    assert "from 4.50 to 1.25 nats" in page
    assert "<td>2 to 5</td><td>2.5000</td><td>2.5000</td><td>2.5000</td>" in page
    assert "&#39;\\n&#39;" in page
    assert "could not be read" not in page
    figures = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", figures)) <= {"#ffffff", "#000000"}


def test_the_larger_the_share_the_darker_the_token(written):
    page = written(SEEN)
    strip = re.search(r'<pre class="box sample last"><span>(.*?)</pre>', page, re.DOTALL)
    assert strip
    assert strip[1].startswith('far<span class="share1"> &lt;b&gt;</span><span class="share5">near')
    assert '<span class="share9">nearer</span><b>' in strip[1]
    style = page[: page.index("</style>")]
    assert all(f".share{level} " in style for level in range(1, 10))


def test_a_model_without_attention_has_the_losses(written):
    page = written(changed(["attention"], None))
    assert "What the memory does" in page
    assert "What a prediction looks at" not in page


def test_an_old_run_has_neither(tmp_path):
    assert "What the memory does" not in write_report(tmp_path).read_text("utf-8")


WRONG = [
    (["in_segment"], []),
    (["in_segment", 0, "spans"], []),
    (["in_segment", 0, "spans", 0, "first"], 0),
    (["in_segment", 0, "spans", 0, "nll"], "much"),
    (["from_start", "spans", 1, "nll"], 10**400),
    (["from_start"], None),
    (["attention", "shares"], [0.5]),
    (["attention", "shares", 0], -1),
    (["attention", "shares", 0], 2),
    (["attention", "texts", 0], 3),
    (["attention", "direct"], []),
    (["attention", "through", 0, "shares"], []),
    (["attention", "through", 0, "shares"], [0.5]),
    (["tokens"], True),
    (["split"], None),
]


def test_what_is_not_well_formed_is_named_and_left_out(written):
    for path, value in WRONG:
        page = written(changed(path, value))
        assert "memory.json could not be read" in page, path
        assert "What the memory does" not in page, path


@pytest.mark.slow
@pytest.mark.usefixtures("whole_reports")
def test_layers_without_any_share_can_be_drawn_with_the_same_bytes_each_time(written):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    for shares in ([0.0, 0.0], [1.0, 0.0]):
        one = [{"first": 0, "last": 0, "shares": shares}]
        seen = changed(["attention", "direct"], one)
        seen["attention"]["through"] = one
        page = written(seen)
        assert page.count("<svg") == 3, shares
    assert written(seen) == page


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(SEEN))
    read = memory_section.parse(path)
    assert read.attention
    assert read.attention.shares == SEEN["attention"]["shares"]
    assert [span.nll for span in read.from_start.spans] == [3.25, 2.5]
