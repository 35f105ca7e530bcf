"""What the imported revision computes: training, evaluation, generation, archives, conversions.

Only what a user has is called: the command `txl`, the names of `transformer_xl.__all__`,
`transformer_xl.hf` and the HTTP interface of the server. So it also runs with revisions whose
insides are cut differently. `same_results.py` runs it with two and compares.
"""

import contextlib
import hashlib
import io
import json
import re
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path
from typing import Any

STEPS = 200
RECIPES = {
    "demo": "--data.split_by fraction --data.vocab_size 512",
    "shakespeare-char-cpu": "--data.test_fraction 0.1 --train.stages 0.0 16 16 0.5 32 32",
    "ptb-word-cpu": "--data.vocab_size 1500 --model.cutoffs 200 --generate.prompt import",
    "ptb-char-lstm-cpu": "--data.vocab chars",
}
SHAPE = {"n_layer": 2, "d_model": 64}
MORE_SHAPE = {"n_head": 2, "d_inner": 128, "mem_len": 32}
SEGMENT_LEN = 32
MODULES = [
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
]
PROMPT = "def "


def record(folder: Path) -> dict[str, Any]:
    """Compute everything with the revision that is imported; return it as JSON values."""
    text = folder / "text.txt"
    parts = [Path(sysconfig.get_paths()["stdlib"], f"{name}.py").read_bytes() for name in MODULES]
    text.write_bytes(b"".join(parts)[:250_000].decode("ascii", "ignore").encode())
    (folder / "short.txt").write_bytes(text.read_bytes()[100_000:103_000])
    found: dict[str, Any] = {}
    for name, more in RECIPES.items():
        found[f"training/{name}"] = _trained(folder, name, more)
        _say(f"trained {name}")
    runs = {name: folder / name for name in RECIPES}
    for name, run in runs.items():
        found |= _evaluated(name, run, folder / "short.txt")
        found |= _generated(name, run, folder)
        _say(f"evaluated and generated with {name}")
    demo = runs["demo"]
    found["server"] = _served(demo)
    found["transformers"] = _with_transformers(demo)
    found |= _compressed(folder, runs["shakespeare-char-cpu"])
    found["onnx"] = _exported(folder, demo)
    found["evaluation/python"] = _evaluated_in_python(demo)
    return found


def _trained(folder: Path, name: str, more: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        **{f"model.{key}": value for key, value in SHAPE.items()},
        "data.path": folder / "text.txt",
        "data.cache_dir": folder / "cache",
        "train.minutes": None,
        "train.steps": STEPS,
        "train.log_every": 1,
        "train.eval_every": STEPS // 2,
        "train.batch_size": 4,
        "train.segment_len": SEGMENT_LEN,
        "eval.batch_size": 4,
        "generate.length": 100,
    }
    more_shape = {"d_embed": SHAPE["d_model"]} if "lstm" in name else MORE_SHAPE
    settings |= {f"model.{key}": value for key, value in more_shape.items()}
    if "lstm" not in name:
        settings["eval.mem_lens"] = "0 32 64"
    words = [word for key, x in settings.items() for word in (f"--{key}", *str(x).split())]
    run = folder / name
    _txl("train", name, "--out", str(run), "--data.name", "", *words, *more.split())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((run / "results.json").read_text())
    return {
        "losses": [_first(x, "bits_per_token", "bits") for x in records if x["kind"] == "train"],
        "valid": [each["nll"] for each in records if each["kind"] == "valid"],
        "weights": _hash_of_weights(run / "model" / "last"),
        "results": {key: x for key, x in results.items() if key != "settings"},
        "sample": json.loads((run / "sample.json").read_text())["text"],
        "corpora": sorted(_hash(x.read_bytes()) for x in (folder / "cache").rglob("*.bin")),
    }


def _evaluated(name: str, run: Path, short: Path) -> dict[str, Any]:
    lines = {
        "plain": "",
        "segments": "--eval.segment_len 7 --eval.batch_size 3",
        "file": f"--file {short}",
        "bfloat16": "--weights bfloat16",
        "dynamic": f"--eval.dynamic sgd --file {short}",
    }
    if "lstm" in name:
        del lines["bfloat16"]
    else:
        lines |= {
            "memory": "--eval.mem_len 100 --eval.attn_len 50 --eval.clamp_len 40",
            "extended": f"--eval.ext_len 5 --file {short}",
            "window": f"--eval.window 16 --file {short} --eval.batch_size 16",
            "int8": f"--weights int8 --file {short}",
        }
    found = {}
    for key, words in lines.items():
        found[f"evaluation/{name}/{key}"] = _json_of("eval", str(run), *words.split())
    scores = _txl("score", str(run), str(short))
    numbers = re.findall(r"-\d+\.\d+(?:e-?\d+)?", scores)
    found[f"evaluation/{name}/scores"] = [len(numbers), _hash(" ".join(numbers).encode())]
    return found


