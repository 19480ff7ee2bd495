"""What the engine process and its client say to each other: tagged structs, one message per frame.

The union types below are the whole protocol; each side reads it with one ``match``. Decoding checks every type and the
ranges of sampling parameters, so what comes out is either a well-formed message or a MessageError: bytes are never
interpreted as anything but data. All times are CLOCK_MONOTONIC seconds (``time.monotonic()``), which the processes of
one Linux machine share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import EngineError
from suimon.core_engine.framing import frame
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.sequence import Timing
from suimon.core_engine.stats import EngineStats

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class MessageError(Exception):
    """A frame's content is not a message of this protocol. The next frame may well be."""


# --- client to engine -------------------------------------------------------------------------------------------------


class Configure(msgspec.Struct, tag="configure", frozen=True, kw_only=True):
    """The first frame: what engine to be. ``model_path`` is where the model lies on this machine, if it needs one."""

    config: EngineConfig
    model_path: str = ""


class AddRequest(msgspec.Struct, tag="add", frozen=True, kw_only=True, omit_defaults=True):
    """Compute ``sampling.n`` continuations of a prompt. ``request_id`` is unique among the requests in the engine."""

    request_id: str
    prompt_token_ids: list[TokenId]
    sampling: SamplingParams
    tenant: str = ""
    priority: int = 0
    weight: float = 1.0
    arrival: float = 0.0
    deadline: float | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    trace_context: dict[str, str] = {}


class EmbedRequest(msgspec.Struct, tag="embed", frozen=True):
    """Compute the vector of each input. ``request_id`` is unique among the requests in the engine."""

    request_id: str
    inputs: list[list[TokenId]]


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    """Forget a request, or only its choice ``index``. An unknown id is no error: it may have just finished."""

    request_id: str
    index: int | None = None


class EndTokens(msgspec.Struct, tag="end_tokens", frozen=True):
    """Further ids that end an answer: those the tokenizer's files name, beside the checkpoint's own."""

    token_ids: list[TokenId]


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End now: what still runs is dropped."""


ToEngine = Configure | AddRequest | EmbedRequest | AbortRequest | EndTokens | Shutdown


# --- engine to client -------------------------------------------------------------------------------------------------


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """The process lives. ``state`` is loading, ready or stepping, since the time ``since``."""

    state: str
    since: float


class EngineReady(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The model is loaded; ``generates`` (text) and ``embeds`` say what it can be asked for.

    ``plan`` says for people what ``auto`` became, one line each.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    generates: bool = True
    embeds: bool = False
    eos_token_ids: list[int] = []
    plan: list[str] = []


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The process is about to end. ``kind`` is the class name of the error, ``message`` is fit to be shown."""

    message: str
    kind: str


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step's new tokens of one choice. ``timing`` comes with the first and the last.

    ``error`` fails the whole request; ``error_kind`` is its class among ours, or another name.
    """

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_kind: str = ""
    timing: Timing | None = None


class StepOutputs(msgspec.Struct, tag="outputs", frozen=True):
    """Everything one step has to say, for all requests, and the engine's state after it."""

    outputs: list[SequenceOutput]
    stats: EngineStats


class Embedding(msgspec.Struct, tag="embedding", frozen=True):
    """The vector of input ``index`` of an EmbedRequest, or the error that fails the whole request."""

    request_id: str
    index: int
    vector: list[float] = []
    error: str | None = None
    error_kind: str = ""


FromEngine = Heartbeat | EngineReady | EngineFailed | StepOutputs | Embedding


# --- encoding ---------------------------------------------------------------------------------------------------------

Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def to_frame(message: ToEngine | FromEngine) -> bytes:
    """The message as a frame. Raises ValueError if it is longer than a frame may be."""
    return frame(_encoder.encode(message))


def decode_to_engine(payload: bytes) -> ToEngine:
    """Read a client's message. Raises MessageError, and nothing else, for bytes that are not one."""
    return _decode(_to_engine.decode, payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """Read an engine's message. Raises MessageError, and nothing else, for bytes that are not one."""
    return _decode(_from_engine.decode, payload)


def _decode(decode: Callable[[bytes], Message], payload: bytes) -> Message:
    try:
        return decode(payload)
    except (msgspec.MsgspecError, EngineError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"not a message ({type(error).__name__}: {error})") from None
