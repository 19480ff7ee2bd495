"""The native executor on a tiny model: logits rows, cache operations, capabilities, and sampling through submit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from suimon.core_engine.batch import CopyBlock, FreeSequence, ScheduledBatch, ScheduledSequence, TrimSequence
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.model_runner import ModelRunner

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 58, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of CONFIG."""
    folder = tmp_path_factory.mktemp("tiny")
    generator = torch.Generator().manual_seed(2)
    shapes = {"model.embed_tokens.weight": (61, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm.weight": (16,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {
            f"{prefix}self_attn.{name}_proj.weight": (size, 16) for name, size in zip("qkv", (32, 16, 16), strict=True)
        }
        shapes |= {f"{prefix}self_attn.o_proj.weight": (16, 32), f"{prefix}mlp.down_proj.weight": (16, 24)}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
    save_file(
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    config = EngineConfig(model="tiny", dtype="float32", device="cpu", block_size=4, num_blocks=20, num_threads=1)
    return ModelRunner.load(config, open_checkpoint(folder))


def run(runner: ModelRunner, *sequences: ScheduledSequence, ops: list | None = None) -> torch.Tensor:
    return runner.forward(ScheduledBatch(0, list(sequences), ops or []))


def test_capabilities_are_the_plans(runner: ModelRunner) -> None:
    capabilities = runner.capabilities
    assert (capabilities.vocab_size, capabilities.num_blocks, capabilities.block_size) == (61, 20, 4)
    assert capabilities.max_model_len == 80  # 20 blocks of 4, of the model's 128
    assert len(runner.kv_cache) == 2 and runner.kv_cache[0].key.shape == (20, 4, 2, 8)


def test_logits_are_those_of_the_rows_that_asked(runner: ModelRunner) -> None:
    everything = run(runner, ScheduledSequence(0, PROMPT, 0, [1, 2, 3], num_logits=10))
    assert everything.shape == (10, 61)
    assert run(runner, ScheduledSequence(0, PROMPT[:4], 0, [4], num_logits=0)).shape == (0, 61)
    two = run(
        runner,
        ScheduledSequence(1, PROMPT[:4], 0, [5], num_logits=0),
        ScheduledSequence(0, PROMPT[4:], 4, [4, 6, 7], num_logits=3),
        ScheduledSequence(2, PROMPT[:1], 0, [8]),
    )
    torch.testing.assert_close(two, everything[[7, 8, 9, 0]], atol=1e-5, rtol=1e-5)


def test_copied_blocks_are_read_in_place_of_their_source(runner: ModelRunner) -> None:
    expected = run(runner, ScheduledSequence(0, PROMPT, 0, [1, 2, 3]))
    run(runner, ScheduledSequence(0, PROMPT[:6], 0, [1, 2], num_logits=0))
    overwrite = ScheduledSequence(1, [60, 60, 60, 60], 0, [1])
    ops = [CopyBlock(1, 9), CopyBlock(2, 8), FreeSequence(3), TrimSequence(0, 6)]
    found = run(runner, overwrite, ScheduledSequence(0, PROMPT[6:], 6, [9, 8, 7]), ops=ops)
    torch.testing.assert_close(found[1:], expected, atol=1e-5, rtol=1e-5)


def test_half_precision_is_close_to_float32(runner: ModelRunner, folder: Path) -> None:
    config = EngineConfig(model="tiny", dtype="bfloat16", device="cpu", num_blocks=4)
    half = ModelRunner.load(config, open_checkpoint(folder))
    assert half.kv_cache[0].key.dtype == torch.bfloat16
    exact = run(runner, ScheduledSequence(0, PROMPT, 0, [1, 2, 3], 10))
    rounded = run(half, ScheduledSequence(0, PROMPT, 0, [0], 10))
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_weights_and_logits_carry_no_gradient(runner: ModelRunner) -> None:
    assert not run(runner, ScheduledSequence(0, PROMPT, 0, [1, 2, 3])).requires_grad
