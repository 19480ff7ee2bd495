"""The command line as its user meets it: real processes and exit statuses, one clear line where something is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from suimon.gateway import cli

PATIENCE = 60.0
QUIET = {name: value for name, value in os.environ.items() if not name.startswith(("SUIMON_", "OTEL_"))}

PLUGIN = """
import asyncio

from suimon.gateway.hookspecs import hookimpl
from suimon.plugins.echo import EchoBackend

class Planned(EchoBackend):
    def describe(self):
        return ["planned with care"]

class Slow(EchoBackend):
    async def start(self):
        print("loading", flush=True)
        await asyncio.sleep(600)

class Broken(EchoBackend):
    async def start(self):
        from suimon.gateway.hookspecs import BackendUnavailable
        raise BackendUnavailable("the model file is missing: name another")

@hookimpl
def register_backends(register, settings):
    for model in settings.models:
        if model.backend == "planned":
            register(Planned("p"))
        if model.backend == "slow":
            register(Slow("s"))
        if model.backend == "broken":
            register(Broken("b"))

@hookimpl
def register_commands(commands):
    command = commands.add_parser("greet", help="Say hello.")
    command.add_argument("name")
    command.set_defaults(run=lambda arguments: print("hello", arguments.name))
"""


def suimon(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "suimon.gateway.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=QUIET | environ)


def one_line(result: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """The one line of an error; no traceback, nothing on standard output."""
    assert (result.returncode, result.stdout) == (status, "")
    assert result.stderr.startswith("suimon: error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder with one plugin."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "cli_test_plugin.py").write_text(PLUGIN, encoding="utf-8")
    return folder


@contextlib.contextmanager
def serving(
    *flags: str, until: str = "ready", **environ: str
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A running ``suimon serve``: the process, its base URL and what it printed until it was ready."""
    command = [sys.executable, "-m", "suimon.gateway.cli", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=QUIET | environ)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or until not in lines[-1]:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            lines.append(line.rstrip("\n"))
        found = re.search(r"http://[\d.:]+", lines[-1])
        yield process, found.group() if found else "", lines
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


# --- serve ------------------------------------------------------------------------------------------------------------


def test_serve_ends_in_a_ready_line_that_tells_where(plugins: Path) -> None:
    with serving("--backend", "planned", "--plugins-dir", str(plugins)) as (process, url, lines):
        assert lines[0] == "p: planned with care"
        assert re.fullmatch(rf"Suimon is ready: {url}/v1  \(model p, \d+\.\d s\)", lines[1])
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            assert [model["id"] for model in json.load(response)["data"]] == ["p"]
        process.send_signal(signal.SIGINT)
        out, log = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in log and "GET" in log and "status=200" in log


def test_a_request_is_a_span_a_metric_and_a_line_without_its_words() -> None:
    canary = "canary-prompt-93fe"
    with serving("--backend", "echo", "--api-key", "canary-key-11", "--log-format", "json") as (process, url, _):
        body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": canary}]}).encode()
        headers = {"content-type": "application/json", "authorization": "Bearer canary-key-11"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as response:
            assert canary in response.read().decode()
            name = response.headers["x-request-id"]
        metrics = urllib.request.Request(f"{url}/metrics", headers=headers)
        with urllib.request.urlopen(metrics) as response:
            shown = response.read().decode()
        process.terminate()
        out, log = process.communicate(timeout=PATIENCE)
    assert 'suimon_requests_finished_total{gen_ai_request_model="echo",reason="stop"} 1.0' in shown
    entries = [json.loads(line) for line in log.splitlines()]
    (entry,) = [entry for entry in entries if entry.get("path") == "/v1/chat/completions"]
    assert (entry["status"], entry["request_id"]) == (200, name)
    assert "canary" not in out + log + shown


def test_a_model_that_does_not_load_stops_the_server_with_its_reason(plugins: Path) -> None:
    result = suimon("serve", "--port", "0", "--backend", "broken", "--plugins-dir", str(plugins))
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == "suimon: error: the model file is missing: name another"
    assert "Traceback" not in result.stderr


def test_a_signal_while_a_model_loads_is_an_orderly_end(plugins: Path) -> None:
    with serving("--backend", "slow", "--plugins-dir", str(plugins), until="loading") as (process, _, _):
        process.terminate()
        out, log = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, log) == (0, "", "")


