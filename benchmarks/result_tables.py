"""Write those tables of docs/results.md that a file of results holds.

    python benchmarks/result_tables.py            # whether they are up to date
    python benchmarks/result_tables.py --write

The files are those in `benchmarks/results`, as the programs beside this one have written them. What
`make demo` gives is written by `benchmarks/demo.py`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marked_tables import main, row, table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
XEON = "cpu_xeon_amx_202611"
H200, H100 = "gpu_h200_202611", "gpu_h100_202611"
H100_BFLOAT16 = 989e3
"""GFLOP/s of the data sheet, of an H100 and an H200 alike."""
_Case = Mapping[str, Any]


def _result(name: str, machine: str) -> Any:
    return json.loads((RESULTS / f"{name}_{machine}.json").read_text("utf-8"))


def _texts(columns: str, rows: Iterable[str]) -> str:
    return table(columns, rows, n_texts=columns.count("|") + 1)


def _spread(case: _Case, way: str) -> str:
    """Return a ratio with its range; nothing if the way was not measured."""
    if way not in case["ratio"]:
        return ""
    least, most = case["ratio_range"][way]
    return f"{case['ratio'][way]:.2f} ({least:.2f} to {most:.2f})"


def _trainings(names: Sequence[str]) -> Iterator[tuple[str, _Case]]:
    """Yield the trainings beside the peers, each with the name of its shape."""
    for name in names:
        result = _result(name, XEON)
        for case in result["rows"]:
            dropout = f", dropout {case['dropout']}" if case["dropout"] else ""
            yield result["shape"]["name"] + dropout, case


def _peers() -> Iterator[str]:
    names = ("training_peers", "training_dropout", "training_small", "training_small_dropout")
    for shape, case in _trainings(names):
        mb = case["peak_mb"]
        yield row(
            shape,
            case["dtype"],
            f"{case['seconds']['ours']:.2f} s",
            _spread(case, "huggingface"),
            _spread(case, "gpt"),
            f"{mb['ours']:,.0f} / {mb['huggingface']:,.0f} MB",
            f"{_share(case)} of {case['ceiling_gflops']:,.0f} GFLOP/s",
        )


def _other_peers() -> Iterator[str]:
    for shape, case in _trainings(("training_peers", "training_small")):
        ways = ("x_transformers_t5", "x_transformers_rotary", "labml")
        yield row(shape, case["dtype"], *(_spread(case, way) for way in ways))


def _share(case: _Case) -> str:
    """Return what of the machine a reading takes: of its products, or times reading the weights."""
    if "reading_seconds" in case:
        return f"{case['seconds']['ours'] / case['reading_seconds']:.1f} x"
    return f"{100 * case['share_of_ceiling']['ours']:.0f} %"


def _readings() -> Iterator[str]:
    for name, work in {"evaluation": "evaluation", "generation": "one token"}.items():
        for case in _result(name, XEON)["rows"]:
            ms = 1e3 * case["seconds"]["ours"]
            yield row(
                work,
                case["dtype"].replace("_", " "),
                f"{ms:.1f} ms",
                *(_spread(case, way) for way in ("huggingface", "gpt_kept")),
                _share(case),
            )


def _by_memory(name: str) -> str:
    """Return milliseconds by the length of the memory."""
    by_dtype: dict[str, dict[int, str]] = {}
    for case in _result(name, XEON)["rows"]:
        text = f"{1e3 * case['seconds']['ours']:.1f} ms, {_share(case)}"
        by_dtype.setdefault(case["dtype"], {})[case["mem_len"]] = text
    lengths = next(iter(by_dtype.values()))
    rows = (row(dtype.replace("_", " "), *cells.values()) for dtype, cells in by_dtype.items())
    return _texts("|".join(["memory", *(f"{n:,}" for n in lengths)]), rows)


def _attention() -> Iterator[str]:
    for case in _result("attention", XEON)["rows"]:
        yield row(
            case["dtype"],
            "forward and backward" if case["backward"] else "forward",
            f"{1e3 * case['seconds']['ours']:.1f} ms",
            *(f"{case['ratio'][x]:.2f}" for x in ("authors", "reference", "sdpa_mask", "plain")),
        )


def _attention_gpu() -> Iterator[str]:
    for case in _result("attention", H200)["rows"]:
        seconds = case["seconds"]["triton"]
        yield row(
            "forward and backward" if case["backward"] else "forward",
            f"{1e3 * seconds:.2f} ms",
            f"{case['gflop']['triton'] / seconds / 1e3:.0f}",
            *(f"{case['ratio'][x]:.2f}" for x in ("flex", "sdpa_mask", "plain")),
        )


def _steps_gpu() -> Iterator[str]:
    trained = ("training", H200), ("training_again", H200), ("training", H100)
    for name, card in (*trained, ("training_large", H200)):
        result = _result(name, card)
        for case in result["rows"]:
            way = next(iter(case["seconds"]))
            seconds, tokens = case["seconds"][way], case["tokens_per_second"][way]
            flops = case["gflop"][way] / seconds / H100_BFLOAT16
            yield row(
                f"training step, `{result['shape']['name']}`, {case['batch']} streams",
                _card(result),
                f"{1e3 * seconds:.1f} ms",
                f"{tokens:,.0f}",
                f"{flops:.1%} MFU",
                _spread(case, "gpt"),
            )
    for name, card in (("generation", H200), ("generation_64", H200), ("generation_64", H100)):
        result = _result(name, card)
        for case in result["rows"]:
            seconds = case["seconds"]["ours"]
            yield row(
                f"a token of each stream, B = {case['batch']}, M = {case['mem_len']:,}",
                _card(result),
                f"{1e3 * seconds:.2f} ms",
                f"{case['tokens_per_second']['ours']:,.0f}",
                f"{seconds / case['reading_seconds']:.2f} x reading",
                "",
            )


def _card(result: _Case) -> str:
    """Name the GPU of a measurement, without its maker."""
    return result["processor"].split()[1]


def tables() -> dict[str, str]:
    """Return the tables of the page by their names."""
    beyond = "share of the ceiling, or times the reading of weights, keys and values"
    others = "x-transformers, T5 positions|x-transformers, rotary|labml_nn"
    return {
        "peers": _texts(
            "shape|dtype|ours|Hugging Face|plain GPT with memory|memory|share of the ceiling",
            _peers(),
        ),
        "other-peers": _texts(f"shape|dtype|{others}", _other_peers()),
        "readings": _texts(
            f"work|precision|ours|Hugging Face|plain GPT with kept keys|{beyond}", _readings()
        ),
        "evaluation-by-memory": _by_memory("evaluation_mem_len"),
        "token-by-memory": _by_memory("generation_mem_len"),
        "attention": _texts(
            "dtype|pass|ours|authors' einsum and shift|reference"
            "|position term as a mask of PyTorch's attention|plain attention, no position term",
            _attention(),
        ),
        "attention-gpu": _texts(
            "pass|fused kernels|TFLOP/s|FlexAttention"
            "|position term as a mask of PyTorch's attention|plain attention, no position term",
            _attention_gpu(),
        ),
        "steps-gpu": _texts(
            "work|GPU|time|tokens a second|share of the GPU|plain GPT with memory", _steps_gpu()
        ),
    }


if __name__ == "__main__":
    main(PAGE, tables(), "result_tables.py")
