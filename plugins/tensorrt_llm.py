"""NVIDIA's TensorRT-LLM (1.x, its PyTorch backend): one backend for each model whose ``backend`` is ``tensorrt_llm``.

It schedules tokens itself, so the gateway's admission stands in front of it. Options: ``tensorrt_llm_options``; what is
asked of it and how its answers are read: ``tensorrt_llm_answer``. The library is imported when a model starts, never
before. What of this was run, and on what, is said in docs/tensorrt-llm.md.

Threads. ``LLM(...)`` takes minutes and is made in a thread. ``generate_async`` must be called where an event loop runs:
it looks for one to decide whether its result can be awaited, when the result is made and not when the LLM is. So it is
called on the gateway's loop; it is cheap there, because prompts are given as token ids.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from suimon.core_engine.daemon_thread import in_daemon_thread
from suimon.core_engine.loader.sources import resolve_model
from suimon.core_engine.prompts import PromptBuilder, load_text_side
from suimon.core_engine.public_text import clean
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.sequence import Timing
from suimon.core_engine.tracing import PHASES, record_spans
from suimon.gateway.hookspecs import (
    Backend,
    BackendCrashed,
    BackendError,
    BackendUnavailable,
    Capabilities,
    ContextTooLong,
    Delta,
    GenerateRequest,
    Health,
    InvalidRequest,
    Load,
    Offer,
    hookimpl,
)
from suimon.plugins.stepped import engine_request, model_name, translated_errors
from suimon.plugins.tensorrt_llm_answer import Choice, answer, relative_priority, sampling_arguments
from suimon.plugins.tensorrt_llm_options import (
    DEFAULT_CONCURRENCY,
    SEEDED_SAMPLER,
    Checkpoint,
    check_quantization,
    llm_arguments,
    read_checkpoint,
    read_options,
    wrong,
)

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings, Settings

log = logging.getLogger("suimon.plugins.tensorrt_llm")

PACKAGE = "tensorrt_llm"
INSTALL_HINT = 'pip install "suimon[tensorrt-llm]"'
RETRY_AFTER = 5.0  # seconds
SHUTTING_DOWN = "LLM is shutting down"  # what it says to requests once it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A loaded model. ``accepts`` are the parameters of this version's ``generate_async``."""

    llm: Any
    package: ModuleType
    request_error: type[Exception]
    accepts: frozenset[str]
    checkpoint: Checkpoint
    prompts: PromptBuilder

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The token ids that end an answer, the tokenizer's own first."""
        tokenizer = self.prompts.tokenizer
        first = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        return tuple(dict.fromkeys((*first, *sorted(tokenizer.eos_token_ids))))

    def close(self) -> None:
        """Release the GPU and the template's workers; blocks."""
        self.prompts.close()
        self.llm.shutdown()


