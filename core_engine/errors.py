"""What can go wrong in the engine, by kind. The gateway's plugins map these to its own errors, by class."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class InvalidRequestError(EngineError):
    """The request itself is wrong; ``param`` names the culprit."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt and the tokens asked for do not fit the context, or can never fit the KV cache."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)


class QueueFullError(EngineError):
    """The waiting queue is full; ``retry_after`` is the engine's estimate in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(EngineError):
    """The engine process ended or hung while the request was in it."""


class EngineUnavailableError(EngineError):
    """The engine is loading, draining or restarting, or failed to load: it takes no requests now."""


class ModelLoadError(EngineError):
    """A checkpoint cannot be loaded; the message names the file and what is wrong with it."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint is sound, but its architecture or format is not served here."""


_BY_NAME: dict[str, type[EngineError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequestError,
        ContextLengthError,
        QueueFullError,
        EngineDeadError,
        EngineUnavailableError,
        ModelLoadError,
        UnsupportedModelError,
    )
}


def error_class(name: str, otherwise: type[EngineError] = EngineError) -> type[EngineError]:
    """The class of that name, as it comes over a process boundary; ``otherwise`` if it is none of these."""
    return _BY_NAME.get(name, otherwise)
