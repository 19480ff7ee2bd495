"""JSON objects in a model's folder: config.json and its like. Knows no keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from suimon.core_engine.errors import ModelLoadError

MAX_BYTES = 64 << 20  # the index of the largest sharded models has a few


def read_object(path: Path) -> dict[str, Any]:
    """The object in the file. Raises ModelLoadError, naming the file, for a missing one and for any other content."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelLoadError(f"{path}: larger than {MAX_BYTES} bytes")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: holds {type(content).__name__}, expected an object")
    return content


def read_object_if_there(path: Path) -> dict[str, Any]:
    """The same, and {} where there is no such file."""
    return read_object(path) if path.exists() else {}
