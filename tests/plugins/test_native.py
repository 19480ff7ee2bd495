"""The native backend over a real, tiny Llama in a real engine process; and its translations of requests and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from suimon.core_engine import errors
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.llm import LLM
from suimon.core_engine.sampling_params import SamplingParams as EngineSampling
from suimon.gateway import hookspecs
from suimon.gateway.config import ModelSettings, Settings
from suimon.gateway.hookspecs import Delta, GenerateRequest, Message, SamplingParams, Usage
from suimon.plugins import native, stepped
from suimon.plugins.native import NativeBackend

PATIENCE = 120.0  # seconds that only a defect takes
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 257,
}
TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def write_tiny_llama(folder: Path) -> Path:
    """Two layers of seeded noise, and a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    hidden, inner, kv = 32, 64, 16
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {
        f"model.layers.{i}.{name}.weight": torch.randn(shape) * 0.3 for i in (0, 1) for name, shape in layer.items()
    }
    norms = [
        f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {name: torch.ones(hidden) for name in [*norms, "model.norm.weight"]}
    tensors |= {name: torch.randn(258, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("SUIMON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_tiny_llama(tmp_path_factory.mktemp("tiny") / "")


OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 64, "max_num_seqs": 8}


class Running:
    """A started backend and the event loop it lives on."""

    def __init__(self, model: Path) -> None:
        settings = ModelSettings(model=str(model), served_model_name="tiny", max_num_batched_tokens=24, **OPTIONS)
        self.backend = NativeBackend(settings)
        self.runner = asyncio.Runner()
        self.run(self.backend.start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, PATIENCE))

    def generate(self, **request: Any) -> list[Delta]:
        return self.run(collect(self.backend, **request))


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Running]:
    service = Running(model)
    yield service
    service.run(service.backend.stop())
    service.runner.close()


async def collect(backend: NativeBackend, **request: Any) -> list[Delta]:
    wanted = GenerateRequest(request_id="r", model="tiny", **request)
    return [delta async for delta in backend.generate(wanted)]


def token_ids(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token_id for delta in deltas if delta.index == index for token_id in delta.token_ids]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ("a", "The water gate", "x" * 100, "水門", "one two three four five six seven")


def test_online_equals_offline_alone_and_in_a_crowd(running: Running, model: Path) -> None:
    async def crowd() -> list[list[Delta]]:
        return await asyncio.gather(*(collect(running.backend, prompt=p, sampling=GREEDY) for p in PROMPTS))

    alone = [token_ids(running.generate(prompt=prompt, sampling=GREEDY)) for prompt in PROMPTS]
    together = [token_ids(deltas) for deltas in running.run(crowd())]
    with LLM(str(model), **OPTIONS) as llm:
        params = EngineSampling(temperature=0.0, max_tokens=12, ignore_eos=True)
        offline = [result.completions[0].token_ids for result in llm.generate(list(PROMPTS), params)]
    assert alone == together == offline
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


def test_a_chat_and_its_usage(running: Running) -> None:
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="Hello"))
    deltas = running.generate(messages=messages, sampling=GREEDY)
    prompt = "system: Be brief.\nuser: Hello\nassistant: "
    assert token_ids(deltas) == token_ids(running.generate(prompt=prompt, sampling=GREEDY))
    assert [delta.usage for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    usage = deltas[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 12)
    assert deltas[-1].finish_reason == "length"


def test_the_second_time_a_prompt_comes_from_the_cache(running: Running) -> None:
    prompt = "what has been computed once need not be computed again"
    first, second = (running.generate(prompt=prompt, sampling=GREEDY) for _ in range(2))
    assert token_ids(first) == token_ids(second)
    assert (first[-1].usage.cached_tokens, second[-1].usage.cached_tokens) == (0, len(prompt) // 16 * 16)
    other = running.generate(prompt=prompt, sampling=GREEDY, cache_salt="another tenant")
    assert (token_ids(other), other[-1].usage.cached_tokens) == (token_ids(first), 0)


def test_choices_end_one_by_one_and_the_last_has_the_usage_of_all(running: Running) -> None:
    sampling = SamplingParams(temperature=1.5, max_tokens=9, n=3, seed=5, ignore_eos=True)
    deltas = running.generate(prompt="many", sampling=sampling)
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]
    assert len({tuple(token_ids(deltas, index)) for index in range(3)}) == 3
    assert [delta.usage for delta in deltas if delta.usage] == [Usage(prompt_tokens=4, completion_tokens=27)]
    assert deltas[-1].usage is not None


def test_logprobs_have_text_and_bytes(running: Running) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)
    deltas = running.generate(prompt="x", sampling=sampling)
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [entry.chosen.token_id for entry in entries] == token_ids(deltas)
    for entry in entries:
        assert entry.top[0] == entry.chosen
        assert entry.chosen.logprob >= entry.top[1].logprob
        assert entry.chosen.token == bytes(entry.chosen.bytes).decode("utf-8", "replace")
    joined = b"".join(bytes(entry.chosen.bytes) for entry in entries)
    assert joined.decode("utf-8", "replace") == text(deltas)


