"""Two models whose engines die at every step, and a third beside them: real processes, one gateway."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from suimon.gateway.config import ModelSettings
from suimon.plugins.stepped import SteppedBackend

DYING = """
import os
from next_letter import NextLetter


class Dying(NextLetter):
    def forward(self, batch):
        os.abort()
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The alphabet's model and executor, as the tests of stepped backends make them, and one that dies."""
    path = Path(__file__).with_name("test_stepped.py")
    spec = importlib.util.spec_from_file_location("suimon_test_stepped_for_isolation", path)
    assert spec is not None and spec.loader is not None
    stepped = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stepped)
    for place in stepped.folder.__wrapped__(tmp_path_factory):
        (place / "dying.py").write_text(DYING)
        yield place


def alphabet(folder: Path, name: str, executor: str) -> SteppedBackend:
    model = ModelSettings(model=str(folder), served_model_name=name, max_restarts=2, num_threads=1)
    return SteppedBackend(model, executor=executor)


def test_two_crash_looping_backends_do_not_disturb_a_third(folder: Path, gateway_tests: ModuleType) -> None:
    dying = [alphabet(folder, name, "dying:Dying") for name in ("first", "second")]
    steady = alphabet(folder, "steady", "next_letter:NextLetter")
    with gateway_tests.running_server(*dying, steady) as server:
        pid, looping, answers = steady.client.pid, threading.Event(), []
        looping.set()

        def ask_steady() -> None:
            while looping.is_set() or len(answers) < 20:
                answers.append(ask(server, "steady"))

        asking = threading.Thread(target=ask_steady)
        asking.start()
        with ThreadPoolExecutor() as both:
            told = list(both.map(lambda backend: ask_until_given_up(server, backend), dying))
        looping.clear()
        asking.join()
        assert set(answers) == {(200, "ghijkl")}
        assert (steady.client.pid, steady.client.restarts, steady.client.state) == (pid, 0, "ready")
        assert steady.load().blocks_used == 0
        for codes, backend in zip(told, dying, strict=True):
            assert codes[0] == (500, "backend_crashed") and codes[-1] == (503, "backend_unavailable")
            assert (backend.client.restarts, backend.client.pid) == (2, 0)
        status, _, raw = server.request("GET", "/v1/models")  # tells of those that were given up, too
        listed = {entry["id"]: entry["suimon"] for entry in json.loads(raw)["data"]} if status == 200 else {}
        assert {name: entry["state"] for name, entry in listed.items()} == {
            "first": "failed",
            "second": "failed",
            "steady": "ready",
        }
        assert all("knows the alphabet" in entry["details"] for entry in listed.values())
        status, _, raw = server.request("GET", "/health/ready")
        assert (status, json.loads(raw)) == (200, {"status": "degraded"})


def ask(server: Any, model: str) -> tuple[int, str]:
    """(status, the answer's text or the error's code)."""
    status, body = server.post("/v1/completions", {"model": model, "prompt": "abcdef", "max_tokens": 6})
    return status, body["choices"][0]["text"] if status == 200 else body["error"]["code"]


def ask_until_given_up(server: Any, backend: SteppedBackend) -> list[tuple[int, str]]:
    """What clients are told until its engine is started no more."""
    told = [ask(server, backend.model_id)]
    while backend.client.state != "failed":
        told.append(ask(server, backend.model_id))
    return [*told, ask(server, backend.model_id)]
