import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import as the programs do, which begin in their own folder."""
    monkeypatch.syspath_prepend(str(PROGRAMS))


def _run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), "--rounds", "1", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("training", ["--ways", "ours"]),
        ("evaluation", ["--mem_lens", "16", "--ways", "ours"]),
        ("generation", ["--mem_lens", "16", "--ways", "ours"]),
        ("attention", ["--ways", "ours", "--forward"]),
    ],
)
def test_a_program_writes_a_table_and_its_numbers(
    program: str, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "measured.json"
    done = _run(program, "--shape", "tiny", "--dtypes", "float32", "--json", str(path), *words)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["seconds"]["ours"] > 0
    assert row["share_of_ceiling"]["ours"] > 0
    assert ("reading_seconds" in row) == (program == "generation")
    assert "| ours |" in done.stdout


def test_a_process_that_fails_ends_the_program_and_is_named(tmp_path: Path) -> None:
    program = tmp_path / "failing.py"
    program.write_text("import sys; sys.exit('no such thing')")
    take_turns = import_module("turns").take_turns
    with pytest.raises(SystemExit, match=r"this process failed, see above: .*failing.py"):
        take_turns(str(program), {"ours": ["a"]}, "ours", rounds=1, warm=1)


def test_a_peer_that_is_not_installed_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers = import_module("peers")
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    missing = {name: way.missing for name, way in peers.WAYS.items() if way.environment}
    assert missing["huggingface"] == "benchmarks/peers/install huggingface"
    assert peers.WAYS["ours"].missing is None
    for name in missing:
        environment = peers.WAYS[name].environment
        assert (PROGRAMS / "peers" / f"{environment}.txt").exists()
        (tmp_path / environment).mkdir(exist_ok=True)
        assert peers.WAYS[name].missing is None


@pytest.mark.parametrize("way", ["ours", "gpt"])
def test_what_was_read_long_ago_changes_nothing(way: str) -> None:
    peers, shapes = import_module("peers"), import_module("shapes")
    job = shapes.Job("generation", shapes.SHAPES["tiny"], "float32")
    tokens = torch.randint(50, (2, 45))
    scores = []
    # One begins elsewhere: with other keys, at another place of its room and at other positions.
    for start in (0, 5):
        peer = peers.build(way, job)
        with torch.no_grad():
            for i in range(start, 45):
                found = peer.scores(tokens[:, i : i + 1])
        scores.append(found.log_softmax(-1))
    torch.testing.assert_close(*scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["ours", "gpt", "gpt_kept"])
def test_training_depends_on_the_memory_and_reaches_all_weights(way: str) -> None:
    peers, shapes = import_module("peers"), import_module("shapes")
    job = shapes.Job("training", shapes.SHAPES["tiny"], "float32")
    peer = peers.build(way, job)
    tokens = torch.randint(50, (2, 9))
    losses = [peer.loss(tokens[:, :-1], tokens[:, 1:]) for _ in range(2)]
    assert losses[0] != losses[1]
    losses[1].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in peer.model.parameters())


@pytest.mark.parametrize("way", ["authors", "sdpa_mask"])
@pytest.mark.parametrize(("length", "mem_len"), [(8, 8), (5, 3), (1, 7), (6, 0)])
def test_ways_to_attend_compute_the_same(way: str, length: int, mem_len: int) -> None:
    attention = import_module("attention")
    size = attention.Size(length, mem_len, 2, 2, 16)
    found = [_attended(attention, name, size) for name in (way, "reference")]
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


def _attended(attention: Any, way: str, size: Any) -> torch.Tensor:
    _, step, layout = attention.attend(way, size, torch.float32, "cpu")
    return step().permute([layout.index(letter) for letter in "BTHK"])


def test_as_many_bytes_are_read_as_the_weights_and_the_memory_have() -> None:
    peers, shapes = import_module("peers"), import_module("shapes")
    shape = shapes.SHAPES["small"]
    peer = peers.build("ours", shapes.Job("generation", shape, "float32"))
    # Matrices, but for those that project the positions.
    matrices = {
        name: p for name, p in peer.model.named_parameters() if p.ndim == 2 and "r_proj" not in name
    }
    remembered = 2 * shape.n_layer * shape.batch * shape.mem_len * shape.d_model
    expected = 4 * (sum(p.numel() for p in matrices.values()) + remembered)
    assert shapes.read_bytes(shape, "float32") == expected
