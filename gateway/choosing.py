"""``backend = "auto"``: which plugin serves a model, and why.

Every plugin may make an offer (hook ``offer_model``); the highest rank wins. Knows offers; refuses to know models,
devices and what is installed: that is what the plugins tell. Nothing is loaded or fetched.

The built-in plugins offer so: TensorRT-LLM for a model with options of its own, before all others; native for whatever
it can load, on CUDA and on CPU; llama.cpp for a GGUF file, after native, so for those that native lacks. A remote
server is never chosen: what leaves this machine is for the operator to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from suimon.gateway.config import ConfigError

if TYPE_CHECKING:
    from suimon.gateway.config import ModelSettings, Settings
    from suimon.gateway.hookspecs import Offer
    from suimon.gateway.plugin_manager import PluginManager

AUTO = "auto"


def resolve(settings: Settings, plugins: PluginManager) -> tuple[Settings, Mapping[int, str]]:
    """The settings with a backend in place of every "auto", and the reasons, by the model's index.

    A model whose backend was named has no reason. Raises ConfigError, with a line for each model that all refuse.
    """
    models, reasons, refused = list(settings.models), {}, []
    for index, model in enumerate(settings.models):
        if model.backend != AUTO:
            continue
        try:
            models[index], reasons[index] = choose(model, plugins)
        except ConfigError as error:
            refused.append(str(error))
    if refused:
        raise ConfigError("\n".join(refused))
    return msgspec.structs.replace(settings, models=tuple(models)), reasons


def choose(model: ModelSettings, plugins: PluginManager) -> tuple[ModelSettings, str]:
    """The model with the backend of the best offer, and that offer's reason. Of equal ones the last plugin's wins.

    Where no plugin has anything to say, the model stays as it is: one may serve it without an offer. Raises ConfigError
    with every plugin's reason where all refuse.
    """
    offers: Sequence[Offer] = plugins.ask("offer_model", model=model)
    if not offers:
        return model, "no plugin made an offer"
    best = max(offers, key=lambda offer: offer.rank)
    if not best.accepted:
        name = model.served_model_name or model.model
        reasons = "; ".join(f"{offer.backend}: {offer.reason}" for offer in offers[::-1])
        raise ConfigError(f"model {name!r}: no backend can serve it ({reasons}); set `backend` to one that can")
    return msgspec.structs.replace(model, backend=best.backend), f"auto: {best.reason}"
