"""Life of the application: loading, draining, stopping; hooks; CORS; the route table."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sys
import threading
from typing import Any

import pytest
from litestar import Request, get

from suimon.gateway.app import create_app, public_paths, route_table
from suimon.gateway.auth import AUTH, CLASSES, PUBLIC
from suimon.gateway.config import ApiKey, ConfigError, ModelSettings, Settings
from suimon.gateway.hookspecs import Backend, BackendCrashed, Capabilities, Delta, GenerateRequest, Health, hookimpl
from suimon.gateway.plugin_manager import PluginError, load_plugins


def chat_later(server: Any, results: list[Any], **fields: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.append(server.chat(**fields)))
    thread.start()
    return thread


def gauges(server: Any) -> tuple[float, float]:
    """(running, waiting) as /metrics tells them."""
    text = server.request("GET", "/metrics")[2].decode()
    found = [re.search(rf"^suimon_requests_{name}{{[^}}]*}} (\S+)", text, re.M) for name in ("running", "waiting")]
    return tuple(float(match[1]) for match in found)  # type: ignore[index,return-value]


# --- The route table --------------------------------------------------------------------------------------------------


def test_every_route_states_its_class_and_only_probes_are_public(plain: Any) -> None:
    table = {
        (path, method): handler.opt[AUTH] for path, handler in route_table(plain.app) for method in handler.http_methods
    }
    assert set(table.values()) == set(CLASSES)
    assert {route for route, auth in table.items() if auth == PUBLIC} == {
        (path, method)
        for path in ("/health", "/health/live", "/health/ready", "/health/startup")
        for method in ("GET", "HEAD")
    }
    assert set(table) - {route for route, auth in table.items() if auth == PUBLIC} == {
        ("/v1/chat/completions", "POST"),
        ("/v1/completions", "POST"),
        ("/v1/embeddings", "POST"),
        ("/tokenize", "POST"),
        ("/detokenize", "POST"),
        *((path, "GET") for path in ("/v1/models", "/v1/models/{model_id:path}", "/metrics", "/version")),
        *((path, "HEAD") for path in ("/v1/models", "/v1/models/{model_id:path}", "/metrics", "/version")),
    }


def manager_with(*plugins: Any, backends: Any = ()) -> Any:
    class Backends:
        @hookimpl
        def register_backends(self, register: Any, settings: Any) -> None:
            for backend in backends:
                register(backend)

    manager = load_plugins(built_in=())
    for plugin in (Backends(), *plugins):
        manager.register(plugin)
    return manager


class Routes:
    """A plugin with routes of its own."""

    def __init__(self, *handlers: Any) -> None:
        self.handlers = handlers

    @hookimpl
    def register_routes(self, register: Any) -> None:
        for handler in self.handlers:
            register(handler)


def test_routes_of_plugins_need_a_key_unless_they_say_otherwise(serve: Any) -> None:
    @get("/closed")
    async def closed() -> dict[str, str]:
        return {}

    @get("/open", opt={AUTH: PUBLIC})
    async def opened() -> dict[str, str]:
        return {}

    server = serve(named=[Routes(closed, opened)], api_keys=(ApiKey(key="k"),))
    assert server.request("GET", "/closed")[0] == 401
    assert server.request("GET", "/closed", headers={"authorization": "Bearer k"})[0] == 200
    assert server.request("GET", "/open")[0] == 200


def test_routes_of_plugins_that_nobody_named_are_not_served(serve: Any) -> None:
    @get("/closed")
    async def closed() -> dict[str, str]:
        return {}

    assert serve(plugins=[Routes(closed)]).request("GET", "/closed")[0] == 404


class NoHandler:
    pass


def test_what_is_no_route_names_its_plugin(scripted: Any) -> None:
    manager = manager_with(backends=[scripted()])
    plugin = Routes(NoHandler)
    manager.named.append(plugin)
    manager.register(plugin, "with_a_class")
    with pytest.raises(PluginError, match=r"plugin 'with_a_class' registered .*NoHandler.* no route handler"):
        create_app(Settings(), manager)


@pytest.mark.parametrize("error", [KeyError("options"), SystemExit(2)])
def test_an_accident_in_a_hook_names_plugin_hook_and_place(error: Any) -> None:
    class Stumbles:
        @hookimpl
        def register_backends(self, register: Any, settings: Any) -> None:
            raise error

    manager = load_plugins(built_in=())
    manager.register(Stumbles(), "stumbles")
    with pytest.raises(PluginError, match=rf"^plugin 'stumbles' failed in register_backends: {type(error).__name__}.*"):
        create_app(Settings(), manager)


def test_a_path_is_public_only_if_all_its_handlers_are(scripted: Any) -> None:
    from litestar import post

    @get("/mixed", opt={AUTH: PUBLIC})
    async def reading() -> None: ...

    @post("/mixed")
    async def writing() -> None: ...

    routes = Routes(reading, writing)
    manager = manager_with(routes, backends=[scripted()])
    manager.named.append(routes)
    assert b"/mixed" not in public_paths(create_app(Settings(), manager))


def test_a_route_of_no_known_class_stops_the_start(scripted: Any) -> None:
    @get("/odd", opt={AUTH: "whatever"})
    async def odd() -> None: ...

    routes = Routes(odd)
    manager = manager_with(routes, backends=[scripted()])
    manager.named.append(routes)
    with pytest.raises(ConfigError, match="/odd"):
        create_app(Settings(), manager)


def test_an_application_without_a_model_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="'native'"):
        create_app(Settings(), manager_with())


def test_two_backends_of_one_name_are_a_mistake(scripted: Any) -> None:
    with pytest.raises(ConfigError, match="two backends serve the model 'scripted'"):
        create_app(Settings(), manager_with(backends=[scripted(), scripted()]))


class ByConfiguration:
    """Registers a scripted backend for each configured model of its own, and one that nobody asked for."""

    def __init__(self, make: Any) -> None:
        self.make = make

    @hookimpl
    def register_backends(self, register: Any, settings: Settings) -> None:
        for model in settings.models:
            if model.backend == "scripted":
                register(self.make(model_id=model.served_model_name or model.model))
        register(self.make(model_id="unasked"))


def configured(make: Any, *models: ModelSettings) -> Any:
    return create_app(Settings(models=models), manager_with(ByConfiguration(make))).state.gateway.router


def test_models_are_listed_in_the_order_of_the_configuration(scripted: Any) -> None:
    """A client that does not choose takes the first."""
    models = [ModelSettings(backend="scripted", served_model_name="z"), ModelSettings(backend="scripted", model="a")]
    assert list(configured(scripted, *models).served) == ["z", "a", "unasked"]


def test_a_configured_model_that_nobody_serves_is_a_mistake(scripted: Any) -> None:
    models = (ModelSettings(backend="scripted", model="a"), ModelSettings(backend="absent", model="b"))
    with pytest.raises(ConfigError, match="model 'b': no loaded plugin serves the backend 'absent'"):
        configured(scripted, *models)


def test_replicas_are_backends_of_their_own_and_one_model(scripted: Any) -> None:
    router = configured(scripted, ModelSettings(backend="scripted", model="a", replicas=3))
    assert list(router.served) == ["a", "a#2", "a#3", "unasked"]
    assert len({id(each.backend) for each in router.served.values()}) == 4
    assert list(router.models) == ["a", "unasked"]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [5, 1]), ("priority", [1, 5])])
def test_the_models_policy_orders_its_queue(scripted: Any, policy: str, order: list[int]) -> None:
    async def entered() -> list[int]:
        one_at_once = functools.partial(scripted, capabilities=Capabilities(max_concurrency=1))
        model = ModelSettings(backend="scripted", model="a", scheduling_policy=policy)
        door = configured(one_at_once, model).model("a").replicas[0].admission
        inside: list[int] = []

        async def visit(priority: int, arrival: float) -> None:
            wanted = GenerateRequest(request_id="r", model="a", priority=priority, arrival=arrival)
            async with door.admit(wanted):
                inside.append(priority)

        async with door.admit(GenerateRequest(request_id="r", model="a")):
            waiting = [asyncio.create_task(visit(5, 1.0)), asyncio.create_task(visit(1, 2.0))]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        return inside

    assert asyncio.run(entered()) == order


@pytest.mark.parametrize(
    ("capabilities", "said"),
    [
        (Capabilities(max_concurrency=0), "max_concurrency must be at least 1, not 0"),
        (Capabilities(unsupported=frozenset({"n", "topk"})), "unsupported names .*: topk"),
    ],
)
def test_capabilities_that_cannot_be_are_told_with_their_backend(scripted: Any, capabilities: Any, said: str) -> None:
    with pytest.raises(PluginError, match=rf"model 'scripted' \(\S*ScriptedBackend\) .*{said}"):
        create_app(Settings(), manager_with(backends=[scripted(capabilities=capabilities)]))
    own_queue = Capabilities(own_queue=True, max_concurrency=0)  # which is nobody's to count
    assert create_app(Settings(), manager_with(backends=[scripted(capabilities=own_queue)]))


def test_an_alias_is_another_name_of_the_model(scripted: Any) -> None:
    router = configured(scripted, ModelSettings(backend="scripted", model="a", aliases=("b", "c/d")))
    assert router.model("c/d") is router.model("a")
    assert list(router.models) == ["a", "unasked"]


@pytest.mark.parametrize("aliases", [("y",), ("b", "b"), ("a",), ("unasked",)])
def test_a_name_that_is_taken_twice_is_a_mistake(aliases: tuple[str, ...], scripted: Any) -> None:
    models = [
        ModelSettings(backend="scripted", model="a", aliases=aliases),
        ModelSettings(backend="scripted", model="y"),
    ]
    with pytest.raises(ConfigError, match=f"two backends serve the model '{aliases[-1]}'"):
        configured(scripted, *models)


def test_a_model_with_the_name_of_one_that_a_plugin_serves_unasked(scripted: Any) -> None:
    with pytest.raises(ConfigError, match="two backends serve the model 'unasked'"):
        configured(scripted, ModelSettings(backend="scripted", served_model_name="unasked"))


def test_a_fallback_that_is_not_served_is_a_mistake(scripted: Any) -> None:
    with pytest.raises(ConfigError, match="model 'a': fallback 'nobody' is not a served model; these are: 'a'"):
        configured(scripted, ModelSettings(backend="scripted", model="a", fallback=("nobody",)))


# --- Loading ----------------------------------------------------------------------------------------------------------


def test_while_a_model_loads_probes_answer_and_requests_are_told_to_come_back(
    serve: Any, scripted: Any, tools: Any
) -> None:
    slow, fast = scripted(), scripted(model_id="fast")
    slow.startable.clear()
    server = serve(slow, fast, ready=False)
    tools.wait_until(lambda: server.gateway.router.served["fast"].started, "the fast one's start")
    assert server.request("GET", "/health/live")[0] == 200
    for path in ("/health", "/health/ready", "/health/startup"):
        status, headers, raw = server.request("GET", path)
        assert (status, json.loads(raw)) == (503, {"status": "loading"})
    status, headers, raw = server.request("POST", "/v1/chat/completions", tools.chat_body())
    assert (status, json.loads(raw)["error"]["code"]) == (503, "backend_unavailable")
    assert int(headers["retry-after"]) >= 1
    assert server.post("/tokenize", {"model": "scripted", "prompt": "a"})[0] == 503
    assert server.chat(model="fast")[0] == 200
    slow.startable.set()
    tools.wait_until(lambda: server.request("GET", "/health/ready")[0] == 200, "readiness")
    assert server.request("GET", "/health/startup")[0] == 200
    assert server.chat()[0] == 200


def test_a_model_that_cannot_be_loaded_is_told_to_whoever_waits(serve: Any, scripted: Any, tools: Any) -> None:
    backend = scripted()
    backend.start_error = OSError("no such file: /models/x")
    server = serve(backend, ready=False)
    gateway = server.gateway
    tools.wait_until(lambda: gateway.router.served["scripted"].failure is not None, "the failure")
    with pytest.raises(OSError, match="no such file"):
        asyncio.run_coroutine_threadsafe(gateway.loaded(), server.loop).result(10)
    status, _, raw = server.request("GET", "/health")
    assert (status, raw) == (503, b'{"status":"failed"}')
    status, body = server.chat()
    assert status == 503
    assert "/models" not in body["error"]["message"]


@pytest.mark.parametrize("error", [ZeroDivisionError("by accident"), SystemExit(3)])
def test_an_accident_at_the_start_is_logged_with_its_class_and_place(
    serve: Any, scripted: Any, tools: Any, caplog: Any, error: Any
) -> None:
    broken, other = scripted(model_id="broken"), scripted()
    broken.start_error = error
    server = serve(broken, other, ready=False)
    tools.wait_until(lambda: "model broken did not load" in caplog.text, "the line")
    (line,) = [record for record in caplog.records if "model broken did not load" in record.message]
    assert line.message.endswith(("ZeroDivisionError: by accident", "RuntimeError: it gave up with exit status 3"))
    assert line.exc_info is not None
    tools.wait_until(lambda: server.chat()[0] == 200, "the other's start")


def test_loaded_returns_when_all_models_are(serve: Any, scripted: Any) -> None:
    backend = scripted()
    backend.startable.clear()
    server = serve(backend, ready=False)
    waiting = asyncio.run_coroutine_threadsafe(server.gateway.loaded(), server.loop)
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    backend.startable.set()
    waiting.result(10)


def test_every_backend_is_stopped_once_also_one_that_never_started(scripted: Any) -> None:
    loaded, failed, slow = scripted(model_id="a"), scripted(model_id="b"), scripted(model_id="c")
    failed.start_error = RuntimeError("x")
    slow.startable.clear()

    async def live() -> None:
        app = create_app(Settings(), manager_with(backends=[loaded, failed, slow]))
        async with app.lifespan():
            while not (app.state.gateway.router.served["a"].started and app.state.gateway.router.served["b"].failure):
                await asyncio.sleep(0)

    asyncio.run(live())
    assert (loaded.stopped, failed.stopped, slow.stopped) == (1, 1, 1)


# --- Draining ---------------------------------------------------------------------------------------------------------


def test_a_draining_server_refuses_new_requests_and_finishes_the_old(serve: Any, scripted: Any, tools: Any) -> None:
    released = threading.Event()

    def script(request: Any) -> Any:
        yield Delta(text="a")
        while not released.is_set():
            yield 0.01
        yield from tools.words("b")

    backend = scripted(script)
    server = serve(backend)
    results: list[Any] = []
    running = chat_later(server, results)
    tools.wait_until(lambda: backend.running == 1, "the start")
    server.gateway.drain.begin()
    status, headers, raw = server.request("POST", "/v1/chat/completions", tools.chat_body())
    assert (status, json.loads(raw)["error"]["code"]) == (503, "backend_unavailable")
    assert headers["retry-after"]
    assert headers["connection"] == "close"
    assert server.request("GET", "/health/ready")[0] == 503
    assert server.request("GET", "/health/ready")[2] == b'{"status":"draining"}'
    assert server.request("GET", "/health/live")[0] == 200
    released.set()
    running.join(20)
    assert results[0][0] == 200
    assert results[0][1]["choices"][0]["message"]["content"] == "ab"


def test_when_the_time_is_up_streams_end_with_an_error_and_others_with_503(
    serve: Any, scripted: Any, tools: Any
) -> None:
    backend = scripted([Delta(text="a"), tools.STALL])
    server = serve(backend)
    results: list[Any] = []
    whole = chat_later(server, results)
    streams: list[Any] = []
    stream = threading.Thread(target=lambda: streams.append(server.stream()))
    stream.start()
    tools.wait_until(lambda: backend.running == 2, "both starts")
    server.loop.call_soon_threadsafe(server.gateway.drain.expire)
    whole.join(20)
    stream.join(20)
    assert (results[0][0], results[0][1]["error"]["code"]) == (503, "backend_unavailable")
    *_, failed, last = streams[0]
    assert (failed["error"]["code"], last) == ("backend_unavailable", "[DONE]")
    assert backend.running == 0
    tools.wait_until(lambda: server.gateway.drain.in_flight == 0, "the end of both")


# --- Hooks ------------------------------------------------------------------------------------------------------------


class Recorder:
    """Implements every request hook."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @hookimpl
    def request_started(self, request: Any) -> None:
        self.calls.append(("started", request.request_id))

    @hookimpl
    def request_finished(self, request: Any, usage: Any, error: Any) -> None:
        self.calls.append(("finished", request.request_id, usage and usage.completion_tokens, type(error)))


