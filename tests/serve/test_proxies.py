"""A server behind a proxy that serves it below a path of its own."""

import http.server
import threading
import urllib.error
import urllib.request

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

PREFIX = "/txl"


def proxy_of(address, removes):
    """A handler that passes on what is below the prefix, with or without it, and nothing else."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def pass_on(self):
            if self.path != PREFIX and not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = (self.path.removeprefix(PREFIX) or "/") if removes else self.path
            headers = {"Content-Type": "application/json"} if body else {}
            asked = urllib.request.Request(address + path, body or None, headers)
            try:
                answer = urllib.request.urlopen(asked)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                content = answer.read()
                self.send_response(answer.status)
                for name in ("Content-Type", "Content-Security-Policy"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_POST = pass_on  # noqa: N815  (names of the library)

        def log_message(self, *given):
            pass

    return Proxy


@pytest.fixture(params=[True, False], ids=["removed", "kept"])
def proxied(request, made, run_server):
    """The address of a server behind a proxy that removes the prefix, or keeps it."""
    with run_server(made, root_path="" if request.param else PREFIX) as server:
        handler = proxy_of(server.address, request.param)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
            thread = threading.Thread(target=proxy.serve_forever, daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{proxy.server_address[1]}{PREFIX}"
            proxy.shutdown()
            thread.join()


def test_what_is_below_a_prefix_is_answered_without_a_redirect(proxied):
    for path in ("", "/", "/health/", "/v1/models", "/v1/models/", "/v1/models/tiny/", "/metrics"):
        assert httpx.get(proxied + path).status_code == 200, path
    for path in ("/v1/completions", "/v1/completions/"):
        answer = httpx.post(proxied + path, json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200, path
    assert httpx.get(f"{proxied}/v1/none").status_code == 404


def test_the_description_names_the_prefix_that_is_set(made, run_server):
    for prefix, servers in (("", None), (PREFIX, [{"url": PREFIX}])):
        with run_server(made, root_path=prefix) as server:
            description = httpx.get(f"{server.address}/openapi.json").json()
            assert description.get("servers") == servers
            # Programs of the same machine ask it directly.
            assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_prefix_begins_with_a_slash(refused):
    from transformer_xl.apps.serve.serve_settings import ServeSettings

    for wrong in ("txl", "/", "/txl/", "//txl", "/a b", "http://host/txl"):
        with refused("must begin with a slash and not end with one, as /txl"):
            ServeSettings(root_path=wrong)
    assert ServeSettings(root_path="/a/b").root_path == "/a/b"


def test_the_page_asks_for_nothing_by_an_absolute_path(proxied):
    page = httpx.get(f"{proxied}/").text
    assert "fetch(ROOT + path" in page
    assert page.count("fetch(") == 1
    for quote in "\"'`":
        for word in ("/v1", "/health", "/metrics", "/openapi"):
            assert quote + word not in page


def test_the_page_works_below_a_prefix(browser, proxied, made):
    for address in (f"{proxied}/", proxied):
        browser.events.clear()
        browser.go(address)
        browser.until("document.querySelector('#model').textContent.startsWith('tiny')")
        browser.run("document.querySelector('#max_tokens').value = 5")
        browser.run("document.querySelector('#seed').value = 5")
        browser.run("document.querySelector('#prompt').value = 'abc'")
        browser.run("write()")
        browser.until("document.querySelector('#stop').disabled && tokens.length === 8")
        text = browser.run("document.querySelector('#text').textContent")
        assert text == "abc" + made.alone("abc", 5, seed=5)
        assert browser.faults == []
        assert all(each.startswith(proxied) for each in browser.addresses)
