"""The page, used in a real browser as a person would use it.

With TXL_PICTURES set to a folder, pictures stay there; with TXL_PICTURES_MODEL, of that model.
"""

import os
from pathlib import Path

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")


@pytest.fixture
def page(browser, server):
    browser.size(1280, 900)
    browser.events.clear()
    browser.go(server.address + "/")
    browser.until("document.querySelector('#model').textContent.startsWith('tiny')")
    yield browser
    assert browser.faults == []


@pytest.fixture(scope="module")
def shown(made, server, run_server, tmp_path_factory):
    """The address of the server of which pictures are made."""
    folder = os.environ.get("TXL_PICTURES_MODEL")
    if not folder:
        yield server.address
        return
    from transformer_xl.inference.generate import open_folder
    from transformer_xl.model.pretrained import find_model_folder

    known = type(made)(find_model_folder(folder), *open_folder(folder))
    with run_server(known, name="shakespeare", sessions=tmp_path_factory.mktemp("shown")) as found:
        yield found.address


def write(page, text, n=30):
    page.run(f"document.querySelector('#max_tokens').value = {n}")
    page.run("document.querySelector('#seed').value = 5")
    page.run("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter", control=True)


def text_of(page):
    return page.run("document.querySelector('#text').textContent")


def status(page):
    return page.run("document.querySelector('#status').textContent")


DONE = "document.querySelector('#stop').disabled"


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


def test_it_writes_what_the_model_writes_and_shows_the_memory(page, made, server):
    whole = made.alone("once upon a time", 30, seed=5)
    write(page, "once upon a time")
    page.until(DONE + " && document.querySelectorAll('#strip span').length > 0")
    assert text_of(page) == "once upon a time" + whole
    assert status(page).startswith("30 tokens")
    # Chart, places that the last token was predicted from, and those of the next.
    assert page.run("document.querySelectorAll('#chart .each').length") == 1
    assert page.run("document.querySelectorAll('#looked li').length") == 5
    assert page.run("document.querySelectorAll('#text .seen').length") == 5
    assert page.run("document.querySelector('#strip').textContent") == whole[-13:]
    losses = page.run("tokens.map(t => t.loss)")
    name = page.run("document.querySelector('#session').value")
    body = {"prompt": "once upon a time" + whole, "echo": True, "logprobs": 0, "max_tokens": 0}
    scores = httpx.post(server.address + "/v1/completions", json=body).json()
    expected = scores["choices"][0]["logprobs"]["token_logprobs"]
    # The prompt was read in the same way; what was written saw a little less of it.
    assert losses[0] is None
    assert losses[1:16] == pytest.approx([-x for x in expected[1:16]], abs=1e-4)
    assert {address.split("/")[2] for address in page.addresses} == {server.address[7:]}
    assert [s["id"] for s in httpx.get(f"{server.address}/v1/sessions").json()["data"]] == [name]


def test_the_keyboard_is_enough(page):
    write(page, "abc", n=12)
    page.until(DONE + " && tokens.length === 15")
    page.run("document.querySelector('#text').focus()")
    for _ in range(3):
        page.press("ArrowLeft")
    assert page.run("chosen") == 11
    assert page.run("tokens[11].span.classList.contains('chosen')")
    assert page.run("document.querySelector('#about').textContent").startswith("Written: “")
    page.press("Home")
    assert page.run("document.querySelector('#about').textContent") == "Given: “a”."
    # Every control can be reached, in an order, and says what it is.
    page.run("document.querySelector('details').open = true")
    reached = []
    page.run("document.querySelector('#text').focus()")
    for _ in range(16):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id"))
    assert reached[:2] == ["prompt", "write"]
    assert {"temperature", "session", "resume", "save", "delete", "fresh"} <= {*reached}
    unnamed = page.run(
        "[...document.querySelectorAll('input, textarea, button')]"
        ".filter(x => !(x.labels?.length || x.textContent.trim())).map(x => x.id)"
    )
    assert unnamed == []


def test_stop_ends_it_and_the_session_goes_on(page, server, until):
    write(page, "abc", n=100_000)
    page.until("tokens.length > 20")
    page.run("document.querySelector('#stop').click()")
    page.until(DONE)
    assert status(page).startswith("stopped after")
    until(lambda: server.service.engine.n_running == 0)
    write(page, "d", n=5)
    page.until(DONE + " && document.querySelector('#status').textContent.startsWith('5 tokens')")


def test_a_session_is_saved_resumed_and_deleted(page, server):
    write(page, "some text", n=20)
    page.until(DONE)
    name, text = page.run("document.querySelector('#session').value"), text_of(page)
    page.run("document.querySelector('#save').click()")
    page.until(f"document.querySelector('#status').textContent === '{name} is saved'")
    page.go(server.address + "/")
    page.until("document.querySelectorAll('#sessions button').length > 0")
    page.run(f"document.querySelector('#session').value = '{name}'")
    page.run("document.querySelector('#resume').click()")
    page.until("document.querySelectorAll('#strip span').length > 0")
    assert text_of(page) == text[-13:]
    page.run("document.querySelector('#delete').click()")
    page.until(f"document.querySelector('#status').textContent === '{name} is deleted'")
    page.run("document.querySelector('#resume').click()")
    page.until("document.querySelector('#status').classList.contains('fault')")
    assert "there is no session" in status(page)
    # The browser says of each answer that was an error that it was one.
    page.events[:] = [e for e in page.events if "404" not in str(e.get("params", {}))]


def test_what_goes_wrong_is_said(page):
    write(page, "Ä")
    page.until("document.querySelector('#status').classList.contains('fault')")
    assert "not in the vocabulary" in status(page)
    page.events[:] = [e for e in page.events if "400" not in str(e.get("params", {}))]


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_it_fits(page, shown, width, is_dark, tmp_path):
    page.size(width, 900 if width > 600 else 740, is_dark=is_dark)
    page.go(shown + "/")
    page.until("model !== null")
    write(page, "the quick brown fox jumps over", n=70)
    page.until(DONE + " && document.querySelectorAll('#strip span').length > 0")
    assert page.run("document.documentElement.scrollWidth") <= width
    wide = page.run(
        "[...document.querySelectorAll('body *')].filter(x => x.checkVisibility() && "
        "x.getBoundingClientRect().right > innerWidth + 1).map(x => x.id || x.tagName)"
    )
    assert wide == []
    # Text and what is behind it differ enough to be read (WCAG: 4.5).
    for name in ("--ink", "--soft", "--fault"):
        assert _contrast(page, name, "--card") >= 4.5
    assert _contrast(page, "--on-accent", "--accent") >= 4.5
    folder = Path(os.environ.get("TXL_PICTURES", tmp_path))
    path = folder / f"serve-{width}-{'dark' if is_dark else 'light'}.png"
    page.picture(path, whole=width < 600)
    assert path.read_bytes()[:4] == b"\x89PNG"


def _contrast(page, one, other):
    return page.run(
        f"""(() => {{
        const read = (name) => getComputedStyle(document.documentElement)
            .getPropertyValue(name).trim();
        const light = (name) => [1, 3, 5].map((n) => parseInt(read(name).slice(n, n + 2), 16) / 255)
            .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
            .reduce((sum, x, n) => sum + x * [0.2126, 0.7152, 0.0722][n], 0);
        const [a, b] = [light("{one}"), light("{other}")].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
    }})()"""
    )