class TensorRTBackend(Backend):
    """Serves a checkpoint in Hugging Face's layout. Raises InvalidRequest, naming model and option, for a wrong one."""

    def __init__(self, model: ModelSettings) -> None:
        self.options = read_options(model)
        if not model.model:
            raise wrong(model, "model", "must be given: a folder in Hugging Face's layout or a Hugging Face id")
        self.model_id = model.served_model_name or model_name(model.model)
        self._settings = model
        self._loaded: _Loaded | None = None
        self._health = Health(state="loading")
        self._is_stopped = False
        self._handover = threading.Lock()  # between the thread that loads and whoever stops meanwhile
        self._random = random.Random(model.seed)
        self._num_running = 0
        self._choices: set[Choice] = set()  # those that the library may be working on
        self._set_capabilities(model.max_model_len)

    def _set_capabilities(self, max_model_len: int | None) -> None:
        self.capabilities = Capabilities(
            token_prompts=True,
            logprobs=True,
            seed=self.options.sampler_type == SEEDED_SAMPLER,
            tokenize=True,
            max_model_len=max_model_len,
            max_concurrency=self._settings.max_num_seqs or DEFAULT_CONCURRENCY,
        )

    # --- Life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises BackendUnavailable with what is wrong with it, or how to install what is missing."""
        with translated_errors():
            loaded = await in_daemon_thread(self._load_unless_stopped)
        if self._is_stopped:
            raise self._stopped_error()
        self._set_capabilities(loaded.checkpoint.max_model_len)
        self._health = Health()

    def _load_unless_stopped(self) -> _Loaded:
        """``_load``, and see to it that what is loaded is released: by ``stop``, or here if that has gone before."""
        loaded = self._load()
        with self._handover:
            if not self._is_stopped:
                self._loaded = loaded
                return loaded
        loaded.close()
        raise self._stopped_error()

    def _stopped_error(self) -> BackendUnavailable:
        return BackendUnavailable(f"the model {self.model_id!r} was stopped while it was being loaded")

    def _load(self) -> _Loaded:
        """Everything that blocks."""
        package, llmapi = _import_package(self.model_id)
        accepts, request_error = _interface(package, llmapi)
        checkpoint = read_checkpoint(resolve_model(self._settings.model), self._settings.max_model_len)
        check_quantization(self.options, checkpoint, llmapi)
        arguments = llm_arguments(self._settings, self.options, checkpoint, llmapi)
        tokenizer, renderer = load_text_side(str(checkpoint.folder), self._settings.chat_template)
        prompts = PromptBuilder(tokenizer, renderer, checkpoint.vocab_size, checkpoint.max_model_len)
        try:
            llm = package.LLM(**arguments)
        except Exception as error:  # of its arguments, CUDA, MPI, the checkpoint: no common class
            prompts.close()
            raise BackendUnavailable(f"TensorRT-LLM cannot load the model: {_said(error)}") from error
        return _Loaded(
            llm=llm,
            package=package,
            request_error=request_error,
            accepts=accepts,
            checkpoint=checkpoint,
            prompts=prompts,
        )

    async def stop(self) -> None:
        """Abort what runs and release the GPU."""
        with self._handover:
            self._is_stopped = True
            loaded, self._loaded = self._loaded, None
        self._health = Health(state="draining")
        for choice in self._choices:
            choice.abort()
        if loaded is not None:
            await in_daemon_thread(loaded.close)

    async def health(self) -> Health:
        """What starting it and the last requests have told; the library is not asked."""
        return self._health

    def load(self) -> Load:
        """Requests inside the library; of its queue and KV cache it tells only with statistics that slow it down."""
        return Load(running=self._num_running)

    def describe(self) -> Sequence[str]:
        """Version, parallelism and what the checkpoint decided."""
        if self._loaded is None:
            return ()
        checkpoint, options = self._loaded.checkpoint, self.options
        return (
            f"TensorRT-LLM {getattr(self._loaded.package, '__version__', 'of unknown version')}, tensor parallel "
            f"{options.tensor_parallel_size}, pipeline parallel {options.pipeline_parallel_size}",
            f"context {checkpoint.max_model_len} tokens, weights {checkpoint.quant_algo or 'as in the checkpoint'}",
        )

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the answer as it comes. Each of ``n`` choices is a request of its own: see docs/tensorrt-llm.md.

        Raises InvalidRequest and ContextTooLong for what cannot be asked; BackendUnavailable while it loads, stops or
        has failed; BackendCrashed if the library ended meanwhile; BackendError if it failed on this request.
        """
        loaded = self._ready()
        if request.adapter is not None:
            raise InvalidRequest("the tensorrt_llm backend does not serve LoRA adapters", param="model")
        with translated_errors():
            prompt, params = await asyncio.to_thread(loaded.prompts.build, engine_request(request))
        choices: list[Choice] = []
        with self._counted(request, choices) as timing:
            self._submit(request, loaded, prompt, params, choices)
            async with aclosing(answer(choices, len(prompt))) as deltas:
                async for delta in deltas:
                    if timing.first_token is None:
                        timing.first_token = time.monotonic()
                    yield delta

    @contextmanager
    def _counted(self, request: GenerateRequest, choices: list[Choice]) -> Iterator[Timing]:
        """While inside, the request counts as running; however it is left, nothing of it goes on in the library."""
        now = time.monotonic()
        timing = Timing(arrival=request.arrival or now, first_scheduled=now)
        self._num_running += 1
        try:
            yield timing
        finally:
            self._num_running -= 1
            for choice in choices:
                choice.abort()
            self._choices.difference_update(choices)
            timing.finished = time.monotonic()
            attributes = {"suimon.request_id": request.request_id}  # and no queue: that is the gateway's, and its span
            record_spans(request.trace_context, timing, attributes, names=PHASES[1:])

    def _submit(
        self,
        request: GenerateRequest,
        loaded: _Loaded,
        prompt: Sequence[int],
        params: SamplingParams,
        choices: list[Choice],
    ) -> None:
        """Hand every choice to the library, and append it to ``choices``."""
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        how = self._scheduling(request, loaded)
        end_ids = loaded.end_ids
        for index in range(params.n):
            arguments = sampling_arguments(params, seed + index, end_ids, loaded.checkpoint.vocab_size)
            with self._submission_errors(request):
                result = loaded.llm.generate_async(
                    list(prompt), loaded.package.SamplingParams(**arguments), streaming=True, **how
                )
            choice = Choice(index, result, params, prompt, loaded.prompts.tokenizer, end_ids, self._failure_of(loaded))
            choices.append(choice)
            self._choices.add(choice)

    def _scheduling(self, request: GenerateRequest, loaded: _Loaded) -> dict[str, Any]:
        """What this version takes of who asks. A salt is never left out: it keeps tenants apart."""
        wanted = {
            "cache_salt": request.cache_salt,
            "priority": relative_priority(request.priority),
            "trace_headers": request.trace_context or None,
        }
        if request.cache_salt is not None and "cache_salt" not in loaded.accepts:
            raise InvalidRequest("the installed TensorRT-LLM takes no cache_salt", param="cache_salt")
        return {name: value for name, value in wanted.items() if value is not None and name in loaded.accepts}

    def _ready(self) -> _Loaded:
        if self._loaded is None or not self._health.ready:
            state, detail = self._health.state, self._health.detail
            message = f"The model {self.model_id!r} is {state}{f': {detail}' if detail else ''}."
            raise BackendUnavailable(message, retry_after=RETRY_AFTER)
        return self._loaded

    async def tokenize(self, request: GenerateRequest, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt's token ids. Raises InvalidRequest, BackendUnavailable while no model is loaded."""
        with translated_errors():
            wanted = engine_request(request, add_special_tokens=add_special_tokens)
            return await asyncio.to_thread(self._ready().prompts.encode, wanted)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Their text. Raises InvalidRequest for an id that is no token's, BackendUnavailable."""
        prompts = self._ready().prompts
        with translated_errors():
            return await asyncio.to_thread(lambda: prompts.decode(token_ids, skip_special_tokens=False))

    # --- Errors -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _submission_errors(self, request: GenerateRequest) -> Iterator[None]:
        """What the library refuses at once: ValueError is the request's fault. Anything else fails the request alone,
        unless it says that the library has ended.
        """
        try:
            yield
        except ValueError as error:
            param = "prompt" if request.messages is None else "messages"
            is_length = "max_num_tokens" in str(error) or "max_seq_len" in str(error)
            raise (ContextTooLong(_said(error), param=param) if is_length else InvalidRequest(_said(error))) from error
        except Exception as error:  # RequestError, TypeError, and what its torch code raises: no common class
            if SHUTTING_DOWN not in str(error):
                raise BackendError(f"TensorRT-LLM failed on the request: {_said(error)}") from error
            self._fail(error)
            message = f"TensorRT-LLM takes no requests: {_said(error)}"
            raise BackendUnavailable(message, retry_after=RETRY_AFTER) from error

    def _failure_of(self, loaded: _Loaded) -> Callable[[Exception], BackendError]:
        """Makes the error to raise of one that came with a request's results."""

        def failure(error: Exception) -> BackendError:
            if isinstance(error, loaded.request_error):
                return BackendError(f"TensorRT-LLM failed on the request: {_said(error)}")
            self._fail(error)  # anything else came from its workers, and it has shut itself down
            return BackendCrashed(f"TensorRT-LLM failed while it worked on the request: {_said(error)}")

        return failure

    def _fail(self, error: Exception) -> None:
        """From now on every request is refused: the library cannot be revived within its process."""
        if self._health.ready:
            log.error("TensorRT-LLM of model %r failed", self.model_id, exc_info=error)
            self._health = Health(state="failed", detail="TensorRT-LLM has ended; the server must be restarted")


