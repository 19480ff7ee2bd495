"""The native executor: a model of ours, its paged KV cache, and one forward per step.

Knows tensors and sizes. Refuses to know requests, sampling (its base class) and who owns which block.
"""

from __future__ import annotations

import torch

from suimon.core_engine.batch import CacheOp, CopyBlock, ForwardBatch, ScheduledBatch
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.executor import ExecutorCapabilities, ForwardExecutor
from suimon.core_engine.layers.kv_cache import KVCache
from suimon.core_engine.loader.checkpoint import Checkpoint
from suimon.core_engine.memory import EnginePlan, plan_device, plan_engine
from suimon.core_engine.models import load_model
from suimon.core_engine.models.base import Model


class ModelRunner(ForwardExecutor):
    """Runs ``model`` on a cache of the sizes that ``plan`` says."""

    def __init__(self, model: Model, plan: EnginePlan) -> None:
        super().__init__(plan.device)
        self.model = model
        self.plan = plan
        self.kv_cache = KVCache.allocate(model.kv_shapes, plan.num_blocks, plan.block_size, plan.dtype, plan.device)

    @classmethod
    def load(cls, config: EngineConfig, checkpoint: Checkpoint) -> ModelRunner:
        """Load the checkpoint's model with the options of ``config``, ``auto`` resolved for this machine.

        Sets the process's number of compute threads. Raises ModelLoadError, UnsupportedModelError, or
        InvalidRequestError for an option that the model or the machine cannot satisfy.
        """
        device_plan = plan_device(config, checkpoint.config)
        torch.set_num_threads(device_plan.num_threads)
        model = load_model(checkpoint, device_plan.dtype, device_plan.device)
        model.prepare()
        return cls(model, plan_engine(config, device_plan, model))

    @property
    def capabilities(self) -> ExecutorCapabilities:
        plan = self.plan
        return ExecutorCapabilities(
            vocab_size=self.model.vocab_size,
            max_model_len=plan.max_model_len,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_num_seqs=plan.max_num_seqs,
        )

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Execute the cache operations, then the tokens; logits (batch.num_logits, vocab), any float dtype."""
        self._execute(batch.cache_ops)
        inputs = ForwardBatch.build(batch, self.plan.block_size, self.plan.device)
        hidden = self.model.forward(inputs, self.kv_cache)
        if batch.num_logits != batch.num_tokens:
            hidden = hidden[inputs.logits_indices]
        return self.model.logits(hidden)

    def _execute(self, cache_ops: list[CacheOp]) -> None:
        """Copy blocks. A paged cache has nothing to trim or free: a slot is overwritten before it is read again."""
        pairs = [(op.source, op.target) for op in cache_ops if isinstance(op, CopyBlock)]
        if pairs:
            self.kv_cache.copy_blocks(pairs)
