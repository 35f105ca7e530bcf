"""What 10,000 sessions take: bytes in memory and in the store, cores, and what they cost.

    python benchmarks/session_scale.py --json session_scale.json

Measured here, against a Redis with appendfsync always: the bytes of a full session in a server, of
a young and a full one in Redis, what an answer adds to the append-only file, and how long
acquiring, saving, loading and reading again take. The models are built from recipes, with random
weights, which has no effect on sizes and hardly any on times. Seconds of the processor for each
token are those that benchmarks/serving.py has measured, with 64 sessions at once (results/).

Computed from that: what --sessions sessions take that get an answer of --tokens tokens every
--seconds seconds, after a prompt of --prompt tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from result_file import json_text, write_result_file
from shared_servers import Redis
from turns import circumstances

from transformer_xl.apps.serve.redis_store import RedisStore
from transformer_xl.apps.serve.serve_settings import ServeSettings
from transformer_xl.apps.serve.session_store import Turn
from transformer_xl.apps.serve.texts import most_tokens
from transformer_xl.config.recipes import load_recipe
from transformer_xl.inference.generate import State, largest_state, random_numbers
from transformer_xl.model import build_model
from transformer_xl.model.reading import read_all
from transformer_xl.model.segment import Lengths

MODELS = {
    "3.4 M": ("shakespeare-char-cpu", {"d_model": 256, "d_inner": 1024}, 65),
    "11.5 M": ("shakespeare-char", {}, 65),
}
"""A recipe, settings of its model, and the size of its vocabulary."""
MEASURED = {"3.4 M": "serving_cpu_epyc_202611.json", "11.5 M": "serving_12m_cpu_epyc_202611.json"}
RESULTS = Path(__file__).parent / "results"


def build(name: str) -> Any:
    """Return a model of a recipe with random weights."""
    recipe, settings, size = MODELS[name]
    torch.manual_seed(0)
    config = replace(load_recipe(recipe).model, vocab_size=size, **settings)
    return build_model(config).eval()


@torch.no_grad()
def measure(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the sizes and times of a model's sessions."""
    model = build(name)
    mem_len = model.config.mem_len
    largest = largest_state(model, mem_len, most_tokens(mem_len))
    folder.mkdir()
    redis = Redis(folder)
    settings = ServeSettings(sessions=redis.url)
    store = RedisStore(settings, "0" * 64, model, largest)
    try:
        tokens = torch.randint(0, model.config.vocab_size, (1, 2 * mem_len))
        lengths = Lengths.of(model.config, ext_len=0)
        mems = read_all(model, tokens, lengths, model.keep(model.start_memory(1))).seen()
        random = random_numbers(0).get_state()
        state = State(mems, 1, random, read=tokens[0, :-1].to(torch.int32))
        turn = Turn(tokens[0, : arguments.prompt].tolist(), tokens[0, : arguments.tokens].tolist())
        seconds: dict[str, list[float]] = {"acquire": [], "save": [], "save with the memory": []}
        added: dict[str, list[int]] = {"save": [], "save with the memory": []}
        young = 0
        for number in range(60):
            began = time.perf_counter()
            lease = store.acquire("s")
            seconds["acquire"].append(time.perf_counter() - began)
            size = arguments.prompt + arguments.tokens + 1
            is_whole = lease.n_appended + size > settings.session_snapshot
            kind = "save with the memory" if is_whole else "save"
            before = _aof_bytes(redis)
            began = time.perf_counter()
            store.save(lease, state, turn)
            seconds[kind].append(time.perf_counter() - began)
            added[kind].append(_aof_bytes(redis) - before)
            if number == 0:
                young = redis.client.memory_usage("txl:session:s", samples=0)
        began, spent = time.perf_counter(), time.process_time()
        store.load("s")
        loaded, spent = time.perf_counter() - began, time.process_time() - spent
        return {
            "weights": sum(x.numel() for x in model.parameters()),
            "mem_len": mem_len,
            "bytes_in_a_server": state.mems.nbytes + random.nbytes + state.read.nbytes,
            "bytes_in_redis_young": young,
            "bytes_in_redis_full": redis.client.memory_usage("txl:session:s", samples=0),
            "aof_bytes_an_answer": round(statistics.mean(added["save"])),
            "aof_bytes_with_the_memory": round(statistics.mean(added["save with the memory"])),
            "ms": {key: round(1000 * statistics.median(x), 2) for key, x in seconds.items() if x}
            | {"load and read again": round(1000 * loaded, 1)},
            "processor_ms_load_and_read_again": round(1000 * spent, 1),
            "tokens_read_again": lease.n_appended + size,
        }
    finally:
        store.close()
        redis.kill()


def _aof_bytes(redis: Redis) -> int:
    return int(redis.client.info("persistence")["aof_current_size"])


def compute(name: str, found: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what all sessions take."""
    spent = json.loads((RESULTS / MEASURED[name]).read_text())["load"]["processor_ms_per_token"]
    per_token = (spent["engine"] + spent["rest_of_server"]) / 1000
    answers = arguments.sessions / arguments.seconds
    tokens = answers * arguments.tokens
    cores = tokens * per_token
    every = 1024 / (arguments.prompt + arguments.tokens + 1)
    snapshot = found["aof_bytes_with_the_memory"] / every
    written = answers * (found["aof_bytes_an_answer"] + snapshot)
    return {
        "tokens_a_second_of_a_core": round(1 / per_token),
        "answers_a_second": round(answers, 1),
        "tokens_a_second": round(tokens),
        "cores": round(cores, 1),
        "gb_in_servers": round(arguments.sessions * found["bytes_in_a_server"] / 1e9, 2),
        "gb_in_redis": round(arguments.sessions * found["bytes_in_redis_full"] / 1e9, 2),
        "mb_a_second_to_redis": round(written / 1e6, 1),
        "dollars_a_month": round(730 * cores / arguments.use * arguments.dollars),
    }


def main() -> None:
    """Measure, compute and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="between two answers of one")
    parser.add_argument("--prompt", type=int, default=12, help="tokens")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--use", type=float, default=0.5, help="share of a core that is used")
    parser.add_argument("--dollars", type=float, default=0.04, help="for an hour of a core")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"circumstances": circumstances()}
    given = {name: x for name, x in vars(arguments).items() if name != "json"}
    result["assumed"] = given
    with tempfile.TemporaryDirectory() as place:
        for number, name in enumerate(MODELS):
            found = measure(name, arguments, Path(place) / str(number))
            result[name] = {"measured": found, "computed": compute(name, found, arguments)}
    if arguments.json:
        write_result_file(arguments.json, result)
    print(json_text(result))


if __name__ == "__main__":
    main()
