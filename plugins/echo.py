"""A backend that answers with the prompt, word by word: the smallest complete plugin, and a model for gateway tests.

It is registered for every configured model whose ``backend`` is ``echo``. Its option ``delay`` (seconds) makes it pause
before each word.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from suimon.gateway.hookspecs import Backend, Capabilities, Delta, GenerateRequest, InvalidRequest, Usage, hookimpl

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import Settings

_WORDS = re.compile(r"\S+\s*|\s+")


class EchoBackend(Backend):
    """A word, with the white space after it, is a token; ``max_tokens`` and ``n`` are honoured."""

    capabilities = Capabilities(unsupported=frozenset({"stop", "stop_token_ids", "min_tokens", "logit_bias"}))

    def __init__(self, model_id: str = "echo", *, delay: float = 0.0) -> None:
        self.model_id = model_id
        self._delay = delay

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Every choice in turn; the usage comes with the last delta."""
        prompt = _WORDS.findall(request.last_user_text())
        if not prompt:
            raise InvalidRequest("there is nothing to echo: the prompt is empty", param="prompt")
        answer = prompt[: request.sampling.max_tokens]
        sampling = request.sampling
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(answer) * sampling.n)
        for index in range(sampling.n):
            for word in answer:
                await asyncio.sleep(self._delay)
                yield Delta(text=word, index=index)
            reason = "stop" if len(answer) == len(prompt) else "length"
            is_last = index == sampling.n - 1
            yield Delta(index=index, finish_reason=reason, usage=usage if is_last else None)


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "echo":
            name = model.served_model_name or model.model or "echo"
            register(EchoBackend(name, delay=_delay(name, model.options)))


def _delay(name: str, options: Mapping[str, Any]) -> float:
    delay = options.get("delay", 0.0)
    if set(options) <= {"delay"} and isinstance(delay, int | float) and delay >= 0:
        return float(delay)
    message = f"model {name!r}: the option of the echo backend is `delay`, a number of seconds; got {dict(options)}"
    raise InvalidRequest(message, param="options")