def _said(error: Exception) -> str:
    return clean(str(error) or type(error).__name__)


def _import_package(model_id: str) -> tuple[ModuleType, ModuleType]:
    """The package and its ``llmapi``."""
    try:
        return import_module(PACKAGE), import_module(f"{PACKAGE}.llmapi")
    except (ImportError, OSError, RuntimeError) as error:  # missing, or it misses a CUDA library
        raise BackendUnavailable(
            f"model {model_id!r} needs TensorRT-LLM, which cannot be imported ({_said(error)}): it runs on NVIDIA "
            "GPUs, and pip must be told of NVIDIA's own package index, which alone has it (docs/tensorrt-llm.md)",
            install_hint=INSTALL_HINT,
        ) from error


def _interface(package: ModuleType, llmapi: ModuleType) -> tuple[frozenset[str], type[Exception]]:
    """The parameters of ``generate_async`` and RequestError, looked up before anything is loaded."""
    try:
        return frozenset(inspect.signature(package.LLM.generate_async).parameters), llmapi.RequestError
    except AttributeError as error:
        raise BackendUnavailable(f"the installed TensorRT-LLM is not one of 1.x: {_said(error)}") from error


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "tensorrt_llm":
            register(TensorRTBackend(model))


@hookimpl
def offer_model(model: ModelSettings) -> Offer:
    """Take a model that has options of TensorRT-LLM, before all others: they are how an operator asks for it."""
    if not model.options:
        return Offer.refusal("tensorrt_llm", "is chosen for models that have options of its own")
    try:
        read_options(model)
    except InvalidRequest as error:
        return Offer.refusal("tensorrt_llm", error.message)
    if find_spec(PACKAGE) is None:
        return Offer.refusal("tensorrt_llm", f"is not installed: {INSTALL_HINT}")
    return Offer(backend="tensorrt_llm", rank=Offer.FIRST, reason="the model has options of TensorRT-LLM")
