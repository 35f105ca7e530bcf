"""What the program that reads options of older programs finds in their sources."""

import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks"
ARGPARSE = """
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=8)
parser.add_argument('--name', default="a b", choices=["a b", "c"])
parser.add_argument("--fast-mode", action="store_true")
parser.add_argument("--home", type=str, default=os.getenv("HOME", "here"))
args = parser.parse_args()
print(args.width, args.fast_mode, args.home)
"""
ABSL = """
flags.DEFINE_integer("width", 8, help="")
flags.DEFINE_bool("fast", default=False, help="")
flags.DEFINE_enum("kind", "one", enum_values=["one", "two"], help="")
flags.DEFINE_float("rate", None, help="")
print(FLAGS.width, FLAGS.kind)
"""
CLASSES = """
class Configs(Base):
    width: int = 8
    shape: Tuple[int, int] = (1, 2)
    made: Thing = 'made_by'
    unset: int

class Other:
    ignored: int = 3

def main():
    experiment.configs(conf, {'width': 16, 'optimizer.rate': 0.1})
"""
READ = {
    ARGPARSE: {
        "width": {"type": "int", "default": 8},
        "name": {"type": "str", "default": "a b", "choices": ["a b", "c"]},
        "fast-mode": {"type": "flag", "default": False},
        "home": {"type": "str", "default": "here"},
    },
    ABSL: {
        "width": {"type": "int", "default": 8},
        "fast": {"type": "bool", "default": False},
        "kind": {"type": "str", "default": "one", "choices": ["one", "two"]},
        "rate": {"type": "float"},
    },
    CLASSES: {
        "width": {"type": "int", "default": 16},
        "shape": {"type": "list", "default": [1, 2]},
        "made": {"type": "str", "default": "made_by"},
        "optimizer.rate": {"type": "float", "default": 0.1},
    },
}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return import_module("old_flags")


def written(folder: Path, program: ModuleType) -> list[str]:
    """Write a checkout of each owner; return the options that name them."""
    for owner, files, _ in program.PROGRAMS.values():
        for n, file in enumerate(files):
            path = folder / owner / file
            path.parent.mkdir(parents=True, exist_ok=True)
            is_absl = file.startswith(("tf/", "TensorFlow/"))
            own = ABSL if is_absl else ARGPARSE
            path.write_text((CLASSES if n == 0 else "") if owner == "labml" else own)
    owners = ("authors", "nvidia", "labml")
    return [word for owner in owners for word in (f"--{owner}", str(folder / owner))]


def test_the_table_has_names_types_defaults_choices_and_what_is_unused(
    program, tmp_path, monkeypatch, capsys
):
    words = written(tmp_path, program)
    monkeypatch.setattr("sys.argv", ["old_flags.py", *words])
    program.main()
    text = capsys.readouterr().out
    table = tomllib.loads(text)
    assert table["authors"]["options"] == table["nvidia"]["options"] == READ[ARGPARSE]
    assert table["tensorflow"]["options"] == READ[ABSL]
    assert table["labml"]["options"] == READ[CLASSES]
    assert table["authors"]["unused"] == ["name"]
    assert table["nvidia-tensorflow"]["unused"] == ["fast", "rate"]
    monkeypatch.setattr(program, "TABLE", tmp_path / "table.toml")
    (tmp_path / "table.toml").write_text(text)
    monkeypatch.setattr("sys.argv", ["old_flags.py", *words, "--check"])
    program.main()
    (tmp_path / "table.toml").write_text(text.replace("default = 8", "default = 9"))
    with pytest.raises(SystemExit, match=r"table\.toml is not what these sources say"):
        program.main()
