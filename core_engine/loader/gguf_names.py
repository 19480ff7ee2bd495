"""GGUF tensor names to Hugging Face names, and what a converter did to the values. One table row per architecture.

Knows names; nothing of files or configs. N stands for the layer's number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GATED_MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA_LAYER = {**_ATTENTION, **_GATED_MLP, "ffn_norm": "post_attention_layernorm"}
_GEMMA_LAYER = {
    **_ATTENTION,
    **_GATED_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_LAYER = {
    **_LLAMA_LAYER,
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}

# Tables of rotary frequency factors: they become part of the config, not of the weights.
ROPE_FACTORS = "rope_freqs.weight"
LONG_ROPE_FACTORS, SHORT_ROPE_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TABLES = (ROPE_FACTORS, LONG_ROPE_FACTORS, SHORT_ROPE_FACTORS)

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFArchitecture:
    """How files of one ``general.architecture`` differ.

    ``permuted``: the rows of q and k were reordered for interleaved rotation. ``norm_offset`` was added to the weights
    of every norm. ``sliding_pattern``: every so many layers one attends to everything, the others to a window.
    """

    model_type: str
    architecture: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LLAMA_LAYER)
    permuted: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"
    sliding_pattern: int | None = None


ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(model_type="llama", architecture="LlamaForCausalLM", permuted=True),
    "qwen2": GGUFArchitecture(model_type="qwen2", architecture="Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture(model_type="qwen3", architecture="Qwen3ForCausalLM"),
    "phi3": GGUFArchitecture(model_type="phi3", architecture="Phi3ForCausalLM", layer_names=_PHI3_LAYER),
    "gemma": GGUFArchitecture(
        model_type="gemma", architecture="GemmaForCausalLM", norm_offset=1.0, activation="gelu_pytorch_tanh"
    ),
    "gemma2": GGUFArchitecture(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        layer_names=_GEMMA_LAYER,
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        sliding_pattern=2,
    ),
    "gemma3": GGUFArchitecture(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        layer_names=_GEMMA_LAYER,
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        sliding_pattern=6,
    ),
}


def hugging_face_name(architecture: GGUFArchitecture, name: str) -> str | None:
    """The Hugging Face name of the GGUF tensor ``name``; None for a table that belongs to the config.

    A name that is not known stays as it is, so that the model, which will not know it either, refuses the file.
    """
    if name in ROPE_TABLES:
        return None
    stem, _, suffix = name.rpartition(".")
    if stem in _MODEL:
        return f"{_MODEL[stem]}.{suffix}"
    layer = _LAYER_TENSOR.fullmatch(stem)
    if layer is None or layer[2] not in architecture.layer_names:
        return name
    return f"model.layers.{layer[1]}.{architecture.layer_names[layer[2]]}.{suffix}"
