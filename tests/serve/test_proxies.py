"""A server behind a proxy that serves it below a path of its own, or by another name."""

import pytest

from transformer_xl.apps.serve.serve_settings import ServeSettings

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

PREFIX = "/txl"


@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_what_is_below_a_prefix_is_answered_without_a_redirect(made, run_server, prefix):
    with run_server(made, root_path=prefix) as server:
        # A proxy removes the prefix or keeps it; programs of the same machine ask directly.
        for root in {"", prefix}:
            address = server.address + root
            for path in ("/", "/health", "/v1/models", "/v1/models/tiny", "/metrics"):
                assert httpx.get(address + path).status_code == 200, path
            body = {"prompt": "a", "max_tokens": 1}
            assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
            assert httpx.get(f"{address}/v1/none").status_code == 404
        description = httpx.get(f"{server.address}/openapi.json").json()
        assert description.get("servers") == ([{"url": prefix}] if prefix else None)
        # The page asks for nothing by an absolute path.
        page = httpx.get(f"{server.address}/").text
        assert page.count("fetch(") == page.count("fetch(ROOT + path") == 1


def test_a_prefix_begins_with_a_slash(refused):
    for wrong in ("txl", "/", "/txl/", "//txl", "/a b", "http://host/txl"):
        with refused("must begin with a slash and not end with one, as /txl"):
            ServeSettings(root_path=wrong)
    assert ServeSettings(root_path="/a/b").root_path == "/a/b"
