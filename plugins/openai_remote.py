"""Any server that speaks OpenAI's API as a backend: vLLM, SGLang, trtllm-serve, llama-server, LMDeploy, Suimon.

Registered for every configured model whose ``backend`` is ``openai_remote``; its options are ``OpenAIOptions``. What
the server sends leaves as soon as it has come; when the client leaves, the connection to the server is closed. Which
parameters each kind of server takes is in ``openai_servers``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from suimon.gateway.hookspecs import (
    Backend,
    BackendCrashed,
    BackendError,
    Capabilities,
    Delta,
    Embeddings,
    EmbedRequest,
    GenerateRequest,
    Health,
    InvalidRequest,
    SamplingParams,
    hookimpl,
)
from suimon.plugins.openai_embeddings import PATH as EMBEDDINGS
from suimon.plugins.openai_embeddings import WireVectors, embeddings_body, embeddings_of
from suimon.plugins.openai_servers import COMMON, SERVERS, Server, Tokenizer, recognise
from suimon.plugins.openai_wire import DONE, AnswerReader, request_body, template_fields
from suimon.plugins.remote_backend import LOOK_TIMEOUT, RemoteBackend
from suimon.plugins.remote_options import RemoteOptions, read_options
from suimon.plugins.remote_streams import EventReader

if TYPE_CHECKING:
    from suimon.gateway.hookspecs import ModelSettings, Settings

_CLAIMS = ("chat", "completions", "token_prompts", "tokenize", "logprobs", "seed")
_PARAMETERS = frozenset(SamplingParams.__struct_fields__) - set(_CLAIMS)


class OpenAIOptions(RemoteOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a model. ``kind``: which server it is; ``auto`` asks it.

    ``max_tokens_field``: what the server calls the limit in chats (OpenAI's own newer models know only the new name).
    ``unsupported``: what this server refuses though its kind takes it, so that requests are refused here, by name.
    ``embeddings``: the model makes vectors.
    """

    kind: Literal["auto", "openai", "vllm", "sglang", "trtllm", "llama_cpp", "lmdeploy", "suimon"] = "auto"
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    unsupported: tuple[str, ...] = ()
    embeddings: bool = False


class ListedModel(msgspec.Struct, frozen=True):
    """What a server's /v1/models tells of a model."""

    id: str = ""
    owned_by: str = ""
    max_model_len: int | None = None


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[int]


class _ModelList(msgspec.Struct, frozen=True):
    data: list[ListedModel] = []