def test_token_prompts_tokenize_and_detokenize(running: Running) -> None:
    wanted = GenerateRequest(request_id="t", model="tiny", prompt="Hé<end>")
    ids = running.run(running.backend.tokenize(wanted))
    assert len(ids) == 4 and ids[-1] == 257
    assert running.run(running.backend.detokenize(ids)) == "Hé<end>"
    deltas = running.generate(prompt=tuple(ids[:3]), sampling=GREEDY)
    assert token_ids(deltas) == token_ids(running.generate(prompt="Hé", sampling=GREEDY))


@pytest.mark.parametrize(
    ("request_fields", "kind", "param"),
    [
        ({"prompt": ""}, hookspecs.InvalidRequest, "prompt"),
        ({"prompt": (258,)}, hookspecs.InvalidRequest, "prompt"),
        ({"prompt": "x" * 300}, hookspecs.ContextTooLong, "prompt"),
        ({"messages": (Message(role="user", content="x" * 300),)}, hookspecs.ContextTooLong, "messages"),
        (
            {"prompt": "x", "sampling": SamplingParams(stop_token_ids=(258,))},
            hookspecs.InvalidRequest,
            "stop_token_ids",
        ),
        ({"prompt": "x", "sampling": SamplingParams(temperature=-1.0)}, hookspecs.InvalidRequest, "temperature"),
    ],
)
def test_wrong_requests_name_their_field(running: Running, request_fields, kind, param) -> None:
    with pytest.raises(kind) as caught:
        running.generate(**request_fields)
    assert (type(caught.value), caught.value.param) == (kind, param)


def test_what_it_says_of_itself(running: Running) -> None:
    backend = running.backend
    running.generate(prompt="x", sampling=GREEDY)
    load = backend.load()
    assert (load.blocks_total, load.blocks_used, load.running, load.waiting) == (64, 0, 0, 0)
    assert load.blocks_free + load.blocks_cached == 64
    assert running.run(backend.health()) == hookspecs.Health(state="ready")
    assert (backend.model_id, backend.capabilities.max_model_len) == ("tiny", 256)
    assert any("float32" in line for line in backend.describe())


def test_leaving_early_gives_the_blocks_back(running: Running) -> None:
    async def leave() -> None:
        wanted = GenerateRequest(request_id="l", model="tiny", prompt="x", sampling=SamplingParams(ignore_eos=True))
        deltas = running.backend.generate(wanted)
        await anext(deltas)
        await deltas.aclose()
        while running.backend.load().blocks_used:
            await asyncio.sleep(0.01)

    running.run(leave())


