"""What ``auto`` becomes, on machines made up for the purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from suimon.core_engine import machine, memory
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import InvalidRequestError, ModelLoadError
from suimon.core_engine.layers.kv_cache import KVShape
from suimon.core_engine.memory import GIB, EnginePlan, estimate_parameters, plan_device, plan_engine

# Llama 3.1 8B, whose parameters are public knowledge: 8.03 billion.
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# 2 layers x (key, value) x 2 heads x 16 numbers x 4 bytes = 512 bytes a token, 8 KiB a block of 16.
MODEL = SimpleNamespace(vocab_size=100, max_position=2048, kv_shapes=(KVShape(2, 16),) * 2)


@pytest.fixture(autouse=True)
def made_up_machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """No GPU, 4 cores, 8 GiB available, no bfloat16 instructions, unless a test says otherwise."""
    facts = SimpleNamespace(memory=8 * GIB, cores=4, bfloat16=False)
    monkeypatch.setattr(machine, "available_memory", lambda: facts.memory)
    monkeypatch.setattr(machine, "usable_cores", lambda: facts.cores)
    monkeypatch.setattr(memory, "has_bfloat16_instructions", lambda: facts.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return facts


def plan(**options: Any) -> EnginePlan:
    config = EngineConfig(model="m", **{"dtype": "float32"} | options)
    return plan_engine(config, plan_device(config, {}), MODEL)


def test_parameters_are_estimated_from_the_config() -> None:
    assert estimate_parameters(LLAMA_8B) == pytest.approx(8.03e9, rel=0.001)
    assert estimate_parameters({"text_config": LLAMA_8B}) == estimate_parameters(LLAMA_8B)
    assert estimate_parameters({}) == 0


def test_dtype_on_a_cpu(made_up_machine: SimpleNamespace) -> None:
    """Float32 is the faster one without bfloat16 instructions, as long as it fits comfortably."""
    config = EngineConfig(model="m")
    assert plan_device(config, LLAMA_8B).dtype == torch.bfloat16
    assert plan_device(config, LLAMA_8B | {"num_hidden_layers": 0}).dtype == torch.bfloat16  # 4.2 of 8 GiB x 0.5 x 0.5
    made_up_machine.memory = 128 * GIB
    assert plan_device(config, LLAMA_8B).dtype == torch.float32
    made_up_machine.bfloat16 = True
    assert plan_device(config, LLAMA_8B).dtype == torch.bfloat16
    assert plan_device(EngineConfig(model="m", dtype="float16"), LLAMA_8B).dtype == torch.float16


def test_dtype_on_a_gpu_is_the_checkpoints_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    config = EngineConfig(model="m")
    assert plan_device(config, {"torch_dtype": "float16"}).dtype == torch.float16
    assert plan_device(config, {"dtype": "float32"}).dtype == torch.bfloat16
    assert plan_device(config, {"text_config": {"dtype": "bfloat16"}}).device == "cuda"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert plan_device(config, {"dtype": "bfloat16"}).dtype == torch.float16


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="'cuda:1', but PyTorch finds no GPU"):
        plan_device(EngineConfig(model="m", device="cuda:1"), {})


def test_threads(made_up_machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan().num_threads == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan().num_threads == 3
    assert plan(num_threads=2).num_threads == 2


def test_the_cache_takes_its_share_of_what_is_left(made_up_machine: SimpleNamespace) -> None:
    made_up_machine.memory = 10 << 20
    assert plan().num_blocks == 640  # half of 10 MiB in blocks of 8 KiB
    assert plan(memory_utilization=0.25).num_blocks == 320
    assert plan(kv_cache_memory=1 << 20).num_blocks == 128
    assert plan(num_blocks=7).num_blocks == 7
    assert plan(block_size=32).num_blocks == 320


def test_the_cache_is_never_larger_than_all_sequences_need() -> None:
    assert plan().num_blocks == 32 * 2048 // 16
    assert plan(max_num_seqs=2, max_model_len=100).num_blocks == 13  # 200 tokens


def test_a_cpu_takes_four_gibibytes_unless_asked(made_up_machine: SimpleNamespace) -> None:
    made_up_machine.memory = 100 * GIB
    many = {"max_num_seqs": 10_000}
    assert plan(**many).kv_cache_bytes == 4 * GIB
    assert plan(**many, kv_cache_memory=6 * GIB).kv_cache_bytes == 6 * GIB


def test_context_is_the_models_or_what_fits(made_up_machine: SimpleNamespace) -> None:
    assert plan().max_model_len == 2048
    made_up_machine.memory = 1 << 20
    assert plan().max_model_len == 64 * 16
    assert plan(max_model_len=100).max_model_len == 100


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_the_numbers(
    made_up_machine: SimpleNamespace,
) -> None:
    made_up_machine.memory = 1 << 20
    with pytest.raises(InvalidRequestError, match=r"max_model_len 2000 needs .* hold 1024 tokens"):
        plan(max_model_len=2000)
    with pytest.raises(InvalidRequestError, match="max_model_len is 4096, but the model's positions end at 2048"):
        plan(max_model_len=4096)


def test_no_room_for_a_single_block_is_an_error_with_the_numbers(made_up_machine: SimpleNamespace) -> None:
    made_up_machine.memory = 9000
    with pytest.raises(ModelLoadError, match="one block of 16 tokens takes 8,192 bytes, and 4,500 are left"):
        plan()


def test_step_sizes() -> None:
    assert (plan().max_num_seqs, plan().max_num_batched_tokens) == (32, 512)
    assert plan(num_threads=1).max_num_batched_tokens == 256
    assert plan(max_num_seqs=900).max_num_batched_tokens == 900
    assert plan(max_num_batched_tokens=16).max_num_batched_tokens == 16


def test_the_plan_says_what_and_why() -> None:
    lines = plan(max_model_len=512).describe().splitlines()
    assert lines[0] == "cpu, 4 threads (no GPU was found)"
    assert lines[1] == "float32 (as configured)"
    assert lines[2] == (
        "KV cache 0.01 GiB: 16,384 tokens in 1,024 blocks of 16 (every sequence can have the whole context)"
    )
    assert lines[3] == "context 512 tokens (as configured)"
    assert len(lines) == 6
