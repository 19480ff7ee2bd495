"""R10: what a hundred readers that do not read cost a server, measured in its own process (seen: 53 KiB each)."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest

from suimon.gateway.config import Settings

TINY_SERVER = Path(__file__).resolve().parents[1] / "gateway" / "tiny_server.py"
KIB = 1024


@pytest.fixture
def process() -> Iterator[tuple[int, int]]:
    """(process id, port) of a server around an application whose /big never ends."""
    settings = msgspec.json.encode(Settings(port=0, stream_stall_timeout=300.0)).decode()
    command = [sys.executable, str(TINY_SERVER), settings]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    yield server.pid, int(server.stdout.readline().rsplit(":", 1)[1])
    server.kill()
    server.communicate()


def stalled_reader(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET /big HTTP/1.1\r\nhost: a\r\n\r\n")
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def settled_memory(server: psutil.Process) -> int:
    """Resident bytes once the server does nothing: all its readers have stalled."""
    used = -1.0
    while used != (used := sum(server.cpu_times()[:2])):
        time.sleep(0.2)
    resident: int = server.memory_info().rss
    return resident


def test_a_hundred_stalled_readers(process: tuple[int, int]) -> None:
    server, port = psutil.Process(process[0]), process[1]
    with ExitStack() as stack:
        for _ in range(20):  # whatever is allocated once
            stack.enter_context(stalled_reader(port))
        before = settled_memory(server)
        for _ in range(100):
            stack.enter_context(stalled_reader(port))
        growth = settled_memory(server) - before
    assert growth < 100 * 64 * KIB
