"""Requests made up from the server's own description, fitting or not, are answered as it says.

``TXL_EXAMPLES`` is how many of each kind each address gets at most (4; 20 with ``--nightly``).
"""

import os
from collections import Counter

import pytest

pytestmark = pytest.mark.slow

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")
schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")


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


def ask(operation, mode, examples):
    """Ask one address; return how often each status was answered."""
    from schemathesis.specs.openapi.checks import positive_data_acceptance as fits

    statuses = Counter()

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
        if mode is schemathesis.GenerationMode.POSITIVE and statuses.total() % 2:
            aim(case)
        answer = case.call(timeout=60)
        # What fits the description may still be no text of this vocabulary, or empty.
        case.validate_response(answer, excluded_checks=[fits])
        assert answer.status_code < 500, answer.text
        statuses[answer.status_code] += 1

    try:
        answered()
    except hypothesis.errors.Unsatisfiable:
        # Nothing can be wrong about an address that takes nothing.
        assert mode is schemathesis.GenerationMode.NEGATIVE
    return statuses


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
# Where types are checked at each call, the server's threads draw which item of a list is.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("vocab", ["chars", "bpe"])
@pytest.mark.timeout(0 if "TXL_EXAMPLES" in os.environ else 1200)
def test_made_up_requests_are_answered_as_described(
    make_model, run_server, tmp_path, vocab, is_nightly
):
    examples = int(os.environ.get("TXL_EXAMPLES", "20" if is_nightly else "4"))
    modes = schemathesis.GenerationMode
    made = make_model(vocab=vocab)
    with run_server(made, sessions=tmp_path, max_tokens=20, max_queue=4) as server:
        for name in ("known", "other"):
            body = {"prompt": "ab", "session": name, "max_tokens": 2}
            assert httpx.post(f"{server.address}/v1/completions", json=body).status_code == 200
        schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json", timeout=60)
        operations = [found.ok() for found in schema.get_all_operations()]
        asked = [ask(each, mode, examples) for each in operations for mode in modes]
        assert server.service.engine.is_alive
    statuses = sum(asked, Counter())
    assert 200 in statuses
    assert 422 not in statuses
