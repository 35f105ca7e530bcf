"""export, as a user types it."""

import json

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.compile
def test_export_says_what_it_has_checked(txl, trained, tmp_path):
    ended = txl("export", trained, tmp_path / "out", "--format", "torch", "--mem_len", 3, "--json")
    assert ended.code == 0
    (line,) = ended.err.splitlines()
    start = f"wrote {tmp_path / 'out'}; its log-probabilities equal the model's up to "
    assert line.startswith(start)
    assert float(line.removeprefix(start)) == pytest.approx(ended.json["difference"], rel=0.1)
    assert ended.json["difference"] < 1e-5
    manifest = json.loads((tmp_path / "out" / "step.json").read_text())
    assert ended.json == manifest
    assert (manifest["mem_len"], manifest["vocabulary"]) == (3, "tokenizer.json")