def test_a_model_that_cannot_be_loaded_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    backend = NativeBackend(ModelSettings(model=str(tmp_path / "none.gguf")))

    async def start() -> None:
        try:
            await backend.start()
        finally:
            await backend.stop()

    with pytest.raises(hookspecs.BackendUnavailable, match="no such file"):
        asyncio.run(start())


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (errors.InvalidRequestError("m", param="n"), hookspecs.InvalidRequest, 400),
        (errors.ContextLengthError("m"), hookspecs.ContextTooLong, 400),
        (errors.QueueFullError("m", retry_after=7.0), hookspecs.Overloaded, 429),
        (errors.EngineUnavailableError("m"), hookspecs.BackendUnavailable, 503),
        (errors.EngineDeadError("m"), hookspecs.BackendCrashed, 500),
        (errors.UnsupportedModelError("m"), hookspecs.BackendUnavailable, 503),
        (errors.EngineError("m"), hookspecs.BackendError, 500),
    ],
)
def test_errors_are_mapped_by_class(error, kind, status) -> None:
    mapped = stepped._backend_error(error)
    assert (type(mapped), mapped.status, mapped.message) == (kind, status, "m")
    assert mapped.param == getattr(error, "param", None)
    if status in (429, 503):
        assert mapped.retry_after == getattr(error, "retry_after", stepped.RETRY_AFTER)


def test_every_kind_of_engine_error_is_mapped() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EngineError)]
    assert len(kinds) >= 8
    assert all(isinstance(stepped._backend_error(kind("m")), hookspecs.BackendError) for kind in kinds)


def test_every_field_of_a_request_reaches_the_engine() -> None:
    request = GenerateRequest(
        request_id="i",
        model="m",
        messages=(
            Message(role="user", content=[{"type": "text", "text": "x"}]),
            Message(role="assistant", content="y"),
        ),
        sampling=SamplingParams(**SAMPLING),
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
        tenant="t",
        priority=3,
        weight=2.0,
        arrival=1.0,
        deadline=2.0,
        adapter="a",
        cache_salt="s",
        trace_context={"traceparent": "x"},
    )
    translated = stepped.engine_request(request)
    same = {field.name for field in fields(translated)} - {"messages", "sampling", "add_special_tokens", "prompt"}
    assert {name: getattr(translated, name) for name in same} == {name: getattr(request, name) for name in same}
    assert {name: getattr(translated.sampling, name) for name in SAMPLING} == SAMPLING
    assert set(SAMPLING) == {field.name for field in fields(EngineSampling)}
    assert translated.messages[0] == {"role": "user", "content": [{"type": "text", "text": "x"}]}


SAMPLING: dict[str, Any] = {
    "n": 2,
    "max_tokens": 9,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.0},
    "seed": 4,
    "stop": ("x",),
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "logprobs": 3,
}


def test_settings_become_the_engines_options_by_name() -> None:
    settings = ModelSettings(model="org/name", max_num_seqs=3, seed=9, chat_template="{{ x }}", step_timeout=7.0)
    config = stepped.engine_config(settings)
    assert (config.model, config.max_num_seqs, config.seed) == ("org/name", 3, 9)
    assert (config.chat_template, config.step_timeout) == ("{{ x }}", 7.0)
    settable = {field.name for field in fields(EngineConfig)} - {"executor", "executor_options"}
    assert settable <= set(ModelSettings.__struct_fields__)


@pytest.mark.parametrize(
    ("model_setting", "name"),
    [
        ("", "SmolLM2-135M-Instruct"),
        ("org/name", "org/name"),
        ("org/name@v2", "org/name"),
        ("/models/llama.Q4_1.gguf", "llama.Q4_1"),
        ("models/llama.gguf", "llama"),
        ("./folder", "folder"),
        ("~/models/folder/", "folder"),
        ("pypi:package==1.0/package/model.gguf#sha256=00", "model"),
    ],
)
def test_models_get_a_name_to_be_served_under(model_setting, name) -> None:
    registered: list[Any] = []
    models = (ModelSettings(model=model_setting, backend="native"), ModelSettings(backend="echo"))
    native.register_backends(registered.append, Settings(models=models))
    assert [backend.model_id for backend in registered] == [name]
