"""A stand-in for vLLM, made from contracts/vllm.yaml: what is not in that file does not exist, or is refused.

Its "model" recites TEXT from a place that prompt and seed decide; tokens are bytes. Token t has log-probability
``logprob(t)``, and two alternatives.
"""

from __future__ import annotations

import asyncio
import enum
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

CONTRACT = yaml.safe_load((Path(__file__).parent / "contracts" / "vllm.yaml").read_text())
TEXT = "The gate stands at the river and lets through what the fields can drink. "
TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""
MAX_MODEL_LEN, VOCAB_SIZE = 256, 258


def logprob(token_id: int) -> float:
    return -0.125 * (token_id % 7 + 1)


def write_checkpoint(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 257}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB_SIZE}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    return folder


def record(name: str) -> type[SimpleNamespace]:
    """A class of the contract's defaults that refuses other arguments."""
    defaults = CONTRACT[name]

    def make(self: SimpleNamespace, **given: Any) -> None:
        unknown = set(given) - set(defaults)
        if unknown:
            raise TypeError(f"{name}() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        SimpleNamespace.__init__(self, **(defaults | given))

    return type(name.rpartition(".")[2], (SimpleNamespace,), {"__init__": make})


def result(kind: str, **given: Any) -> SimpleNamespace:
    assert set(given) == set(CONTRACT[kind]), kind
    return SimpleNamespace(**given)


class EngineDeadError(Exception):
    pass


class AsyncLLM:
    """Of the engine; ``lives`` holds those that were made."""

    lives: ClassVar[list[AsyncLLM]] = []

    def __init__(self, arguments: Any) -> None:
        from tokenizers import Tokenizer

        self.arguments = arguments
        self.tokenizer = Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json"))
        limit = arguments.max_model_len or MAX_MODEL_LEN
        self.model_config = SimpleNamespace(max_model_len=limit, get_vocab_size=lambda: VOCAB_SIZE)
        self.errored = False
        self.asked: list[tuple[Any, Any, dict[str, Any]]] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.is_shut_down = False
        self.ending = ""  # finish_reason to end with, or "dead"
        AsyncLLM.lives.append(self)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> AsyncLLM:
        return cls(engine_args)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.discard(request_id)

    def shutdown(self, timeout: float | None = None) -> None:
        self.is_shut_down = True

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **how: Any) -> Any:
        assert set(how) <= set(CONTRACT["vllm.v1.engine.async_llm.AsyncLLM"]["generate"])
        assert set(prompt) <= set(CONTRACT["vllm.inputs.TokensPrompt"])
        if request_id in self.running:
            raise ValueError(f"Request id {request_id} already running.")
        if sampling_params.temperature > 0 and sampling_params.top_p == 0.123:
            raise ValueError("top_p is one that this engine refuses")
        self.asked.append((prompt, sampling_params, how))
        self.running.add(request_id)
        try:
            recitals = [self._recital(prompt, sampling_params, index) for index in range(sampling_params.n)]
            while recitals:
                await asyncio.sleep(0)
                if self.ending == "dead":
                    self.errored = True
                    raise EngineDeadError
                outputs = [next(each, None) for each in recitals]
                recitals = [each for each, output in zip(recitals, outputs, strict=True) if output is not None]
                told = [output for output in outputs if output is not None]
                if told:
                    yield result(
                        "RequestOutput", request_id=request_id, outputs=told, finished=not recitals, num_cached_tokens=1
                    )
        finally:
            self.running.discard(request_id)

    def _recital(self, prompt: Any, params: Any, index: int) -> Iterator[Any]:
        ids = self.tokenizer.encode(TEXT * 9).ids
        place = sum(prompt["prompt_token_ids"]) + index + (params.seed or 0 if params.temperature else 0)
        said, sent = "", 0
        held = max(map(len, params.stop or ()), default=1) - 1  # as vLLM: a stop string's beginning is not sent
        for position in range(params.max_tokens):
            token_id = ids[(place + position) % len(TEXT)]
            said += self.tokenizer.decode([token_id])
            hit = next((stop for stop in params.stop or () if stop in said), None)
            is_last = position == params.max_tokens - 1
            reason = self.ending or ("stop" if hit else "length" if is_last else None)
            until = said.index(hit) if hit else len(said) if reason else max(sent, len(said) - held)
            yield self._output(index, token_id, said[sent:until], params, reason, hit)
            sent = until
            if reason:
                return

    def _output(self, index: int, token_id: int, text: str, params: Any, reason: Any, hit: Any) -> Any:
        alternatives = {token_id, (token_id + 1) % 256, (token_id + 2) % 256}
        entries = {
            each: result("Logprob", logprob=logprob(each), rank=None, decoded_token=None) for each in alternatives
        }
        return result(
            "CompletionOutput",
            index=index,
            text=text,
            token_ids=[token_id],
            logprobs=None if params.logprobs is None else [entries],
            finish_reason=reason,
            stop_reason=hit,
        )


@pytest.fixture(scope="session")
def vllm() -> Iterator[type[AsyncLLM]]:
    """The stand-in, importable as ``vllm``."""
    kinds = CONTRACT["vllm.sampling_params.RequestOutputKind"]
    modules = {
        "vllm": {"AsyncEngineArgs": record("vllm.AsyncEngineArgs"), "SamplingParams": record("vllm.SamplingParams")},
        "vllm.sampling_params": {"RequestOutputKind": enum.Enum("RequestOutputKind", kinds)},
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents, __path__=[])
        sys.modules[name] = module
    yield AsyncLLM
    for name in modules:
        del sys.modules[name]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
