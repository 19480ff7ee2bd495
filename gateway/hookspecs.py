"""The plugin contract: the only file a plugin author reads.

A complete backend plugin::

    from suimon.gateway.hookspecs import Backend, Delta, Usage, hookimpl

    class Parrot(Backend):
        model_id = "parrot"

        async def generate(self, request):
            words = request.last_user_text().split()
            for word in words:
                yield Delta(text=word + " ")
            yield Delta(finish_reason="stop", usage=Usage(completion_tokens=len(words)))

    @hookimpl
    def register_backends(register, settings):
        register(Parrot())

Three rules. Yield ``Delta``s; the last one of each choice carries ``finish_reason``. You are cancelled by your
generator being closed, so clean up in ``finally``. Raise one of the errors below; anything else becomes a 500 that is
logged with your plugin's name.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pluggy

if TYPE_CHECKING:
    import argparse

    # Named again so that a plugin's annotations need no other module either.
    from suimon.gateway.config import ModelSettings as ModelSettings
    from suimon.gateway.config import Settings as Settings

PROJECT = "suimon"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- What a request is ------------------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chat message. ``content`` is text, a list of content parts as sent, or None beside tool calls."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content's text parts, joined."""
        if isinstance(self.content, list):
            return "".join(part.get("text", "") for part in self.content if part.get("type") == "text")
        return self.content or ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Every default means "off"; ranges were checked by the gateway.

    ``max_tokens`` None: up to the context. ``temperature`` 0: greedy. ``top_k`` 0: no limit. ``logprobs``: how
    many alternatives to report beside each chosen token (0: the chosen one only; None: none). ``min_tokens`` counts
    generated tokens. ``seed`` makes a choice's tokens independent of its batch.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for one prompt, in the form that every backend sees. Either ``messages`` or ``prompt`` is set."""

    request_id: str
    model: str  # the name the client used
    messages: tuple[Message, ...] | None = None  # a chat: the backend applies its own template
    prompt: str | tuple[int, ...] | None = None  # a completion: text or token ids, taken as they are
    sampling: SamplingParams = SamplingParams()
    add_generation_prompt: bool = True  # chat only: end the prompt with the assistant's header
    continue_final_message: bool = False  # chat only: go on writing the last message
    chat_template_kwargs: dict[str, Any] = {}  # chat only: allow-listed variables for the template
    tenant: str = ""  # who asks: the name of the API key, "" without one
    priority: int = 0  # lower starts first, where the policy looks at it
    weight: float = 1.0  # share under a fair policy
    arrival: float = 0.0  # time.monotonic() when the gateway took it
    deadline: float | None = None  # time.monotonic() after which the answer is worthless
    adapter: str | None = None  # LoRA adapter name
    cache_salt: str | None = None  # requests share cached prefixes only within one salt
    trace_context: dict[str, str] = {}  # W3C traceparent/tracestate of the gateway's span

    def last_user_text(self) -> str:
        """The text to answer: the last user message, or the prompt."""
        for message in reversed(self.messages or ()):
            if message.role == "user":
                return message.text
        return self.prompt if isinstance(self.prompt, str) else ""


class EmbedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for the vectors of one or several inputs, in the form that every backend sees."""

    request_id: str
    model: str  # the name the client used
    inputs: tuple[str | tuple[int, ...], ...]  # each is text or token ids; none is empty
    dimensions: int | None = None  # length of the vectors wanted, where the model lets it be chosen
    tenant: str = ""  # this and all below as in GenerateRequest
    priority: int = 0
    weight: float = 1.0
    arrival: float = 0.0
    deadline: float | None = None
    trace_context: dict[str, str] = {}


# --- What an answer is ------------------------------------------------------------------------------------------------


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token's text, bytes and log-probability under the model, before temperature and filters."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None
    token_id: int | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """The chosen token and the most likely alternatives at its position, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request, over all its choices. ``cached_tokens`` of the prompt came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


