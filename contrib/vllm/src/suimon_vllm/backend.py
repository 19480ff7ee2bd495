"""vLLM in the gateway's process: a backend for every configured model whose ``backend`` is ``vllm``.

vLLM computes in processes of its own; here is its ``AsyncLLM``. It schedules tokens itself, so the gateway's admission
stands in front of it. Prompts are rendered and encoded by Suimon's code, so a chat reads the same on every backend;
sampling, text, stop strings and log-probabilities are vLLM's. It is imported when a model starts, never before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from importlib import import_module
from operator import contains
from typing import TYPE_CHECKING, Any

from suimon.core_engine.daemon_thread import in_daemon_thread
from suimon.core_engine.loader.sources import resolve_model
from suimon.core_engine.prompts import PromptBuilder, load_text_side
from suimon.core_engine.sampling_params import SamplingParams
from suimon.gateway.hookspecs import (
    Backend,
    BackendCrashed,
    BackendUnavailable,
    Capabilities,
    Delta,
    GenerateRequest,
    Health,
    InvalidRequest,
    Load,
    TokenLogprob,
    TokenLogprobs,
    Usage,
    hookimpl,
)
from suimon.plugins.stepped import engine_request, model_name, translated_errors
from suimon_vllm.options import VLLMOptions, engine_arguments, read_options

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings, Settings

log = logging.getLogger("suimon.vllm")

INSTALL_HINT = 'pip install "suimon-vllm[vllm]"'
# Fields of SamplingParams that vLLM has under the same name.
SAME = (
    *(
        "n",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
    ),
    *("frequency_penalty", "seed", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs"),
)


class VLLMBackend(Backend):
    """Serves a checkpoint in Hugging Face's layout. Raises InvalidRequest, naming model and option."""

    def __init__(self, model: ModelSettings) -> None:
        self.model_id = model.served_model_name or model_name(model.model)
        if not model.model:
            message = f"model {self.model_id!r}: `model` must be given: a folder in Hugging Face's layout, or an id"
            raise InvalidRequest(message, param="model")
        self.options: VLLMOptions = read_options(model, self.model_id)
        self._settings = model
        self._engine: Any = None
        self._prompts: PromptBuilder | None = None
        self._running = 0
        self._is_stopped = False
        self._settle(model.max_model_len)

    def _settle(self, max_model_len: int | None) -> None:
        self.capabilities = Capabilities(
            token_prompts=True,
            logprobs=True,
            seed=True,
            tokenize=True,
            max_model_len=max_model_len,
            max_concurrency=self.options.max_concurrency,
        )

    # --- Life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises BackendUnavailable with what is wrong, or how to install what is missing."""
        with translated_errors():
            self._engine, self._prompts = await in_daemon_thread(self._load)
        self._settle(self._engine.model_config.max_model_len)

    def _load(self) -> tuple[Any, PromptBuilder]:
        """Everything that blocks. vLLM finds the event loop at its first request."""
        vllm, async_llm = self._import("vllm"), self._import("vllm.v1.engine.async_llm")
        folder = str(resolve_model(self._settings.model))
        tokenizer, renderer = load_text_side(folder, self._settings.chat_template)
        engine = None
        try:
            arguments = vllm.AsyncEngineArgs(**engine_arguments(self._settings, self.options, folder))
            engine = async_llm.AsyncLLM.from_engine_args(arguments)
            config = engine.model_config
            prompts = PromptBuilder(tokenizer, renderer, config.get_vocab_size(), config.max_model_len)
        except Exception as error:  # of its arguments, CUDA, the checkpoint: no common class
            renderer.close()
            if engine is not None:
                engine.shutdown()
            raise BackendUnavailable(f"vLLM cannot load the model {self.model_id!r}: {error}") from error
        if self._is_stopped:  # nobody waited for it
            engine.shutdown()
            prompts.close()
        return engine, prompts

    def _import(self, name: str) -> Any:
        try:
            return import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # missing, or it misses a CUDA library
            message = f"model {self.model_id!r} needs vLLM, which cannot be imported ({error})"
            raise BackendUnavailable(message, install_hint=INSTALL_HINT) from error

    async def stop(self) -> None:
        """End vLLM's processes and the template's workers."""
        self._is_stopped = True
        engine, self._engine = self._engine, None
        prompts, self._prompts = self._prompts, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)
        if prompts is not None:
            await asyncio.to_thread(prompts.close)

    async def health(self) -> Health:
        """Whether vLLM's processes live, as it has noticed itself."""
        if self._engine is None:
            return Health(state="loading")
        return Health(state="failed", detail="vLLM's engine has died") if self._engine.errored else Health()

    def load(self) -> Load:
        return Load(running=self._running)

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield vLLM's output as it comes; leaving aborts the request there."""
        if request.adapter is not None:
            raise InvalidRequest("the vllm backend does not serve LoRA adapters", param="model")
        engine, prompts = self._ready()
        with translated_errors():
            token_ids, params = await asyncio.to_thread(prompts.build, engine_request(request))
        if self._engine is not engine:
            raise BackendUnavailable(f"The model {self.model_id!r} was stopped.", retry_after=5.0)
        counted = _Counted(params, len(token_ids), prompts.tokenizer.token_bytes)
        self._running += 1
        try:
            async with aclosing(self._outputs(engine, request, token_ids, params)) as outputs:
                async for output in outputs:
                    for delta in counted.deltas(output):
                        yield delta
        finally:
            self._running -= 1
            if counted.unfinished and self._engine is engine:
                await engine.abort(request.request_id)

    async def _outputs(self, engine: Any, request: GenerateRequest, *what: Any) -> AsyncGenerator[Any, None]:
        """What vLLM tells. Its errors are told apart here, so that ours are none of the client's."""
        with _engine_errors():
            async with aclosing(self._submit(engine, request, *what)) as outputs:
                async for output in outputs:
                    yield output

    def _submit(self, engine: Any, request: GenerateRequest, token_ids: Sequence[int], params: SamplingParams) -> Any:
        vllm, sampling = import_module("vllm"), import_module("vllm.sampling_params")
        prompt = import_module("vllm.inputs").TokensPrompt(prompt_token_ids=list(token_ids))
        if request.cache_salt is not None:
            prompt["cache_salt"] = request.cache_salt
        wanted = vllm.SamplingParams(
            **{name: getattr(params, name) for name in SAME},
            stop=list(params.stop),
            stop_token_ids=list(params.stop_token_ids),
            logit_bias=dict(params.logit_bias) or None,
            output_kind=sampling.RequestOutputKind.DELTA,
        )
        how = {"trace_headers": request.trace_context} if request.trace_context else {}
        priority = request.priority if self._settings.scheduling_policy == "priority" else 0
        return engine.generate(prompt, wanted, request.request_id, priority=priority, **how)

    def _ready(self) -> tuple[Any, PromptBuilder]:
        if self._engine is None or self._prompts is None:
            raise BackendUnavailable(f"The model {self.model_id!r} is not loaded.", retry_after=5.0)
        if self._engine.errored:
            raise BackendUnavailable(f"The model {self.model_id!r} has failed: the server must be restarted.")
        return self._engine, self._prompts

    async def tokenize(self, request: GenerateRequest, *, add_special_tokens: bool = True) -> list[int]:
        wanted = engine_request(request, add_special_tokens=add_special_tokens)
        with translated_errors():
            _, prompts = self._ready()
            return await asyncio.to_thread(prompts.encode, wanted)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        _, prompts = self._ready()
        with translated_errors():
            return await asyncio.to_thread(lambda: prompts.decode(token_ids, skip_special_tokens=False))


