"""Keys, tenants, and targets that try to look like something else."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from suimon.gateway.auth import Authenticator, cache_salt, presented_key
from suimon.gateway.config import ApiKey
from suimon.gateway.hookspecs import NotAuthenticated, hookimpl

KEYS = (ApiKey(name="alice", key="secret-a"), ApiKey(key="gehéim"), ApiKey(name="last", key="secret-z"))


@pytest.fixture(scope="module")
def server(serve_module: Any) -> Any:
    return serve_module(api_keys=KEYS)


def raw_request(server: Any, method: bytes, target: bytes, *headers: bytes) -> bytes:
    with server.connect() as connection:
        lines = (method + b" " + target + b" HTTP/1.1", b"Host: a", b"Connection: close", *headers, b"", b"")
        connection.sendall(b"\r\n".join(lines))
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_without_keys_everybody_is_the_nameless_tenant() -> None:
    assert Authenticator(()).tenant([]) == ""
    assert Authenticator(()).tenant([(b"authorization", b"Bearer whatever")]) == ""


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ([(b"authorization", b"Bearer secret-a")], "alice"),
        ([(b"authorization", b"bearer  secret-a ")], "alice"),
        ([(b"x-api-key", b"secret-z")], "last"),
        ([(b"authorization", "Bearer gehéim".encode())], "key-" + hashlib.sha256("gehéim".encode()).hexdigest()[:8]),
        ([(b"authorization", b"Basic abc"), (b"x-api-key", b"secret-a")], "alice"),
    ],
)
def test_a_key_proves_its_tenant(headers: Any, tenant: str) -> None:
    assert Authenticator(KEYS).tenant(headers) == tenant


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer secret-b")],
        [(b"authorization", b"Bearer secret-a x")],
        [(b"authorization", b"Bearer \xc3\xa9")],
        [(b"authorization", b"Bearer \xff\xfe\x00")],
        [(b"authorization", b"Basic secret-a")],
        [(b"authorization", b"secret-a")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"SECRET-A")],
        [(b"cookie", b"authorization=secret-a")],
        [(b"authorization", b"Bearer " + b"x" * 60_000)],
    ],
)
def test_nothing_else_does(headers: Any) -> None:
    with pytest.raises(NotAuthenticated) as caught:
        Authenticator(KEYS).tenant(headers)
    assert "secret" not in caught.value.message


def test_every_key_is_compared_whichever_fits(monkeypatch: Any) -> None:
    import hmac

    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    for presented in (b"secret-a", b"secret-z", b"nothing"):
        compared.clear()
        try:
            Authenticator(KEYS).tenant([(b"x-api-key", presented)])
        except NotAuthenticated:
            assert presented == b"nothing"
        assert len(compared) == len(KEYS)
        assert all(len(a) == len(b) == 32 for a, b in compared)


def test_the_key_that_was_presented() -> None:
    assert presented_key([(b"authorization", b"Bearer k"), (b"x-api-key", b"other")]) == b"k"
    assert presented_key([]) is None


def test_tenants_share_no_cache_salt() -> None:
    assert cache_salt("", None) is None
    assert cache_salt("", "s") == "s"
    salts = {cache_salt(tenant, salt) for tenant in ("a", "b", "ab", "a1") for salt in (None, "b", "c", "1:b")}
    assert len(salts) == 16
    assert cache_salt("a", "b") == cache_salt("a", "b")


def test_over_http(server: Any) -> None:
    status, headers, raw = server.request("GET", "/v1/models")
    assert (status, json.loads(raw)["error"]["code"]) == (401, "invalid_api_key")
    assert headers["www-authenticate"] == "Bearer"
    assert headers["content-type"] == "application/json"
    assert server.request("GET", "/v1/models", headers={"authorization": "Bearer secret-a"})[0] == 200
    assert server.request("GET", "/v1/models", headers={"x-api-key": "secret-a"})[0] == 200


def test_requests_carry_their_tenant_and_its_salt(server: Any, tools: Any) -> None:
    server.backend.requests.clear()
    for key in ("secret-a", "secret-z"):
        for salt in (None, "s"):
            server.post("/v1/chat/completions", tools.chat_body(cache_salt=salt), {"x-api-key": key})
    requests = server.backend.requests
    assert [request.tenant for request in requests] == ["alice", "alice", "last", "last"]
    assert len({request.cache_salt for request in requests}) == 4


@pytest.mark.parametrize(
    "header", [b"Authorization: Bearer \xc3\xa9", b"Authorization: Bearer \xff", b"X-Api-Key: \xe9"]
)
def test_a_key_that_is_no_ascii_is_401_and_not_500(server: Any, header: bytes) -> None:
    assert status_of(raw_request(server, b"GET", b"/v1/models", header)) == 401


def test_a_key_of_bytes_beyond_ascii_works(server: Any) -> None:
    header = b"Authorization: Bearer " + "gehéim".encode()
    assert status_of(raw_request(server, b"GET", b"/v1/models", header)) == 200


def test_every_closed_route_is_closed(server: Any) -> None:
    from suimon.gateway.app import route_table
    from suimon.gateway.auth import AUTH, KEY

    for path, handler in route_table(server.app):
        for method in handler.http_methods:
            if handler.opt[AUTH] == KEY:
                answer = raw_request(server, method.encode(), path.replace("{model_id:path}", "x").encode())
                assert status_of(answer) == 401, (method, path)
            else:
                assert status_of(raw_request(server, method.encode(), path.encode())) == 200, (method, path)


METHODS = [b"GET", b"HEAD", b"OPTIONS", b"POST", b"PUT", b"TRACE", b"PROPFIND"]


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/models",
        b"//v1/models",
        b"/v1//models",
        b"/v1/models/",
        b"/v1/../v1/models",
        b"/health/../v1/models",
        b"/health/live/../../v1/models",
        b"/health%2f..%2fv1%2fmodels",
        b"/v1%2fmodels",
        b"/%76%31/models",
        b"/v1/models%2f",
        b"/v1/models%3f/health",
        b"/v1/models;/health",
        b"/V1/models",
        b"/./v1/models",
        b"/health/v1/models",
        b"//health",
        b"/%68ealth",
        b"/health%00",
        b"/health;x",
        b"/metrics",
        b"*",
        b"http://a/v1/models",
        b"http://health/v1/models",
    ],
)
def test_no_spelling_of_a_closed_path_is_open(server: Any, target: bytes) -> None:
    disguises = (
        b"X-HTTP-Method-Override: GET",
        b"X-Original-URL: /health",
        b"X-Rewrite-URL: /health",
        b"X-Forwarded-Prefix: /health",
        b"Forwarded: host=health",
    )
    for method in METHODS:
        answer = raw_request(server, method, target, *disguises)
        assert status_of(answer) in (400, 401), (method, answer)
        assert b"scripted" not in answer


@pytest.mark.parametrize("host", [b"a?/health", b"a/health", b"a#/health", b"/health", b"health", b"a@b/health"])
def test_the_host_header_opens_nothing(server: Any, host: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n")
        answer = connection.recv(65536)
    assert status_of(answer) in (400, 401)


def test_a_preflight_opens_nothing_while_cors_is_off(server: Any) -> None:
    headers = (b"Origin: https://a.example", b"Access-Control-Request-Method: POST")
    assert status_of(raw_request(server, b"OPTIONS", b"/v1/models", *headers)) == 401


def test_a_preflight_lookalike_opens_nothing_while_cors_is_on(serve: Any) -> None:
    server = serve(api_keys=KEYS, allowed_origins=("*",))
    for method in METHODS:
        answer = raw_request(server, method, b"/v1/models", b"Origin: x", b"Access-Control-Request-Method: GET")
        assert status_of(answer) == (204 if method == b"OPTIONS" else 401)
        assert b"scripted" not in answer


def test_no_body_is_read_before_the_key(server: Any) -> None:
    """Whoever has no key cannot make the server hold a body, nor learn what it would say to one."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
    )
    with server.connect() as connection:
        connection.sendall(head + b"{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


class Door:
    """A plugin that knows tenants by a header of its own."""

    @hookimpl
    def authenticate(self, headers: Any) -> str | None:
        if headers.get("x-user") == "mallory":
            raise RuntimeError("secret")
        return headers.get("x-user")


def test_a_plugin_decides_before_the_keys(serve: Any, tools: Any) -> None:
    server = serve(plugins=[Door()], api_keys=KEYS)
    assert server.post("/v1/chat/completions", tools.chat_body(), {"X-User": "bob"})[0] == 200
    assert server.post("/v1/chat/completions", tools.chat_body(), {"x-api-key": "secret-a"})[0] == 200
    assert [request.tenant for request in server.backend.requests] == ["bob", "alice"]


def test_a_plugin_alone_is_enough_to_close_the_door(serve: Any) -> None:
    server = serve(plugins=[Door()])
    assert server.request("GET", "/v1/models")[0] == 401
    assert server.request("GET", "/v1/models", headers={"x-user": "bob"})[0] == 200


def test_a_plugin_that_fails_lets_nobody_in(serve: Any) -> None:
    status, _, raw = serve(plugins=[Door()]).request("GET", "/v1/models", headers={"x-user": "mallory"})
    assert (status, json.loads(raw)["error"]["type"]) == (500, "server_error")
    assert b"secret" not in raw


def test_websockets_are_closed_before_anything_else(server: Any) -> None:
    import asyncio

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(server.app({"type": "websocket", "path": "/v1/models", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
