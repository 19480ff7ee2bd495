"""Error texts that may leave the machine: no folders, no addresses, no more than a few lines."""

from __future__ import annotations

import re

from suimon.core_engine.errors import EngineError

MAX_CHARACTERS = 1000
_FOLDERS = re.compile(r"(?<![\w.:/])~?(?:/[^/\s'\"]+)+/")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")


def public_text(error: BaseException) -> str:
    """What may be shown of ``error``: its own words if it was raised on purpose, otherwise only what kind it is."""
    if isinstance(error, EngineError):
        return clean(str(error))
    if is_out_of_memory(error):
        return "out of memory: lower max_num_seqs, max_num_batched_tokens or the KV cache's size"
    return f"internal error ({type(error).__name__}); the server's log has the details"


def clean(text: str) -> str:
    """``text`` with paths cut to their last name and memory addresses blotted out, of bounded length."""
    text = _ADDRESS.sub("0x…", _FOLDERS.sub("", text))
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + "…"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or a device. PyTorch's CPU allocator says so only in its words."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