def test_hooks_tell_how_each_request_ended(serve: Any, scripted: Any, tools: Any) -> None:
    recorder = Recorder()
    backend = scripted()
    server = serve(backend, plugins=[recorder])
    server.chat()
    backend.script = [BackendCrashed("x")]
    server.chat()
    backend.script = [RuntimeError("x")]
    server.chat()
    backend.script = [Delta(text="a"), tools.STALL]
    with server.connect() as connection:
        body = json.dumps(tools.chat_body(stream=True)).encode()
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        tools.wait_until(lambda: backend.running == 1, "the start")
    tools.wait_until(lambda: len(recorder.calls) == 8, "the last call")
    assert [call[0] for call in recorder.calls] == ["started", "finished"] * 4
    assert [call[2:] for call in recorder.calls[1::2]] == [
        (2, type(None)),
        (None, BackendCrashed),
        (None, RuntimeError),
        (None, asyncio.CancelledError),
    ]
    ids = [call[1] for call in recorder.calls]
    assert ids[::2] == ids[1::2]
    assert len(set(ids)) == 4


class Stumbling(Recorder):
    """Raises from both its hooks, after it took note of the call."""

    @hookimpl
    def request_started(self, request: Any) -> None:
        super().request_started(request)
        raise ValueError("no start")

    @hookimpl
    def request_finished(self, request: Any, usage: Any, error: Any) -> None:
        super().request_finished(request, usage, error)
        sys.exit("no finish")