class OpenAIRemote(RemoteBackend):
    """Asks a server. ``server`` is the row of its kind: plain OpenAI's until the server has said what it is."""

    options: OpenAIOptions

    def __init__(self, model: ModelSettings, options: OpenAIOptions, **how: Any) -> None:
        super().__init__(model, options, **how)
        self.server: Server = SERVERS["openai" if options.kind == "auto" else options.kind]
        self._listed: ListedModel | None = None
        self._settle()

    # --- Which server it is -------------------------------------------------------------------------------------------

    async def look(self) -> Health:
        """The server's own health, and once its list of models."""
        if self._listed is None:
            await self._read_list()
        status, _ = await self.client.look(self.server.health, LOOK_TIMEOUT)
        return self.health_of(status)

    async def _read_list(self) -> None:
        """What /v1/models says of our model. A server without such a list, or with an odd one, is left at that."""
        status, body = await self.client.look("/v1/models", LOOK_TIMEOUT)
        if status != 200:
            return
        try:
            listed = msgspec.json.decode(body, type=_ModelList).data
        except (msgspec.DecodeError, RecursionError):
            return
        named = [model for model in listed if model.id == self.upstream_model]
        self._listed = next(iter(named or listed), None)
        if self._listed is not None and self.options.kind == "auto":
            self.server = recognise(self._listed.owned_by) or self.server
        self._settle()

    @property
    def _is_listed(self) -> bool:
        """Whether the server's list names our model: what it says of another's size does not hold for ours."""
        return self._listed is not None and self._listed.id == self.upstream_model

    def _settle(self) -> None:
        """State what this server honours."""
        off = set(self.options.unsupported)
        claims = {name: name not in off for name in _CLAIMS}
        claims["token_prompts"] &= self.server.token_prompts
        claims["tokenize"] &= self.server.tokenizer is not None
        self.capabilities = Capabilities(
            **claims,
            embeddings=self.options.embeddings,
            unsupported=frozenset(_PARAMETERS - set(COMMON) - {n for n, to in self.server.takes.items() if to} | off)
            - set(_CLAIMS),
            max_model_len=self._listed.max_model_len if self._is_listed else None,
            max_concurrency=self.options.max_concurrency,
        )

    def describe(self) -> Sequence[str]:
        """Which server was found, and what it lacks that matters to tenants."""
        lines = [f"served by {self.server.name} at {self.client.root} as {self.upstream_model!r}"]
        if self._listed is not None and not self._is_listed:
            lines.append(f"that server does not list {self.upstream_model!r}")
        if not self.server.takes.get("cache_salt"):
            lines.append("that server takes no cache_salt: tenants share whatever prefix cache it has")
        return lines

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the server's answer as it comes."""
        path, body = request_body(request, self.upstream_model, self.server, self.options.unsupported)
        if request.messages is not None and "max_tokens" in body:
            body[self.options.max_tokens_field] = body.pop("max_tokens")
        answer = AnswerReader(request, self.client.errors)
        async with (
            self.exchange(request, path, body, answer) as reply,
            aclosing(reply.items(EventReader())) as events,
        ):
            try:
                async for data in events:
                    if data == DONE:
                        break
                    for delta in answer.read(data):
                        yield delta
            except BackendCrashed:
                if not answer.is_complete:
                    raise
            yield answer.end()
            await reply.release()

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """By /v1/embeddings. Raises InvalidRequest where the model was not configured to make them."""
        if not self.options.embeddings:
            return await super().embed(request)
        body = embeddings_body(request, self.upstream_model)
        answer = await self.ask(EMBEDDINGS, body, WireVectors, trace_context=request.trace_context)
        try:
            return await embeddings_of(answer, len(request.inputs))
        except ValueError as error:
            raise self._odd(f"sent {error}") from None

    async def tokenize(self, request: GenerateRequest, *, add_special_tokens: bool = True) -> list[int]:
        """By the server's own endpoint."""
        tokenizer = self._tokenizer()
        body = {"model": self.upstream_model, **await self._text(request, tokenizer, add_special_tokens)}
        return (await self.ask("/tokenize", body, _Tokens, trace_context=request.trace_context)).tokens

    async def _text(self, request: GenerateRequest, tokenizer: Tokenizer, add_special_tokens: bool) -> dict[str, Any]:
        """The fields that say what is tokenised."""
        if request.messages is None:
            return {tokenizer.text: request.prompt, tokenizer.special: add_special_tokens}
        messages = [msgspec.to_builtins(message) for message in request.messages]
        if tokenizer.messages:
            return {
                "messages": messages,
                "add_generation_prompt": request.add_generation_prompt,
                "continue_final_message": request.continue_final_message,
                **({"chat_template_kwargs": request.chat_template_kwargs} if request.chat_template_kwargs else {}),
            }
        if self.server.name != "llama_cpp":
            raise InvalidRequest(f"messages: {self.server.name} tokenises text only", param="messages")
        asked = {"messages": messages, **template_fields(request, self.server)}
        rendered = await self._text_of("prompt", "/apply-template", asked, request.trace_context)
        return {tokenizer.text: rendered, tokenizer.special: False, "parse_special": True}

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """By the server's own endpoint."""
        tokenizer = self._tokenizer()
        body = {"model": self.upstream_model, "tokens": list(token_ids)}
        return await self._text_of(tokenizer.answer, "/detokenize", body)

    def _tokenizer(self) -> Tokenizer:
        if self.server.tokenizer is None:
            message = f"the server behind model {self.model_id!r} ({self.server.name}) does not expose its tokenizer"
            raise InvalidRequest(message)
        return self.server.tokenizer

    async def _text_of(self, field: str, path: str, body: Any, trace_context: Mapping[str, str] | None = None) -> str:
        """The text in this field of an answer."""
        text = (await self.ask(path, body, dict[str, Any], trace_context=trace_context)).get(field)
        if not isinstance(text, str):
            raise self._odd(f"answered without {field}")
        return text

    def _odd(self, what: str) -> BackendError:
        """The error to raise for a whole answer that is not what it should be."""
        return self.client.errors.unavailable(what).error


@hookimpl
def register_backends(register: Callable[[Backend], None], settings: Settings) -> None:
    """One backend for each configured model that names this plugin."""
    for model in settings.models:
        if model.backend == "openai_remote":
            register(OpenAIRemote(model, _options(model)))


def _options(model: ModelSettings) -> OpenAIOptions:
    options = read_options(model, OpenAIOptions)
    known = {*_CLAIMS, *_PARAMETERS}
    for name in options.unsupported:
        if name not in known:
            words = f"options.unsupported: {name!r} is none of {', '.join(sorted(known))}"
            raise InvalidRequest(
                f"model {model.served_model_name or model.model!r}: {words}", param="options.unsupported"
            )
    return options
