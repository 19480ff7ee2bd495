"""The user's cache folder: where it is, and how several processes write to it. Knows nothing of what is kept there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def default_cache_dir() -> Path:
    """``$SUIMON_CACHE``, else ``$XDG_CACHE_HOME/suimon``, else ``~/.cache/suimon``. It need not exist."""
    if own := os.environ.get("SUIMON_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "suimon"


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or all of the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # a cache may be shared; nothing in it is secret
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def exclusive(lock_file: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold ``lock_file`` against other processes; ``on_wait`` is called once if another holds it.

    The kernel lets go of the lock when its holder ends, however it ends.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
