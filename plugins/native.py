"""The native engine as a backend: one for each configured model whose ``backend`` is ``native``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from suimon.core_engine.config import NATIVE_EXECUTOR
from suimon.core_engine.errors import UnsupportedModelError
from suimon.core_engine.loader.recognise import recognise
from suimon.core_engine.loader.sources import DEFAULT_MODEL
from suimon.gateway.hookspecs import Backend, InvalidRequest, Offer, hookimpl
from suimon.plugins.stepped import SteppedBackend

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings, Settings


class NativeBackend(SteppedBackend):
    """Answers with the engine's own models. It has no options but the settings that every model has."""

    def __init__(self, model: ModelSettings) -> None:
        super().__init__(model, executor=NATIVE_EXECUTOR)
        if model.options:
            names = ", ".join(sorted(model.options))
            message = f"model {self.model_id!r}: the native backend has no options of its own; got {names}"
            raise InvalidRequest(message, param="options")


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "native":
            register(NativeBackend(model))


@hookimpl
def offer_model(model: ModelSettings) -> Offer:
    """Take what the engine runs, and what is not on this machine yet; it chooses between CUDA and CPU by itself."""
    if model.options:
        return Offer.refusal("native", "has no options, and this model has some")
    try:
        what = recognise(model.model or DEFAULT_MODEL)
    except UnsupportedModelError as error:
        return Offer.refusal("native", str(error))
    reason = (
        "it is not on this machine yet, and native comes first" if what is None else f"the native engine runs {what}"
    )
    return Offer(backend="native", rank=Offer.USUAL, reason=reason)