def test_a_hook_that_raises_costs_neither_the_request_nor_the_others(serve: Any, scripted: Any, caplog: Any) -> None:
    first, stumbling, last = Recorder(), Stumbling(), Recorder()
    backend = scripted()
    server = serve(backend, plugins=[first, stumbling, last])
    assert server.chat()[0] == 200
    backend.script = [BackendCrashed("x")]
    status, body = server.chat()
    assert (status, body["error"]["code"]) == (500, "backend_crashed")
    assert len(first.calls) == 4
    assert first.calls == stumbling.calls == last.calls
    name = server.gateway.plugins.get_name(stumbling)
    assert caplog.text.count(f"plugin '{name}' failed in request_started of request chatcmpl-") == 2
    assert caplog.text.count(f"plugin '{name}' failed in request_finished of request chatcmpl-") == 2


class Errors:
    def __init__(self) -> None:
        self.seen: list[BaseException] = []

    @hookimpl
    def request_finished(self, error: Any) -> None:
        self.seen.append(error)


def test_an_error_keeps_its_cause(serve: Any, scripted: Any) -> None:
    def crash(request: Any) -> Any:
        yield Delta(text="a")
        raise BackendCrashed("x") from OSError("the cause")

    errors = Errors()
    serve(scripted(crash), plugins=[errors]).chat()
    assert [type(error.__cause__) for error in errors.seen] == [OSError]


