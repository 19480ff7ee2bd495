"""Gated activations by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from suimon import kernels
from suimon.core_engine.errors import UnsupportedModelError

GatedActivation = Callable[[torch.Tensor], torch.Tensor]

# (T, 2I) = [gate, up] -> (T, I)
GATED_ACTIVATIONS: dict[str, GatedActivation] = {
    "silu": kernels.silu_and_mul,
    "swish": kernels.silu_and_mul,
    "gelu": partial(kernels.gelu_and_mul, approximate="none"),
    "gelu_new": kernels.gelu_and_mul,
    "gelu_pytorch_tanh": kernels.gelu_and_mul,
}


def gated_activation(name: str) -> GatedActivation:
    """The function for a config's ``hidden_act``. Raises UnsupportedModelError for a name that is not in the table."""
    if name not in GATED_ACTIVATIONS:
        known = ", ".join(GATED_ACTIVATIONS)
        raise UnsupportedModelError(f"activation {name!r} is not supported by the native engine; known: {known}")
    return GATED_ACTIVATIONS[name]
