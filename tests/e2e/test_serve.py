"""``suimon serve`` with the demo model, as a user starts it, and what it lives through: real HTTP, real kills."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from suimon.core_engine.llm import LLM
from suimon.core_engine.sampling_params import SamplingParams

MODEL = "SmolLM2-135M-Instruct"
# Small enough that a dozen long answers do not all fit, so that some requests wait.
OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "4", "--num-gpu-blocks-override", "160")
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}


class Server:
    """A server process, its log, and a client of it."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "suimon.gateway.cli", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.log: list[str] = []
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(180), "".join(self.log)
        url = re.search(r"http://\S+(?=/v1)", self.log[-1])
        assert url is not None, "".join(self.log)
        self.http = httpx.Client(base_url=url[0], timeout=300)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if "Suimon is ready" in line:
                self._ready.set()
        self._ready.set()

    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "suimon.core_engine.process" in child.cmdline())

    def gauge(self, name: str) -> float:
        text = self.http.get("/metrics").text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)
        return sum(map(float, values))

    def is_ready(self) -> bool:
        return self.http.get("/health/ready").status_code == 200

    def complete(self, prompt: str, **options: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, **options}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(demo_gguf: Path) -> Iterator[Server]:
    server = Server(*OPTIONS)
    yield server
    server.stop()


def test_the_capital_of_france(server: Server) -> None:
    answer = server.http.post("/v1/chat/completions", json=QUESTION | {"temperature": 0}).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_plan_is_printed_before_the_ready_line(server: Server) -> None:
    ready = next(index for index, line in enumerate(server.log) if "Suimon is ready" in line)
    plan = "".join(server.log[:ready])
    assert all(word in plan for word in ("float32", "160 blocks", "sequences a step", "tokens a step"))


def test_http_says_what_the_offline_engine_says(server: Server, demo_gguf: Path) -> None:
    prompts = [f"{subject} is" for subject in ("The sea", "A prime number", "Bread", "水門", "Winter in Kyoto")]
    with LLM(str(demo_gguf), dtype="float32", max_model_len=1024) as llm:
        offline = [result.text for result in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))]
    with ThreadPoolExecutor(len(prompts)) as pool:
        online = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=64)["choices"][0]["text"], prompts))
    assert online == offline


def test_those_who_leave_take_their_blocks_with_them(server: Server) -> None:
    body = {"model": MODEL, "prompt": "Count:", "stream": True, "max_tokens": 900, "ignore_eos": True}
    before = server.gauge("suimon_requests_finished_total")
    for _ in range(6):
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    until(lambda: server.gauge("suimon_requests_running") + server.gauge("suimon_requests_waiting") == 0)
    assert server.gauge("suimon_kv_blocks_used") == 0
    free, cached = server.gauge("suimon_kv_blocks_free"), server.gauge("suimon_kv_blocks_cached")
    assert free + cached == server.gauge("suimon_kv_blocks_capacity") == 160
    assert server.gauge("suimon_requests_finished_total") == before + 6


def test_a_killed_engine_ends_streams_with_an_error_and_answers_who_waited(server: Server) -> None:
    body = {"model": MODEL, "prompt": "Count:", "stream": True, "max_tokens": 900, "ignore_eos": True}
    started, events = threading.Barrier(5), []

    def read() -> None:
        url = server.http.base_url.join("/v1/completions")
        with httpx.stream("POST", url, json=body, timeout=300) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            next(lines)
            started.wait(60)
            events.append(list(lines))

    engine = server.engine()
    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    started.wait(60)  # all four places are taken, so the next ones wait
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.complete, f"{n} and", max_tokens=8) for n in ("One", "Two", "Three")]
        until(lambda: server.gauge("suimon_requests_waiting") >= 3)
        engine.kill()
        answers = [future.result() for future in waiting]
    for reader in readers:
        reader.join(60)
    assert all(answer["usage"]["completion_tokens"] == 8 for answer in answers)
    assert len(events) == 4 and all(lines[-1] == "[DONE]" for lines in events)
    errors = [json.loads(lines[-2])["error"] for lines in events]
    assert {error["code"] for error in errors} == {"backend_crashed"}
    assert server.process.poll() is None and server.engine().pid != engine.pid
    until(server.is_ready)
    assert server.gauge("suimon_engine_restarts_total") == 1
    assert server.gauge("suimon_kv_blocks_used") == 0


def test_not_ready_while_the_engine_is_away(server: Server) -> None:
    engine = server.engine()
    engine.kill()
    until(lambda: not server.is_ready(), 10)
    until(server.is_ready, 120)
    assert "Paris" in json.dumps(server.http.post("/v1/chat/completions", json=QUESTION | {"temperature": 0}).json())


def test_nothing_is_left_after_the_end(server: Server) -> None:
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    _, alive = psutil.wait_procs(family, 10)
    assert alive == []


def test_secrets_and_prompts_are_not_in_the_log(demo_gguf: Path) -> None:
    server = Server(*OPTIONS, "--api-key", "canary-key-5113")
    try:
        server.http.headers["authorization"] = "Bearer canary-key-5113"
        server.complete("canary-prompt-7717", max_tokens=2)
        assert server.http.post("/v1/completions", json={"prompt": "canary-prompt-7717"}).status_code == 404
        assert httpx.get(server.http.base_url.join("/v1/models")).status_code == 401
    finally:
        server.stop()
    assert "canary" not in "".join(server.log)
