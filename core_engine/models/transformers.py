"""Any other attention-only decoder: transformers computes everything but attention, which runs on our paged cache.

Rests on transformers' attention interface: a model that supports it hands q, k and v to a function that we register,
and passes unknown keyword arguments of its forward through to that function. That is how the step's ForwardBatch and
cache arrive there; nothing is kept between steps. The packed tokens of all sequences are one row for transformers.

Refused by name, because their state is not keys and values per token: recurrent and hybrid architectures, latent
attention, encoder-decoders, attention sinks and biases, and models that keep attention to themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from suimon.core_engine.batch import ForwardBatch
from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.layers.attention import PagedAttention
from suimon.core_engine.layers.kv_cache import KVCache, KVShape
from suimon.core_engine.loader.checkpoint import Checkpoint
from suimon.core_engine.models.base import Model

ATTENTION = "suimon_paged"
PASSED_THROUGH = "suimon_step"  # the keyword by which a step reaches the attention function

# Config keys of mechanisms whose per-token state is not one key and one value per head.
STATEFUL_KEYS = {
    "kv_lora_rank": "latent attention",
    "mamba_d_state": "a state space",
    "ssm_state_size": "a state space",
    "state_size": "a state space",
    "linear_num_key_heads": "linear attention",
    "lru_width": "a linear recurrence",
    "conv_L_cache": "a convolution state",
}
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
REMEDY = "serve this model with another backend"


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward hands to every attention call."""

    batch: ForwardBatch
    kv_cache: KVCache
    attention: nn.ModuleList


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer asks of attention."""

    num_heads: int
    kv_shape: KVShape
    scale: float
    sliding_window: int | None
    soft_cap: float | None

    def layer(self) -> PagedAttention:
        """The paged attention that answers it."""
        kv_heads, head_dim = self.kv_shape
        return PagedAttention(self.num_heads, kv_heads, head_dim, self.scale, self.sliding_window, self.soft_cap)


class GivenHiddenStates(nn.Module):
    """Stands where the decoder was in a causal language model, so that the rest of it turns given rows into logits."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersModel(Model):
    """A transformers causal language model over the paged cache.

    Its decoder is run apart from its head, which keeps the architecture's own scaling and caps of the logits. Raises
    UnsupportedModelError, naming the mechanism, for an architecture that cannot be served this way.
    """

    def __init__(self, model: Any, calls: list[AttentionCall]) -> None:
        super().__init__()
        self.decoder = model.base_model
        self.head = model
        setattr(model, model.base_model_prefix, GivenHiddenStates())
        self.attention = nn.ModuleList(call.layer() for call in calls)
        self.kv_shapes = tuple(call.kv_shape for call in calls)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.max_position = _context_length(model.config)
        self.dtype = model.dtype

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> TransformersModel:
        from transformers import AttentionInterface, AutoConfig

        AttentionInterface.register(ATTENTION, _attend)
        if not (checkpoint.path / "config.json").is_file():
            name = checkpoint.config.get("architectures") or checkpoint.config.get("model_type")
            raise UnsupportedModelError(f"{name} is not served from {checkpoint.path.name}; use its safetensors folder")
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
        refuse_unserved(config)
        architecture, calls = probe(config)
        return cls(_load(architecture, checkpoint, config, dtype).to(device).eval(), calls)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        output = self.decoder(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            **{PASSED_THROUGH: Step(batch, kv_cache, self.attention)},
        )
        hidden: torch.Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return logits


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **passed: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls: query (1, H, T, D), key and value (1, KVH, T, D) -> (1, T, H, D)."""
    step: Step | Probe = passed[PASSED_THROUGH]
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(step, Probe):
        step.record(layer, query, key, value, scaling, sliding_window, softcap, passed)
        return query.transpose(1, 2), None
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return step.attention[layer](q, k, v, step.kv_cache[layer], step.batch).unsqueeze(0), None


class Probe:
    """Records what each layer asks of attention during one forward without weights, and refuses what is not ours."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def record(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        passed: dict[str, Any],
    ) -> None:
        for name in ("s_aux", "position_bias", "head_mask", "cu_seq_lens_q"):
            if passed.get(name) is not None:
                raise UnsupportedModelError(f"its attention needs {name!r}, which the paged attention does not have")
        if layer in self.calls or query.shape[-1] != value.shape[-1]:
            raise UnsupportedModelError(f"layer {layer} keeps more than one key and value per token and head")
        head_dim = query.shape[-1]
        self.calls[layer] = AttentionCall(
            num_heads=query.shape[1],
            kv_shape=KVShape(key.shape[1], head_dim),
            scale=head_dim**-0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            soft_cap=softcap,
        )


