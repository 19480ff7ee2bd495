"""One request as TensorRT-LLM answers it: what is asked of it, and its results read as Deltas.

Knows ``SamplingParams``, result objects and their traps, which docs/tensorrt-llm.md lists. Tokens and log-probabilities
are TensorRT-LLM's; text, stop strings and prompts are made by the native engine's code, so that they are the same on
both. Refuses to know how the library is constructed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from suimon.core_engine.detokenizer import IncrementalDetokenizer
from suimon.core_engine.public_text import clean
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.tokenizer import Tokenizer
from suimon.gateway.hookspecs import (
    BackendError,
    BackendUnavailable,
    DeadlineExceeded,
    Delta,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)

log = logging.getLogger("suimon.plugins.tensorrt_llm")

Deltas = AsyncGenerator[Delta, None]

_SEED_MASK = 2**64 - 1  # the library's seeds are unsigned
# Ours -> (theirs, the value that means "off" and is not sent: not every sampler of the library has every parameter).
_OPTIONAL = {
    "min_tokens": ("min_tokens", 0),
    "min_p": ("min_p", 0.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "presence_penalty": ("presence_penalty", 0.0),
    "frequency_penalty": ("frequency_penalty", 0.0),
}


def sampling_arguments(params: SamplingParams, seed: int, end_ids: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Keyword arguments of the library's SamplingParams for one choice.

    ``params.max_tokens`` is resolved. ``end_ids`` end the model's answers: the library takes one, the others are given
    as stop tokens. Whatever has a surprising default is always stated: it samples greedily, 32 tokens, from seed 0.
    """
    greedy = params.is_greedy
    stop_ids = dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else end_ids[1:])))
    arguments: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": 0.0 if greedy else params.temperature,
        "top_k": 1 if greedy else max(params.top_k, 0),
        "top_p": 1.0 if greedy else params.top_p,
        "seed": seed & _SEED_MASK,
        "ignore_eos": params.ignore_eos,
        "detokenize": False,
        # Else it cuts stop tokens off the end of token_ids, which then are fewer than their log-probabilities.
        "include_stop_str_in_output": True,
    }
    if end_ids:
        arguments["end_id"] = end_ids[0]
    if stop_ids:
        arguments["stop_token_ids"] = list(stop_ids)
    if params.logprobs is not None:
        arguments["logprobs"] = max(1, params.logprobs)  # it takes 0 for "none"
    if params.logit_bias:
        arguments["embedding_bias"] = _bias(params.logit_bias, vocab_size)
    chosen = {name: (theirs, getattr(params, name), off) for name, (theirs, off) in _OPTIONAL.items()}
    return arguments | {theirs: value for theirs, value, off in chosen.values() if value != off}


def _bias(logit_bias: Mapping[int, float], vocab_size: int) -> Any:
    """(vocab_size,) float32: what is added to each logit."""
    import torch

    bias = torch.zeros(vocab_size, dtype=torch.float32)
    bias[list(logit_bias)] = torch.tensor(list(logit_bias.values()), dtype=torch.float32)
    return bias


def relative_priority(priority: int) -> float:
    """Ours (lower goes first, 0 is usual) as the library's: from 0 to 1, higher goes first, 0.5 is usual."""
    return 0.5 - priority / (2 * (1 + abs(priority)))