def _generated(name: str, run: Path, folder: Path) -> dict[str, Any]:
    import torch

    import transformer_xl as txl

    best = run / "model" / "best"
    model, vocab = txl.TransformerXL.from_pretrained(best), txl.load_vocab(best)
    prompt = vocab.encode("import " if "ptb-word" in name else PROMPT)
    settings = {
        "greedy": {"temperature": 0.0},
        "drawn": {"seed": 5},
        "cut": {"seed": 5, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    }
    found: dict[str, Any] = {}
    for key, values in settings.items():
        found[key] = list(txl.generate(model, prompt, length=120, **values))
    rows = txl.generate_batch(model, [prompt] * 16, length=40, seed=3)
    texts: dict[int, list[int]] = {}
    for step in rows:
        for row, token in step.items():
            texts.setdefault(row, []).append(int(token))
    found["streams"] = [texts[row] for row in sorted(texts)]
    session = txl.Session.open(best, seed=4)
    session.write("import " if "ptb-word" in name else PROMPT)
    first = "".join(session.generate(30))
    session.save(folder / f"{name}.state")
    session = txl.Session.load(best, folder / f"{name}.state")
    found["session"] = [first, "".join(session.generate(30))]
    words = ["--length", "60", "--seed", "9", "--temperature", "1", "--top_p", "1"]
    found["command"] = _json_of("generate", str(run), "--prompt", "import ", *words)["text"]
    ids = torch.tensor([vocab.encode((folder / "short.txt").read_text())[:256]])
    model = model.double()
    with torch.no_grad():
        out = model(ids[:, :100], targets=ids[:, 1:101])
        again = model(ids[:, 100:150], mems=out.mems, targets=ids[:, 101:151])
    found["forward"] = [float(out.nll.sum()), float(again.nll.sum())]
    # Greedy tokens of a model in float64 have no near ties.
    found["float64"] = list(txl.generate(model, prompt, length=60, temperature=0.0))
    return {f"generation/{name}/{key}": x for key, x in found.items()}


def _served(run: Path) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformer_xl", "serve", str(run), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    request = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "logprobs": 2}
    request |= {"temperature": 1.0, "top_p": 1.0, "seed": 7}
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        found = {}
        kinds = {"drawn": {}, "greedy": {"temperature": 0.0}, "several": {"n": 3}}
        for name, more in kinds.items():
            body = json.dumps({**request, **more}).encode()
            url = f"http://127.0.0.1:{port}/v1/completions"
            http = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(http, timeout=120) as answer:
                choices = json.load(answer)["choices"]
            found[name] = [[each["text"], each["logprobs"]["token_logprobs"]] for each in choices]
        return found
    finally:
        server.terminate()
        server.communicate(timeout=60)


def _with_transformers(run: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    import transformer_xl as txl
    import transformer_xl.hf

    best = run / "model" / "best"
    model, vocab = AutoModelForCausalLM.from_pretrained(best), txl.load_vocab(best)
    ids = torch.tensor([vocab.encode(PROMPT + "main(self, argument):\n")])
    torch.manual_seed(3)
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    return {
        "loss": loss,
        "greedy": model.generate(ids, max_new_tokens=40, do_sample=False).tolist(),
        "drawn": model.generate(ids, max_new_tokens=40, do_sample=True, top_k=0).tolist(),
        "beams": model.generate(ids, max_new_tokens=20, num_beams=3, do_sample=False).tolist(),
    }


def _compressed(folder: Path, run: Path) -> dict[str, Any]:
    found, short = {}, folder / "short.txt"
    for name, words in {"model": ("--model", str(run)), "learning": ("--learn",)}.items():
        archive, restored = folder / f"{name}.txl", folder / f"{name}.restored"
        _txl("compress", str(short), str(archive), *words)
        words = tuple(word for word in words if word != "--learn")
        _txl("decompress", str(archive), str(restored), *words)
        same = restored.read_bytes() == short.read_bytes()
        found[f"archive/{name}"] = {"restored": same, "archive": _hash(archive.read_bytes())}
    return found


def _exported(folder: Path, run: Path) -> dict[str, Any]:
    _txl("export", str(run), str(folder / "onnx"))
    import numpy as np
    import onnxruntime

    manifest = json.loads((folder / "onnx" / "step.json").read_text())
    program = next((folder / "onnx").glob("*.onnx"))
    session = onnxruntime.InferenceSession(str(program), providers=["CPUExecutionProvider"])
    given = {}
    for each in session.get_inputs():
        shape = [x if isinstance(x, int) else 1 for x in each.shape]
        if "int" in each.type:
            given[each.name] = np.ones(shape, np.int64 if "int64" in each.type else np.int32)
        else:
            given[each.name] = np.full(shape, 0.25, np.float32)
    out = session.run(None, given)
    sums = [round(float(np.abs(x.astype(np.float64)).mean()), 6) for x in out]
    return {"outputs": sums, "inputs": sorted(manifest)}


def _evaluated_in_python(run: Path) -> dict[str, Any]:
    import transformer_xl as txl

    best = run / "model" / "best"
    model, vocab = txl.TransformerXL.from_pretrained(best), txl.load_vocab(best)
    text = vocab.encode((run.parent / "short.txt").read_text())
    result = txl.evaluate(model, text, segment_len=10, mem_len=20)
    return {"nll": result.nll, "tokens": result.tokens}


def _first(values: dict[str, Any], *names: str) -> Any:
    return next(values[name] for name in names if name in values)


def _json_of(*words: str) -> dict[str, Any]:
    return json.loads(_txl(*words, "--json").splitlines()[-1])


def _txl(*words: str) -> str:
    """Run a command line in this process; return what it printed."""
    from transformer_xl.cli import main

    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    if code:
        raise RuntimeError(f"txl {' '.join(words)} ended with {code}:\n{err.getvalue()}")
    out.flush()
    return out.buffer.getvalue().decode("utf-8", "surrogateescape")


def _hash_of_weights(folder: Path) -> str:
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    lines = (f"{n} {x.dtype} {x.shape} {_hash(x.tobytes())}" for n, x in sorted(weights.items()))
    return _hash("\n".join(lines).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
