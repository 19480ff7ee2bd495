"""The operations a model's forward is made of, on tensors; knows nothing of models, sequences or configs.

Every operation is specified by ``suimon.kernels.reference``; other providers implement the same functions faster. The
provider is decided once, when this package is first imported: ``SUIMON_KERNELS`` names one, otherwise the first that
``PREFERENCE`` lists. An operation that the chosen provider does not have falls to the reference. The ``cpu`` provider
has no operations of these shapes: it does a whole decoder's step in one call (``suimon.kernels.cpu.decoder``).
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

PROVIDERS = {"reference": "suimon.kernels.reference", "cpu": "suimon.kernels.reference"}
PREFERENCE = ("cpu", "reference")
OPERATIONS = (
    "copy_blocks",
    "gelu_and_mul",
    "linear",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "write_kv_cache",
)


def choose_provider() -> str:
    """The provider's name. Raises ValueError if ``SUIMON_KERNELS`` names none of ``PROVIDERS``."""
    forced = os.environ.get("SUIMON_KERNELS", "")
    if forced and forced not in PROVIDERS:
        raise ValueError(f"SUIMON_KERNELS={forced!r} is not a kernel provider; known: {', '.join(PROVIDERS)}")
    return forced or PREFERENCE[0]


def _operation(module: ModuleType, name: str) -> object:
    reference = import_module(PROVIDERS["reference"])
    return getattr(module, name, None) or getattr(reference, name)


provider = choose_provider()

# Type checkers see the specification; at run time the same names are the chosen provider's functions.
if TYPE_CHECKING:
    from suimon.kernels.reference import (
        copy_blocks,
        gelu_and_mul,
        linear,
        paged_attention,
        plan_attention,
        rms_norm,
        rotary,
        silu_and_mul,
        write_kv_cache,
    )
else:
    _module = import_module(PROVIDERS[provider])
    globals().update({name: _operation(_module, name) for name in OPERATIONS})

__all__ = [
    "copy_blocks",
    "gelu_and_mul",
    "linear",
    "paged_attention",
    "plan_attention",
    "provider",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "write_kv_cache",
]
