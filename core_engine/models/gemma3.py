"""Gemma 3, text: Gemma 2 without score caps, with normed queries and keys, five windowed layers to one that sees all,
and a rotary base for each of the two kinds.

Gemma Team 2025 (Gemma 3 Technical Report). Of an image-and-text checkpoint the text half is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from suimon.core_engine.models.config import ModelConfig, architecture_of
from suimon.core_engine.models.gemma2 import GEMMA2_DEFAULTS, Gemma2Layer, Gemma2Model, read_gemma_config
from suimon.core_engine.models.qwen3 import NormedAttention

GEMMA3_DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


class Gemma3Attention(NormedAttention):
    norm_offset = 1.0


class Gemma3Layer(Gemma2Layer):
    attention_class = Gemma3Attention


class Gemma3Model(Gemma2Model):
    """Gemma3ForCausalLM, and the text half of Gemma3ForConditionalGeneration."""

    layer_class = Gemma3Layer
    prefixes = ("model.", "language_model.model.", "model.language_model.")
    ignored_tensors = (*Gemma2Model.ignored_tensors, r"(model\.)?(vision_tower|multi_modal_projector)\..*")

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        text = config.get("text_config")
        nested = {**text, "architectures": [architecture_of(config)]} if isinstance(text, Mapping) else config
        return read_gemma_config(nested, GEMMA3_DEFAULTS)
