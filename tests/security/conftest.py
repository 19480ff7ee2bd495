"""``suimon serve`` on a tiny Llama of noise: a whole server that starts fast, for tests that attack or kill it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

PATIENCE = 60.0  # seconds that only a defect takes
KEY, OTHER_KEY = "key-of-one-tenant", "key-of-another"
CONTEXT, VOCABULARY = 2048, 258
ENDS = [257, 255]  # the second one is only in generation_config.json
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": ENDS[0],
}
# Knows no developer, and wants the roles to change from message to message.
TEMPLATE = r"""
{%- for m in messages %}
{%- if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('no such role') }}{% endif %}
{%- if loop.previtem and m.role == loop.previtem.role %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- m.role }}: {{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.a }}){% endfor %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def write_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Two layers of seeded noise, and a tokenizer whose tokens are bytes."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    noise = torch.Generator().manual_seed(0)
    sizes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    shapes = {f"self_attn.{name}": shape for name, shape in sizes.items()}
    shapes |= {"mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64)}
    tensors = {
        f"model.layers.{i}.{name}.weight": torch.randn(shape, generator=noise) * 0.3
        for i in (0, 1)
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{i}.{name}_layernorm.weight" for i in (0, 1) for name in ("input", "post_attention")]
    tensors |= {name: torch.ones(32) for name in [*norms, "model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.randn((VOCABULARY, 32), generator=noise)
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    return folder


class Server:
    """A server process, its log, and a client of it that has a key."""

    def __init__(self, model: Path, *options: str) -> None:
        command = [sys.executable, "-m", "suimon.gateway.cli", "serve", str(model), "--port", "0"]
        fixed = ["--served-model-name", "tiny", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"]
        keys = ["--api-key", KEY, "--api-key", OTHER_KEY]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SUIMON_CHECK_INVARIANTS": "1"}
        self.process = subprocess.Popen(
            [*command, *fixed, *keys, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self.log: list[str] = []
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(PATIENCE), "".join(self.log)
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.log[-1])
        assert found is not None, "".join(self.log)
        self.port = int(found[1])
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=PATIENCE,
            headers={"authorization": f"Bearer {KEY}"},
            limits=httpx.Limits(max_connections=None),
        )

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            if "Suimon is ready" in line:
                self._ready.set()
        self._ready.set()

    # --- asking

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """(status, decoded answer); NaN and Infinity, which JSON does not have, are errors."""
        response = self.http.post(path, json={"model": "tiny"} | body)
        return response.status_code, json.loads(response.content, parse_constant=_not_json)

    def complete(self, prompt: Any, **options: Any) -> Any:
        """The answer to a completion that must succeed; greedy, and to its full length, unless said otherwise."""
        fields = {"temperature": 0, "ignore_eos": True} | options
        status, answer = self.post("/v1/completions", prompt=prompt, **fields)
        assert status == 200, answer
        return answer

    def text(self, prompt: Any, **options: Any) -> str:
        text: str = self.complete(prompt, **options)["choices"][0]["text"]
        return text

    def tokens(self, **what: Any) -> list[int]:
        status, answer = self.post("/tokenize", **what)
        assert status == 200, answer
        found: list[int] = answer["tokens"]
        return found

    def refusal(self, path: str, **body: Any) -> Any:
        """The error of a request that must be refused with 400."""
        status, answer = self.post(path, **body)
        assert status == 400, answer
        assert list(answer["error"]) == ["message", "type", "param", "code"]
        return answer["error"]

    def send(self, path: str = "/v1/completions", *, narrow: bool = False, **body: Any) -> socket.socket:
        """A request on a socket of its own, its answer unread; ``narrow``: with small buffers on our side."""
        connection = socket.socket()
        if narrow:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", self.port))
        data = json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    # --- looking

    def gauge(self, name: str, labels: str = "") -> float:
        text = self.http.get("/metrics").text
        found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.M)
        return sum(float(value) for given, value in found if labels in given)

    def is_ready(self) -> bool:
        return self.http.get("/health/ready").status_code == 200

    def is_idle(self) -> bool:
        busy = ("suimon_requests_running", "suimon_requests_waiting", "suimon_kv_blocks_used", "suimon_queued_tokens")
        return all(self.gauge(name) == 0 for name in busy)

    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "suimon.core_engine.process" in child.cmdline())

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]


def _not_json(constant: str) -> None:
    raise AssertionError(f"{constant} in an answer")


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    connection.close()
    return data


def events(raw: bytes) -> list[Any]:
    """The events of a whole answer as it came from a socket, chunked; "[DONE]" is the last."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    assert re.fullmatch(rb"(data: [^\r\n]+\n\n)+", body), body
    found = [block.removeprefix(b"data: ") for block in body[:-2].split(b"\n\n")]
    return [block.decode() if block == b"[DONE]" else json.loads(block) for block in found]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true"
        time.sleep(0.01)


class Tools:
    """The helpers above, for test modules, which cannot import one another."""

    KEY, OTHER_KEY, CONTEXT, VOCABULARY, ENDS = KEY, OTHER_KEY, CONTEXT, VOCABULARY, ENDS
    read_to_end = staticmethod(read_to_end)
    events = staticmethod(events)
    wait_until = staticmethod(wait_until)


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``with start_server(*options, template=...) as server``: a server of its own."""

    @contextmanager
    def start(*options: str, template: str = TEMPLATE) -> Iterator[Server]:
        server = Server(write_model(tmp_path_factory.mktemp("model"), template), *options)
        try:
            yield server
        finally:
            server.http.close()
            server.process.kill()
            server.process.wait()

    return start


@pytest.fixture(scope="session")
def shared_server(start_server: Callable[..., Any]) -> Iterator[Server]:
    limits = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "600"]
    timeouts = ["--heartbeat-interval", "0.2", "--heartbeat-timeout", "7"]
    with start_server(*limits, *timeouts) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """One server for all that it must survive: afterwards it is ready and idle, with every block back, and answers."""
    seen = len(shared_server.log)
    yield shared_server
    print(*(line for line in shared_server.log[seen:] if "/metrics" not in line and "/health" not in line), sep="")
    wait_until(shared_server.is_ready, "readiness")
    wait_until(shared_server.is_idle, "idleness")
    kinds = ("capacity", "free", "cached")
    capacity, free, cached = (shared_server.gauge(f"suimon_kv_blocks_{kind}") for kind in kinds)
    assert free + cached == capacity
    assert len(shared_server.text("still there?", max_tokens=2)) >= 1
