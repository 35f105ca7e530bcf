"""Which hosts and origins a request may name."""

import pytest

pytest.importorskip("starlette", reason="needs pip install 'transformer-xl[serve]'")

from starlette.requests import Request

from transformer_xl.apps.serve.errors import ApiError
from transformer_xl.apps.serve.hosts import Hosts, is_loopback


def status(hosts, host, method="GET", origin=None):
    headers = [(b"host", host.encode())] if host is not None else []
    headers += [] if origin is None else [(b"origin", origin.encode())]
    request = Request({"type": "http", "method": method, "path": "/", "headers": headers})
    try:
        hosts.check(request)
    except ApiError as error:
        return error.status
    return 200


LOOPBACK = [
    *("localhost", "LocalHost", "localhost.", "a.localhost", "127.0.0.1", "127.1.2.3", "127.1"),
    *("[::1]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "0x7f.1", "2130706433"),
]
OTHERS = [
    *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost", ""),
    *(
        "192.168.0.1",
        "0.0.0.0",
        "[::]",
        "[fe80::1]",
        "user@localhost",
        "localhost/x",
        "127.0.0.1:x",
    ),
    *("localhost, evil.example", "localhost\x00", "\u0661", "127.0.0.1 evil.example", "127.1\tx"),
]


def test_every_spelling_of_loopback_is_one():
    for host in LOOPBACK:
        assert is_loopback(host), host
        for own in ("127.0.0.1", "localhost", "::1", "127.0.0.5"):
            assert status(Hosts(own, ()), host) == 200, host
            assert status(Hosts(own, ()), f"{host}:8000") == 200, host


def test_a_local_server_answers_to_no_other_host():
    for host in [*OTHERS, None]:
        assert status(Hosts("127.0.0.1", ()), host) == 421, host
        assert status(Hosts("127.0.0.7", ("models.example",)), host) == 421, host


def test_names_are_trusted_and_on_other_addresses_only_they():
    hosts = Hosts("0.0.0.0", ("models.example", "*.inner.example"))
    found = {
        name: status(hosts, name)
        for name in ("Models.example:443", "a.inner.example", "10.0.0.1", "[fe80::1]", "localhost")
    }
    assert set(found.values()) == {200}
    assert status(hosts, "evil.example") == 421
    # Without names a server on another address has any.
    assert status(Hosts("0.0.0.0", ()), "any.example") == 200


def test_only_the_own_origin_may_change_something():
    for method in ["POST", "PUT", "PATCH", "DELETE"]:
        hosts = Hosts("127.0.0.1", ("models.example",))
        for host, origin, expected in [
            ("localhost:8000", None, 200),
            ("localhost:8000", "http://localhost:8000", 200),
            ("LOCALHOST:8000", "http://localhost:8000", 200),
            ("localhost", "http://localhost", 200),
            ("models.example", "https://models.example", 200),
            ("localhost:8000", "https://models.example", 200),
            ("localhost:8000", "http://localhost:3000", 403),
            ("localhost:8000", "http://127.0.0.1:8000", 403),
            ("localhost:8000", "http://evil.example", 403),
            ("localhost:8000", "http://evil.example:8000", 403),
            ("localhost:8000", "null", 403),
            ("localhost:8000", "", 403),
            ("localhost:8000", "file://", 403),
            ("localhost:8000", "http://localhost:8000@evil.example", 403),
        ]:
            assert status(hosts, host, method, origin) == expected, (host, origin)
        assert status(hosts, "localhost:8000", "GET", "http://evil.example") == 200


def test_a_name_that_is_an_address_is_one_in_any_spelling():
    hosts = Hosts("127.0.0.1", ("[2001:DB8:0::1]", "10.0.0.1"))
    for host in ("[2001:db8::1]", "[2001:0db8:0:0::1]:8000", "10.0.0.1", "10.1:8000"):
        assert status(hosts, host) == 200, host
    for host in ("[2001:db8::2]", "10.0.0.2"):
        assert status(hosts, host) == 421, host
    assert status(hosts, "localhost", "POST", "http://[2001:db8::1]") == 200
    assert status(hosts, "localhost", "POST", "http://[2001:db8::2]") == 403
