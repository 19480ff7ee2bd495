"""Other settings for a running server: what is added, replaced and taken away, and what a mistake changes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from suimon.gateway.config import ConfigError, ModelSettings, Settings
from suimon.gateway.hookspecs import BackendUnavailable, Health, Offer, hookimpl


def model(name: str, **options: Any) -> ModelSettings:
    return ModelSettings(backend="scripted", model=name, **options)


class Factory:
    """A plugin that makes a scripted backend for each model, and keeps them by name."""

    def __init__(self, make: Any) -> None:
        self.make = make
        self.made: dict[str, list[Any]] = {}
        self.broken: set[str] = set()

    @hookimpl
    def register_backends(self, register: Any, settings: Settings) -> None:
        for each in settings.models:
            if each.backend != "scripted":
                continue
            backend = self.make(model_id=each.model)
            backend.start_error = OSError("no such file") if each.model in self.broken else None
            self.made.setdefault(each.model, []).append(backend)
            register(backend)


@pytest.fixture
def factory(scripted: Any) -> Factory:
    return Factory(scripted)


@pytest.fixture
def reload(serve: Any, scripted: Any, factory: Factory) -> Any:
    """A server with models a and b; calling the fixture brings it to other models and returns it."""
    server = serve(scripted(model_id="unasked"), plugins=[factory], models=(model("a"), model("b")), drain_timeout=5.0)

    def change(*models: ModelSettings | Exception) -> Any:
        def read() -> Settings:
            for each in models:
                if isinstance(each, Exception):
                    raise each
            return Settings(models=models)  # type: ignore[arg-type]

        asyncio.run_coroutine_threadsafe(server.gateway.reload(read), server.loop).result(20)
        return server

    change.server = server  # type: ignore[attr-defined]
    return change


def names(server: Any) -> list[str]:
    return [each["id"] for each in json.loads(server.request("GET", "/v1/models")[2])["data"]]


def test_models_come_and_go_and_the_others_do_not_notice(reload: Any, factory: Factory, tools: Any) -> None:
    server = reload(model("c"), model("b"))
    assert names(server) == ["c", "b", "unasked"]
    assert server.chat(model="c")[0] == 200
    assert server.chat(model="a")[0] == 404
    tools.wait_until(lambda: factory.made["a"][0].stopped == 1, "the end of a")
    assert [(len(made), made[0].stopped) for made in (factory.made["b"], factory.made["c"])] == [(1, 0), (1, 0)]


def test_a_changed_model_is_replaced_by_one_that_has_started(reload: Any, factory: Factory, tools: Any) -> None:
    server = reload(model("a", seed=3), model("b"))
    first, second = factory.made["a"]
    tools.wait_until(lambda: first.stopped == 1, "the end of the old one")
    assert server.chat(model="a")[0] == 200
    assert (len(first.requests), len(second.requests), second.stopped) == (0, 1, 0)


def test_other_names_and_rules_leave_the_backend_as_it_is(
    reload: Any, factory: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = reload(model("a", aliases=("x",), fallback=("b",), routing="prefix"), model("b"))
    assert "the configuration was reloaded: updated a" in caplog.text
    assert server.chat(model="x")[0] == 200
    (only,) = factory.made["a"]
    assert (len(only.requests), only.stopped) == (1, 0)
    only.script = [BackendUnavailable("down")]
    assert server.chat(model="x")[0] == 200  # by its new fallback
    assert len(factory.made["b"][0].requests) == 1
    assert reload(model("a"), model("b")).chat(model="x")[0] == 404


def test_a_model_that_leaves_finishes_what_it_has(reload: Any, factory: Factory, tools: Any) -> None:
    server, old = reload.server, factory.made["a"][0]
    old.script = [*tools.words("one")[:1], 0.5, *tools.words("two")]
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(server.chat(model="a")))
    asking.start()
    tools.wait_until(lambda: old.running == 1, "the request")
    reload(model("b"))
    assert old.stopped == 0
    asking.join(10)
    status, body = answers[0]
    assert (status, body["choices"][0]["message"]["content"]) == (200, "onetwo")
    tools.wait_until(lambda: old.stopped == 1, "its end")


@pytest.mark.parametrize(
    "wrong",
    [
        (ConfigError("suimon.toml:3: port: expected an integer"),),
        (RuntimeError("a plugin's mistake"),),
        (model("a"), model("a", max_num_seqs=3)),
        (model("a"), model("c", fallback=("nobody",))),
        (model("a"), ModelSettings(backend="absent", model="c")),
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_a_mistake_changes_nothing_and_is_logged(
    wrong: Any, reload: Any, factory: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    server = reload(*wrong)
    assert names(server) == ["a", "b", "unasked"]
    assert [server.chat(model=name)[0] for name in ("a", "b")] == [200, 200]
    assert [factory.made[name][0].stopped for name in ("a", "b")] == [0, 0]
    assert "the configuration was not reloaded" in caplog.text


def test_a_new_model_that_does_not_start_changes_nothing(
    reload: Any, factory: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    factory.broken = {"c", "e"}
    server = reload(model("c"), model("d"), model("e"))
    assert names(server) == ["a", "b", "unasked"]
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    mistakes = [record.message.rpartition("reloaded: ")[2] for record in errors if "reloaded: " in record.message]
    assert [record.exc_info is not None for record in errors] == [True, True, False, False]  # where it came from
    assert mistakes == [
        "model 'c' does not start: OSError: no such file",
        "model 'e' does not start: OSError: no such file",
    ]
    assert [factory.made[name][0].stopped for name in "cde"] == [1, 1, 1]
    factory.broken = set()
    assert names(reload(model("c"), model("d"))) == ["c", "d", "unasked"]


def test_a_model_that_has_failed_is_tried_again_and_stands_in_nobodys_way(
    reload: Any, factory: Factory, caplog: pytest.LogCaptureFixture, tools: Any
) -> None:
    dead = factory.made["a"][0]
    dead.state = Health(state="failed", detail="given up")
    factory.broken = {"a"}
    server = reload(model("a"), model("b"), model("c"))
    assert names(server) == ["a", "b", "c", "unasked"]
    assert "model a did not load: OSError: no such file" in caplog.text
    assert [server.chat(model=name)[0] for name in "abc"] == [503, 200, 200]
    tools.wait_until(lambda: dead.stopped == 1, "the end of the dead one")
    factory.broken = set()
    assert reload(model("a"), model("b"), model("c")).chat(model="a")[0] == 200
    assert [len(factory.made[name]) for name in "abc"] == [3, 1, 1]


def test_a_replica_that_has_failed_is_tried_again(reload: Any, factory: Factory, tools: Any) -> None:
    twins = model("twin", replicas=2)
    server = reload(twins)
    first, second = factory.made["twin"]
    second.state = Health(state="failed", detail="given up")
    assert reload(twins) is server
    tools.wait_until(lambda: second.stopped == 1, "the end of the dead one")
    third = factory.made["twin"][2]
    assert [each.backend for each in server.gateway.router.models["twin"].replicas] == [first, third]
    assert (len(factory.made["twin"]), first.stopped, third.stopped) == (3, 0, 0)
    third.state = Health(state="failed")
    factory.broken = {"twin"}
    assert names(reload(twins, model("c"))) == ["twin", "c", "unasked"]
    assert server.chat(model="twin")[0] == 200


def test_plugins_are_asked_outside_the_event_loop(reload: Any, factory: Factory) -> None:
    threads: list[Any] = []
    make = factory.make
    factory.make = lambda **how: threads.append(threading.current_thread()) or make(**how)  # type: ignore[func-returns-value]
    server = reload(model("c"))

    async def own() -> threading.Thread:
        return threading.current_thread()

    assert threads and asyncio.run_coroutine_threadsafe(own(), server.loop).result(10) not in threads


def test_a_stop_that_has_begun_is_not_broken_off(reload: Any, factory: Factory, tools: Any) -> None:
    """Neither that of a model that leaves nor that after a failed start, though the server stops meanwhile."""
    server = reload.server
    stopping, stopped = [], []
    go_on = {"a": threading.Event(), "c": threading.Event()}

    def slow_to_stop(backend: Any) -> None:
        async def stop() -> None:
            stopping.append(backend.model_id)
            while not go_on[backend.model_id].is_set():
                await asyncio.sleep(0.01)
            stopped.append(backend.model_id)

        backend.stop = stop

    slow_to_stop(factory.made["a"][0])
    reload(model("b"))
    make = factory.make

    def make_slow(**how: Any) -> Any:
        backend = make(**how)
        slow_to_stop(backend)
        return backend

    factory.make, factory.broken = make_slow, {"c"}
    wanted = Settings(models=(model("b"), model("c")))
    asyncio.run_coroutine_threadsafe(server.gateway.reload(lambda: wanted), server.loop)
    tools.wait_until(lambda: sorted(stopping) == ["a", "c"], "both stops")
    ending = asyncio.run_coroutine_threadsafe(server.gateway.reloader.stop(), server.loop)
    for _ in range(3):  # turns of the loop in which a cancellation would arrive
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(10)
    assert not ending.done() and stopped == []
    go_on["c"].set()
    tools.wait_until(lambda: stopped == ["c"], "the end of what had not started")
    for _ in range(3):
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(10)
    assert not ending.done()
    go_on["a"].set()
    ending.result(10)
    assert sorted(stopped) == ["a", "c"]


def test_settings_that_need_a_restart_are_named(reload: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reload(model("a"), model("b"))
    assert "no model changed" in caplog.text
    assert "only a restart takes them: port, drain_timeout" in caplog.text


def test_reloads_follow_one_another(reload: Any, factory: Factory, tools: Any) -> None:
    server = reload.server
    wanted = [Settings(models=(model("a"), model(f"m{i}"))) for i in range(4)]
    running = [
        asyncio.run_coroutine_threadsafe(server.gateway.reload(lambda found=found: found), server.loop)  # type: ignore[misc]
        for found in wanted
    ]
    for each in running:
        each.result(20)
    assert names(server) == ["a", "m3", "unasked"]
    tools.wait_until(lambda: all(factory.made[f"m{i}"][0].stopped == 1 for i in range(3)), "the ends")
    assert factory.made["a"][0].stopped == 0


def test_a_server_that_stops_ends_the_reload_and_what_it_was_loading(
    reload: Any, factory: Factory, scripted: Any, tools: Any
) -> None:
    server = reload.server

    def slow(**how: Any) -> Any:
        backend = scripted(**how)
        backend.startable.clear()  # it loads for ever
        return backend

    factory.make = slow
    wanted = Settings(models=(model("a"), model("c")))
    going_on = asyncio.run_coroutine_threadsafe(server.gateway.reload(lambda: wanted), server.loop)
    tools.wait_until(lambda: "c" in factory.made, "the new backend")
    assert server.chat(model="a")[0] == 200  # meanwhile
    server.uvicorn.should_exit = True
    tools.wait_until(going_on.done, "the end of the reload")
    tools.wait_until(lambda: factory.made["a"][0].stopped == 1, "the end of the server")
    assert (going_on.cancelled(), factory.made["c"][0].stopped) == (True, 1)


def test_a_choice_that_was_left_to_the_plugins_is_logged(
    reload: Any, factory: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    class Offering:
        @hookimpl
        def offer_model(self, model: ModelSettings) -> Offer:
            return Offer(backend="scripted", rank=Offer.USUAL, reason=f"it knows {model.model}")

    caplog.set_level("INFO")
    reload.server.gateway.plugins.register(Offering())
    server = reload(model("a"), ModelSettings(model="c"))
    assert server.chat(model="c")[0] == 200
    assert "model c: backend scripted (auto: it knows c)" in caplog.text
    assert "model a: backend" not in caplog.text


def test_a_server_that_drains_reloads_nothing(reload: Any, factory: Factory, caplog: pytest.LogCaptureFixture) -> None:
    reload.server.gateway.drain.begin()
    reload(model("c"))
    assert "not reloaded: the server is stopping" in caplog.text
    assert "c" not in factory.made


# --- The real command -------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str], Path]]:
    """(URL, process, configuration file) of a real server of two echo models; its log is beside the file."""
    path = tmp_path / "suimon.toml"
    path.write_text(tables("one", "two"))
    command = [sys.executable, "-m", "suimon.gateway.cli", "serve", "--config", str(path)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    found = next((m for line in process.stdout if (m := re.search(r"is ready: (http\S+)/v1", line))), None)
    assert found is not None, (tmp_path / "log").read_text()
    yield found[1], process, path
    process.kill()
    process.wait()


def tables(*models: str) -> str:
    return "port = 0\n" + "".join(f'[[models]]\nmodel = "{name}"\nbackend = "echo"\n' for name in models)


def wait_for(path: Path, text: str) -> None:
    until = time.monotonic() + 30
    while text not in (path.parent / "log").read_text():
        assert time.monotonic() < until, (path.parent / "log").read_text()
        time.sleep(0.05)


def listed(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return [each["id"] for each in json.load(answer)["data"]]


def test_sighup_reads_the_file_again(served: tuple[str, subprocess.Popen[str], Path]) -> None:
    url, process, path = served
    path.write_text(tables("two", "three"))
    os.kill(process.pid, signal.SIGHUP)
    wait_for(path, "the configuration was reloaded: added three; removed one")
    assert listed(url) == ["two", "three"]
    path.write_text(tables("four").replace("backend", "bakend", 1))
    os.kill(process.pid, signal.SIGHUP)
    wait_for(path, "the configuration was not reloaded")
    assert "bakend: unknown key; did you mean 'backend'?" in (path.parent / "log").read_text()
    assert listed(url) == ["two", "three"]
    path.write_text(tables("two", "four") + "options = {dealy = 1}\n[[models]]\nbackend = 'absent'\n")
    os.kill(process.pid, signal.SIGHUP)
    wait_for(path, "serves the backend 'absent'")
    log = (path.parent / "log").read_text()
    assert f"not reloaded: {path}:8: models[1].options: " in log and f"not reloaded: {path}:9: models[2]: " in log
    assert "Traceback" not in log
    assert listed(url) == ["two", "three"]
    for name in ("five", "six", "seven"):  # in a row, each while the one before it may still be at work
        whole = path.with_suffix(".new")
        whole.write_text(tables("two", name))
        whole.replace(path)
        os.kill(process.pid, signal.SIGHUP)
    wait_for(path, "added seven")
    assert listed(url) == ["two", "seven"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
