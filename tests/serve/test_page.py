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


def test_every_reason_for_which_a_text_ends_has_its_words(server):
    schema = httpx.get(server.address + "/openapi.json").json()["components"]["schemas"]
    kinds = schema["Choice"]["properties"]["stop_reason"]["anyOf"]
    reasons = [kind["const"] for kind in kinds if "const" in kind]
    assert reasons
    page = httpx.get(server.address + "/").text
    words = page.partition("const ENDINGS = {")[2].partition("}")[0]
    for reason in ("stop", *reasons):
        assert f" {reason}: " in words
