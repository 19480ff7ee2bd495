"""The plugin: a backend for every configured model whose ``backend`` is ``example``.

Its option is ``pause``, the seconds that a word takes. The library blocks, so it runs in a thread per request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from itertools import islice
from typing import TYPE_CHECKING

from suimon.gateway.hookspecs import (
    Backend,
    Capabilities,
    Delta,
    GenerateRequest,
    InvalidRequest,
    Load,
    Usage,
    hookimpl,
    stream_from_thread,
)
from suimon_example.engine import WordReverser

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings, Settings


class ExampleBackend(Backend):
    """Recites the prompt backwards. A word is a token; of the sampling parameters only ``max_tokens`` has a meaning."""

    capabilities = Capabilities(
        unsupported=frozenset({"n", "stop", "stop_token_ids", "min_tokens", "logit_bias"}),
        max_concurrency=8,  # threads; further requests wait in the gateway
    )

    def __init__(self, model_id: str, *, pause: float = 0.0) -> None:
        self.model_id = model_id
        self._library = WordReverser(pause)
        self._running = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield word after word."""
        text = request.last_user_text()
        if not self._library.words(text):
            raise InvalidRequest("the prompt has no words", param="prompt")
        self._running += 1
        try:
            async with aclosing(stream_from_thread(lambda: self._deltas(text, request.sampling.max_tokens))) as deltas:
                async for delta in deltas:
                    yield delta
        finally:  # also when the client leaves in the middle
            self._running -= 1

    def _deltas(self, text: str, max_tokens: int | None) -> Iterator[Delta]:
        """In the thread."""
        given = len(self._library.words(text))
        said = 0
        for word in islice(self._library.recite(text), max_tokens):
            said += 1
            yield Delta(text=word)
        usage = Usage(prompt_tokens=given, completion_tokens=said)
        yield Delta(finish_reason="stop" if said == given else "length", usage=usage)

    def load(self) -> Load:
        return Load(running=self._running)


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "example":
            name = model.served_model_name or "example"
            register(ExampleBackend(name, pause=_pause(name, model)))


def _pause(name: str, model: ModelSettings) -> float:
    """The one option, checked: what is not known is refused, with the model's name and what there is."""
    pause = model.options.get("pause", 0.0)
    if set(model.options) <= {"pause"} and type(pause) in (int, float) and pause >= 0:
        return float(pause)
    message = f"model {name!r}: the option of the example backend is `pause`, in seconds; got {model.options}"
    raise InvalidRequest(message, param="options")
