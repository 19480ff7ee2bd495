"""What every model is to the engine, and the loop that every native decoder shares.

Knows embeddings, layers, norm and head. Refuses to know files (loading.py) and steps (batch.py gives positions).

Shapes: T tokens of the step, R rows that need logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from suimon.core_engine.batch import ForwardBatch
from suimon.core_engine.layers.kv_cache import KVCache, KVShape, LayerCache
from suimon.core_engine.layers.linear import Embedding, Linear
from suimon.core_engine.layers.norm import RMSNorm
from suimon.core_engine.layers.rotary import RotaryEmbedding
from suimon.core_engine.loader.checkpoint import Checkpoint
from suimon.core_engine.models.config import ModelConfig

if TYPE_CHECKING:
    from suimon.core_engine.models.one_call import OneCallStep

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: each (T, R) float32


class Model(nn.Module, ABC):
    """A decoder with its weights. ``kv_shapes`` is what each layer keeps per token; ``max_position`` its context."""

    vocab_size: int
    max_position: int
    dtype: torch.dtype
    kv_shapes: tuple[KVShape, ...]

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Model:
        """Build and fill the model. Raises ModelLoadError or UnsupportedModelError."""

    def prepare(self) -> None:
        """Called once after loading: bring the weights into the form that this machine computes with."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Write the step's keys and values to ``kv_cache`` and return the hidden states (T, hidden)."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (R, vocab) of rows of hidden states (R, hidden)."""


class DecoderLayer(nn.Module, ABC):
    """Block ``index`` of a decoder, with empty weights."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        cache: LayerCache,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, hidden) twice: what the block adds last, and the stream it is to be added to (None before layer 0)."""


class DecoderModel(Model):
    """Embedding, layers, norm, head. A family says how its config is read and what its layers are.

    Tensors whose checkpoint name matches one of ``ignored_tensors`` (regular expressions) are left in the file.
    """

    layer_class: type[DecoderLayer]
    norm_offset = 0.0
    ignored_tensors: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    # Where the decoder's tensors sit in a checkpoint: the first prefix that the file has is taken.
    prefixes: tuple[str, ...] = ("model.",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.max_position = config.vocab_size, config.max_position
        self.kv_shapes = (KVShape(config.num_kv_heads, config.head_dim),) * len(config.layers)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_class(config, index) for index in range(len(config.layers)))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.norm_offset)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.ropes = [RotaryEmbedding(rope) for rope in config.ropes]
        self.layer_ropes = [config.ropes.index(layer.rope) for layer in config.layers]
        self.one_call: OneCallStep | None = None  # the whole step, where the CPU kernels do it

    @classmethod
    @abstractmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The family's reading of a Hugging Face config. Raises ModelLoadError or UnsupportedModelError."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> DecoderModel:
        from suimon.core_engine.models.loading import fill_from_checkpoint

        with torch.device("meta"):
            model = cls(cls.read_config(checkpoint.config))
        fill_from_checkpoint(model, checkpoint, dtype, device)
        return model

    def finish_loading(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """Called once every parameter is filled: ties the head and moves what is not a parameter."""
        self.dtype = dtype
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        for rope in self.ropes:
            rope.to_device(device)

    def prepare(self) -> None:
        from suimon.core_engine.models.one_call import one_call_step

        self.one_call = one_call_step(self)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(T,) int64 -> (T, hidden)."""
        if self.one_call is not None and self.config.tie_word_embeddings:
            return self.one_call.embed(token_ids)
        return self.embed_tokens.forward(token_ids)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        if self.one_call is not None:
            return self.one_call.forward(batch, kv_cache)
        hidden = self.embed(batch.token_ids)
        rotations = [rope.forward(batch.positions) for rope in self.ropes]
        residual: torch.Tensor | None = None
        for layer, rope, cache in zip(self.layers, self.layer_ropes, kv_cache, strict=True):
            hidden, residual = layer(hidden, residual, rotations[rope], cache, batch)
        return self.norm.add(hidden, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden) if self.one_call is None else self.one_call.head(hidden)
        cap = self.config.final_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
