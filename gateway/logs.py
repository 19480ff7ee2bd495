"""Logging: one set-up, two forms (text for people, JSON for machines), and nothing secret in either.

The redaction is the second line of defence: no code logs keys or prompts on purpose, and what looks like a key is
blanked here all the same, also inside tracebacks.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import Any, TextIO

import msgspec

# What keys look like: an authorization value, a key in a URL or a setting, OpenAI's own form.
_SECRETS = re.compile(
    r"(?i)(bearer\s+|basic\s+|api[-_]?key[\"']?\s*[=:]\s*[\"']?|authorization[\"']?\s*[=:]\s*[\"']?(?!bearer|basic))"
    r"[^\s\"',;&]+|\bsk-[A-Za-z0-9_-]{8,}"
)
# Line breaks and escapes would let a client write lines of its own into a text log.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def redact(text: str) -> str:
    """``text`` with whatever looks like a secret replaced by ``***``."""
    return _SECRETS.sub(lambda match: (match.group(1) or "") + "***", text)


def _plain(text: str) -> str:
    """Redacted, and something that JSON can hold: names of files need not be text."""
    return redact(text).encode("utf-8", "backslashreplace").decode()


class _Formatter(logging.Formatter):
    def trouble(self, record: logging.LogRecord) -> str:
        """The traceback, redacted; empty without one."""
        return redact(self.formatException(record.exc_info)) if record.exc_info else ""


class TextFormatter(_Formatter):
    """``12:00:00 INFO    access: request method=GET path=/ ...`` with a traceback on the lines below."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, its control characters escaped."""
        fields = " ".join(f"{key}={value}" for key, value in getattr(record, "fields", {}).items())
        name = record.name.removeprefix("suimon.")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname:<7} {name}: {record.getMessage()} {fields}".rstrip()
        line = _CONTROL.sub(lambda match: repr(match.group())[1:-1], redact(line).replace("\n", "\\n"))
        trouble = self.trouble(record)
        return f"{line}\n{trouble}" if trouble else line


class JsonFormatter(_Formatter):
    """One JSON object per line: time (Unix seconds), level, logger, message, the record's fields, error."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _plain(record.getMessage()),
        }
        for key, value in getattr(record, "fields", {}).items():
            entry[key] = _plain(value) if isinstance(value, str) else value
        trouble = self.trouble(record)
        if trouble:
            entry["error"] = _plain(trouble)
        return msgspec.json.encode(entry).decode()


FORMATTERS: dict[str, type[_Formatter]] = {"text": TextFormatter, "json": JsonFormatter}


def configure(level: str = "info", form: str = "text", *, access: bool = True, stream: TextIO | None = None) -> None:
    """Send all logs of this process to ``stream`` (standard error). Replaces what was set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(FORMATTERS[form]())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("suimon").setLevel(level.upper())
    logging.getLogger("suimon.access").disabled = not access
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its notices repeat ours
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