def test_a_backend_that_raises_before_it_streams_is_explained_and_announced(serve: Any, caplog: Any) -> None:
    class Hasty(Backend):
        model_id = "scripted"

        def generate(self, request: Any) -> Any:
            raise RuntimeError("secret")

    recorder = Recorder()
    server = serve(Hasty(), plugins=[recorder])
    status, body = server.chat()
    assert status == 500 and "secret" not in str(body)
    assert [call[0] for call in recorder.calls] == ["started", "finished"]
    assert "Hasty failed on request" in caplog.text


def test_a_plugin_may_route(serve: Any, scripted: Any) -> None:
    class ToSecond:
        @hookimpl
        def route_request(self, request: Any, backends: Any) -> Any:
            return backends["second"] if request.model == "alias" else None

    first, second = scripted(), scripted(model_id="second")
    server = serve(first, second, plugins=[ToSecond()])
    assert server.chat(model="alias")[0] == 200
    assert (len(first.requests), len(second.requests)) == (0, 1)
    metrics = server.request("GET", "/metrics")[2]
    assert b'gen_ai_request_model="second",reason="stop"' in metrics
    assert b"alias" not in metrics  # or every name that a client thinks of would be kept for good
    assert server.chat()[0] == 200
    assert len(first.requests) == 1
    assert server.chat(model="nobody")[0] == 404


