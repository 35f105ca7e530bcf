"""Time and memory of converting a checkpoint of the size of the released WikiText-103 model.

    python benchmarks/converting.py
    python benchmarks/converting.py --folder /somewhere/with/4/GB

Makes a model of 285 M parameters with random weights, writes it in the old formats, and converts
each with ``txl convert`` in a process of its own. Time is that of the whole command; memory is the
largest resident size, the parts of the files that are mapped into memory included.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from result_file import write_result_file

sys.path.insert(0, str(Path(__file__).parent))
from turns import circumstances

from transformer_xl.config import ModelConfig
from transformer_xl.interop.convert.export import write_authors, write_huggingface
from transformer_xl.model import TransformerXL

CONFIG = ModelConfig(
    vocab_size=267_735,
    n_layer=18,
    n_head=16,
    d_model=1024,
    d_inner=4096,
    cutoffs=(20_000, 40_000, 200_000),
    div_val=4,
    tie_projections=(False, True, True, True),
    mem_len=384,
)
FORMATS = ("authors", "authors, legacy container", "huggingface")


def make(folder: Path) -> dict[str, Path]:
    """Write the model in each format."""
    torch.manual_seed(0)
    model = TransformerXL(CONFIG)
    weights = {name: x.detach() for name, x in model.named_parameters()}
    places = {name: folder / name.replace(", ", "_").replace(" ", "_") for name in FORMATS}
    for place in places.values():
        place.mkdir()
    write_authors(CONFIG, weights, places["authors"])
    legacy = places["authors, legacy container"]
    state = torch.load(places["authors"] / "state_dict.pt", weights_only=True, mmap=True)
    torch.save(state, legacy / "state_dict.pt", _use_new_zipfile_serialization=False)
    shutil.copy(places["authors"] / "config.json", legacy)
    write_huggingface(CONFIG, weights, None, {}, places["huggingface"])
    return places


def convert(source: Path, folder: Path) -> tuple[float, float]:
    """Convert in a process of its own; return its seconds and its peak in MB."""
    command = [sys.executable, "-m", "transformer_xl", "convert", str(source), str(folder)]
    began = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        sys.exit(f"{' '.join(command)} failed")
    shutil.rmtree(folder)
    return seconds, usage.ru_maxrss / 1024


def main() -> None:
    """Measure, print, and write the result to a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the files go for the time being")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        print(json.dumps({name: str(path) for name, path in make(arguments.make).items()}))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        # In a process of its own: the peak of a process begins with that of its parent.
        command = [sys.executable, __file__, "--make", name]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        for kind, source in json.loads(made.stdout.splitlines()[-1]).items():
            seconds, peak = convert(Path(source), folder / "converted")
            n_bytes = sum(x.stat().st_size for x in Path(source).iterdir())
            rows.append({"format": kind, "bytes": n_bytes, "seconds": seconds, "peak_mb": peak})
            print(f"{kind:28} {n_bytes / 1e6:6.0f} MB  {seconds:6.1f} s  peak {peak:6.0f} MB")
    result = circumstances() | {"parameters": 285_170_506, "rows": rows}
    if arguments.json:
        write_result_file(arguments.json, result)


if __name__ == "__main__":
    main()
