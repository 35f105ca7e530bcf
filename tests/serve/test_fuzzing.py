"""Requests made up from the server's own description, fitting or not, are answered as it says.

``TXL_EXAMPLES`` is how many of each kind each address gets at most (4; 20 with ``--nightly``), and
``TXL_REQUESTS`` a folder for tables of what was asked and answered: 10,000 requests and more by
``TXL_EXAMPLES=450``.
"""

import json
import logging
import os
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")
schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

log = logging.getLogger(__name__)

SLOWEST = 60.0
"""Seconds that no answer may take; most of them are for a machine that does much else."""
PARTS = ("/v1/completions", "/v1/chat", "/v1/sessions", "/")
"""Addresses by their beginnings; each has a table of its own."""


def aim(case):
    """Let a request name the model, a text of the vocabulary, and a session that exists."""
    if "name" in (case.path_parameters or {}):
        session = "other" if case.method == "DELETE" else "known"
        case.path_parameters["name"] = "tiny" if "models" in case.path else session
    if isinstance(case.body, dict):
        case.body["model"] = "tiny"
        if "messages" in case.body:
            for message in case.body["messages"]:
                message["content"] = "abc"
        else:
            case.body["prompt"] = "abc"
            case.headers.pop("X-Session", None)


@pytest.fixture
def examples(is_nightly):
    """Most requests of each kind to each address."""
    return int(os.environ.get("TXL_EXAMPLES", "20" if is_nightly else "4"))


def ask(operation, mode, statuses, seconds, examples):
    """Ask one address; count the statuses of its answers, and note how long they took."""
    from schemathesis.specs.openapi.checks import positive_data_acceptance as fits

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def answered(case):
        # Of the requests that fit, every second one is about what there is.
        if mode is schemathesis.GenerationMode.POSITIVE and len(seconds) % 2:
            aim(case)
        began = time.monotonic()
        answer = case.call(timeout=SLOWEST)
        seconds.append(time.monotonic() - began)
        # What fits the description may still be no text of this vocabulary, or empty.
        case.validate_response(answer, excluded_checks=[fits])
        assert answer.status_code < 500, answer.text
        statuses[answer.status_code] += 1

    try:
        answered()
    except hypothesis.errors.Unsatisfiable:
        # Nothing can be wrong about an address that takes nothing.
        assert mode is schemathesis.GenerationMode.NEGATIVE


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
# Where types are checked at each call, the server's threads draw which item of a list is.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("vocab", ["chars", "bpe"])
@pytest.mark.timeout(0 if "TXL_EXAMPLES" in os.environ else 1200)
def test_made_up_requests_are_answered_as_described(
    make_model, run_server, tmp_path, vocab, examples
):
    made = make_model(vocab=vocab)
    with run_server(made, sessions=tmp_path, max_tokens=20, max_queue=4) as server:
        for name in ("known", "other"):
            body = {"prompt": "ab", "session": name, "max_tokens": 2}
            assert httpx.post(f"{server.address}/v1/completions", json=body).status_code == 200
        schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json", timeout=60)
        operations = [found.ok() for found in schema.get_all_operations()]
        for part in PARTS:
            own = [x for x in operations if part == next(y for y in PARTS if x.path.startswith(y))]
            ask_all(own, examples, f"{vocab}{part.replace('/', '-')}.json")
        assert server.service.engine.is_alive


def ask_all(operations, examples, name):
    """Ask the addresses of a part; write the table of their answers."""
    table: dict[str, Counter[int]] = {}
    seconds: list[float] = []
    modes = schemathesis.GenerationMode
    for operation in operations:
        for mode in (modes.POSITIVE, modes.NEGATIVE):
            statuses = table[f"{operation.label}, {mode.value}"] = Counter()
            ask(operation, mode, statuses, seconds, examples)
    whole = sum(table.values(), Counter())
    log.info("%d requests, statuses %s", whole.total(), sorted(whole.items()))
    if folder := os.environ.get("TXL_REQUESTS"):
        about = {"requests": whole.total(), "slowest_seconds": round(max(seconds), 2)}
        text = json.dumps(about | {"statuses": table}, indent=1)
        (Path(folder) / name).write_text(f"{text}\n")
    assert len(table) >= 2, name
    assert 200 in whole, name
    assert 422 not in whole, name
