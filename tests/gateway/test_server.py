"""The server as a process, spoken to over real sockets: limits, slow clients, signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from suimon.gateway.config import ConfigError, Settings
from suimon.gateway.server import base_url, listen

TINY = Path(__file__).with_name("tiny_server.py")
PATIENCE = 20.0  # seconds until a test gives up on something that never comes; no test waits for it to pass


class Process:
    """A running tiny server."""

    def __init__(self, **settings: Any) -> None:
        configured = msgspec.json.encode(Settings(port=0, **settings)).decode()
        command = [sys.executable, str(TINY), configured]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        url = self.process.stdout.readline().strip()
        assert url, self.process.communicate()[1]
        self.port = int(url.rsplit(":", 1)[1])

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(PATIENCE)
        client.connect(("127.0.0.1", self.port))
        return client

    def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send raw bytes and read to the end of the connection: status, headers, body."""
        with self.connect() as client:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(data)
            return parse(read_all(client))

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Exit status and log."""
        _, log = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, log


def read_all(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(65536):
            data += chunk
    return data


def parse(data: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    line, *fields = head.decode("latin-1").split("\r\n")
    headers = dict(field.lower().split(": ", 1) for field in fields)
    return int(line.split()[1]), headers, body


def error_code(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


def read_until(client: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        chunk = client.recv(65536)
        assert chunk, data
        data += chunk
    return data


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[Process]:
    server = Process(**settings)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    """One server with small limits, for every test that leaves it as it was."""
    limits = {"max_header_size": 4096, "max_header_count": 20, "max_body_size": 10_000, "max_connections": 8}
    clocks = {"header_timeout": 0.5, "body_timeout": 0.5, "keep_alive_timeout": 0.5, "stream_stall_timeout": 0.5}
    with running(**limits, **clocks) as process:
        yield process


GET = b"GET /x HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /x HTTP/1.1\r\nhost: a\r\n"
CLOSE = b"connection: close\r\n"


@pytest.fixture(autouse=True)
def still_fine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a client did, the next one is served."""
    yield
    if "server" in request.fixturenames:
        process: Process = request.getfixturevalue("server")
        assert process.ask(POST + CLOSE + b"content-length: 5\r\n\r\nhello")[::2] == (200, b"5")


# --- What may be sent -------------------------------------------------------------------------------------------------


def test_at_the_limits_requests_pass(server: Process) -> None:
    fields = b"".join(b"h%d: x\r\n" % index for index in range(20 - 3))
    status, _, body = server.ask(POST + CLOSE + fields + b"content-length: 10000\r\n\r\n" + bytes(10_000))
    assert (status, body) == (200, b"10000")


@pytest.mark.parametrize(
    "data",
    [
        GET + b"h: " + b"x" * 5000 + b"\r\n\r\n",
        GET + b"h: " + b"x" * 500_000,  # never ends
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /" + b"x" * 500_000,
        GET + b"".join(b"h%d: x\r\n" % index for index in range(21)) + b"\r\n",
        GET + b"x" * 5000,  # a name that never ends
    ],
    ids=["long value", "endless value", "long target", "endless target", "many", "endless name"],
)
def test_headers_beyond_the_limits_are_answered_431(server: Process, data: bytes) -> None:
    status, headers, body = server.ask(data)
    assert (status, error_code(body), headers["connection"]) == (431, "headers_too_large", "close")


def test_the_size_of_headers_is_counted_over_many_small_pieces(server: Process) -> None:
    with server.connect() as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(GET)
        for _ in range(10):
            client.sendall(b"h: " + b"x" * 497 + b"\r\n")
            time.sleep(0.005)
        assert parse(read_all(client))[0] == 431


def test_headers_are_counted_per_request_not_per_connection(server: Process) -> None:
    with server.connect() as client:
        for _ in range(5):
            client.sendall(POST + b"h: " + b"x" * 2000 + b"\r\ncontent-length: 2\r\n\r\nok")
            read_until(client, b"\r\n\r\n2")


def test_a_body_declared_too_long_is_refused_unread(server: Process) -> None:
    status, _, body = server.ask(POST + b"content-length: 10001\r\n\r\n")
    assert (status, error_code(body)) == (413, "body_too_large")
    assert server.ask(POST + b"content-length: 99999999999999999999999\r\n\r\n")[0] in (400, 413)


def flood(client: socket.socket) -> bytes:
    """Send chunks of a body until the server has had enough; what it answered."""
    received = b""
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            assert time.monotonic() < deadline
            client.sendall(b"400\r\n" + bytes(1024) + b"\r\n")
            if select.select([client], [], [], 0)[0]:
                received += client.recv(65536)
    return received


