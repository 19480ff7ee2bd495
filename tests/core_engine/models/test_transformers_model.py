"""Architectures without a file of their own run through transformers' attention interface on the paged cache.

Oracle: the same tiny random models in transformers itself, eager attention, fp32, no cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from suimon.core_engine.batch import ForwardBatch, ScheduledBatch, ScheduledSequence
from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.layers.kv_cache import KVCache
from suimon.core_engine.models.transformers import TransformersModel

BLOCK = 4
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "phi3": lambda: transformers.Phi3Config(**SIZES, num_key_value_heads=2, sliding_window=7),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES, num_key_value_heads=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "granite": lambda: transformers.GraniteConfig(
        **SIZES, num_key_value_heads=2, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.5
    ),
    "cohere2": lambda: transformers.Cohere2Config(**SIZES, num_key_value_heads=2, sliding_window=6),
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES, num_key_value_heads=2),
}


@dataclass(frozen=True)
class Open:
    """A checkpoint folder, as much of one as this model class reads."""

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        return transformers.AutoConfig.from_pretrained(self.path).to_dict()

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(load_file(self.path / "model.safetensors"))

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return load_file(self.path / "model.safetensors")[name].to(dtype)


def save(config: Any, path: Path) -> Any:
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0.0, 0.15) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(path)
    return reference


def load(path: Path) -> TransformersModel:
    return TransformersModel.from_checkpoint(Open(path), torch.float32, "cpu")


def forward(
    model: TransformersModel, cache: KVCache, rows: list[tuple[list[int], int, list[int], int]]
) -> torch.Tensor:
    sequences = [ScheduledSequence(i, ids, start, table, wanted) for i, (ids, start, table, wanted) in enumerate(rows)]
    with torch.inference_mode():
        batch = ForwardBatch.build(ScheduledBatch(0, sequences), BLOCK)
        return model.logits(model.forward(batch, cache)[batch.logits_indices])


@pytest.mark.parametrize("family", CONFIGS)
def test_mixed_chunks_over_scattered_blocks_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = save(CONFIGS[family](), tmp_path)
    model = load(tmp_path)
    ids = [torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2)]
    with torch.inference_mode():
        expected = [reference(torch.tensor([tokens])).logits[0] for tokens in ids]
    cache = KVCache.allocate(model.kv_shapes, 16, BLOCK, torch.float32)
    for layer in cache:  # what was never written must not be read
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    tables = [[9, 2, 14, 5, 7], [3, 11, 0, 8, 1]]
    got: list[list[torch.Tensor]] = [[], []]
    # Both prompts in one step, in chunks of different lengths; then one token of the first beside a chunk of the other.
    for lengths in ((11, 6), (1, 9), (1, 1), (7, 4)):
        starts = [sum(len(chunk) for chunk in parts) for parts in got]
        rows = [(ids[i][starts[i] : starts[i] + n], starts[i], tables[i], n) for i, n in enumerate(lengths)]
        logits = forward(model, cache, rows)
        for i, part in enumerate(logits.split(list(lengths))):
            got[i].append(part)
    for i in range(2):
        torch.testing.assert_close(torch.cat(got[i]), expected[i], atol=2e-4, rtol=1e-4)
    assert expected[0].std() > 0.02  # the comparison is not between zeros


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    save(CONFIGS["olmo2"](), tmp_path)
    model = load(tmp_path)
    cache = KVCache.allocate(model.kv_shapes, 8, BLOCK, torch.float32)
    table = [1, 2, 3]
    assert forward(model, cache, [([5, 6, 7], 0, table, 0)]).shape == (0, 128)
    assert forward(model, cache, [([8, 9], 3, table, 2)]).shape == (2, 128)


REFUSED = {
    "mamba": lambda: transformers.MambaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**SIZES, q_lora_rank=16, kv_lora_rank=16),
    "bloom": lambda: transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(vocab_size=128, hidden_size=64, num_hidden_layers=3),
    "lfm2": lambda: transformers.Lfm2Config(vocab_size=128, hidden_size=64, num_hidden_layers=2),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SIZES),
    "t5": lambda: transformers.T5Config(vocab_size=128, d_model=64),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=2, head_dim=16),
}


@pytest.mark.parametrize("family", REFUSED)
def test_state_that_is_not_keys_and_values_is_refused_by_name(family: str, tmp_path: Path) -> None:
    config = REFUSED[family]()
    config.architectures = [f"{family.title()}ForTest"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"(?i)serve this model with another backend") as refusal:
        load(tmp_path)
    assert family.replace("_", "") in str(refusal.value).lower().replace("_", "")


def test_longrope_serves_its_original_length_where_angles_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    sizes = {**SIZES, "max_position_embeddings": 256}
    rope = {"rope_type": "longrope", "short_factor": [1.1] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 64
    config = transformers.Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=64)
    save(config, tmp_path)
    assert load(tmp_path).max_position == 64


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save(CONFIGS["olmo2"](), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.stray.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj.*layers\.0\.stray"):
        load(tmp_path)
