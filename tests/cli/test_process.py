"""What only a process of its own can show: signals, pipes and full disks."""

import os
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from transformer_xl.config.recipes import recipe_text

TXL = [sys.executable, "-m", "transformer_xl"]


@pytest.fixture
def start():
    """Start `txl`; what still runs at the end of the test is killed."""
    started = []

    def begin(*words, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        # Tiny models are fastest on one thread. Output waits in a buffer, as it does by default.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        process = subprocess.Popen([*TXL, *map(str, words)], env=environment, **options)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        # Closes the pipes and waits.
        process.__exit__(None, None, None)


def read_until(stream, beginning):
    """Read lines until one begins like this."""
    lines = []
    for line in stream:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"no line began with {beginning!r}: {lines}")


def run_closed(closed, *words, program=None):
    """Run `txl` as a shell does that closes some of its standard streams."""
    script = f'exec "$@" {closed}'
    txl = [sys.executable, "-c", program] if program else TXL
    command = ["sh", "-c", script, "sh", *txl, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True)


@pytest.mark.slow
def test_messages_are_not_in_the_output_where_stderr_is_closed(shipped_root, tmp_path):
    pytest.importorskip("constriction")
    text, archive = tmp_path / "text", tmp_path / "text.txl"
    text.write_bytes(b"so it goes, " * 40)
    # Both say which of the models of the tests they take.
    program = "import sys; from transformer_xl.cli import main; from transformer_xl.config import "
    program += f"files; files.SHIPPED = files.Path({str(shipped_root)!r}); sys.exit(main())"
    compress = run_closed("2>&-", "compress", text, "-", "--model", "notes", program=program)
    assert (compress.returncode, compress.stderr) == (0, b"")
    archive.write_bytes(compress.stdout)
    restored = run_closed("2>&-", "decompress", archive, "-", "--model", "notes", program=program)
    assert (restored.returncode, restored.stdout) == (0, text.read_bytes())


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(start, toy_toml, tmp_path):
    words = ["--train.save_every", 0, "--train.eval_every", 0, "--train.steps", 1_000_000]
    process = start("train", toy_toml, "--out", tmp_path / "run", "--json", *words)
    read_until(process.stderr, "training")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "stopping after this step and saving; Ctrl-C now stops at once" in err
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    last = f"stopped at step {step} and saved; the same command resumes from there"
    assert err.splitlines()[-1] == last


@pytest.mark.slow
def test_ctrl_c_while_it_writes_keeps_the_memory(start, trained, tmp_path):
    state = tmp_path / "state"
    process = start("generate", trained, "--length", 0, "--state", state)
    assert process.stdout.read(100).startswith("the ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "saved the state to" in err
    assert "Traceback" not in err
    assert load_file(state)["keys"].isfinite().all()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_full_disk_behind_stdout_is_an_error(start):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        process = start("recipes", stdout=full)
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == "txl: the disk is full: [Errno 28] No space left on device\n"


def test_bytes_that_are_no_text_pass_through_the_command_line(tmp_path):
    command = [*TXL, "recipes", b"\xff\xfe"]
    result = subprocess.run(command, capture_output=True)
    assert result.returncode == 2
    assert b"Traceback" not in result.stderr
    assert b"no recipe and no file is called" in result.stderr


REFUSED = {
    "eval run --file empty.txt": (2, "empty.txt is empty (0 tokens): at least 2"),
    "score run none.txt": (1, "cannot read none.txt: No such file"),
    "eval none": (1, "none does not exist: give a model folder"),
    "compress text.txt --model run": (1, "text.txt.txl exists; --force"),
    "decompress text.txt.txl --model run": (1, "text.txt exists; --force"),
    "export run run": (1, "run exists and is not empty"),
}
PROGRAM = """
import sys
from transformer_xl.cli import main
for line in sys.stdin.read().splitlines():
    print(main(line.split()), "torch" in sys.modules, flush=True)
    print("end", file=sys.stderr)
"""


def test_what_cannot_be_is_said_before_anything_is_loaded(tmp_path):
    for name, content in (("empty.txt", ""), ("text.txt", "a"), ("text.txt.txl", "b")):
        (tmp_path / name).write_text(content)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "recipe.toml").write_text(recipe_text("demo"))
    lines = "\n".join(REFUSED)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        check=True,
        cwd=tmp_path,
        input=lines,
        capture_output=True,
        text=True,
    )
    assert ended.stdout.splitlines() == [f"{code} False" for code, _ in REFUSED.values()]
    for said, (_, message) in zip(ended.stderr.split("end\n"), REFUSED.values(), strict=False):
        assert message in said
