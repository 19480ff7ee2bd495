"""Classes of attack that have no home in another test: the table in SECURITY.md says where each of the others is."""

from __future__ import annotations

import re
import tracemalloc
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from suimon.gateway import limits
from suimon.gateway.hookspecs import InvalidRequest
from suimon.gateway.openai.bodies import ChatCompletionRequest, CompletionRequest
from suimon.gateway.openai.fields import decode_body
from suimon.gateway.openai.requests import chat_request, completion_requests

ROOT = Path(__file__).resolve().parents[2]


# --- Tenants (class 10) -----------------------------------------------------------------------------------------------


def test_tenants_share_no_cached_blocks(server: Any, tools: Any) -> None:
    """The second key finds nothing of the first's, also where both send the same salt; each finds its own."""
    prompt = "the same words of two tenants, several blocks of them"

    def cached(key: str, **options: Any) -> int:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1} | options
        answer = server.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}).json()
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    whole_blocks = (len(prompt) - 1) // 16 * 16
    assert [cached(key) for key in (tools.KEY, tools.OTHER_KEY)] == [0, 0]
    assert [cached(key) for key in (tools.KEY, tools.OTHER_KEY)] == [whole_blocks, whole_blocks]
    assert [cached(key, cache_salt="s") for key in (tools.KEY, tools.OTHER_KEY)] == [0, 0]


# --- What a client may point at (classes 7 and 18) --------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    ["/etc/passwd", "../model", "file:///etc/passwd", "http://127.0.0.1:1/", "pypi:x==1/y", "org/other", "tiny\0", "*"],
)
def test_no_model_is_fetched_or_opened_for_a_client(server: Any, model: str) -> None:
    status, answer = server.post("/v1/completions", model=model, prompt="x")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_base", "http://127.0.0.1:1"),
        ("base_url", "http://127.0.0.1:1"),
        ("lora_path", "/etc/passwd"),
        ("lora_request", {"lora_path": "/etc/passwd"}),
        ("chat_template", "{{ ''.__class__ }}"),
        ("chat_template_kwargs", {"tokenize": True}),
        ("mm_processor_kwargs", {"x": 1}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("guided_regex", "(a+)+b"),
        ("grammar", "root ::= " + "(" * 1000),
        ("bad_words", ["x"] * 1000),
        ("use_beam_search", True),
    ],
)
def test_fields_that_would_reach_further_are_refused_by_name(server: Any, name: str, value: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    error = server.refusal("/v1/chat/completions", messages=messages, **{name: value})
    assert error["param"] == name


@pytest.mark.parametrize("url", ["http://127.1/", "http://169.254.169.254/", "file:///etc/passwd", "data:,x"])
def test_no_url_is_fetched_for_a_client(server: Any, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    error = server.refusal("/v1/chat/completions", messages=[{"role": "user", "content": [part]}])
    assert error["param"] == "messages[0].content[0].type"


# --- Amplification (class 15) -----------------------------------------------------------------------------------------

MIB = 1024 * 1024
TURN = b'{"role":"user","content":""}'
PART = b'{"type":"text","text":""}'


def listed(entry: bytes, size: int) -> bytes:
    """A JSON list of ``size`` bytes of this entry."""
    return b"[" + b",".join([entry] * (size // (len(entry) + 1))) + b"]"


COSTLY = {
    "short messages": b'{"messages":' + listed(TURN, limits.MAX_QUOTES * len(TURN) // 8) + b"}",
    "short parts": b'{"messages":[{"role":"user","content":' + listed(PART, limits.MAX_QUOTES * 3) + b"}]}",
    "too many messages": b'{"messages":' + listed(TURN, 32 * MIB) + b"}",
    "empty lists": b'{"prompt":' + listed(b"[]", 32 * MIB) + b"}",
    "token ids": b'{"prompt":' + listed(b"7", 2 * limits.MAX_PROMPT_TOKENS - 8) + b"}",
    "prompts of one token": b'{"prompt":' + listed(b"[7]", 4 * (limits.MAX_PROMPTS - 1)) + b"}",
    "short prompts": b'{"prompt":' + listed(b'"a"', 4 * (limits.MAX_PROMPTS - 1)) + b"}",
    "more choices than tokens": b'{"prompt":"a","n":128}',
    "biases": b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % i for i in range(1024)) + b"}}",
    "long text": b'{"prompt":"' + b"a" * 8 * MIB + b'"}',
    "escapes": b'{"prompt":"' + b"\\u0001" * MIB + b'"}',
    "deep": b'{"tools":' + b"[" * 4 * MIB + b"]" * 4 * MIB + b"}",
    "unknown keys": b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
    "one key again": b"{" + b",".join([b'"n":1'] * 100_000) + b"}",
    "metadata": b'{"metadata":{' + b",".join(b'"%d":""' % i for i in range(7000)) + b"}}",
}


@pytest.mark.parametrize("name", COSTLY)
def test_no_body_costs_a_hundred_times_its_size(name: str) -> None:
    """Of memory, while it becomes requests or is refused; 64 KiB are anybody's due."""
    body = COSTLY[name]
    chat = b'"messages"' in body[:16]
    tracemalloc.start()
    try:
        if chat:
            chat_request(decode_body(body, ChatCompletionRequest), "id")
        else:
            completion_requests(decode_body(body, CompletionRequest), "id")
    except (InvalidRequest, RecursionError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(body) + 64 * 1024
    assert peak < 256 * MIB


# --- What we are built from (class 20) --------------------------------------------------------------------------------

FLOORS = {"torch": (2, 10), "transformers": (5, 3), "litestar": (2, 22), "jinja2": (3, 1, 6)}


def as_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


@pytest.mark.parametrize("name", FLOORS)
def test_releases_with_published_advisories_are_excluded(name: str) -> None:
    stated = re.search(rf'^    "{name}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert stated is not None and as_numbers(stated[1]) >= FLOORS[name]
    assert as_numbers(version(name)) >= FLOORS[name]


def test_the_tested_set_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("#")[0].split(";")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==[\w.+!]+", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    needed = re.search(r"^dependencies = \[$(.*?)^\]$", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert needed is not None
    names = {name.lower() for name in re.findall(r'^    "([\w-]+)', needed[1], re.M)}
    assert names - {"pip"} <= pinned


def test_nothing_of_ours_runs_when_an_interpreter_starts() -> None:
    packed = [
        path for package in ("gateway", "core_engine", "kernels", "plugins") for path in (ROOT / package).rglob("*")
    ]
    assert [path for path in packed if path.suffix in {".pth", ".pkl", ".pt", ".bin"} or path.is_symlink()] == []
    assert ".pth" not in (ROOT / "pyproject.toml").read_text()
