"""The log of an engine process: lines of the same two forms as its user's, on the same standard error.

``SUIMON_LOG_FORMAT`` (text or json) and ``SUIMON_LOG_LEVEL`` say which; whoever starts the process passes them on.
"""

from __future__ import annotations

import json
import logging
import os
import sys


class JsonLines(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, logger (the engine), message, error."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        """One line, in ASCII."""
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": self._name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging(name: str) -> None:
    """Log as the engine ``name`` from now on; may be called again when its name is known."""
    label = f"engine[{name}]"
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {label.replace('%', '%%')}: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonLines(label) if os.environ.get("SUIMON_LOG_FORMAT") == "json" else text)
    level = os.environ.get("SUIMON_LOG_LEVEL", "info").upper()
    known = level in ("DEBUG", "INFO", "WARNING", "ERROR")
    logging.basicConfig(handlers=[handler], level=level if known else "INFO", force=True)