class Collector(BaseHTTPRequestHandler):
    """Keeps what it is sent by OTLP."""

    received: ClassVar[dict[str, bytes]] = {}

    def do_POST(self) -> None:
        self.received[self.path] = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_traces_and_metrics_reach_a_collector_before_the_end() -> None:
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, args=(0.05,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    body = b'{"model": "echo", "messages": [{"role": "user", "content": "canary"}]}'
    with serving("--backend", "echo", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint) as (process, url, _):
        headers = {"content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)).close()
        process.terminate()
        process.communicate(timeout=PATIENCE)
    collector.shutdown()
    collector.server_close()
    assert b"chat echo" in Collector.received["/v1/traces"]
    assert b"POST /v1/chat/completions" in Collector.received["/v1/traces"]
    assert b"gen_ai.server.request.duration" in Collector.received["/v1/metrics"]
    assert not any(b"canary" in sent for sent in Collector.received.values())


def test_a_collector_that_does_not_answer_delays_nobody() -> None:
    with serving("--backend", "echo", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9") as (process, url, _):
        urllib.request.urlopen(f"{url}/v1/models").close()
        process.terminate()
        process.communicate(timeout=8)  # the exporter alone would retry for longer
    assert process.returncode == 0


def test_a_taken_port_is_known_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line(suimon("serve", "--backend", "echo", "--port", str(port)))
    assert f"port {port}" in line and "--port" in line


def test_a_taken_port_is_told_before_a_plugin_that_is_broken(plugins: Path) -> None:
    (plugins / "cli_broken_plugin.py").write_text("1 / 0", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line(suimon("serve", "--plugins-dir", str(plugins), "--port", str(port)))
    assert f"port {port}" in line


def test_other_machines_are_not_served_without_a_key_unless_a_plugin_asks_for_it(plugins: Path) -> None:
    assert "--allow-unauthenticated" in one_line(suimon("serve", "--host", "0.0.0.0"))
    asks = "from suimon.gateway.hookspecs import hookimpl\n@hookimpl\ndef authenticate(headers):\n    return None\n"
    (plugins / "cli_doorkeeper.py").write_text(asks, encoding="utf-8")
    checked = suimon("check-config", "--host", "0.0.0.0", "--backend", "echo", "--plugins-dir", str(plugins))
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["allow_unauthenticated"] is False


def test_a_command_that_two_plugins_add_costs_only_the_second(plugins: Path) -> None:
    (plugins / "cli_second_plugin.py").write_text(PLUGIN, encoding="utf-8")
    environ = {"PYTHONPATH": str(plugins), "SUIMON_PLUGINS": "cli_test_plugin,cli_second_plugin"}
    result = suimon("greet", "you", **environ)
    assert result.stdout == "hello you\n"
    assert "failed in register_commands: ArgumentError" in result.stderr and result.stderr.count("\n") == 1


def test_a_backend_that_no_plugin_serves_is_named() -> None:
    assert "'nonesuch'" in one_line(suimon("serve", "--port", "0", "--backend", "nonesuch"))
    assert "a power of two" in one_line(suimon("serve", "--port", "0", "--block-size", "17"))


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (('backend = "echo"', 'backend = "echo"'), "two backends serve the model 'echo'"),
        (
            ('backend = "absent"', 'backend = "echo"'),
            ":2: models[0]: model 'the demo model': no loaded plugin serves the backend 'absent'",
        ),
        (
            ('backend = "echo"', "block_size = 17"),
            "models[1].block_size: model 'SmolLM2-135M-Instruct': block_size must be a power of two, got 17",
        ),
        (('dtype = "int3"\nserved_model_name = "small"',), "models[0].dtype: expected one of auto, float32"),
        (('backend = "echo"\noptions = { delay = "1" }',), "`delay`, a number of seconds"),
        (('backend = "echo"\noptions = { dealy = 1 }',), "'dealy'"),
    ],
)
def test_models_that_cannot_be_served_are_one_line(tmp_path: Path, models: tuple[str, ...], said: str) -> None:
    path = tmp_path / "suimon.toml"
    path.write_text("port = 0\n" + "".join(f"[[models]]\n{table}\n" for table in models), encoding="utf-8")
    assert said in one_line(suimon("check-config", "--config", str(path)))


def test_flags_that_are_no_text_are_one_line() -> None:
    assert "--api-key: the key is empty" in one_line(suimon("serve", "--api-key", ""))
    assert "MODEL: is not text" in one_line(suimon("serve", os.fsdecode(b"/\xff.gguf")))


def test_a_terminal_without_the_characters_of_a_name_is_served_all_the_same() -> None:
    with serving("--backend", "echo", "--served-model-name", "水門", PYTHONIOENCODING="ascii") as (_, url, lines):
        assert "model \\u6c34\\u9580" in lines[-1]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "水門"


def test_without_standard_streams_it_serves() -> None:
    """A closed one's number must not go to a socket."""
    command = f'exec "{sys.executable}" -m suimon.gateway.cli serve --backend echo --port "$0" <&- >&- 2>&-'
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(["sh", "-c", command, str(port)], env=QUIET)
    try:
        body = {"model": "echo", "prompt": "still here"}
        answer = httpx.Client(transport=httpx.HTTPTransport(retries=8)).post(
            f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE
        )
        assert answer.json()["choices"][0]["text"] == "still here"
        assert {os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 1, 2)} == {os.devnull}
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_its_output_costs_a_warning() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "suimon.gateway.cli", "serve", "--port", "0", "--backend", "echo"]
        process = subprocess.Popen(command, stdout=full, stderr=subprocess.PIPE, text=True, env=QUIET)
        assert process.stderr is not None
        warning = process.stderr.readline()
        process.terminate()
        assert process.wait(PATIENCE) == 0
        process.stderr.close()
    assert "No space left" in warning and "Suimon is ready" in warning


