"""LLM: the offline door. The same engine, tokenizer and text as behind HTTP, in this process and without waiting.

Knows batches of prompts; refuses to know processes, streams and event loops. Not thread-safe: one caller at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from suimon.core_engine.assembly import build_engine
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import EngineError, InvalidRequestError
from suimon.core_engine.loader.sources import DEFAULT_MODEL, resolve_model
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.outputs import EngineOutput, RequestOutput
from suimon.core_engine.prompts import PromptBuilder, load_text_side
from suimon.core_engine.public_text import clean
from suimon.core_engine.request import EngineRequest, Message
from suimon.core_engine.request_text import RequestText
from suimon.core_engine.sampling_params import SamplingParams

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One continuation. ``logprobs`` runs parallel to ``token_ids`` when asked for; see RequestOutput for the rest."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str = ""
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What became of one prompt; ``num_cached_tokens`` of it were in the prefix cache already."""

    prompt: Prompt | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first continuation, which is the only one unless ``n`` was set."""
        return self.completions[0].text


class LLM:
    """An engine to call: ``LLM().generate("Once upon a time")[0].text``. Keyword arguments are EngineConfig's fields.

    Raises ModelLoadError, and InvalidRequestError for a wrong option. Use as a context manager, or call ``close``.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        path = str(resolve_model(model))
        built = build_engine(self.config, path)
        tokenizer, renderer = load_text_side(path, self.config.chat_template)
        self.engine = built.engine
        self.plan = built.plan
        self.engine.add_end_tokens(tokenizer.eos_token_ids)
        self._prompts = PromptBuilder(
            tokenizer, renderer, self.engine.executor.capabilities.vocab_size, self.engine.context_limit
        )
        self._serials = itertools.count(1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Continue every prompt - text, token ids, or a list of either - and return the results in their order.

        ``sampling_params`` is for all of them, or a list of as many. Raises InvalidRequestError or ContextLengthError
        for a prompt that cannot be computed, before any is; EngineError if one fails.
        """
        listed = _as_list(prompts)
        params = _one_each(sampling_params, len(listed))
        return self._run([self._request(prompt=p, sampling=s) for p, s in zip(listed, params, strict=True)])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[GenerationResult]:
        """Answer one chat, or a list of them, by the model's own template.

        ``template_options`` are EngineRequest's: ``add_generation_prompt``, ``continue_final_message``,
        ``chat_template_kwargs``. Raises as ``generate``.
        """
        chats: list[Any] = [messages] if not messages or isinstance(messages[0], dict) else list(messages)
        params = _one_each(sampling_params, len(chats))
        pairs = zip(chats, params, strict=True)
        return self._run([self._request(messages=c, sampling=s, **template_options) for c, s in pairs])

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``."""
        return self._prompts.encode(self._request(prompt=text, add_special_tokens=add_special_tokens))

    def close(self) -> None:
        """Release the model. The object is of no use afterwards."""
        self.engine.close()
        self._prompts.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, **fields: Any) -> EngineRequest:
        return EngineRequest(request_id=str(next(self._serials)), **fields)

    def _run(self, requests: Sequence[EngineRequest]) -> list[GenerationResult]:
        jobs = {request.request_id: _Job(request, self._prompts) for request in requests}
        try:
            for request_id, job in jobs.items():
                self.engine.add_request(request_id, job.token_ids, job.sampling)
            while self.engine.has_work:
                for output in self.engine.step():
                    self._take(jobs[output.request_id], output)
        finally:
            for request_id, job in jobs.items():
                if job.text.unfinished:
                    self.engine.abort(request_id)
        return [job.result for job in jobs.values()]

    def _take(self, job: _Job, output: EngineOutput) -> None:
        if output.error is not None:
            raise EngineError(clean(output.error))
        result = job.text.advance(output)
        if result is None:
            return
        job.add(result)
        if result.finish_reason is not None and output.finish_reason is None:
            self.engine.abort(output.request_id, output.index)  # a stop string, of which the engine knows nothing


class _Job:
    """One prompt being continued."""

    def __init__(self, request: EngineRequest, prompts: PromptBuilder) -> None:
        self.token_ids, self.sampling = prompts.build(request)
        self.text = RequestText(request.request_id, self.token_ids, self.sampling, prompts.tokenizer)
        self._prompt = request.prompt
        self._num_cached_tokens = 0
        self._completions = [
            Completion(index, logprobs=None if self.sampling.logprobs is None else [])
            for index in range(self.sampling.n)
        ]

    def add(self, output: RequestOutput) -> None:
        completion = self._completions[output.index]
        completion.text += output.text
        completion.token_ids += output.token_ids
        if completion.logprobs is not None:
            completion.logprobs += output.logprobs or ()
        completion.finish_reason = output.finish_reason or ""
        completion.stop_reason = output.stop_reason
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)

    @property
    def result(self) -> GenerationResult:
        return GenerationResult(self._prompt, self.token_ids, self._completions, self._num_cached_tokens)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string or a list of ids is one prompt; a list of strings or of lists is several."""
    if isinstance(prompts, str) or (prompts and all(isinstance(item, int) for item in prompts)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    listed = list(params)
    if len(listed) != count:
        message = f"sampling_params must be one, or one for each of the {count} prompts, got {len(listed)}"
        raise InvalidRequestError(message, param="sampling_params")
    return listed
