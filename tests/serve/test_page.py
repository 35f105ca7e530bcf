"""The page: what it loads, and its words for what the server answers."""

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")


def test_the_page_needs_nothing_from_elsewhere(server):
    answer = httpx.get(server.address + "/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    for word in ("http://", "https://", " style=", " onclick=", '<link rel="stylesheet', "src="):
        found = answer.text.replace("http://www.w3.org/2000/svg", "")
        assert word not in found, word