def probe(config: Any) -> tuple[Any, list[AttentionCall]]:
    """Run the architecture once on shapes alone: its class, and what each layer asks of attention, in layer order."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)  # type: ignore[no-untyped-call]
        refuse_unserved_class(model)
        record = Probe()
        ids = torch.zeros(1, 3, dtype=torch.int64)
        positions = torch.arange(3).unsqueeze(0)
        try:
            model.eval()(input_ids=ids, position_ids=positions, use_cache=False, **{PASSED_THROUGH: record})
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{type(model).__name__}: {error}; {REMEDY}") from None
        except Exception as error:
            message = f"{type(model).__name__} does not run through transformers' attention interface ({error})"
            raise UnsupportedModelError(f"{message}; {REMEDY}") from error
    layers = config.get_text_config().num_hidden_layers
    if sorted(record.calls) != list(range(layers)):
        message = f"{type(model).__name__} runs {len(record.calls)} of its {layers} layers through attention"
        raise UnsupportedModelError(f"{message}; only attention-only decoders are served; {REMEDY}")
    return type(model), [record.calls[layer] for layer in range(layers)]


def refuse_unserved(config: Any) -> None:
    """Raise UnsupportedModelError for a configuration that names state we do not keep."""
    text = config.get_text_config()
    name = (config.architectures or [config.model_type])[0]
    reason = next((what for key, what in STATEFUL_KEYS.items() if getattr(text, key, None)), None)
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder beside the decoder"
    strange = set(getattr(text, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if strange:
        reason = f"layers of type {', '.join(sorted(strange))}"
    if (getattr(text, "rope_parameters", None) or {}).get("rope_type") == "dynamic":
        reason = "rotary angles that depend on the longest sequence in the batch (dynamic rope scaling)"
    if reason:
        raise UnsupportedModelError(f"{name} has {reason}, which the paged KV cache does not hold; {REMEDY}")


def refuse_unserved_class(model: Any) -> None:
    """Raise UnsupportedModelError for a class that keeps state or attention to itself."""
    name = type(model).__name__
    if model._is_stateful:
        raise UnsupportedModelError(f"{name} is recurrent: its state is not keys and values per token; {REMEDY}")
    if not model._supports_attention_backend:
        message = f"{name} does not support transformers' attention interface"
        raise UnsupportedModelError(f"{message}; {REMEDY}")


def _load(architecture: Any, checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> Any:
    """The model with the checkpoint's weights; every tensor filled and every tensor used, or ModelLoadError.

    The tensors come through our own loader, so that its rules (safetensors only, the index decides) hold here too.
    """
    weights = {name: checkpoint.tensor(name, dtype) for name in sorted(checkpoint.tensor_names)}
    model, info = architecture.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, attn_implementation=ATTENTION, output_loading_info=True
    )
    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing or unused or info["mismatched_keys"]:
        shapes = sorted(str(key) for key in info["mismatched_keys"])
        details = f"not in the checkpoint: {missing}; not in the model: {unused}; of another shape: {shapes}"
        raise ModelLoadError(f"{type(model).__name__} does not match {checkpoint.path.name}: {details}")
    return model


def _context_length(config: Any) -> int:
    """Positions the model serves: for longrope the original length, as beyond it angles depend on the whole batch."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings")
        return int(original or text.original_max_position_embeddings)
    return int(text.max_position_embeddings)