# Whatever ends a choice is one of these; clients refuse any other word.
FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter"})


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of choice ``index``. Each choice's last has ``finish_reason``; the request's last has ``usage``."""

    text: str = ""
    index: int = 0
    token_ids: tuple[int, ...] = ()  # when the backend knows them
    logprobs: tuple[TokenLogprobs, ...] | None = None  # parallel to token_ids, when asked for
    finish_reason: str | None = None  # one of FINISH_REASONS
    stop_reason: str | int | None = None  # the stop string or token id that was hit; None for the model's own end
    usage: Usage | None = None


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """``vectors[i]`` is that of ``inputs[i]``: floats, all of one length. ``usage`` counts the inputs' tokens.

    Any sequence of floats will do; ``array.array("f")`` keeps one in four bytes a number.
    """

    vectors: tuple[Sequence[float], ...]
    usage: Usage = Usage()


# --- What can go wrong ------------------------------------------------------------------------------------------------


class BackendError(Exception):
    """Base of the errors a backend raises on purpose; ``message`` is shown to the client."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(BackendError):  # noqa: N818 - named for what happened, as the HTTP error type is
    """The request is wrong; ``param`` names the field."""

    status, type = 400, "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Prompt and output do not fit: the message gives the limit and both lengths."""

    code = "context_length_exceeded"


class NotAuthenticated(BackendError):  # noqa: N818
    """No valid API key."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class ModelNotFound(BackendError):  # noqa: N818
    """No backend serves the model; the message lists those that are served."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class Overloaded(BackendError):  # noqa: N818
    """Too much is waiting; try again after ``retry_after`` seconds."""

    status, type, code = 429, "rate_limit_error", "overloaded"


class BackendUnavailable(BackendError):  # noqa: N818
    """The backend is loading, restarting, draining or not installed.

    ``install_hint`` is the command that installs what is missing; it is added to the message.
    """

    status, type, code = 503, "server_error", "backend_unavailable"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        install_hint: str | None = None,
    ) -> None:
        remedy = f"; install it with: {install_hint}" if install_hint else ""
        super().__init__(message + remedy, param=param, retry_after=retry_after)
        self.install_hint = install_hint


class DeadlineExceeded(BackendError):  # noqa: N818
    """The request's own deadline passed before its answer was complete."""

    status, type, code = 504, "server_error", "deadline_exceeded"


class BackendCrashed(BackendError):  # noqa: N818
    """The backend died while it worked on this request."""

    status, type, code = 500, "server_error", "backend_crashed"


# --- What a backend is ------------------------------------------------------------------------------------------------


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``state`` is loading, ready, restarting, draining or failed; ``detail`` is one line for people."""

    state: str = "ready"
    detail: str = ""

    @property
    def ready(self) -> bool:
        return self.state == "ready"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a backend is; zeros where it cannot know. What routing, gauges and Retry-After go by."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    restarts: int = 0


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend honours, so that a request for anything else is refused by name instead of quietly ignored.

    ``unsupported`` names the fields of SamplingParams that it cannot honour, beyond ``logprobs`` and ``seed``.
    """

    chat: bool = True
    completions: bool = True
    embeddings: bool = False
    token_prompts: bool = False
    logprobs: bool = False
    seed: bool = False
    tokenize: bool = False
    unsupported: frozenset[str] = frozenset()
    max_model_len: int | None = None
    own_queue: bool = False  # queues, and raises Overloaded, by itself: the gateway puts no queue in front of it
    max_concurrency: int = 64  # without own_queue: requests it is given at once; the rest wait in the gateway


