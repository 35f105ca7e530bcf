"""`txl generate --on_loop` ends a text that loops and says so, or breaks the loop."""

import pytest

LENGTH = 150


@pytest.fixture
def written(txl, trained):
    def run(*words, length=LENGTH):
        loop = ["--loop_min_length", 20] if "--on_loop" in words else []
        words = ["--prompt", "the ", "--temperature", 0, "--length", length, *words, *loop]
        ended = txl("generate", trained, *words, "--json")
        assert ended.code == 0, ended.err
        found = ended.json
        return found, ended.err

    return run


def test_a_text_that_loops_is_ended_and_that_is_said(written, tmp_path):
    whole, err = written()
    assert "ended early" not in err
    found, err = written("--on_loop", "end")
    assert whole["text"].startswith(found["text"])
    assert len(found["text"]) < LENGTH
    assert "the text ended early: the last 20 tokens or more repeat one sequence" in err
    assert found["settings"]["on_loop"] == "end"
    assert found["settings"]["loop_min_length"] == 20
    # What a state remembers does not count.
    again = ["--on_loop", "end", "--state", tmp_path / "state"]
    for _ in range(2):
        text = written(*again)[0]["text"]
        assert len(text) >= 20