def test_an_endless_chunked_body_is_cut_off(server: Process) -> None:
    with server.connect() as client:
        client.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
        assert parse(flood(client))[0] == 413


def test_an_endless_body_is_cut_off_also_where_the_application_has_answered_without_it(server: Process) -> None:
    with server.connect() as client:
        client.sendall(b"POST /deaf HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        read_until(client, b"unread")
        assert flood(client) == b""


def test_endless_chunk_extensions_and_trailers_are_cut_off(server: Process) -> None:
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n"
    assert server.ask(chunked + b"1;" + b"x" * 500_000)[0] in (400, 431)
    assert server.ask(chunked + b"1\r\na\r\n0\r\nt: " + b"x" * 500_000)[0] in (400, 431)


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"


def test_an_offer_of_another_protocol_is_ignored_and_costs_no_body(server: Process) -> None:
    """Java's HTTP client makes one with every request."""
    asked = POST + OFFER + b"content-length: 5\r\n\r\nhello"
    last = POST + CLOSE + b"content-length: 2\r\n\r\nhi"
    with server.connect() as client:
        client.sendall(asked + asked)
        for piece in (asked[:30], asked[30:-2], asked[-2:] + last):
            time.sleep(0.02)  # so that the head and the body arrive in pieces
            client.sendall(piece)
        answers = read_all(client)
    assert re.findall(rb"\r\n\r\n(\d+)", answers) == [b"5", b"5", b"5", b"2"]


def test_an_offer_changes_no_limit(server: Process) -> None:
    offered = POST + OFFER + CLOSE
    assert server.ask(offered + b"content-length: 10001\r\n\r\n")[0] == 413
    assert server.ask(offered + b"h: x\r\n" * 20 + b"\r\n")[0] == 431
    assert server.ask(offered + b"content-length: 5\r\n\r\nhel")[0] == 408
    assert server.ask((POST + OFFER + b"\r\n") * 200 + POST + CLOSE + b"\r\n")[0] == 200


def test_a_trailer_is_no_header(server: Process) -> None:
    chunked = (
        b"POST /headers HTTP/1.1\r\nhost: a\r\n" + CLOSE + b"x-api-key: mine\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    status, _, body = server.ask(chunked + b"1\r\na\r\n0\r\nx-api-key: yours\r\nauthorization: Bearer b\r\n\r\n")
    assert (status, json.loads(body)["x-api-key"]) == (200, "mine")
    assert "authorization" not in json.loads(body)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: a\r\n\r\n",
        POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        GET + b"a b: c\r\n\r\n",
        GET + b"a: b\r\n c\x00d\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_400_in_the_shape_of_an_error(server: Process, data: bytes) -> None:
    status, headers, body = server.ask(data)
    assert (status, error_code(body), headers["content-type"]) == (400, "invalid_http", "application/json")


def test_connections_beyond_the_limit_are_told_so(server: Process) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(server.connect())
            client.sendall(GET)  # held open
        status, headers, body = server.ask(GET + b"\r\n")
        assert (status, error_code(body), headers["retry-after"]) == (503, "overloaded", "1")
    deadline = time.monotonic() + PATIENCE
    while server.ask(GET + CLOSE + b"\r\n")[0] != 200:  # until the server has noticed that they left
        assert time.monotonic() < deadline


# --- How slowly -------------------------------------------------------------------------------------------------------


def trickle(client: socket.socket, piece: bytes) -> bytes:
    """Send a piece every 50 ms until the server answers or closes; the answer."""
    deadline = time.monotonic() + PATIENCE
    while not select.select([client], [], [], 0.05)[0]:
        assert time.monotonic() < deadline
        client.sendall(piece)
    return read_all(client)


def test_a_slow_header_is_answered_408(server: Process) -> None:
    with server.connect() as client:
        client.sendall(GET)
        assert parse(trickle(client, b"h: x\r\n"[:1]))[0] == 408


def test_a_silent_connection_and_one_that_sends_only_line_ends_are_closed(server: Process) -> None:
    with server.connect() as silent, server.connect() as blank:
        assert parse(trickle(blank, b"\r\n"))[0] == 408
        assert parse(read_all(silent))[0] == 408


def test_the_clock_runs_again_for_the_second_request_of_a_connection(server: Process) -> None:
    with server.connect() as client:
        client.sendall(POST + b"content-length: 2\r\n\r\nok")
        read_until(client, b"\r\n\r\n2")
        assert parse(trickle(client, b"\r\n"))[0] == 408


def test_a_body_shorter_than_declared_is_answered_408(server: Process) -> None:
    with server.connect() as client:
        client.sendall(POST + b"content-length: 500\r\n\r\nonly this")
        assert parse(read_all(client))[0] == 408


def test_a_body_that_trickles_is_answered_408(server: Process) -> None:
    with server.connect() as client:
        client.sendall(POST + b"content-length: 9000\r\n\r\n")
        assert parse(trickle(client, b"x"))[0] == 408


def test_an_idle_connection_is_closed_without_a_word(server: Process) -> None:
    with server.connect() as client:
        client.sendall(POST + b"content-length: 2\r\n\r\nok")
        read_until(client, b"\r\n\r\n2")
        assert read_all(client) == b""


def test_readers_that_stop_are_dropped_and_not_buffered(server: Process) -> None:
    memory = psutil.Process(server.process.pid).memory_info
    with contextlib.ExitStack() as stack:
        before = memory().rss
        clients = [stack.enter_context(server.connect(receive_buffer=4096)) for _ in range(6)]
        for client in clients:
            client.sendall(b"GET /big HTTP/1.1\r\nhost: a\r\n\r\n")
            read_until(client, b"\r\n\r\n")
        grown = memory().rss - before
        deadline = time.monotonic() + PATIENCE
        while len(psutil.Process(server.process.pid).net_connections("tcp")) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert grown < 6 * 256 * 1024  # /big would send 400 MB to each


# --- Signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stream(server: Process, events: int = 1000) -> Iterator[socket.socket]:
    """A client in the middle of a stream."""
    with server.connect() as client:
        client.sendall(b"GET /stream?%d HTTP/1.1\r\nhost: a\r\n\r\n" % events)
        read_until(client, b"data: 2\n\n")
        yield client


def wait_until_draining(server: Process) -> None:
    deadline = time.monotonic() + PATIENCE
    while server.ask(GET + CLOSE + b"\r\n")[0] != 503:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(number: int) -> None:
    with running(drain_timeout=PATIENCE) as server, stream(server, events=40) as client:
        server.stop(number)
        wait_until_draining(server)
        status, headers, body = server.ask(POST + b"content-length: 2\r\n\r\nhi")
        assert (status, error_code(body)) == (503, "backend_unavailable")
        assert headers["connection"] == "close" and int(headers["retry-after"]) >= 1
        assert b"data: [DONE]" in read_all(client)
        status, log = server.end()
    assert status == 0
    assert "Traceback" not in log and "error" not in log.lower().replace("status=", "")


def test_after_the_drain_time_streams_end_with_an_error_their_client_can_read() -> None:
    with running(drain_timeout=0.3) as server, stream(server) as client:
        server.stop()
        rest = read_all(client)
        assert b"data: error" in rest and b"data: [DONE]" in rest
        assert server.end()[0] == 0


def test_a_second_signal_ends_the_drain() -> None:
    with running(drain_timeout=600.0) as server, stream(server) as client:
        server.stop()
        wait_until_draining(server)
        server.stop()
        assert b"data: error" in read_all(client)
        assert server.end()[0] == 0


def test_without_drain_time_the_process_is_gone_in_under_two_seconds() -> None:
    with running(drain_timeout=0.0) as server, stream(server), server.connect() as idle:
        idle.sendall(GET)
        children = psutil.Process(server.process.pid).children(recursive=True)
        began = time.monotonic()
        server.stop()
        assert server.end()[0] == 0
        assert time.monotonic() - began < 2.0  # the promise R5 itself is a time
        assert not [child for child in children if child.is_running()]


def test_an_idle_server_stops_at_once_and_says_nothing() -> None:
    with running() as server:
        server.stop()
        status, log = server.end()
    assert (status, log) == (0, "")


# --- Ports ------------------------------------------------------------------------------------------------------------


def test_a_taken_port_is_one_clear_line() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port {port} on 127.0.0.1 is already in use.*--port$"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["..", "a" * 64 + ".example"])
def test_what_is_no_name_of_a_host_is_told(host: str) -> None:
    with pytest.raises(ConfigError, match="this is not a host's name"):
        listen(host, 0)


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^cannot listen on 203\.0\.113\.1 port 8000: "):
        listen("203.0.113.1", 8000)


def test_the_url_tells_the_real_port_and_a_reachable_host() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*", base_url(listener))


@pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")
def test_the_url_of_an_ipv6_address() -> None:
    with listen("::1", 0) as listener:
        assert re.fullmatch(r"http://\[::1\]:[1-9]\d*", base_url(listener))


def test_refusals_are_in_the_access_log() -> None:
    with running(max_header_size=1024) as server:
        assert server.ask(GET + b"h: " + b"x" * 2000)[0] == 431
        server.stop()
        _, log = server.end()
    (line,) = log.splitlines()
    assert "refused status=431 code=headers_too_large client=127.0.0.1" in line
