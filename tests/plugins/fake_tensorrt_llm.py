"""A stand-in for tensorrt_llm, built from tests/contracts/tensorrt_llm.yaml: what is not in that file does not exist.

Names, parameters and defaults come from the file, and unknown ones are refused as the real package refuses them; the
rules of SamplingParams and the behaviour of results (cumulative, made in a running loop, aborted, shut down) are
written here. The "model" recites TEXT in the tokens of the checkpoint's tokenizer: greedily from its beginning,
otherwise from a place that the seed decides. Token i of an answer has log-probability ``logprob(i)``.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import yaml

CONTRACT = Path(__file__).parent.parent / "contracts" / "tensorrt_llm.yaml"
TEXT = "The water gate stands at the river. It lets the water through, as much as the fields can drink: 水門. "
ALTERNATIVES = 24  # the likeliest tokens at each place, of which a request gets as many as it asks for


def read_contract() -> dict[str, Any]:
    return yaml.safe_load(CONTRACT.read_text())


def logprob(position: int) -> float:
    return -0.125 * (position % 5) - 0.0625


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "max_position_embeddings": 256,
    "eos_token_id": 257,
}
TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def write_checkpoint(folder: Path, **config: Any) -> Path:
    """A checkpoint without weights, whose tokens are bytes; 256 begins and 257 ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
    return folder


def in_version(row: dict[str, Any], version: str) -> bool:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")[:2]))

    return numbers(row.get("since", "1.0")) <= numbers(version)


class Refuser:
    """Binds keyword arguments as a signature from the contract would; ``unknown`` makes the error for other names."""

    def __init__(self, rows: dict[str, Any], version: str) -> None:
        self.rows = {name: row for name, row in rows.items() if in_version(row, version)}

    def bind(self, given: dict[str, Any], unknown: Any) -> dict[str, Any]:
        for name in given:
            if name not in self.rows:
                raise unknown(name)
        missing = [name for name, row in self.rows.items() if row.get("required") and name not in given]
        if missing:
            raise TypeError(f"missing required argument: {missing[0]!r}")
        return {name: row.get("default") for name, row in self.rows.items()} | given

    def signature(self, *, keywords: bool = False) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        empty = inspect.Parameter.empty
        parameters = [
            inspect.Parameter(name, kind, default=empty if row.get("required") else row.get("default"))
            for name, row in self.rows.items()
        ]
        rest = [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)] if keywords else []
        return inspect.Signature([*parameters, *rest])


class Logprob:
    """``rank`` is 1 for the likeliest token."""

    def __init__(self, value: float, rank: int) -> None:
        self.logprob = value
        self.rank = rank


class CompletionOutput:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None


class RequestOutput:
    """What generate_async returns: an asynchronous iterator of itself, cumulative."""

    def __init__(self, llm: Any, params: Any, answer: list[int], limit: int, cached_tokens: int) -> None:
        try:
            asyncio.get_running_loop()
            self._responses: asyncio.Queue[Any] | None = asyncio.Queue()
        except RuntimeError:
            self._responses = None
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = cached_tokens
        self._llm = llm
        self._params = params
        self._answer = answer
        self._limit = limit
        self.was_aborted = False

    async def run(self, fault: Any) -> None:
        """The engine's side: one response per step, until an end."""
        put, tokens = self._responses.put_nowait, []
        try:
            for index in range(self._limit):
                await self._llm.step()
                if self.was_aborted:
                    put(([], "cancelled", None))
                    return
                if fault is not None and index == 2:
                    put(fault)
                    return
                tokens.append(self._answer[index % len(self._answer)])
                reason, stop_reason = self._ending(index, tokens[-1])
                if reason is not None or len(tokens) == self._llm.interval:
                    put((tokens, reason, stop_reason))
                    tokens = []
                if reason is not None:
                    return
        finally:
            self._llm.requests.discard(self)

    def _ending(self, index: int, token: int) -> tuple[str | None, int | None]:
        params, may_end = self._params, index + 1 >= (self._params.min_tokens or 1)
        if may_end and token == params.end_id and not params.ignore_eos:
            return "stop", None
        if may_end and token in (params.stop_token_ids or ()):
            return "stop", token
        return ("length" if index + 1 == self._limit else None), None

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        assert self._responses is not None, "The asyncio event loop was not present during initialization"
        response = await self._responses.get()
        if isinstance(response, Exception):
            if not isinstance(response, self._llm.request_error):
                self._llm.shutdown()  # as the real one does before it raises
            raise response
        self._handle(*response)
        return self

    def _handle(self, token_ids: list[int], reason: str | None, stop_reason: int | None) -> None:
        output = self.outputs[0]
        for token in token_ids:
            if self._params.logprobs and self._llm.entries != "missing":
                output.logprobs.append(self._llm.logprob_entry(token, len(output.token_ids), self._params.logprobs))
            output.token_ids.append(token)
        output.finish_reason, output.stop_reason = reason, stop_reason
        if stop_reason is not None and not self._params.include_stop_str_in_output:
            output.token_ids = output.token_ids[:-1]
        self.finished = reason is not None

    def abort(self) -> None:
        assert not self._llm.is_shut_down, "The executor is not set for this result."
        self.was_aborted = True
        self._llm.num_aborts += 1


