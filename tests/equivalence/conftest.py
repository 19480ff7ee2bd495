"""The oracle of these tests: greedy tokens are those of transformers in fp32, however the engine came to them.

Oracle: transformers, eager attention, fp32, one whole forward over prompt and answer. If at every position its most
likely token is the one the engine chose, then its greedy search gives the same answer, by induction. A choice between
tokens whose reference logits differ by less than ``TIE`` of their size is no difference: that is the rounding of fp32
sums in another order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from suimon.core_engine.llm import LLM
from suimon.core_engine.loader import open_checkpoint
from suimon.core_engine.sampling_params import SamplingParams
from suimon.kernels import cpu

NUM_PROMPTS, NUM_TOKENS = 50, 64
TIE = 1e-5
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

REFERENCE = "PyTorch's operations"  # a variant: without the compiled kernels

# One engine option changed at a time. The last makes dozens of sequences share 40 blocks, so some are preempted.
PLAIN: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 32, "max_num_batched_tokens": 8192, "num_blocks": 1024}
VARIANTS: dict[str, dict[str, Any]] = {
    "no prefix cache": {"enable_prefix_caching": False},
    "budget 16": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "budget 64": {"max_num_batched_tokens": 64},
    "batch 1": {"max_num_seqs": 1},
    "preemption": {"num_blocks": 40, "max_model_len": 256},
    REFERENCE: {},
}

# How many of the prompts a variant runs, where all of them would take minutes; SUIMON_FULL_EQUIVALENCE=1 runs them all.
FULL = os.environ.get("SUIMON_FULL_EQUIVALENCE") == "1"
FEW = 10

Tokens = Sequence[int]


def check_greedy(reference: PreTrainedModel, prompt: Tokens, answer: Tokens) -> None:
    """Every token of ``answer`` is the reference's most likely one after what precedes it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    best, chosen = logits.max(-1), logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    gap, position = (best.values - chosen).max(0)
    expected, got = best.indices[position].item(), answer[int(position)]
    assert gap < TIE * max(1.0, best.values[position].abs().item()), (
        f"token {int(position)}: the reference prefers {expected} to {got} by {gap:.2e}"
    )


def run(path: Path, prompts: Sequence[Tokens], **options: Any) -> tuple[list[list[int]], int]:
    """Token ids per prompt, and how many preemptions there were."""
    with LLM(str(path), **{**PLAIN, **options}) as llm:
        results = llm.generate([list(prompt) for prompt in prompts], GREEDY)
        return [list(result.completions[0].token_ids) for result in results], llm.engine.stats().preemptions


@contextmanager
def kernels(name: str) -> Iterator[None]:
    """The models that are loaded here compute with these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUIMON_KERNELS", name)
        cpu.is_available.cache_clear()
        yield
    cpu.is_available.cache_clear()


class Subject:
    """A model, its reference, its prompts, and the answers of the plain engine."""

    def __init__(self, path: Path, reference: PreTrainedModel, prompts: list[list[int]], *, few: set[str]) -> None:
        self.path, self.reference, self.prompts = path, reference.eval(), prompts
        self.few = few
        self.answers, _ = run(path, prompts)

    def check(self) -> None:
        assert len(self.prompts) >= NUM_PROMPTS
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            assert len(answer) == NUM_TOKENS
            check_greedy(self.reference, prompt, answer)

    def check_variant(self, name: str) -> None:
        count = FEW if name in self.few and not FULL else len(self.prompts)
        with kernels("reference" if name == REFERENCE else "cpu"):
            answers, preemptions = run(self.path, self.prompts[:count], **VARIANTS[name])
        assert (preemptions > 0) == (name == "preemption")
        for prompt, plain, answer in zip(self.prompts, self.answers, answers, strict=False):
            if answer != plain:
                check_greedy(self.reference, prompt, answer)


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


@pytest.fixture(scope="session")
def make_real_subject() -> Callable[..., Subject]:
    """A Subject of a GGUF file: transformers gets the weights that the file's blocks decode to."""

    def make(path: Path, *, few: set[str]) -> Subject:
        checkpoint = open_checkpoint(path)
        config = transformers.AutoConfig.for_model(**checkpoint.config)
        reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.tensor_names}
        missing, unexpected = reference.load_state_dict(weights, strict=False, assign=True)
        reference.tie_weights()
        assert unexpected == [] and set(missing) <= {"lm_head.weight"}
        texts = [opening.format(subject) for opening in OPENINGS for subject in SUBJECTS][:NUM_PROMPTS]
        with LLM(str(path), **PLAIN) as llm:
            return Subject(path, reference, [llm.tokenize(text) for text in texts], few=few)

    return make


@pytest.fixture(scope="session")
def make_subject() -> type[Subject]:
    return Subject


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS)
