"""What a page of another site, open in a real browser, can do to a server on this machine."""

import http.server
import re
import threading

import pytest

for _name in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(_name, reason="needs pip install 'transformer-xl[serve]'")
httpx = pytest.importorskip("httpx")

PAGE = b"<!doctype html><title>elsewhere</title><p>A page of another site."


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A site that shows one page at each address."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *given):
        pass


@pytest.fixture(scope="module")
def elsewhere():
    """The port of another site on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as site:
        thread = threading.Thread(target=site.serve_forever, daemon=True)
        thread.start()
        yield site.server_address[1]
        site.shutdown()
        thread.join()


@pytest.fixture
def served(made, run_server, tmp_path):
    """A server with an unsaved session."""
    with run_server(made, sessions=tmp_path) as server:
        body = {"prompt": "abc", "session": "tale", "max_tokens": 2}
        assert httpx.post(f"{server.address}/v1/completions", json=body).status_code == 200
        yield server


def port_of(server):
    return int(server.address.rpartition(":")[2])


def refused(server):
    """How many requests were refused for their origin."""
    found = re.search(
        r'txl_requests_total\{[^}]*status="403"\} ([\d.]+)',
        httpx.get(f"{server.address}/metrics").text,
    )
    return float(found[1]) if found else 0


FORM = """(() => {{
  const form = document.createElement("form");
  form.method = "POST"; form.action = "{address}"; form.enctype = "{kind}";
  form.target = "answer";
  const field = document.createElement("input");
  field.name = '{{"prompt": "abc", "session": "tale", "x": "'; field.value = '"}}';
  if ({has_body}) form.append(field);
  const frame = document.createElement("iframe");
  frame.name = "answer";
  document.body.append(frame, form);
  form.submit();
}})()"""


@pytest.mark.parametrize("page", ["http://elsewhere.example", "http://localhost", "null"])
def test_forms_and_requests_of_other_sites_change_nothing(browser, served, elsewhere, until, page):
    # Another port of this machine is another site, too. A sandboxed frame has no origin at all.
    is_sandboxed = page == "null"
    browser.go(f"{'http://elsewhere.example' if is_sandboxed else page}:{elsewhere}/")
    address = f"http://127.0.0.1:{port_of(served)}"
    attempts = [
        FORM.format(address=f"{address}/v1/{path}", kind=kind, has_body=has_body)
        for path, kind, has_body in (
            ("completions", "text/plain", "true"),
            ("sessions/tale/save", "application/x-www-form-urlencoded", "false"),
            ("sessions/tale/save", "text/plain", "false"),
        )
    ]
    save = f"{address}/v1/sessions/tale/save"
    attempts.append(f'fetch("{save}", {{method: "POST", mode: "no-cors"}}).then(() => 0, () => 0)')
    attempts.append(f'(navigator.sendBeacon("{save}"), 0)')
    for number, script in enumerate(attempts, 1):
        if is_sandboxed:
            script = f"""(() => {{
              const frame = document.createElement("iframe");
              frame.sandbox = "allow-scripts allow-forms";
              frame.srcdoc = "<body><script>" + {script!r} + "</" + "script>";
              document.body.append(frame);
            }})()"""
        browser.run(script)
        until(lambda number=number: refused(served) == number)
    # These are asked about before (preflight), and the browser is told nothing that allows them.
    for method in ("DELETE", "PUT"):
        script = (
            f'fetch("{address}/v1/sessions/tale", {{method: "{method}"}}).then(() => "done", '
            '() => "refused")'
        )
        assert browser.run(script) == "refused"
    script = f'fetch("{address}/v1/sessions").then(x => x.text(), () => "refused")'
    assert browser.run(script) == "refused"
    about = httpx.get(f"{served.address}/v1/sessions/tale").json()
    assert (about["id"], about["is_saved"], about["remembered"]) == ("tale", False, 4)
    browser.events.clear()


def test_a_name_that_comes_to_mean_this_machine_reads_nothing(browser, served):
    browser.go(f"http://rebound.example:{port_of(served)}/v1/sessions")
    seen = browser.run("document.body.innerText")
    assert "does not answer to the host" in seen
    assert "tale" not in seen
    for method, path in (("GET", "sessions"), ("POST", "sessions/tale/save"), ("DELETE", "x")):
        script = f'fetch("/v1/{path}", {{method: "{method}"}}).then(x => x.status)'
        assert browser.run(script) == 421
    browser.events.clear()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "my.localhost", "127.1"])
def test_the_own_page_works_by_every_name_of_this_machine(browser, served, host):
    browser.go(f"http://{host}:{port_of(served)}/")
    save = 'fetch("/v1/sessions/tale/save", {method: "POST"}).then(x => x.status)'
    assert browser.run(save) == 200
    assert browser.run('fetch("/v1/sessions/tale", {method: "DELETE"}).then(x => x.status)') == 200
    browser.events.clear()