def test_a_plugin_that_routes_to_a_stranger_is_a_server_error(serve: Any, scripted: Any) -> None:
    class ToStranger:
        @hookimpl
        def route_request(self, request: Any, backends: Any) -> Any:
            return scripted()

    status, body = serve(plugins=[ToStranger()]).chat()
    assert (status, body["error"]["type"]) == (500, "server_error")


# --- Limits of admission over HTTP ------------------------------------------------------------------------------------


def test_what_is_too_much_is_refused_at_once_and_the_rest_is_answered(serve: Any, scripted: Any, tools: Any) -> None:
    from suimon.gateway.hookspecs import Capabilities

    released = threading.Event()

    def script(request: Any) -> Any:
        while not released.is_set():
            yield 0.01
        yield from tools.words("a")

    backend = scripted(script, capabilities=Capabilities(max_concurrency=1))
    server = serve(backend, max_queued_requests=2)
    results: list[Any] = []
    threads = [chat_later(server, results) for _ in range(20)]
    tools.wait_until(lambda: len(results) == 17, "the refusals")
    assert {status for status, _ in results} == {429}
    assert {body["error"]["code"] for _, body in results} == {"overloaded"}
    status, headers, _ = server.request("POST", "/v1/chat/completions", tools.chat_body())
    assert status == 429
    assert gauges(server) == (1.0, 2.0)
    assert 1 <= int(headers["retry-after"]) <= 60
    released.set()
    for thread in threads:
        thread.join(20)
    assert sorted(status for status, _ in results) == [200] * 3 + [429] * 17
    assert backend.most_at_once == 1
    assert gauges(server) == (0.0, 0.0)


