"""A model's file that cannot be read is for the operator to mend: such errors, with its name and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from suimon.core_engine.errors import ModelLoadError


@contextmanager
def unreadable_files_named() -> Iterator[None]:
    """Raise ModelLoadError for an OSError about a file. One about none (memory, sockets) passes as it is."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ModelLoadError(f"{error.filename}: cannot be read: {error.strerror}") from error
