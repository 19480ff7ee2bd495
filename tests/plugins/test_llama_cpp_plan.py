"""Sizes of llama.cpp's memory from a header and a configuration: own KV for each sequence, or one pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import InvalidRequestError, ModelLoadError
from suimon.plugins.llama_cpp_options import LlamaCppOptions
from suimon.plugins.llama_cpp_plan import CPU_KV_CACHE_LIMIT, LlamaCppPlan, checked_header, make_plan

KV_BYTES = 30 * 3 * (64 + 64) * 2  # of one token of the demo model: 30 layers of 3 heads of 64, float16


def plan(path: Path, options: dict[str, Any] | None = None, **config: Any) -> LlamaCppPlan:
    given = EngineConfig(model="m", **config)
    return make_plan(given, LlamaCppOptions(**options or {}), checked_header(path), on_gpu=False, embeds=False)


@pytest.mark.parametrize(
    ("num_blocks", "length", "seqs", "expected"),
    [
        (64, 256, 4, (False, 4, 1024, 256)),
        (63, 256, 4, (True, 8, 1008, 256)),
        (64, 200, 4, (False, 4, 1024, 200)),  # 200 is 256 to the library
        (1280, 1280, 16, (False, 16, 20480, 1280)),
        (64, 256, 1, (False, 4, 1024, 256)),  # idle seats keep what has ended
        (20, 256, 1, (False, 1, 256, 256)),
        (64, 256, 200, (True, 256, 1024, 256)),
    ],
)
def test_each_sequence_has_its_own_kv_where_whole_contexts_fit(
    demo_gguf: Path, num_blocks: int, length: int, seqs: int, expected: tuple[bool, int, int, int]
) -> None:
    made = plan(demo_gguf, num_blocks=num_blocks, max_model_len=length, max_num_seqs=seqs)
    assert (made.kv_unified, made.num_seats, made.num_tokens, made.max_model_len) == expected
    assert made.kv_bytes == KV_BYTES


def test_the_demo_models_whole_context_does_not_fit_16_times(demo_gguf: Path) -> None:
    made = plan(demo_gguf, memory_utilization=0.9)
    assert made.kv_unified and made.max_num_seqs == 16 and made.max_model_len == 8192
    assert made.num_tokens <= CPU_KV_CACHE_LIMIT // KV_BYTES
    assert "in one pool" in made.describe()[1]


def test_what_is_asked_for_is_done_or_refused(demo_gguf: Path) -> None:
    pooled = plan(demo_gguf, {"kv_unified": True}, num_blocks=64, max_model_len=256, max_num_seqs=4)
    assert pooled.kv_unified and pooled.min_shared_tokens == 1
    shared_out = plan(demo_gguf, {"kv_unified": False}, num_blocks=100, max_num_seqs=2)
    assert (shared_out.kv_unified, shared_out.max_model_len, shared_out.num_tokens) == (False, 768, 1536)
    assert shared_out.min_shared_tokens == 768 // 64
    with pytest.raises(InvalidRequestError, match="768 tokens for each of 2 sequences; raise num_blocks"):
        plan(demo_gguf, {"kv_unified": False}, num_blocks=100, max_num_seqs=2, max_model_len=1000)
    with pytest.raises(InvalidRequestError, match="none of 8 sequences 256 of its own"):
        plan(demo_gguf, {"kv_unified": False}, num_blocks=100, max_num_seqs=8)


def test_on_a_gpu_its_own_memory_counts(demo_gguf: Path) -> None:
    header, options = checked_header(demo_gguf), LlamaCppOptions()
    given = EngineConfig(model="m", memory_utilization=0.5)
    made = make_plan(given, options, header, on_gpu=True, embeds=False, free_memory=2 * 1000 * KV_BYTES)
    assert made.num_tokens == 1000
    with pytest.raises(ModelLoadError, match="kv_cache_memory"):
        make_plan(given, options, header, on_gpu=True, embeds=False, free_memory=0)


@pytest.mark.parametrize("key", ["head_count", "head_count_kv", "key_length", "value_length"])
def test_negative_heads_are_refused(demo_gguf: Path, key: str) -> None:
    header = checked_header(demo_gguf)
    header.metadata[f"llama.attention.{key}"] = -3
    with pytest.raises(ModelLoadError, match="-3"):
        make_plan(EngineConfig(model="m"), LlamaCppOptions(), header, on_gpu=False, embeds=False)
