"""EngineClient: everything of an engine that lives in its user's process, on its event loop.

It owns the engine process (through the supervisor), the tokenizer and the requests in flight. It knows text and tokens;
it refuses to know HTTP, and never imports torch: the process that answers HTTP starts at once and stays small.

A request is in exactly one place at a time: being turned into tokens (in a thread), waiting for an engine (while one is
restarted), or in the engine. However its reader goes away - cancelled, closed, failed - it leaves that place, and the
engine hears of it at most once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from suimon.core_engine.chat_template import ChatTemplateRenderer
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.daemon_thread import in_daemon_thread
from suimon.core_engine.drain_rate import DrainRate
from suimon.core_engine.embedding_calls import EmbeddingCalls
from suimon.core_engine.errors import (
    EngineDeadError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    error_class,
)
from suimon.core_engine.loader.sources import resolve_model
from suimon.core_engine.messages import (
    AbortRequest,
    AddRequest,
    Embedding,
    EndTokens,
    EngineReady,
    SequenceOutput,
    StepOutputs,
)
from suimon.core_engine.outputs import EmbeddingOutput, RequestOutput
from suimon.core_engine.prompts import PromptBuilder, load_text_side
from suimon.core_engine.public_text import public_text
from suimon.core_engine.request import EngineRequest
from suimon.core_engine.request_stream import RequestStream
from suimon.core_engine.request_text import RequestText
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.stats import EngineStats
from suimon.core_engine.supervisor import EngineSupervisor
from suimon.core_engine.tokenizer import Tokenizer
from suimon.core_engine.tracing import record_spans

PROMPT_THREADS = 2
MAX_QUEUED_INPUTS = 1 << 15  # to embed, of all requests together: they take memory while they wait
CLOSE_TIMEOUT = 1.0  # seconds for the template's workers to end; their pipes close with this process anyway
Result = TypeVar("Result")


class EngineClient:
    """One engine process and the requests in it. All methods belong to the event loop that called ``start``.

    ``state`` is loading, ready, restarting, draining or failed, and ``detail`` one line about it. ``stats`` is the
    latest snapshot, its counters going on where a dead engine's stopped; inputs to embed count as waiting.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._stats = EngineStats()
        self._past_stats = EngineStats()
        self._supervisor = EngineSupervisor(config, self)
        self._threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="prompt")
        self._side_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._num_aside = 0  # calls that wait for it
        self._prompts: PromptBuilder | None = None
        self._failure = ""
        self._draining = False
        self._streams: dict[str, RequestStream] = {}
        self._embeddings = EmbeddingCalls(self._supervisor.send)
        self._choices = 0  # of all requests that were admitted and are not over
        self._serials = itertools.count(1)
        self._drain_rate = DrainRate()
        self._idle = asyncio.Event()
        self._idle.set()

    # --- state

    @property
    def state(self) -> str:
        if self._draining:
            return "draining"
        if self._failure:
            return "failed"
        state = self._supervisor.state
        return "loading" if state == "ready" and self._prompts is None else state

    @property
    def detail(self) -> str:
        if self._draining:
            return "shutting down: no new requests are taken"
        return self._failure or self._supervisor.detail

    @property
    def stats(self) -> EngineStats:
        calls = self._embeddings
        return replace(
            self._stats,
            waiting=self._stats.waiting + calls.num_inputs,
            queued_tokens=self._stats.queued_tokens + calls.num_tokens,
        )

    @property
    def restarts(self) -> int:
        """How often a dead or hung engine was replaced."""
        return self._supervisor.restarts

    @property
    def pid(self) -> int:
        """The engine's process id, 0 if there is none now."""
        return self._supervisor.pid

    @property
    def model(self) -> EngineReady:
        """What the engine said of itself when it was ready. Raises EngineUnavailableError before that."""
        self._check_loaded()
        assert self._supervisor.ready is not None
        return self._supervisor.ready

    # --- life

    async def start(self) -> EngineReady:
        """Start the process, then find the model and load its tokenizer beside it; return when all are ready.

        Raises ModelLoadError (or its kind) with what is wrong; the state is then ``failed``. ``stop`` in any case.
        """
        path = asyncio.create_task(in_daemon_thread(lambda: str(resolve_model(self.config.model))))
        text_side = asyncio.create_task(self._load_text_side(path))
        try:
            ready = await self._supervisor.start(path)
            tokenizer, renderer = await text_side
        except BaseException as error:
            self._failure = public_text(error)
            path.cancel()
            text_side.cancel()
            await asyncio.gather(path, text_side, return_exceptions=True)
            await self._supervisor.stop()
            raise
        self._prompts = PromptBuilder(tokenizer, renderer, ready.vocab_size, ready.max_model_len)
        self._supervisor.send(EndTokens(sorted(tokenizer.eos_token_ids)))
        return ready

    async def stop(self, drain_timeout: float = 0.0) -> None:
        """Take no new requests, give those in flight ``drain_timeout`` seconds, fail what is left, end the process."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_timeout)
        self._fail_all("the server is shutting down")
        await self._supervisor.stop()
        for pool in (self._threads, self._side_thread):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._prompts is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(in_daemon_thread(self._prompts.close), CLOSE_TIMEOUT)

    async def _load_text_side(self, path: asyncio.Task[str]) -> tuple[Tokenizer, ChatTemplateRenderer]:
        found = await path
        return await in_daemon_thread(lambda: load_text_side(found, self.config.chat_template))

    # --- work

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield what the engine writes, for all choices in one stream; the last of each has ``finish_reason``.

        While a dead engine is being replaced, requests wait for the next one. Raises InvalidRequestError,
        ContextLengthError, QueueFullError, EngineUnavailableError (loading, draining, failed) before the first output;
        EngineDeadError if the engine died after it.
        """
        prompts = self._admit()
        num_choices = request.sampling.n
        self._occupy(num_choices)
        try:
            token_ids, sampling = await self._in_pool(lambda: prompts.build(request))
            stream = self._submit(request, token_ids, sampling)
            try:
                text = RequestText(request.request_id, token_ids, sampling, prompts.tokenizer)
                while text.unfinished:
                    for output in await stream.next():
                        result = text.advance(output)
                        if result is not None:
                            yield result
                    self._abort_stopped(stream, text.unfinished)
            finally:
                self._release(stream)
        finally:
            self._occupy(-num_choices)

    async def embed(self, inputs: Sequence[str | Sequence[int]]) -> list[EmbeddingOutput]:
        """The vectors of texts or token ids, in their order.

        A request counts as one sequence, for requests take turns in the engine. Raises InvalidRequestError,
        ContextLengthError (with the numbers), QueueFullError, EngineUnavailableError, EngineDeadError.
        """
        self._check_embeds(inputs)
        prompts = self._admit()
        self._check_inputs()
        self._occupy(1)
        try:
            encoded = self._encoded(prompts, inputs)
            return await self._embeddings.run(f"embed#{next(self._serials)}", len(inputs), encoded)
        finally:
            self._occupy(-1)

    async def _encoded(self, prompts: PromptBuilder, inputs: Sequence[str | Sequence[int]]) -> list[list[int]]:
        token_ids = await self._in_pool(lambda: prompts.build_inputs(inputs))
        self._check_not_draining()
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text; often no complete UTF-8 by itself. Also while the engine drains."""
        prompts = self._prompts or self._check_loaded()
        return prompts.tokenizer.token_bytes(token_id)

    async def tokenize(self, request: EngineRequest) -> list[int]:
        """The token ids of the request's prompt or rendered messages.

        Raises InvalidRequestError, QueueFullError while too many wait for this, EngineUnavailableError.
        """
        prompts = self._check_loaded()
        return await self._aside(lambda: prompts.encode(request))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ``token_ids``.

        Raises InvalidRequestError for one outside the vocabulary, and otherwise what ``tokenize`` raises.
        """
        prompts = self._check_loaded()
        return await self._aside(lambda: prompts.decode(token_ids, skip_special_tokens=skip_special_tokens))

    # --- what the supervisor tells (see Listener)

    def engine_ready(self, ready: EngineReady) -> None:
        if self._prompts is not None:
            self._supervisor.send(EndTokens(sorted(self._prompts.tokenizer.eos_token_ids)))
        for stream in self._streams.values():
            if stream.is_wanted:
                self._send(stream)

    def engine_outputs(self, message: StepOutputs) -> None:
        self._stats = message.stats.counting_from(self._past_stats)
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # its reader left; the abort is on its way
            if output.error is None:
                stream.push(output)
            else:
                stream.open_choices.discard(output.index)
                stream.fail(_request_error(output))

    def engine_embedding(self, message: Embedding) -> None:
        self._embeddings.take(message)

    def engine_died(self, reason: str) -> None:
        self._embeddings.fail_all(EngineDeadError(f"the engine ended while it worked on this request: {reason}"))
        self._stats = self._past_stats = self._stats.when_gone()
        for stream in self._streams.values():
            stream.crashes += stream.is_sent
            stream.is_sent = False
            if stream.is_wanted and not stream.may_be_replayed:
                stream.fail(EngineDeadError(f"the engine ended while it worked on this request: {reason}"))

    def engine_given_up(self, reason: str) -> None:
        self.engine_died(reason)
        self._fail_all("the engine failed again and again and was given up")

    # --- the way in and out

    def _check_loaded(self) -> PromptBuilder:
        if self._prompts is None or self.state not in ("ready", "restarting"):
            raise EngineUnavailableError(f"the engine of this model is {self.state}: {_ADVICE.get(self.state, '')}")
        return self._prompts

    def _admit(self) -> PromptBuilder:
        prompts = self._check_loaded()
        limit = self.config.max_num_queued_requests
        if self._choices >= self.model.max_num_seqs + limit:
            wait = self._drain_rate.seconds_for(limit)
            message = f"{limit} sequences are waiting already (max_num_queued_requests): try again in {wait:.0f} s"
            raise QueueFullError(message, retry_after=wait)
        return prompts

    def _check_embeds(self, inputs: Sequence[str | Sequence[int]]) -> None:
        if not self.model.embeds:
            raise InvalidRequestError("this model computes no embeddings", param="model")
        if not inputs:
            raise InvalidRequestError("there is nothing to embed: give one input or more", param="input")

    def _check_inputs(self) -> None:
        if self._embeddings.num_inputs >= MAX_QUEUED_INPUTS:
            wait = self._drain_rate.seconds_for(self._choices)
            message = f"{MAX_QUEUED_INPUTS} inputs are waiting for their embeddings already: try again in {wait:.0f} s"
            raise QueueFullError(message, retry_after=wait)

    def _check_not_draining(self) -> None:
        if self._draining:
            raise EngineUnavailableError("the server is shutting down")

    def _occupy(self, num_choices: int) -> None:
        """Count choices in, or out with a negative number."""
        self._choices += num_choices
        if num_choices < 0:
            self._drain_rate.count()
        if self._choices:
            self._idle.clear()
        else:
            self._idle.set()

    def _submit(self, request: EngineRequest, token_ids: list[int], sampling: SamplingParams) -> RequestStream:
        self._check_not_draining()
        message = AddRequest(
            request_id=f"{request.request_id}#{next(self._serials)}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            tenant=request.tenant,
            priority=request.priority,
            weight=request.weight,
            arrival=request.arrival or time.monotonic(),
            deadline=request.deadline,
            adapter=request.adapter,
            cache_salt=request.cache_salt,
            trace_context=dict(request.trace_context),
        )
        stream = RequestStream(message, set(range(sampling.n)))
        self._send(stream)
        self._streams[message.request_id] = stream
        return stream

    def _send(self, stream: RequestStream) -> None:
        """Hand it to the engine, if there is one; otherwise ``engine_ready`` will."""
        try:
            stream.is_sent = stream.is_sent or self._supervisor.send(stream.message)
        except ValueError as error:
            raise InvalidRequestError(f"the request is too large: {error}") from None

    def _abort_stopped(self, stream: RequestStream, unfinished: set[int]) -> None:
        """Stop strings have ended choices that the engine, which knows no text, is still writing."""
        stopped = stream.open_choices - unfinished if unfinished else set()
        for index in stopped:
            stream.open_choices.discard(index)
            self._supervisor.send(AbortRequest(stream.message.request_id, index))

    def _release(self, stream: RequestStream) -> None:
        """The reader is done or gone: whatever the engine still does for it is for nothing."""
        del self._streams[stream.message.request_id]
        if stream.is_sent and stream.open_choices:
            self._supervisor.send(AbortRequest(stream.message.request_id))
        message = stream.message
        record_spans(message.trace_context, stream.timing, {"suimon.request_id": message.request_id})

    def _fail_all(self, message: str) -> None:
        self._embeddings.fail_all(EngineUnavailableError(message))
        for stream in self._streams.values():
            if stream.is_wanted:
                stream.fail(EngineUnavailableError(message))

    async def _in_pool(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def _aside(self, function: Callable[[], Result]) -> Result:
        """In a thread of its own, for what no answer waits for: a chat's prompt is not to wait behind it."""
        limit = self.config.max_num_queued_requests
        if self._num_aside >= limit:
            message = f"{limit} texts are waiting to be tokenized already (max_num_queued_requests): try again"
            raise QueueFullError(message)
        self._num_aside += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._side_thread, function)
        finally:
            self._num_aside -= 1


_ADVICE = {
    "loading": "try again when /health/ready says so",
    "draining": "the server is shutting down",
    "failed": "the server's log says why; it must be restarted",
}


def _request_error(output: SequenceOutput) -> EngineError:
    """The error of a request that the engine refused or could not finish, of its own class if that is one of ours."""
    return error_class(output.error_kind)(output.error)
