"""Give a shipped model its preface: the text that is read before it generates.

    python scripts/pretrained/preface.py english python-code

The text is scripts/pretrained/prefaces/NAME.txt, written for this purpose. Its tokens go into the
config.json of the newest version of the model; SHA256SUMS is written again.
benchmarks/stutter.py measures what it is worth.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from shipping import write_sums

from transformer_xl import load_vocab
from transformer_xl.config.checks import require
from transformer_xl.config.files import replace_file
from transformer_xl.config.shipped import SUMS_FILE, shipped_path

PREFACES = Path(__file__).parent / "prefaces"


def write_preface(folder: Path, text: str) -> int:
    """Write the tokens of a text into the settings of a model folder; return their number."""
    path, tokens = folder / "config.json", load_vocab(folder).encode(text)
    content = json.loads(path.read_text(encoding="utf-8"))
    content.pop("preface", None)
    require(
        len(tokens) < content["mem_len"],
        f"{len(tokens)} tokens with mem_len={content['mem_len']}: a preface must fit the memory: "
        "else sessions, which read token by token, write other texts; shorten it",
    )
    written = json.dumps(content, indent=2)
    # In one line, unlike other lists: there are hundreds.
    line = f',\n  "preface": {json.dumps(tokens)}\n}}\n'
    replace_file(path, (written.removesuffix("\n}") + line).encode())
    return len(tokens)


def main() -> None:
    """Write the prefaces of the named models."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", help="names of shipped models")
    for name in parser.parse_args().models:
        shipped = shipped_path(name)
        with tempfile.TemporaryDirectory() as temporary:
            # The package refuses to write into the models that come with it.
            folder = Path(shutil.copytree(shipped, Path(temporary) / shipped.name))
            n = write_preface(folder, (PREFACES / f"{name}.txt").read_text(encoding="utf-8"))
            write_sums(folder)
            for changed in ("config.json", SUMS_FILE):
                shutil.copyfile(folder / changed, shipped / changed)
        print(f"{shipped.name}: a preface of {n} tokens")


if __name__ == "__main__":
    main()