class _Counted:
    """A request's outputs as Deltas: what came of each choice, and the usage with the last."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int, token_bytes: Callable[[int], bytes]) -> None:
        self.unfinished = set(range(params.n))
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._most = params.logprobs
        self._token_bytes = token_bytes

    def deltas(self, output: Any) -> Iterator[Delta]:
        """One for each choice that ``output`` tells of."""
        for choice in output.outputs:
            if choice.index not in self.unfinished:
                continue
            if choice.finish_reason not in (None, "stop", "length"):  # abort, error
                raise BackendCrashed(f"vLLM ended the request: {choice.finish_reason}")
            self._num_tokens += len(choice.token_ids)
            if choice.finish_reason is not None:
                self.unfinished.discard(choice.index)
            usage = Usage(
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=self._num_tokens,
                cached_tokens=output.num_cached_tokens or 0,
            )
            yield Delta(
                text=choice.text,
                index=choice.index,
                token_ids=tuple(choice.token_ids),
                logprobs=None if self._most is None else tuple(self._logprobs(choice, self._most)),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                usage=None if self.unfinished else usage,
            )

    def _logprobs(self, choice: Any, most: int) -> Iterator[TokenLogprobs]:
        """vLLM gives a dict per token: the chosen one and the likeliest, which may hold it too."""
        told = choice.logprobs or ()
        if len(told) != len(choice.token_ids) or not all(map(contains, told, choice.token_ids)):
            raise BackendCrashed("vLLM left out the log-probabilities that were asked for")
        for token_id, entries in zip(choice.token_ids, told, strict=True):
            named = {key: self._named(key, entry.logprob) for key, entry in entries.items()}
            best = sorted(named.values(), key=lambda one: one.logprob, reverse=True)[:most]
            yield TokenLogprobs(named[token_id], tuple(best))

    def _named(self, token_id: int, logprob: float) -> TokenLogprob:
        text = self._token_bytes(token_id)
        return TokenLogprob(text.decode("utf-8", "replace"), logprob, tuple(text), token_id)


@contextmanager
def _engine_errors() -> Iterator[None]:
    """ValueError is vLLM's word for a request that it cannot take; a dead engine has a class of its own."""
    dead = import_module("vllm.v1.engine.exceptions").EngineDeadError
    try:
        yield
    except dead as error:
        raise BackendCrashed("vLLM's engine died while it worked on the request") from error
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "vllm":
            register(VLLMBackend(model))