def test_hook_calls_can_be_traced_without_their_values() -> None:
    with serving("--backend", "echo", "--trace-plugins") as (process, _, _):
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE)
    assert re.search(r"hook register_backends\(register, settings\) calls .*suimon\.plugins\.echo", log)


def test_no_command_imports_an_engine() -> None:
    """Also with the plugins loaded: torch alone would cost seconds."""
    code = (
        "import sys; from suimon.gateway import cli, serve; import suimon.gateway.app\n"
        "cli.main(['plugins', '--all'])\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'numpy', 'transformers', 'tokenizers'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=QUIET)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


def test_help_imports_neither_framework_nor_server() -> None:
    code = (
        "import sys; from suimon.gateway import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'litestar', 'uvicorn', 'opentelemetry', 'httpx', 'pluggy', 'asyncio'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=QUIET)
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr
    assert "--max-model-len" in result.stdout


# --- The other commands -----------------------------------------------------------------------------------------------


def test_version() -> None:
    assert re.fullmatch(r"suimon \d+\.\d+\S*\n", suimon("version").stdout)
    assert suimon("--version").stdout == suimon("version").stdout


def test_help_lists_every_command() -> None:
    shown = suimon("--help").stdout
    assert all(f"    {name}" in shown for name in ("serve", "chat", "models", "plugins", "check-config", "version"))


def test_check_config_shows_the_result_and_no_key(tmp_path: Path) -> None:
    path = tmp_path / "suimon.toml"
    path.write_text('port = 81\n[[models]]\nmodel = "m"\n', encoding="utf-8")
    result = suimon("check-config", "--config", str(path), "--api-key", "canary-key", SUIMON_SEED="4")
    shown = json.loads(result.stdout)
    assert (shown["port"], shown["models"][0]["model"], shown["models"][0]["seed"]) == (81, "m", 4)
    assert "canary" not in result.stdout
    path.write_text("prt = 81", encoding="utf-8")
    assert one_line(suimon("check-config", "--config", str(path))).endswith("did you mean 'port'?\n")


def test_a_wrong_flag_ends_with_status_2() -> None:
    result = suimon("serve", "--no-such-flag")
    assert result.returncode == 2 and "--no-such-flag" in result.stderr


def test_plugins_as_json(plugins: Path) -> None:
    environ = {"PYTHONPATH": str(plugins), "SUIMON_PLUGINS": "cli_test_plugin"}
    listed = json.loads(suimon("plugins", **environ).stdout)
    (mine,) = [entry for entry in listed if not str(entry["distribution"]).startswith("suimon-")]  # of contrib/
    assert mine["hooks"] == ["register_backends", "register_commands"]
    assert (mine["name"], mine["version"], mine["distribution"]) == ("cli_test_plugin", None, None)
    names = [entry["name"] for entry in json.loads(suimon("plugins", "--all", **environ).stdout)]
    assert {"suimon.plugins.native", "suimon.plugins.echo", "cli_test_plugin"} <= set(names)
    assert json.loads(suimon("plugins", "--all", "--hook", "register_commands", **environ).stdout) == [mine]


def test_a_plugin_can_add_a_command(plugins: Path) -> None:
    environ = {"PYTHONPATH": str(plugins), "SUIMON_PLUGINS": "cli_test_plugin"}
    assert suimon("greet", "you", **environ).stdout == "hello you\n"
    assert "greet" in suimon("--help", **environ).stdout


def test_a_broken_plugin_is_named_and_costs_only_its_own_commands(plugins: Path) -> None:
    environ = {"PYTHONPATH": str(plugins), "SUIMON_PLUGINS": "cli_broken_plugin"}
    (plugins / "cli_broken_plugin.py").write_text("1 / 0", encoding="utf-8")
    helped = suimon("--help", **environ)
    assert helped.returncode == 0 and "serve" in helped.stdout and "cli_broken_plugin" in helped.stderr
    line = one_line(suimon("serve", "--port", "0", **environ))
    assert "cli_broken_plugin" in line and "ZeroDivisionError" in line


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    add, _, text = cli._COMMANDS["version"]
    monkeypatch.setitem(cli._COMMANDS, "version", (add, interrupted, text))
    assert cli.main(["version"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(arguments: object) -> int:
        raise RuntimeError("ours")

    add, _, text = cli._COMMANDS["version"]
    monkeypatch.setitem(cli._COMMANDS, "version", (add, mistaken, text))
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["version"])