def _sampling_params(contract: dict[str, Any], version: str) -> type:
    rows = Refuser(contract["parameters"], version)

    class SamplingParams:
        def __init__(self, **given: Any) -> None:
            unknown = lambda name: TypeError(f"SamplingParams.__init__() got an unexpected keyword argument {name!r}")  # noqa: E731
            vars(self).update(rows.bind(given, unknown))
            self._check("top_p", self.top_p, self.top_p is None or 0 <= self.top_p <= 1, "0 <= top_p <= 1")
            self._check("top_k", self.top_k, self.top_k is None or self.top_k >= 0, "top_k >= 0")
            ok = self.temperature is None or self.temperature >= 0
            self._check("temperature", self.temperature, ok, "temperature >= 0")
            self._check("seed", self.seed, self.seed is None or 0 <= self.seed < 2**64, "an unsigned seed")
            if self.embedding_bias is not None:
                assert str(self.embedding_bias.dtype) == "torch.float32" and self.embedding_bias.dim() == 1

        @staticmethod
        def _check(name: str, value: Any, ok: bool, rule: str) -> None:
            if not ok:
                raise ValueError(f"require {rule}, got {name}={value}")

        @property
        def is_greedy(self) -> bool:
            nothing_set = self.temperature is None and self.top_p is None and self.top_k is None
            return nothing_set or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0

    SamplingParams.__signature__ = rows.signature()
    return SamplingParams


def _model_class(name: str, contract: dict[str, Any], version: str) -> type:
    """A pydantic model that forbids extra fields, as far as anybody sees from outside."""
    rows = Refuser(contract["fields"], version)

    class Model:
        model_fields = rows.rows

        def __init__(self, **given: Any) -> None:
            self.given = given
            vars(self).update(rows.bind(given, lambda field: ValueError(f"{field}: Extra inputs are not permitted")))

    Model.__name__ = Model.__qualname__ = name
    return Model