class Choice:
    """One continuation: one request of the library's, with n = 1.

    ``result`` is what ``generate_async(streaming=True)`` returned: an asynchronous iterator of itself, cumulative.
    ``failed`` makes the error to raise of what the library raised meanwhile. ``own_end_ids`` end answers without being
    stop tokens that anybody asked for.
    """

    def __init__(
        self,
        index: int,
        result: Any,
        params: SamplingParams,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        own_end_ids: Sequence[int],
        failed: Callable[[Exception], BackendError],
    ) -> None:
        self.index = index
        self.num_output_tokens = 0
        self._result = result
        self._num_alternatives = params.logprobs
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params, prompt)
        self._own_end_ids = frozenset(own_end_ids) - set(params.stop_token_ids)
        self._failed = failed
        self._num_read = 0
        self._is_over = False

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache, as far as the library tells."""
        return int(getattr(self._result, "cached_tokens", 0) or 0)

    async def deltas(self) -> Deltas:
        """New output as it comes; the last has the finish reason.

        Raises what ``failed`` makes of the library's errors, BackendError for answers that cannot be read or have no
        end, DeadlineExceeded and BackendUnavailable for endings that are none.
        """
        while await self._step():
            delta = self._read()
            yield delta
            if delta.finish_reason is not None:
                return
        raise BackendError("TensorRT-LLM ended the answer without saying why")

    def abort(self) -> None:
        """Tell the library that nobody reads on, unless it is done: what it still computes would be for nothing."""
        if self._is_over or self._result.finished:
            return
        self._is_over = True
        try:
            self._result.abort()
        except Exception:  # it is going down, and the request with it
            log.warning("TensorRT-LLM could not abort a request", exc_info=True)

    async def _step(self) -> bool:
        """Wait for the next response; False when there is none."""
        try:
            await anext(self._result)
        except StopAsyncIteration:
            return False
        except Exception as error:
            raise self._failed(error) from error
        return True

    def _read(self) -> Delta:
        """What the cumulative output has beyond what was read: responses may have been joined while nobody read."""
        output = self._result.outputs[0]
        token_ids = tuple(output.token_ids[self._num_read :])
        logprobs = self._read_logprobs(output, len(token_ids)) if self._num_alternatives is not None else None
        self._num_read += len(token_ids)
        reason = self._finish_reason(output)
        found = self._detokenizer.append(token_ids, reason is not None)
        self.num_output_tokens += found.token_count
        if found.stop is not None:
            reason, stop_reason = "stop", found.stop
            self.abort()  # it knows no stop strings
        else:
            stop_reason = None if output.stop_reason in self._own_end_ids else output.stop_reason
        return Delta(
            text=found.text,
            index=self.index,
            token_ids=token_ids[: found.token_count],
            logprobs=None if logprobs is None else self._told(token_ids, logprobs)[: found.token_count],
            finish_reason=reason,
            stop_reason=stop_reason if reason == "stop" else None,
        )

    def _finish_reason(self, output: Any) -> str | None:
        """The library's word as ours. Raises what an ending that is none means."""
        reason = output.finish_reason
        if reason is None and self._result.finished:
            said = getattr(self._result, "error", None)
            raise BackendError(f"TensorRT-LLM failed on the request: {clean(str(said or 'it does not say why'))}")
        if reason == "timeout":
            raise DeadlineExceeded("TensorRT-LLM's own time limit for the request passed.")
        if reason == "cancelled":
            raise BackendUnavailable("TensorRT-LLM cancelled the request: it may be shutting down.")
        if reason not in (None, "stop", "length"):
            raise BackendError(f"TensorRT-LLM ended the answer with {clean(repr(reason))}, which is not known here")
        return None if reason is None else str(reason)

    def _read_logprobs(self, output: Any, count: int) -> Sequence[Any]:
        """The new tokens' entries. One that is missing is an error: nothing is made up in its place."""
        entries = (output.logprobs or [])[self._num_read : self._num_read + count]
        if len(entries) != count:
            raise BackendError(
                f"TensorRT-LLM gave log-probabilities of {len(entries)} of {count} tokens: ask without logprobs"
            )
        return entries

    def _told(self, token_ids: Sequence[int], entries: Sequence[Any]) -> tuple[TokenLogprobs, ...]:
        return tuple(map(self._token_logprobs, token_ids, entries))

    def _token_logprobs(self, token_id: int, entry: Any) -> TokenLogprobs:
        """``entry`` is {token id: Logprob}, the chosen token and the likeliest ones, or the chosen one's number."""
        wanted = self._num_alternatives or 0
        is_single = not isinstance(entry, Mapping)
        numbers = {token_id: entry} if is_single else {other: found.logprob for other, found in entry.items()}
        if token_id not in numbers or (wanted and (is_single or len(numbers) < wanted)):
            raise BackendError(f"TensorRT-LLM gave no log-probabilities of token {token_id} and {wanted} alternatives")
        best = sorted(numbers, key=numbers.__getitem__, reverse=True)[:wanted]
        return TokenLogprobs(
            self._token_logprob(token_id, numbers[token_id]),
            tuple(self._token_logprob(other, numbers[other]) for other in best),
        )

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        text = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(text.decode("utf-8", "replace"), logprob, tuple(text), token_id)


async def answer(choices: Sequence[Choice], num_prompt_tokens: int) -> Deltas:
    """The deltas of all choices as they come; the last one has the usage.

    The first choice says what was cached: the others may find what it has just computed.
    """
    unfinished = len(choices)
    streams = [choice.deltas() for choice in choices]
    async with aclosing(streams[0] if unfinished == 1 else _merged(streams)) as deltas:
        async for delta in deltas:
            unfinished -= delta.finish_reason is not None
            yield delta if unfinished else msgspec.structs.replace(delta, usage=_usage(choices, num_prompt_tokens))


def _usage(choices: Sequence[Choice], num_prompt_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=sum(choice.num_output_tokens for choice in choices),
        cached_tokens=choices[0].num_cached_tokens,
    )


async def _merged(streams: Sequence[Deltas]) -> Deltas:
    """What any of them yields, as it comes. The first error ends all; so does closing."""
    waiting = {_next_of(stream): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                waiting[_next_of(stream)] = stream
                yield delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(stream.aclose() for stream in streams))


def _next_of(stream: AsyncIterator[Delta]) -> asyncio.Task[Delta]:
    async def take() -> Delta:
        return await anext(stream)

    return asyncio.create_task(take())
