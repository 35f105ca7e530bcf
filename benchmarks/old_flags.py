"""Read the options of older programs from their sources, without running them.

    python benchmarks/old_flags.py --authors transformer-xl --nvidia DeepLearningExamples \
        --labml annotated_deep_learning_paper_implementations

Each is a checkout. Prints `src/transformer_xl/interop/old_programs.toml`: names, types, defaults
and choices, and the options that a program parses and never uses. `--check` compares with that.
"""

import argparse
import ast
import json
import re
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "src" / "transformer_xl" / "interop" / "old_programs.toml"
NVIDIA = Path("LanguageModeling/Transformer-XL")
PROGRAMS = {
    # Name: whose checkout, files, title.
    "authors": ("authors", ["pytorch/train.py"], "the authors' pytorch/train.py"),
    "tensorflow": ("authors", ["tf/train_gpu.py"], "the authors' tf/train_gpu.py"),
    "tensorflow-tpu": ("authors", ["tf/train.py"], "the authors' tf/train.py"),
    "nvidia": ("nvidia", [f"PyTorch/{NVIDIA}/pytorch/train.py"], "NVIDIA's pytorch/train.py"),
    "nvidia-tensorflow": ("nvidia", [f"TensorFlow/{NVIDIA}/tf/main.py"], "NVIDIA's tf/main.py"),
    "labml": (
        "labml",
        [
            "labml_nn/helpers/trainer.py",
            "labml_nn/experiments/nlp_autoregression.py",
            "labml_nn/optimizers/configs.py",
            "labml_nn/transformers/xl/experiment.py",
        ],
        "labml's transformers/xl/experiment.py",
    ),
}
ABSL = {
    "DEFINE_string": "str",
    "DEFINE_bool": "bool",
    "DEFINE_float": "float",
    "DEFINE_integer": "int",
    "DEFINE_enum": "str",
    "DEFINE_list": "list",
}


def main() -> None:
    """Print or check the table."""
    parser = argparse.ArgumentParser()
    for name in ("authors", "nvidia", "labml"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    lines = ["# Made by benchmarks/old_flags.py from the sources of these programs."]
    for name, (owner, files, title) in PROGRAMS.items():
        sources = [(getattr(given, owner) / file).read_text("utf-8") for file in files]
        options: dict[str, Any] = {}
        for file, source in zip(files, sources, strict=True):
            read = _attributes if owner == "labml" else _options
            options |= read(ast.parse(source), "optimizer." if "optimizers" in file else "")
        unused = [] if owner == "labml" else [x for x in options if not _is_used(x, sources[0])]
        lines += ["", f"[{name}]", f"title = {json.dumps(title)}", f"unused = {json.dumps(unused)}"]
        lines += [f"[{name}.options]", *(_line(*option) for option in options.items())]
    text = "\n".join(lines) + "\n"
    if not given.check:
        print(text, end="")
    elif text != TABLE.read_text("utf-8"):
        raise SystemExit(f"{TABLE} is not what these sources say; print it anew")


def _line(name: str, option: dict[str, Any]) -> str:
    """Return the line of an option: what JSON writes of these values is TOML."""
    facts = ", ".join(f"{key} = {json.dumps(value)}" for key, value in option.items())
    return f"{json.dumps(name) if '.' in name else name} = {{{facts}}}"


def _is_used(name: str, source: str) -> bool:
    return re.search(rf"\b(args|FLAGS|config_args)\.{name.replace('-', '_')}\b", source) is not None


def _options(tree: ast.Module, prefix: str) -> dict[str, Any]:
    """Return the options that calls of argparse or absl define."""
    found: dict[str, Any] = {}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        kind, named = call.func.attr, {x.arg: x.value for x in call.keywords}
        if kind == "add_argument" and isinstance(call.args[0], ast.Constant):
            option: dict[str, Any] = {"type": ast.unparse(named.get("type", ast.Name("str")))}
            if "action" in named:
                option = {"type": "flag", "default": False}
            name = str(call.args[0].value).removeprefix("--")
        elif kind in ABSL:
            option = {"type": ABSL[kind]}
            name = ast.literal_eval(call.args[0])
            if len(call.args) > 1:
                named["default"] = call.args[1]
        else:
            continue
        for key, ours in {
            "default": "default",
            "choices": "choices",
            "enum_values": "choices",
        }.items():
            if key in named and (value := _value(named[key])) is not None:
                option[ours] = value
        found[f"{prefix}{name}"] = option
    return found


def _attributes(tree: ast.Module, prefix: str) -> dict[str, Any]:
    """Return the plain attributes of the settings classes, and what the experiment overrides."""
    found: dict[str, Any] = {}
    wanted = ("NLPAutoRegressionConfigs", "OptimizerConfigs", "Configs", "TrainValidConfigs")
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.ClassDef) and node.name in wanted:
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and each.value is not None:
                    pairs.append((ast.unparse(each.target), each.value))
        elif isinstance(node, ast.Dict):
            pairs = [
                (ast.literal_eval(k), v) for k, v in zip(node.keys, node.values, strict=True) if k
            ]
        for name, given in pairs:
            value = _value(given)
            if value is not None and not isinstance(value, dict):
                found[f"{prefix}{name}"] = {"type": type(value).__name__, "default": value}
    return found


def _value(node: ast.expr) -> Any:
    """Return a literal; of a variable of the environment, what it is without one."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.getenv":
        node = node.args[1]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    main()
