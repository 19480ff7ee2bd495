"""sha256 of model files, remembered between runs. Knows files and the cache folder, not what the files hold."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.loader.cache import default_cache_dir, write_atomically

# Below this, hashing costs less than looking the answer up.
_REMEMBER_FROM_BYTES = 1 << 20


def hash_file(path: Path) -> str:
    """The sha256 hex digest of the file's content. Raises ModelLoadError when it cannot be read.

    A large file's digest is remembered under its identity (path, inode, size, times of change in nanoseconds): the
    kernel sets the time of the last status change on every write, and nothing can set it back.
    """
    try:
        if path.stat().st_size < _REMEMBER_FROM_BYTES:
            return _digest(path)
        note = _note(path)
        digest = _recall(note) or _digest(path)
        _keep(note, digest)
        return digest
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error


def remember(path: Path, digest: str) -> None:
    """Spare the next hash_file(path): ``digest`` is known to be its sha256."""
    _keep(_note(path), digest)


def hash_files(paths: Iterable[Path]) -> str:
    """One digest over the names and contents of several files, whatever their order."""
    lines = sorted(f"{path.name}\0{hash_file(path)}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _note(path: Path) -> Path:
    status = path.stat()
    identity = f"{path.resolve()}:{status.st_dev}:{status.st_ino}:{status.st_size}"
    identity += f":{status.st_mtime_ns}:{status.st_ctime_ns}"
    return default_cache_dir() / "hashes" / hashlib.sha256(os.fsencode(identity)).hexdigest()


def _recall(note: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        digest = note.read_text("ascii")
        return digest if len(bytes.fromhex(digest)) == 32 else None
    return None


def _keep(note: Path, digest: str) -> None:
    with contextlib.suppress(OSError):  # an unwritable cache costs time, not correctness
        if not note.exists():
            write_atomically(note, digest.encode())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
