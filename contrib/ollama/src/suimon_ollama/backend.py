"""An Ollama server as a backend: every configured model whose ``backend`` is ``ollama``.

Chats go to ``/api/chat``, where Ollama applies the model's own template; completions to ``/api/generate`` with ``raw``,
where it applies none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from suimon.gateway.hookspecs import Backend, Capabilities, Delta, GenerateRequest, hookimpl
from suimon.plugins.remote_backend import RemoteBackend
from suimon.plugins.remote_options import RemoteOptions, read_options
from suimon.plugins.remote_streams import JsonLineReader
from suimon_ollama.native import REFUSED, LineReader, body_of, check, options_of

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings, Settings


class OllamaOptions(RemoteOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a model, beyond those of every remote server."""

    num_ctx: Annotated[int, Meta(ge=1)] | None = None  # context that the server is to give it; default: the server's
    keep_alive: str = ""  # how long the server keeps the model loaded, such as "10m"; default: the server's


class OllamaBackend(RemoteBackend):
    """Asks one Ollama server for one model."""

    health_path = "/api/version"
    content_types = ("application/x-ndjson",)
    options: OllamaOptions

    def __init__(self, model: ModelSettings, options: OllamaOptions, **how: Any) -> None:
        super().__init__(model, options, **how)
        self.client.errors.aliases[503] = 429  # its word for a full queue
        self.capabilities = Capabilities(
            logprobs=True,
            seed=True,
            unsupported=frozenset(REFUSED),
            max_model_len=options.num_ctx,
            max_concurrency=options.max_concurrency,
        )

    def describe(self) -> Sequence[str]:
        """Where, and what it lacks that matters to tenants."""
        return (
            f"served by Ollama at {self.client.root} as {self.upstream_model!r}",
            "that server takes no cache_salt: tenants share its prefix cache",
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the server's answer as it comes."""
        check(request)
        path, body = body_of(request, self.upstream_model, options_of(request.sampling, self.options.num_ctx))
        if self.options.keep_alive:
            body["keep_alive"] = self.options.keep_alive
        answer = LineReader(request, self.client.errors)
        async with (
            self.exchange(request, path, body, answer) as reply,
            aclosing(reply.items(JsonLineReader())) as lines,
        ):
            async for line in lines:
                for delta in answer.read(line):
                    yield delta
                if answer.is_complete:
                    await reply.release()
                    return
            raise reply.failed("ended its answer before it was finished")


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "ollama":
            register(OllamaBackend(model, read_options(model, OllamaOptions)))
