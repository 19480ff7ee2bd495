"""An executor as a backend: the common engine loop in its own process, spoken to in the gateway's terms.

A plugin that brings a StepExecutor of its own needs this and nothing else::

    from suimon.gateway.hookspecs import hookimpl
    from suimon.plugins.stepped import SteppedBackend

    @hookimpl
    def register_backends(register, settings):
        for model in settings.models:
            if model.backend == "mine":
                register(SteppedBackend(model, executor="my_package.executor:MyExecutor", options=model.options))

The class is imported in the engine's process, so its module must be installed, and is made as ``MyExecutor(config,
model_path)``. Batching, scheduling, sampling, tokenizer, chat template, stop strings and restarts are the engine's.

The one place that knows both sides: the gateway's requests and errors, and the engine library's. It only translates.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import fields
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from suimon.core_engine import errors, sampling_params
from suimon.core_engine.client import EngineClient
from suimon.core_engine.config import NATIVE_EXECUTOR, EngineConfig
from suimon.core_engine.loader.sources import DEFAULT_MODEL
from suimon.core_engine.logprobs import TokenLogprobs as EngineLogprobs
from suimon.core_engine.outputs import RequestOutput
from suimon.core_engine.request import EngineRequest
from suimon.gateway import hookspecs
from suimon.gateway.hookspecs import (
    Backend,
    BackendError,
    Capabilities,
    Delta,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    Health,
    InvalidRequest,
    Load,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings

RETRY_AFTER = 5.0  # seconds, while an engine loads or is replaced

# The first class that fits decides; an engine error of no other class is the server's own fault.
_ERRORS: tuple[tuple[type[errors.EngineError], type[BackendError]], ...] = (
    (errors.ContextLengthError, hookspecs.ContextTooLong),
    (errors.InvalidRequestError, hookspecs.InvalidRequest),
    (errors.QueueFullError, hookspecs.Overloaded),
    (errors.EngineUnavailableError, hookspecs.BackendUnavailable),
    (errors.ModelLoadError, hookspecs.BackendUnavailable),
    (errors.EngineDeadError, hookspecs.BackendCrashed),
    (errors.EngineError, BackendError),
)


class SteppedBackend(Backend):
    """Serves ``model`` with the class that ``executor`` ("package.module:Class") names. ``model_id`` is for clients.

    ``options`` reach the executor as ``config.executor_options``; who passes them has checked them. Raises
    InvalidRequest, naming the model, for settings that the engine refuses.
    """

    def __init__(self, model: ModelSettings, *, executor: str, options: Mapping[str, Any] | None = None) -> None:
        self.config = engine_config(model, executor, options or {})
        self.model_id = self.config.served_model_name or model_name(self.config.model)
        self.capabilities = _capabilities(self.config.max_model_len)
        self.client = EngineClient(self.config)
        self._plan: tuple[str, ...] = ()

    async def start(self) -> None:
        """Load the model. Raises BackendUnavailable with what is wrong with it."""
        with translated_errors():
            ready = await self.client.start()
        self.capabilities = _capabilities(ready.max_model_len, generates=ready.generates, embeds=ready.embeds)
        self._plan = tuple(ready.plan)

    async def stop(self) -> None:
        """End the engine process; requests still in it fail. The gateway has drained by then."""
        await self.client.stop()

    async def health(self) -> Health:
        return Health(state=self.client.state, detail=self.client.detail)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the engine's output as it comes; the request's last delta has the usage of all choices.

        Raises InvalidRequest and ContextTooLong for what the model cannot be asked, Overloaded while too many wait,
        BackendUnavailable while there is no engine, BackendCrashed if it died after the first output.
        """
        usage = _UsageCount(request.sampling.n)
        with translated_errors():
            async with aclosing(self.client.generate(engine_request(request))) as outputs:
                async for output in outputs:
                    yield self._delta(output, usage.count(output))

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """The vectors of the request's inputs, in their order, as the executor makes them.

        Raises InvalidRequest and ContextTooLong for inputs that the model cannot take, Overloaded while too many wait,
        BackendUnavailable while there is no engine, BackendCrashed if it died meanwhile.
        """
        if request.dimensions is not None:
            message = f"the vectors of model {self.model_id!r} have one length, which cannot be chosen"
            raise InvalidRequest(message, param="dimensions")
        with translated_errors():
            outputs = await self.client.embed(request.inputs)
        return Embeddings(
            vectors=tuple(output.vector for output in outputs),
            usage=Usage(prompt_tokens=sum(output.num_tokens for output in outputs)),
        )

    async def tokenize(self, request: GenerateRequest, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt's token ids. Raises InvalidRequest, Overloaded while too many wait, BackendUnavailable."""
        with translated_errors():
            return await self.client.tokenize(engine_request(request, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Their text. Raises InvalidRequest for an id that is no token's, Overloaded, BackendUnavailable."""
        with translated_errors():
            return await self.client.detokenize(token_ids)

    def load(self) -> Load:
        stats = self.client.stats
        return Load(
            running=stats.running,
            waiting=stats.waiting,
            queued_tokens=stats.queued_tokens,
            blocks_total=stats.num_blocks,
            blocks_free=stats.free_blocks,
            blocks_used=stats.used_blocks,
            blocks_cached=stats.cached_blocks,
            preemptions=stats.preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            restarts=self.client.restarts,
        )

    def describe(self) -> Sequence[str]:
        """What the engine said of itself when it was first ready; also of one that has failed since."""
        return self._plan

    def _delta(self, output: RequestOutput, usage: Usage | None) -> Delta:
        logprobs = output.logprobs
        return Delta(
            text=output.text,
            index=output.index,
            token_ids=output.token_ids,
            logprobs=None if logprobs is None else tuple(map(self._token_logprobs, logprobs)),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            usage=usage,
        )

    def _token_logprobs(self, entry: EngineLogprobs) -> TokenLogprobs:
        chosen = self._token_logprob(entry.token_id, entry.logprob)
        return TokenLogprobs(chosen, tuple(self._token_logprob(*pair) for pair in entry.top))

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        text = self.client.token_bytes(token_id)
        return TokenLogprob(text.decode("utf-8", "replace"), logprob, tuple(text), token_id)


class _UsageCount:
    """Adds up a request's choices, and states the sum when the last of them ends."""

    def __init__(self, num_choices: int) -> None:
        self._unfinished = num_choices
        self._num_output_tokens = 0

    def count(self, output: RequestOutput) -> Usage | None:
        self._num_output_tokens += len(output.token_ids)
        self._unfinished -= output.finish_reason is not None
        if self._unfinished:
            return None
        return Usage(
            prompt_tokens=output.num_prompt_tokens,
            completion_tokens=self._num_output_tokens,
            cached_tokens=output.num_cached_tokens,
        )


def engine_request(request: GenerateRequest, *, add_special_tokens: bool = True) -> EngineRequest:
    """The same request in the engine's terms. Raises InvalidRequestError for sampling parameters out of range."""
    messages = request.messages
    return EngineRequest(
        request_id=request.request_id,
        prompt=request.prompt,
        messages=None if messages is None else tuple(msgspec.to_builtins(message) for message in messages),
        sampling=sampling_params.SamplingParams(**msgspec.structs.asdict(request.sampling)),
        add_special_tokens=add_special_tokens,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
        tenant=request.tenant,
        priority=request.priority,
        weight=request.weight,
        arrival=request.arrival,
        deadline=request.deadline,
        adapter=request.adapter,
        cache_salt=request.cache_salt,
        trace_context=request.trace_context,
    )


def engine_config(
    model: ModelSettings, executor: str = NATIVE_EXECUTOR, options: Mapping[str, Any] | None = None
) -> EngineConfig:
    """The engine's options of a configured model: every setting that EngineConfig has under the same name.

    Raises InvalidRequest, naming the model, for a value that the engine refuses.
    """
    names = {field.name for field in fields(EngineConfig)} & set(msgspec.structs.asdict(model))
    values = {name: getattr(model, name) for name in names} | {"model": model.model or DEFAULT_MODEL}
    try:
        return EngineConfig(**values, executor=executor, executor_options=options or {})
    except errors.InvalidRequestError as error:
        name = model.served_model_name or model.model or DEFAULT_MODEL
        raise hookspecs.InvalidRequest(f"model {name!r}: {error}", param=error.param) from error


def model_name(model: str) -> str:
    """A name to serve a model under: its id on the hub or built-in name, the file's or folder's of anything else."""
    location = model.partition("#")[0]
    is_local = location.startswith((".", "/", "~", "pypi:")) or PurePath(location).suffix in (".gguf", ".safetensors")
    return _FORMAT.sub("", PurePath(location).name) if is_local else location.partition("@")[0]


_FORMAT = re.compile(r"(\.gguf|\.safetensors)$")


def _capabilities(max_model_len: int | None, *, generates: bool = True, embeds: bool = False) -> Capabilities:
    return Capabilities(
        chat=generates,
        completions=generates,
        embeddings=embeds,
        token_prompts=True,
        logprobs=True,
        seed=True,
        tokenize=True,
        max_model_len=max_model_len,
        own_queue=True,
    )


@contextmanager
def translated_errors() -> Iterator[None]:
    """The engine library's errors leave as the gateway's."""
    try:
        yield
    except errors.EngineError as error:
        raise _backend_error(error) from error


def _backend_error(error: errors.EngineError) -> BackendError:
    kind = next(kind for known, kind in _ERRORS if isinstance(error, known))
    param = getattr(error, "param", None)
    retry_after = getattr(error, "retry_after", None)
    if retry_after is None and kind is hookspecs.BackendUnavailable:
        retry_after = RETRY_AFTER
    return kind(str(error), param=param, retry_after=retry_after)
