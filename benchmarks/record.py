"""Put what a run found into a small file that is committed: `benchmarks/results/runs/NAME.json`.

    python benchmarks/record.py runs/enwik8 enwik8-cpu          # a run folder; NAME is the recipe's
    python benchmarks/record.py runs/ablation ablation-ptb-char # a folder of txl ablate
    python benchmarks/record.py recl.json recl-wt103            # what txl recl --json wrote
    python benchmarks/record.py table-9.json evaluation-speed   # ... or evaluation_speed.py

`benchmarks/reproduction.py` makes docs/reproduction.md of these files. Every one has

    format_version    1
    kind              run, ablation, recl or evaluation_speed
    command           what made it
    machine           processor, gpu, threads, torch, python; as far as it is known

and by its kind

    run               recipe (what it sets), parameters, steps, minutes (of the steps alone),
                      results (results.json of the run), curve: train and valid as pairs of a step
                      and bits per token, at most 100 of each
    ablation          table (of the paper), rows (of studies.ablate.summary), minutes
    recl              contexts, models: name, nll by context, recl by r; true_length if it is known
    evaluation_speed  rows: attn_len, seconds for a token by window and by memory, slowdown

Paths are left out but for the last name of each: they belong to the machine.
"""

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import torch
from result_file import write_result_file

from transformer_xl.model.pretrained import WEIGHTS_FILE, ModelFolder
from transformer_xl.studies.ablate import MEASURED_FILE
from transformer_xl.train.checkpoint.checkpoints import read_about
from transformer_xl.train.figures import series, smoothed, thinned

RESULTS = Path(__file__).parent / "results" / "runs"
POINTS = 100
FORMAT_VERSION = 1


def recorded(source: Path) -> dict[str, Any]:
    """Return what is committed of a run folder, an ablation's folder or a result file.

    Raises:
        SystemExit: It is none of these, or the run is not finished.
    """
    if source.is_file():
        return _of_file(source)
    if (source / "recipe.toml").is_file():
        return _of_run(source)
    if (source / MEASURED_FILE).is_file():
        return _of_ablation(source)
    raise SystemExit(f"{source} is neither a run folder, nor one of txl ablate, nor a result file")


def _of_run(folder: Path) -> dict[str, Any]:
    results = folder / "results.json"
    if not results.is_file():
        raise SystemExit(f"{folder} is not finished: it has no results.json; train it to its end")
    recipe = tomllib.loads((folder / "recipe.toml").read_text("utf-8"))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps, seconds = _spent(folder)
    found = _without_paths(json.loads(results.read_text()))
    found.pop("settings", None)
    return {
        **_head("run", json.loads((folder / "environment.json").read_text())),
        "recipe": {section: _without_paths(values) for section, values in recipe.items()},
        "parameters": _parameters(folder),
        "steps": steps,
        "minutes": round(seconds / 60, 2),
        "results": found,
        "curve": {kind: _curve(records, kind) for kind in ("train", "valid")},
    }


def _of_ablation(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / MEASURED_FILE).read_text())
    places = [folder / run["row"] / f"seed_{run['seed']}" for run in found["runs"]]
    environment = json.loads((places[0] / "environment.json").read_text())
    return {
        **_head("ablation", environment),
        "table": found["table"],
        "rows": found["rows"],
        "minutes": round(sum(_spent(place)[1] for place in places) / 60, 2),
    }


def _of_file(path: Path) -> dict[str, Any]:
    # What a command prints with --json is on its last line.
    text = path.read_text()
    found = json.loads(text if text.lstrip().startswith("{\n") else text.splitlines()[-1])
    if "contexts" in found and "models" in found:
        kind, names = "recl", ("contexts", "models", "true_length", "settings")
    elif found.get("rows") and "slowdown" in found["rows"][0]:
        kind, names = "evaluation_speed", ("rows", "n_layer", "d_model", "segment_len", "dtype")
    else:
        raise SystemExit(f"{path} holds neither context lengths nor evaluation speeds")
    return _head(kind, found) | {name: found[name] for name in names if name in found}


def _head(kind: str, environment: dict[str, Any]) -> dict[str, Any]:
    versions, command = environment.get("packages", {}), environment.get("command")
    machine = {name: environment.get(name) for name in ("gpu", "threads", "python")}
    machine["processor"] = environment.get("processor", environment.get("device"))
    machine["torch"] = environment.get("torch", versions.get("torch"))
    return {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "command": command and _shown_command(command),
        "machine": {name: x for name, x in machine.items() if x is not None},
    }


def _shown_command(command: str) -> str:
    words = command.split()
    program = 1 if words[0].endswith("python") else 0
    words[program] = "txl" if words[program].endswith(("/txl", "__main__.py")) else words[program]
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: Path(x).name if isinstance(x, str) and x.startswith("/") else x
        for key, x in values.items()
    }


def _spent(folder: Path) -> tuple[int, float]:
    """Return the steps of a run and the seconds that they took."""
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    if not checkpoints:
        raise SystemExit(f"{folder} has no checkpoint, which says how long the training took")
    state = read_about(checkpoints[-1])
    return state["step"], state["seconds"]


def _parameters(folder: Path) -> int:
    from safetensors import safe_open

    with safe_open(ModelFolder.find(folder).path / WEIGHTS_FILE, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return sum(torch.Size(shape).numel() for shape in shapes)


def _curve(records: list[dict[str, Any]], kind: str) -> list[list[float]]:
    steps, bits = series([record for record in records if record["kind"] == kind], "bits_per_token")
    if kind == "train" and len(bits):
        bits = smoothed(bits)
    few = thinned(len(bits), POINTS) if len(bits) else []
    return [[int(steps[i]), round(float(bits[i]), 4)] for i in few]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a run folder, one of txl ablate, or a JSON file")
    parser.add_argument("name", help="the recipe's name for a run, else any")
    parser.add_argument("--command", help="what made it, where the source does not say it well")
    parser.add_argument("--note", help="what else should be known, in a sentence")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = recorded(arguments.source)
    found |= {x: getattr(arguments, x) for x in ("command", "note") if getattr(arguments, x)}
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"{arguments.name}.json"
    write_result_file(path, found)
    print(f"wrote {path}; now run benchmarks/reproduction.py")


if __name__ == "__main__":
    main()