# --- CORS -------------------------------------------------------------------------------------------------------------

PREFLIGHT = {"origin": "https://a.example", "access-control-request-method": "POST"}


def test_cors_is_off_by_default(plain: Any) -> None:
    for method, path in (("OPTIONS", "/v1/chat/completions"), ("GET", "/v1/models")):
        _, headers, _ = plain.request(method, path, headers=PREFLIGHT)
        assert not [name for name in headers if name.startswith("access-control")]


def test_allowed_origins_may_call_with_a_key(serve: Any) -> None:
    server = serve(allowed_origins=("https://a.example",), api_keys=(ApiKey(key="k"),))
    wanted = PREFLIGHT | {"access-control-request-headers": "authorization, content-type"}
    status, headers, _ = server.request("OPTIONS", "/v1/chat/completions", headers=wanted)
    assert status == 204
    assert headers["access-control-allow-origin"] == "https://a.example"
    assert "POST" in headers["access-control-allow-methods"]
    assert "authorization" in headers["access-control-allow-headers"].lower()
    status, headers, _ = server.request("GET", "/v1/models", headers={"origin": "https://a.example"})
    assert (status, headers["access-control-allow-origin"]) == (401, "https://a.example")
    headers = {"origin": "https://a.example", "authorization": "Bearer k"}
    status, headers, _ = server.request("GET", "/v1/models", headers=headers)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")


def test_other_origins_may_not(serve: Any) -> None:
    server = serve(allowed_origins=("https://a.example",), api_keys=(ApiKey(key="k"),))
    other = PREFLIGHT | {"origin": "https://b.example"}
    status, headers, _ = server.request("OPTIONS", "/v1/chat/completions", headers=other)
    assert "access-control-allow-origin" not in headers
    assert status >= 400
    _, headers, _ = server.request("GET", "/v1/models", headers=other)
    assert "access-control-allow-origin" not in headers


def test_a_handler_that_fails_explains_nothing(serve: Any, caplog: Any) -> None:
    @get("/fails")
    async def fails(request: Request[Any, Any, Any]) -> None:
        raise ZeroDivisionError("secret")

    status, _, raw = serve(named=[Routes(fails)]).request("GET", "/fails")
    assert status == 500
    assert b"secret" not in raw
    assert json.loads(raw)["error"]["type"] == "server_error"
    assert "ZeroDivisionError: secret" in caplog.text


def test_health_that_hangs_or_fails_is_not_ready(serve: Any, scripted: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr("suimon.gateway.served.HEALTH_TIMEOUT", 0.05)
    backend = scripted()
    server = serve(backend)

    async def hangs() -> Health:
        await asyncio.Event().wait()
        return Health()

    async def fails() -> Health:
        raise RuntimeError("secret")

    for health in (hangs, fails):
        backend.health = health
        status, _, raw = server.request("GET", "/health")
        assert (status, raw) == (503, b'{"status":"failed"}')
    del backend.health
    assert server.request("GET", "/health")[0] == 200
    assert caplog.text.count("cannot tell its health") == 1  # and not once a probe
    assert caplog.text.count("tells its health again") == 1


def test_health_is_asked_of_all_at_once(serve: Any, scripted: Any) -> None:
    """Two backends each of which waits for the other to be asked."""
    backends = [scripted(model_id="a"), scripted(model_id="b")]
    server = serve(*backends)
    asked = set()

    def waits(name: str) -> Any:
        async def health() -> Health:
            asked.add(name)
            while len(asked) < 2:
                await asyncio.sleep(0)
            return Health()

        return health

    for backend in backends:
        backend.health = waits(backend.model_id)
    assert server.request("GET", "/health")[2] == b'{"status":"ready"}'