class Backend(ABC):
    """Answers requests for one model. ``generate`` is the only method that must be written."""

    model_id: str
    capabilities: Capabilities = Capabilities()

    async def start(self) -> None:
        """Get ready in the background of a server that already answers health checks.

        Raise where it cannot: the model has failed then and the others serve; if none is left, the server stops.
        """

    async def stop(self) -> None:
        """Release everything. May come without a start, in the middle of one, after one that failed, and twice."""

    async def health(self) -> Health:
        """Answer quickly and from memory."""
        return Health()

    @abstractmethod
    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield the answer (write it as ``async def`` with ``yield``). Closed early when the client leaves."""

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """The vectors of the request's inputs, in their order. Cancelled when the client leaves."""
        raise InvalidRequest(f"the backend of model {self.model_id!r} does not make embeddings", param="model")

    async def tokenize(self, request: GenerateRequest, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of the request's prompt or rendered messages."""
        raise InvalidRequest(f"the backend of model {self.model_id!r} does not expose its tokenizer")

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``; raise InvalidRequest for an id outside the vocabulary."""
        raise InvalidRequest(f"the backend of model {self.model_id!r} does not expose its tokenizer")

    def load(self) -> Load:
        """How busy it is now."""
        return Load()

    def prefix_key(self, request: GenerateRequest) -> str | None:
        """What routing by prefix goes by: requests with the same key had better meet in the same replica's cache.

        None: any replica will do. The default is ``conversation_key``; override it where the cache goes by another.
        """
        return conversation_key(request)

    def describe(self) -> Sequence[str]:
        """Lines for the operator, asked for once it has started: what it chose where it was left the choice."""
        return ()


PREFIX_CHARACTERS, PREFIX_TOKENS = 1024, 256  # of a prompt that is no chat: what two prompts must share


def conversation_key(request: GenerateRequest) -> str:
    """A digest of how the request begins: a chat up to its first user message, the head of any other prompt.

    So the turns of one conversation have one key, and two conversations under the same instructions have two.
    """
    if request.messages is not None:
        roles = [message.role for message in request.messages]
        until = roles.index("user") + 1 if "user" in roles else len(roles)
        begin: Any = [(message.role, message.text) for message in request.messages[:until]]
    elif isinstance(request.prompt, str):
        begin = request.prompt[:PREFIX_CHARACTERS]
    else:
        begin = (request.prompt or ())[:PREFIX_TOKENS]
    encoded = msgspec.json.encode((request.cache_salt, request.adapter, begin))
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One of the backends that serve a model, and how busy it is, the gateway's own queue included.

    ``number`` counts the model's replicas from 1 and stays theirs while others come and go.
    """

    number: int
    backend: Backend
    load: Load


async def stream_from_thread(make: Callable[[], Iterator[Delta]]) -> AsyncIterator[Delta]:
    """Run a blocking generator in a thread of its own and yield what it yields, at the reader's pace.

    ``make`` is called in the thread. When the caller leaves, the generator is closed at its next item, and the caller
    waits for it: so there are never more threads than requests inside. Raises what the generator raised; RuntimeError
    for a SystemExit and its like, which are not for the server.
    """
    stream = _ThreadStream(make)
    try:
        while (item := await stream.items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
            stream.permits.release()
    finally:
        await stream.leave()


class _ThreadStream:
    """A blocking generator in a thread of its own. ``items`` is what comes of it: deltas, then an error or None."""

    AHEAD = 16  # items that it may be ahead of its reader

    def __init__(self, make: Callable[[], Iterator[Delta]]) -> None:
        self.items: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()
        self.permits = threading.Semaphore(self.AHEAD)
        self._make = make
        self._left = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, daemon=True, name="stream_from_thread").start()

    def _run(self) -> None:
        """In the thread."""
        ending: Exception | None = None
        try:
            self._read()
        except Exception as error:
            ending = error
        except BaseException as error:
            ending = RuntimeError(f"the generator ended with {type(error).__name__}: {error}")
            ending.__cause__ = error
        self._call(self.items.put_nowait, ending)
        self._call(self._ended.set_result, None)

    def _read(self) -> None:
        generator = self._make()
        for delta in generator:
            self.permits.acquire()
            if self._left.is_set():
                break
            self._call(self.items.put_nowait, delta)
        close = getattr(generator, "close", None)
        if close is not None:
            close()

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        with suppress(RuntimeError):  # the loop is gone: nobody is listening
            self._loop.call_soon_threadsafe(function, argument)

    async def leave(self) -> None:
        """Return when the thread has ended, however often this is cancelled meanwhile."""
        self._left.set()
        self.permits.release()
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                await asyncio.shield(self._ended)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin says to a model whose ``backend`` is "auto": that it can serve it, or why it cannot.

    The highest ``rank`` wins; 0 is a refusal. The built-in ones go by the ranks below. ``reason`` is one line that
    operators see: what speaks for this backend, or against it.
    """

    SPARE: ClassVar[int] = 10  # when nothing better can
    USUAL: ClassVar[int] = 20
    FIRST: ClassVar[int] = 30  # the configuration speaks for it

    backend: str
    rank: int
    reason: str

    @property
    def accepted(self) -> bool:
        return self.rank > 0

    @classmethod
    def refusal(cls, backend: str, reason: str) -> Offer:
        return cls(backend=backend, rank=0, reason=reason)


# --- The hooks --------------------------------------------------------------------------------------------------------
# Synchronous on purpose: pluggy would take an un-awaited coroutine for an answer. Asynchronous work belongs in Backend.
# Arguments may be added, never removed.


class Hooks:
    """Every hook with its signature; write a module-level function of the same name, marked ``@hookimpl``."""

    @hookspec
    def register_backends(self, register: Callable[[Backend], None], settings: Settings) -> None:
        """Call ``register(backend)`` for the one model in ``settings.models``, if this plugin serves it.

        Called for each replica of each configured model, at the start, at every reload and by ``suimon check-config``;
        and once with no models, for a plugin that serves a model whatever is configured. Often only to see whether it
        succeeds, and sometimes in a thread: a backend acquires nothing before its ``start``, for not every one is
        started, and those that are not are not stopped either.
        """

    @hookspec
    def offer_model(self, model: ModelSettings) -> Offer | None:
        """Say whether this plugin can serve a model whose ``backend`` is "auto"; None: nothing to say.

        Must be quick: look at what lies on this machine, load and fetch nothing.
        """

    @hookspec(firstresult=True)
    def route_request(
        self,
        request: GenerateRequest | EmbedRequest,
        backends: Mapping[str, Backend],
        replicas: Sequence[Replica],
        routing: str,
    ) -> Backend | None:
        """Choose the backend for a request, or None to leave it to the next plugin.

        ``backends`` is by model name, further replicas under the name with a number (``name#2``). ``replicas`` are
        those of the model that the request names which can answer, none if there is no such model; ``routing`` is how
        that model's configuration wants one chosen.
        """

    @hookspec(firstresult=True)
    def authenticate(self, headers: Mapping[str, str]) -> str | None:
        """The tenant that these lower-cased HTTP headers prove, or None to leave it to the API keys."""

    @hookspec
    def request_started(self, request: GenerateRequest | EmbedRequest) -> None:
        """A request was accepted and routed. Must return quickly; what it raises is logged and changes nothing.

        A request that goes on to another replica or a fallback is started and finished once for each that was asked,
        always under one ``request_id``.
        """

    @hookspec
    def request_finished(
        self, request: GenerateRequest | EmbedRequest, usage: Usage | None, error: BaseException | None
    ) -> None:
        """A request ended: ``error`` is what ended it early (asyncio.CancelledError when the client left).

        Follows every ``request_started``; what it raises is logged and changes nothing.
        """

    @hookspec
    def register_routes(self, register: Callable[[Any], None]) -> None:
        """Add Litestar route handlers. Only called for plugins that the operator named: routes widen the surface."""

    @hookspec
    def register_commands(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add subcommands to ``suimon``; each sets ``run`` to a function of the parsed arguments."""
