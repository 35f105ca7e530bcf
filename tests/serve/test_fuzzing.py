"""Requests made up from the server's own description, fitting or not, are answered as it says."""

import logging
import os

import pytest

pytestmark = pytest.mark.slow

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

log = logging.getLogger(__name__)

EXAMPLES = int(os.environ.get("TXL_EXAMPLES", "40"))
"""Most requests of each kind to each address."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_made_up_requests_are_answered_as_described(made, run_server, tmp_path):
    from schemathesis.specs.openapi.checks import positive_data_acceptance as fits

    # What fits the description may still be no text of this vocabulary, or empty.
    count, statuses = 0, set()
    with run_server(made, sessions=tmp_path, max_tokens=20, max_texts=4) as server:
        schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in (
                schemathesis.GenerationMode.POSITIVE,
                schemathesis.GenerationMode.NEGATIVE,
            ):

                @hypothesis.settings(
                    max_examples=EXAMPLES,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(hypothesis.HealthCheck),
                )
                @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
                def answered(case):
                    nonlocal count
                    answer = case.call(timeout=30)
                    case.validate_response(answer, excluded_checks=[fits])
                    assert answer.status_code != 500, answer.text
                    statuses.add(answer.status_code)
                    count += 1

                try:
                    answered()
                except hypothesis.errors.Unsatisfiable:
                    # Nothing can be wrong about an address that takes nothing.
                    assert mode is schemathesis.GenerationMode.NEGATIVE
        assert server.service.is_ready
    log.info("%d requests, statuses %s", count, sorted(statuses))
    assert count > 10 * EXAMPLES
    assert {200, 404, 422} <= statuses
