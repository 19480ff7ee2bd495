"""``suimon models``: what it shows of this project's server, and of one that only knows OpenAI's fields."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from suimon.gateway import cli
from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import hookimpl


class Twins:
    """A plugin whose every backend is scripted; the first of all does not start."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self.made: list[Any] = []

    @hookimpl
    def register_backends(self, register: Any, settings: Settings) -> None:
        for model in settings.models:
            backend = self.make(model_id=model.model)
            backend.describe = lambda: ("cpu, 2 threads", "context 100 tokens")
            backend.start_error = None if self.made else OSError("gone")
            self.made.append(backend)
            register(backend)


@pytest.fixture
def server(serve: Any, scripted: Any, tools: Any) -> Any:
    twin = ModelSettings(
        backend="scripted", model="twin", replicas=2, aliases=("gpt-4o", "small"), fallback=("unasked",)
    )
    running = serve(scripted(model_id="unasked"), plugins=[Twins(scripted)], models=(twin,), ready=False)
    tools.wait_until(lambda: running.gateway.router.served["unasked"].started, "the start")
    tools.wait_until(lambda: running.gateway.router.served["twin#2"].started, "the second replica's start")
    return running


def test_what_is_loaded_where_and_why(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--url", server.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "twin  ready",
        "    backend  scripted (as configured)",
        "    replicas 1 of 2 ready",
        "    aliases  gpt-4o, small",
        "    fallback unasked",
        "    is       cpu, 2 threads",
        "             context 100 tokens",
        "unasked  ready",
        "    backend  of a plugin (a plugin serves it)",
    ]


def test_as_json_it_is_what_the_server_says(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--url", server.url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(server.request("GET", "/v1/models")[2])["data"]
    assert shown[0]["suimon"]["ready"] == 1


@pytest.fixture
def stranger() -> Iterator[str]:
    """The URL of a server that lists names, one of which would clear the screen."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "plain"}, {"id": "\\u001b[2Jbold", "suimon": 3}]}')

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    listening.server_close()


def test_other_servers_are_listed_by_name(stranger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--url", stranger]) == 0
    assert capsys.readouterr().out == "plain\n\\x1b[2Jbold\n"
