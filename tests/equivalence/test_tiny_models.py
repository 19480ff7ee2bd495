"""Tiny random models of every family answer greedily as transformers, however the engine came to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PreTrainedModel

NUM_PROMPTS = 50

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3 rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama linear": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=21, head_dim=16),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=21, query_pre_attn_scalar=20),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=21,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=2.0, attention_multiplier=0.2),
}


def save_random(config: Any, path: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Spread wide enough that answers do not fall into a loop of one token.
            parameter.normal_(0.0, 0.3) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer.save(str(path / "tokenizer.json"))
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_subject: Any) -> Any:
    path = tmp_path_factory.mktemp("tiny")
    reference = save_random(FAMILIES[request.param](), path)
    dice = random.Random(request.param)
    shared = [dice.randrange(3, 320) for _ in range(40)]
    prompts = [shared[: dice.choice((0, 16, 32, 40))] for _ in range(NUM_PROMPTS)]
    prompts = [p + [dice.randrange(3, 320) for _ in range(dice.randint(1, 40))] for p in prompts]
    return make_subject(path, reference, prompts, few={"batch 1"})


def test_tiny_models_of_every_family_answer_as_transformers(tiny: Any) -> None:
    tiny.check()
    assert len({tuple(answer[-8:]) for answer in tiny.answers}) > NUM_PROMPTS // 2  # they do not all say the same


def test_how_the_engine_got_there_changes_no_token(tiny: Any, variant: str) -> None:
    tiny.check_variant(variant)
