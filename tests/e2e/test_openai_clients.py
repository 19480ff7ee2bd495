"""The openai packages of Python and of npm run the same script, and see the same.

First against scripted backends, where every answer and accident is known; then against the native engine and the demo
model, as ``suimon serve`` starts them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from suimon.gateway.access import AccessLayer
from suimon.gateway.app import create_app
from suimon.gateway.config import ApiKey, Settings
from suimon.gateway.hookspecs import (
    Backend,
    BackendCrashed,
    Capabilities,
    Delta,
    Overloaded,
    TokenLogprob,
    TokenLogprobs,
    Usage,
    hookimpl,
)
from suimon.gateway.http_protocol import limited_protocol
from suimon.gateway.plugin_manager import load_plugins

HERE = Path(__file__).parent
NPM_VERSION = "7.59.0"  # of the openai package

EXPECTED: dict[str, Any] = {
    "chat": ["chat.completion", "assistant", True, True, True],
    "chat_stream": [True, True, [], "assistant"],
    "chat_stream_usage": [[0, True]],
    "chat_logprobs": [True, True],
    "chat_n": [[0, 1], 1],
    "chat_parts": True,
    "chat_extensions": True,
    "chat_left_early": True,
    "completion": ["text_completion", True, True],
    "completion_stream": [True, True, [[0, True]]],
    "completion_batch": [0, 1, 2, 3],
    "completion_tokens": True,
    "completion_logprobs": True,
    "models": [True, True],
    "errors": {
        "key": ["AuthenticationError", 401, None, "invalid_api_key"],
        "model": ["NotFoundError", 404, "model", "model_not_found"],
        "model_id": ["NotFoundError", 404, "model", "model_not_found"],
        "range": ["BadRequestError", 400, "temperature", None],
        "type": ["BadRequestError", 400, "max_tokens", None],
        "unknown": ["BadRequestError", 400, "no_such_field", None],
        "tools": ["BadRequestError", 400, "tools", None],
        "format": ["BadRequestError", 400, "response_format", None],
        "empty": ["BadRequestError", 400, "prompt", None],
        "stream": ["BadRequestError", 400, "top_p", None],
    },
}
SPECIAL: dict[str, Any] = {
    "breaks": ["APIError", None, None, "backend_crashed"],
    "full": ["RateLimitError", 429, None, "overloaded"],
    "slow": True,
}


class Storyteller(Backend):
    """Tells the same story to everybody; ``before`` runs before the second word."""

    capabilities = Capabilities(token_prompts=True, logprobs=True)

    def __init__(self, model_id: str, before: Any = None) -> None:
        self.model_id = model_id
        self.before = before

    async def generate(self, request: Any) -> Any:
        import asyncio

        for number, word in enumerate(("Red", ", ", "blue", " 😀")):
            if number == 1 and isinstance(self.before, Exception):
                raise self.before
            if number == 1 and self.before:
                await asyncio.sleep(self.before)
            one = TokenLogprob(word, -0.5, tuple(word.encode()))
            for index in range(request.sampling.n):
                yield Delta(text=word, index=index, token_ids=(1,), logprobs=(TokenLogprobs(one, (one,)),))
        for index in range(request.sampling.n):
            yield Delta(index=index, finish_reason="stop", usage=Usage(prompt_tokens=5, completion_tokens=4))


class Full(Storyteller):
    """Never has room."""

    async def generate(self, request: Any) -> Any:
        raise Overloaded("full", retry_after=1)
        yield


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    class Plugin:
        @hookimpl
        def register_backends(self, register: Any, settings: Any) -> None:
            register(Storyteller("org/model"))
            register(Storyteller("breaks", BackendCrashed("the engine died")))
            register(Storyteller("slow", 0.3))
            register(Full("full"))

    manager = load_plugins(built_in=())
    manager.register(Plugin())
    settings = Settings(api_keys=(ApiKey(key="key"),), sse_keepalive_interval=0.05)
    app = create_app(settings, manager)
    listener = socket.create_server(("127.0.0.1", 0))
    layered = AccessLayer(app, app.state.drain, app.state.telemetry)
    config = uvicorn.Config(layered, http=limited_protocol(settings), ws="none", lifespan="on", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def native_url(demo_gguf: Path) -> Iterator[str]:
    """``suimon serve`` with the demo model, in fp32 so that a text does not depend on how its prompt was batched."""
    command = [sys.executable, "-m", "suimon.gateway.cli", "serve", "--port", "0", "--api-key", "key"]
    options = ["--dtype", "float32", "--max-model-len", "1024", "--num-threads", "1"]
    server = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        urls = (re.search(r"http://\S+/v1", line) for line in server.stdout if "is ready" in line)
        url = next(urls, None)
        assert url is not None, "the server ended without a ready line"
        yield url[0]
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def node_script() -> Path:
    """The script beside an installed npm package, in the user's cache; skipped where npm cannot provide it."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "suimon" / "tests" / f"openai-{NPM_VERSION}"
    if not (folder / "node_modules" / "openai").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run([*install, f"openai@{NPM_VERSION}"], capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"npm cannot install the openai package: {done.stderr[-200:]}")
    return Path(shutil.copy(HERE / "openai_script.mjs", folder))


def clients_see(command: list[str], url: str, model: str) -> Any:
    done = subprocess.run([*command, url, "key", model], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_python_package(url: str) -> None:
    seen = clients_see([sys.executable, str(HERE / "openai_script.py")], url, "org/model")
    assert seen == EXPECTED | {"special_models": SPECIAL}


def test_the_npm_package(url: str, node_script: Path) -> None:
    seen = clients_see(["node", str(node_script)], url, "org/model")
    assert seen == EXPECTED | {"special_models": SPECIAL}


@pytest.mark.slow
def test_the_python_package_and_the_demo_model(native_url: str) -> None:
    seen = clients_see([sys.executable, str(HERE / "openai_script.py")], native_url, "SmolLM2-135M-Instruct")
    assert seen == EXPECTED | {"special_models": {}}


@pytest.mark.slow
def test_the_npm_package_and_the_demo_model(native_url: str, node_script: Path) -> None:
    seen = clients_see(["node", str(node_script)], native_url, "SmolLM2-135M-Instruct")
    assert seen == EXPECTED | {"special_models": {}}
