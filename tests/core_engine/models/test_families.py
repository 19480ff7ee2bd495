"""Every native family against transformers in float32: the same tiny random weights, the same logits.

transformers runs each prompt alone and whole; our model gets it whole, in chunks, token by token and mixed with
others, through block tables with holes over a cache poisoned with NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from suimon.core_engine.batch import ForwardBatch, ScheduledBatch, ScheduledSequence
from suimon.core_engine.layers.kv_cache import KVCache
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.models import load_model
from suimon.core_engine.models.base import Model

VOCAB = 199
BLOCK_SIZE = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# name -> (transformers' config class, options beside SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_untied_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama_llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.5}}),
    "llama_yarn": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama_yarn_mscale": ("LlamaConfig", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "mistral_full": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"attention_bias": True}),
    "gemma2": ("Gemma2Config", {"sliding_window": 5, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 9, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}),
}


@pytest.fixture(scope="module")
def save_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Build a family's tiny random transformers model and save it; returns the model and its folder."""
    transformers = pytest.importorskip("transformers")

    def save(family: str) -> tuple[Any, Path]:
        config_class, options = FAMILIES[family]
        torch.manual_seed(len(family))
        config = getattr(transformers, config_class)(**SIZES | {"num_hidden_layers": 4} | options)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases start at constants that would hide mistakes
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        return model, folder

    return save


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, save_tiny: Callable[[str], tuple[Any, Path]]) -> SimpleNamespace:
    """``ours``, three prompts and transformers' logits (len, vocab) for each."""
    oracle, folder = save_tiny(request.param)
    randomness = random.Random(5)
    prompts = [[randomness.randrange(VOCAB) for _ in range(length)] for length in (37, 1, 18)]
    with torch.inference_mode():
        expected = [oracle(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return SimpleNamespace(
        ours=load_model(open_checkpoint(folder), torch.float32), prompts=prompts, expected=expected, oracle=oracle
    )


class Runner:
    """Feeds a model sequences step by step; blocks are scattered and every slot starts as NaN."""

    def __init__(self, model: Model, num_sequences: int) -> None:
        self.model = model
        blocks = list(range(num_sequences * 16))
        random.Random(11).shuffle(blocks)
        self.tables = [blocks[16 * s : 16 * s + 16] for s in range(num_sequences)]
        self.cache = KVCache.allocate(model.kv_shapes, len(blocks), BLOCK_SIZE, torch.float32)
        for layer in self.cache:
            layer.key.fill_(float("nan"))
            layer.value.fill_(float("nan"))
        self.done = [0] * num_sequences

    def step(self, shares: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Append tokens to sequences; logits (len, vocab) of every appended token, by sequence."""
        scheduled = [
            ScheduledSequence(
                s,
                tokens,
                self.done[s],
                self.tables[s][: -(-(self.done[s] + len(tokens)) // BLOCK_SIZE)],
                len(tokens),
            )
            for s, tokens in shares.items()
        ]
        batch = ForwardBatch.build(ScheduledBatch(0, scheduled), BLOCK_SIZE)
        with torch.inference_mode():
            hidden = self.model.forward(batch, self.cache)
            logits = self.model.logits(hidden[batch.logits_indices])
        for s, tokens in shares.items():
            self.done[s] += len(tokens)
        return dict(zip(shares, logits.split([len(tokens) for tokens in shares.values()]), strict=True))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_whole_prompts_in_one_batch(family: SimpleNamespace) -> None:
    runner = Runner(family.ours, 3)
    logits = runner.step(dict(enumerate(family.prompts)))
    for s, expected in enumerate(family.expected):
        close(logits[s], expected)


def test_logits_vary(family: SimpleNamespace) -> None:
    """The oracle can tell tokens and positions apart: a comparison against constants would prove nothing."""
    assert family.expected[0].std(dim=0).mean() > 0.05
    assert len(set(family.expected[0].argmax(-1).tolist())) > 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 36])
def test_chunked_prompt(family: SimpleNamespace, size: int) -> None:
    prompt = family.prompts[0]
    runner = Runner(family.ours, 1)
    chunks = [runner.step({0: prompt[start : start + size]})[0] for start in range(0, len(prompt), size)]
    close(torch.cat(chunks), family.expected[0])


def test_decodes_beside_chunks(family: SimpleNamespace) -> None:
    """Sequences join at different steps and take tokens at different rates."""
    rates, starts = {0: 5, 1: 1, 2: 1}, {0: 2, 1: 4, 2: 0}
    runner = Runner(family.ours, 3)
    found: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for step in range(40):
        shares = {s: family.prompts[s][runner.done[s] :][: rates[s]] for s in rates if step >= starts[s]}
        shares = {s: tokens for s, tokens in shares.items() if tokens}
        if shares:
            for s, logits in runner.step(shares).items():
                found[s].append(logits)
    for s, expected in enumerate(family.expected):
        close(torch.cat(found[s]), expected)


def test_greedy_continuation_is_the_oracles(family: SimpleNamespace) -> None:
    prompt = family.prompts[2]
    sequence = list(prompt)
    with torch.inference_mode():
        for _ in range(30):
            sequence.append(int(family.oracle(torch.tensor([sequence])).logits[0, -1].argmax()))
    expected = sequence[len(prompt) :]
    runner = Runner(family.ours, 1)
    tokens = [int(runner.step({0: prompt})[0][-1].argmax())]
    while len(tokens) < len(expected):
        tokens.append(int(runner.step({0: tokens[-1:]})[0][-1].argmax()))
    assert tokens == expected
