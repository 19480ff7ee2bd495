"""Which class runs which architecture, and the one door to a loaded model.

A model module is imported when its architecture is asked for. An architecture that is not in the table is run by
FALLBACK, through transformers' own modelling code on our paged cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from suimon.core_engine.errors import UnsupportedModelError
from suimon.core_engine.models.config import architecture_of

if TYPE_CHECKING:
    import torch

    from suimon.core_engine.loader.checkpoint import Checkpoint
    from suimon.core_engine.models.base import Model

# Hugging Face architecture -> "module:Class"; add a family by adding a row.
ARCHITECTURES = {
    "LlamaForCausalLM": "suimon.core_engine.models.llama:LlamaModel",
    "MistralForCausalLM": "suimon.core_engine.models.llama:MistralModel",
    "Qwen2ForCausalLM": "suimon.core_engine.models.qwen2:Qwen2Model",
    "Qwen3ForCausalLM": "suimon.core_engine.models.qwen3:Qwen3Model",
    "Gemma2ForCausalLM": "suimon.core_engine.models.gemma2:Gemma2Model",
    "Gemma3ForCausalLM": "suimon.core_engine.models.gemma3:Gemma3Model",
    "Gemma3ForConditionalGeneration": "suimon.core_engine.models.gemma3:Gemma3Model",
}
FALLBACK = "suimon.core_engine.models.transformers:TransformersModel"


def model_class(config: Mapping[str, Any]) -> type[Model]:
    """The class that runs the config's architecture. Raises ModelLoadError if the config names none."""
    module, _, name = ARCHITECTURES.get(architecture_of(config), FALLBACK).partition(":")
    found: type[Model] = getattr(import_module(module), name)
    return found


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu") -> Model:
    """Build the model that ``checkpoint`` describes and fill it, weights in ``dtype`` on ``device``.

    Raises UnsupportedModelError for an architecture, option or quantisation that is not served, ModelLoadError for a
    checkpoint that does not hold exactly the model's tensors.
    """
    _refuse_quantized(checkpoint)
    return model_class(checkpoint.config).from_checkpoint(checkpoint, dtype, device).eval()


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    text = checkpoint.config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    quantization = checkpoint.config.get("quantization_config") or nested
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModelError(
            f"{checkpoint.path}: quantized checkpoints (here: {method}) are not served by the native engine. "
            "Use the full-precision checkpoint or a GGUF file of the model."
        )
