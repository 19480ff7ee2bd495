"""llama.cpp as a backend: one for each configured model whose ``backend`` is ``llama_cpp`` (docs/llama-cpp.md).

GGUF files, on CPUs and whatever else the installed library computes on, under the common engine loop. The library is
only ever loaded in the engine's process; here its options are checked, and whether it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from suimon.core_engine.loader.recognise import gguf_file
from suimon.gateway.hookspecs import Backend, BackendUnavailable, InvalidRequest, Offer, hookimpl
from suimon.plugins.llama_cpp_options import INSTALL_HINT, OptionError, read_options
from suimon.plugins.stepped import SteppedBackend

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings, Settings

EXECUTOR = "suimon.plugins.llama_cpp_executor:make_executor"


class LlamaCppBackend(SteppedBackend):
    """Serves a GGUF file. Raises InvalidRequest, naming model and option, for an option that is wrong."""

    def __init__(self, model: ModelSettings) -> None:
        try:
            options = msgspec.to_builtins(read_options(model.options))
        except OptionError as error:
            name = model.served_model_name or model.model
            raise InvalidRequest(f"model {name!r}: {error}", param=f"options.{error.option}") from None
        super().__init__(model, executor=EXECUTOR, options=options)

    async def start(self) -> None:
        """Load the model. Raises BackendUnavailable with what is wrong with it, or how to install what is missing."""
        if find_spec("llama_cpp") is None:
            raise BackendUnavailable(f"model {self.model_id!r} needs llama-cpp-python: {INSTALL_HINT}")
        await super().start()


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "llama_cpp":
            register(LlamaCppBackend(model))


@hookimpl
def offer_model(model: ModelSettings) -> Offer:
    """Take a GGUF file that nothing better takes, if the library is installed and the options are its own."""
    if gguf_file(model.model) is None:
        return Offer.refusal("llama_cpp", "is for GGUF files on this machine")
    try:
        read_options(model.options)
    except OptionError as error:
        return Offer.refusal("llama_cpp", str(error))
    if find_spec("llama_cpp") is None:
        return Offer.refusal("llama_cpp", f"llama-cpp-python is not installed: {INSTALL_HINT}")
    return Offer(backend="llama_cpp", rank=Offer.SPARE, reason="llama.cpp runs GGUF files that nothing else takes")