def _llm_class(contract: dict[str, Any], messages: dict[str, Any], version: str, request_error: type) -> type:
    rows = Refuser(contract["parameters"] | contract["keywords"], version)
    generate = Refuser(contract["methods"]["generate_async"]["parameters"], version)
    text = {name: row["text"] for name, row in messages.items()}

    class LLM:
        made: ClassVar[list[Any]] = []  # every one, newest last
        load_error: ClassVar[Exception | None] = None
        delay: ClassVar[float] = 0.0  # seconds a step takes
        interval: ClassVar[int] = 1  # tokens of a response

        def __init__(self, model: Any, **given: Any) -> None:
            if LLM.load_error is not None:
                raise LLM.load_error
            unknown = lambda name: ValueError(text["unknown_keyword"].format(name))  # noqa: E731
            self.arguments = rows.bind({"model": model, **given}, unknown)
            self.given = {"model": model, **given}
            self.request_error = request_error
            self.is_shut_down = False
            self.requests: set[RequestOutput] = set()
            self.asked: list[dict[str, Any]] = []
            self.num_aborts = 0
            self.faults: list[Any] = []  # of the next requests: what comes instead of their third response
            self.refusals: list[Exception] = []  # what the next requests get instead of a result
            self.entries = "dict"  # how log-probabilities come: dict | float | missing
            self.known_prompts: set[tuple[int, ...]] = set()
            self._tasks: set[asyncio.Task[None]] = set()
            self._load(Path(model))
            LLM.made.append(self)

        def _load(self, folder: Path) -> None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.text_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
            self.end_id = tokenizer.token_to_id("<end>")
            self.vocab_size = tokenizer.get_vocab_size()

        async def step(self) -> None:
            await asyncio.sleep(LLM.delay)

        def logprob_entry(self, token: int, position: int, wanted: int) -> Any:
            """The chosen token is the second likeliest; it is there also where only the likeliest was asked for."""
            if self.entries != "dict":
                return logprob(position)
            others = [(token + 1 + i) % self.vocab_size for i in range(ALTERNATIVES)]
            ranked = [others[0], token, *others[1:]]
            values = [logprob(position) + 0.03125, *(logprob(position) - 0.25 * i for i in range(ALTERNATIVES))]
            entry = {i: Logprob(v, rank + 1) for rank, (i, v) in enumerate(zip(ranked, values, strict=True))}
            kept = dict(list(entry.items())[:wanted])
            return kept | {token: entry[token]}

        def generate_async(self, *positional: Any, **given: Any) -> RequestOutput:
            if self.is_shut_down:
                raise RuntimeError(text["shutting_down"])
            if self.refusals:
                raise self.refusals.pop(0)
            named = dict(zip(generate.rows, positional, strict=False)) | given
            unknown = lambda name: TypeError(f"generate_async() got an unexpected keyword argument {name!r}")  # noqa: E731
            call = generate.bind(named, unknown)
            self.asked.append(call)
            params, prompt = call["sampling_params"], tuple(call["inputs"])
            limit = self.arguments["max_num_tokens"]
            if not self.arguments["enable_chunked_prefill"] and len(prompt) > limit:
                raise ValueError(text["prompt_too_long"].format(float(len(prompt)), limit))
            assert call["streaming"] and params.detokenize is False
            return self._begin(prompt, params, call["cache_salt"])

        def _begin(self, prompt: tuple[int, ...], params: Any, salt: str | None) -> RequestOutput:
            start = 0 if params.is_greedy else params.seed * 7 % len(self.text_ids)
            answer = [*self.text_ids[start:], *self.text_ids[:start], self.end_id]
            if params.embedding_bias is not None:
                banned = {i for i, bias in enumerate(params.embedding_bias.tolist()) if bias <= -100}
                answer = [token for token in answer if token not in banned]
            room = self.arguments["max_seq_len"] - len(prompt)
            cached = len(prompt) // 4 * 4 if (salt, prompt) in self.known_prompts else 0
            self.known_prompts.add((salt, prompt))
            result = RequestOutput(self, params, answer, min(params.max_tokens, room), cached)
            self.requests.add(result)
            fault = self.faults.pop(0) if self.faults else None
            task = asyncio.get_running_loop().create_task(result.run(fault))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return result

        def shutdown(self) -> None:
            self.is_shut_down = True

    LLM.generate_async.__signature__ = _method_signature(generate)
    LLM.__init__.__signature__ = _method_signature(Refuser(contract["parameters"], version), keywords=True)
    return LLM


def _method_signature(rows: Refuser, *, keywords: bool = False) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = rows.signature(keywords=keywords)
    return signature.replace(parameters=[own, *signature.parameters.values()])


def build(version: str | None = None) -> dict[str, ModuleType]:
    """Module name -> module, of the package as of ``version`` (default: the contract's own)."""
    contract = read_contract()
    version = version or contract["version"]
    names = contract["modules"]["tensorrt_llm"]
    llmapi = ModuleType("tensorrt_llm.llmapi")
    for name, row in contract["modules"]["tensorrt_llm.llmapi"].items():
        if in_version(row, version):
            setattr(llmapi, name, _MAKERS[row["kind"]](name, row, version))
    package = ModuleType("tensorrt_llm")
    package.__version__ = f"{version}.0"
    package.SamplingParams = _sampling_params(names["SamplingParams"], version)
    package.LLM = _llm_class(names["LLM"], contract["messages"], version, llmapi.RequestError)
    package.llmapi = llmapi
    return {"tensorrt_llm": package, "tensorrt_llm.llmapi": llmapi}


_MAKERS = {
    "model": _model_class,
    "enum": lambda name, row, version: enum.StrEnum(name, {member: member for member in row["members"]}),
    "exception": lambda name, row, version: type(name, (RuntimeError,), {}),
}
