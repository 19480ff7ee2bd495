"""Greedy tokens are those of transformers in fp32, and stay the same however the engine came to them.

Oracle: transformers, eager attention, fp32, one whole forward over prompt and answer. If at every position its most
likely token is the one the engine chose, then its greedy search gives the same answer, by induction. A choice between
tokens whose reference logits differ by less than ``TIE`` is no difference: that is the rounding of fp32 sums in another
order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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

from suimon.core_engine.llm import LLM
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.sampling_params import SamplingParams

NUM_PROMPTS, NUM_TOKENS = 50, 64
TIE = 2e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

# One engine option changed at a time. The last makes 50 x 6 blocks of need share 40, so sequences are preempted.
PLAIN: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 8192, "num_blocks": 1024}
VARIANTS: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "budget 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "budget 64": {"max_num_batched_tokens": 64},
    "batch 1": {"max_num_seqs": 1},
    "preemption": {"num_blocks": 40, "max_model_len": 256},
}

Tokens = Sequence[int]


def check_greedy(reference: PreTrainedModel, prompt: Tokens, answer: Tokens) -> None:
    """Every token of ``answer`` is the reference's most likely one after what precedes it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    best, chosen = logits.max(-1), logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    gap, position = (best.values - chosen).max(0)
    expected, got = best.indices[position].item(), answer[int(position)]
    assert gap < TIE, f"token {int(position)}: the reference prefers {expected} to {got} by {gap:.2e}"


def run(path: Path, prompts: Sequence[Tokens], **options: Any) -> tuple[list[list[int]], int]:
    """Token ids per prompt, and how many preemptions there were."""
    with LLM(str(path), **{**PLAIN, **options}) as llm:
        results = llm.generate([list(prompt) for prompt in prompts], GREEDY)
        return [list(result.completions[0].token_ids) for result in results], llm.engine.stats().preemptions


class Model:
    """A model, its reference, its prompts, and the answers of the plain engine."""

    def __init__(self, path: Path, reference: PreTrainedModel, prompts: list[list[int]]) -> None:
        self.path, self.reference, self.prompts = path, reference.eval(), prompts
        self.answers, _ = run(path, prompts)

    def check(self) -> None:
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            assert len(answer) == NUM_TOKENS
            check_greedy(self.reference, prompt, answer)

    def check_variant(self, name: str) -> None:
        answers, preemptions = run(self.path, self.prompts, **VARIANTS[name])
        assert (preemptions > 0) == (name == "preemption")
        for prompt, plain, answer in zip(self.prompts, self.answers, answers, strict=True):
            if answer != plain:
                check_greedy(self.reference, prompt, answer)


# --- Tiny random models of every family ------------------------------------------------------------------------------

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
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("tiny")
    reference = save_random(FAMILIES[request.param](), path)
    dice = random.Random(request.param)
    shared = [dice.randrange(3, 320) for _ in range(40)]
    prompts = [shared[: dice.choice((0, 16, 32, 40))] for _ in range(NUM_PROMPTS)]
    return Model(path, reference, [p + [dice.randrange(3, 320) for _ in range(dice.randint(1, 40))] for p in prompts])


def test_tiny_models_of_every_family_answer_as_transformers(tiny: Model) -> None:
    tiny.check()
    assert len({tuple(answer[-8:]) for answer in tiny.answers}) > NUM_PROMPTS // 2  # they do not all say the same


@pytest.mark.parametrize("variant", VARIANTS)
def test_how_the_engine_got_there_changes_no_token(tiny: Model, variant: str) -> None:
    tiny.check_variant(variant)


# --- The two real models ---------------------------------------------------------------------------------------------

SUBJECTS = ("the sea", "prime numbers", "a lost key", "Kyoto in autumn", "photosynthesis", "my grandmother's bread")
OPENINGS = (
    "Write one sentence about {}.",
    "Explain {} to a child:",
    "Three facts about {}\n1.",
    "def describe():\n    # says something about {}\n    return",
    "{} und was ich darüber weiß:",
    "Q: What do people ask about {}?\nA:",
    "Once upon a time there was {}, and",
    "水門 - {}:",
    "Dear editor,\n\nyour article on {} was",
)


@pytest.fixture(scope="module", params=["demo_gguf", "gemma_gguf"])
def real(request: pytest.FixtureRequest) -> Model:
    path: Path = request.getfixturevalue(request.param)
    checkpoint = open_checkpoint(path)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.tensor_names}
    missing, unexpected = reference.load_state_dict(weights, strict=False, assign=True)
    reference.tie_weights()
    assert unexpected == [] and set(missing) <= {"lm_head.weight"}
    texts = [opening.format(subject) for opening in OPENINGS for subject in SUBJECTS][:NUM_PROMPTS]
    with LLM(str(path), **PLAIN) as llm:
        prompts = [llm.tokenize(text) for text in texts]
    return Model(path, reference, prompts)


def test_real_models_answer_as_transformers(real: Model) -> None:
    real.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_how_the_engine_got_there_changes_no_token_of_a_real_model(real: Model, variant: str) -> None:
    real.check_variant(variant)
