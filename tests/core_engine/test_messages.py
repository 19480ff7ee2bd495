"""The protocol: what goes in comes out, and nothing but messages comes out, whatever goes in."""

from __future__ import annotations

import random
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from suimon.core_engine.config import EngineConfig
from suimon.core_engine.framing import FrameReader, FramingError, frame
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.messages import (
    AbortRequest,
    AddRequest,
    Configure,
    EndTokens,
    EngineFailed,
    EngineReady,
    Heartbeat,
    MessageError,
    SequenceOutput,
    Shutdown,
    StepOutputs,
    decode_from_engine,
    decode_to_engine,
    to_frame,
)
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.sequence import Timing
from suimon.core_engine.stats import EngineStats

ADD = AddRequest(
    request_id="a",
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingParams(logit_bias={5: -100.0}, stop=("x",), seed=-1, logprobs=3, stop_token_ids=(7,)),
    tenant="t",
    priority=-3,
    weight=2.5,
    arrival=12.5,
    deadline=99.0,
    adapter="lora",
    cache_salt="salt",
    trace_context={"traceparent": "00-1-2-01"},
)
OUTPUT = SequenceOutput(
    "a", 1, [4, 5], "stop", 7, 16, [TokenLogprobs(4, -0.5, 1, ((4, -0.5),))] * 2, None, "", Timing(1.0, 2.0, 3.0, 4.0)
)
TO_ENGINE = [
    Configure(config=EngineConfig(model="m", max_num_seqs=3), model_path="p"),
    ADD,
    AbortRequest("a"),
    AbortRequest("a", 2),
    EndTokens([1, 2]),
    Shutdown(),
]
FROM_ENGINE = [
    Heartbeat("stepping", 1.5),
    EngineReady(vocab_size=9, max_model_len=8, num_blocks=7, block_size=16, max_num_seqs=5, plan=["x"]),
    EngineFailed("no", "ModelLoadError"),
    StepOutputs([OUTPUT], EngineStats(running=2, finished={"stop": 1})),
]


@pytest.mark.parametrize(
    ("decode", "message"),
    [(decode_to_engine, m) for m in TO_ENGINE] + [(decode_from_engine, m) for m in FROM_ENGINE],
    ids=lambda value: type(value).__name__,
)
def test_every_message_survives_the_wire(decode, message) -> None:
    (payload,) = FrameReader().feed(to_frame(message))
    assert decode(payload) == message


def test_sampling_parameters_arrive_with_their_values_and_ranges() -> None:
    """B28: what is lost in serialisation is lost in silence."""
    (payload,) = FrameReader().feed(to_frame(ADD))
    assert decode_to_engine(payload).sampling == ADD.sampling
    raw = msgspec.msgpack.decode(payload)
    raw["sampling"]["temperature"] = -1.0
    with pytest.raises(MessageError, match="temperature"):
        decode_to_engine(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [2**31]},
        {"prompt_token_ids": "123"},
        {"prompt_token_ids": [1.5]},
        {"request_id": 7},
        {"sampling": None},
        {"sampling": {"n": 10**9}},
        {"sampling": {"logit_bias": {"x": 1}}},
        {"priority": "high"},
        {"trace_context": {"a": 1}},
        {"type": "configure"},
        {"type": "outputs"},
        {"type": "__class__"},
    ],
    ids=str,
)
def test_a_wrong_field_is_a_message_error(change) -> None:
    (payload,) = FrameReader().feed(to_frame(ADD))
    with pytest.raises(MessageError):
        decode_to_engine(msgspec.msgpack.encode(msgspec.msgpack.decode(payload) | change))


@pytest.mark.parametrize(
    "payload", [b"", b"\x91" * 200_000, b"\x81\xa4type\xa5\xff\xfe\xfd\xfc\xfb", b"\xdd\xff\xff\xff\xff"]
)
def test_hostile_payloads_are_message_errors(payload) -> None:
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises(MessageError):
            decode(payload)


def hostile_payloads(count: int, seed: int) -> list[bytes]:
    """Random bytes, and real messages cut, lengthened, spliced and with bits flipped."""
    chance = random.Random(seed)
    real = [to_frame(message)[4:] for message in TO_ENGINE]
    payloads = []
    for _ in range(count):
        base = bytearray(chance.choice(real))
        match chance.randrange(5):
            case 0:
                base = bytearray(chance.randbytes(chance.randrange(64)))
            case 1:
                del base[chance.randrange(len(base)) :]
            case 2:
                base[chance.randrange(len(base))] ^= 1 << chance.randrange(8)
            case 3:
                base += chance.randbytes(chance.randrange(1, 9))
            case 4:
                other = chance.choice(real)
                base[chance.randrange(len(base)) :] = other[chance.randrange(len(other)) :]
        payloads.append(bytes(base))
    return payloads


def test_a_hundred_thousand_hostile_frames_are_decoded_or_refused() -> None:
    """R11, the decoding half; test_process.py sends them to a live engine."""
    reader, refused = FrameReader(), 0
    for payload in hostile_payloads(100_000, seed=1):
        for received in reader.feed(frame(payload)):
            try:
                message = decode_to_engine(received)
            except MessageError:
                refused += 1
            else:
                assert isinstance(message, Configure | AddRequest | AbortRequest | EndTokens | Shutdown)
    assert 50_000 < refused < 100_000


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(1, 64))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(payloads, size) -> None:
    stream = b"".join(map(frame, payloads))
    reader = FrameReader()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [received for piece in pieces for received in reader.feed(piece)] == payloads


def test_a_length_above_the_maximum_ends_the_stream_after_what_came_before() -> None:
    frames = FrameReader(max_frame_bytes=10).feed(frame(b"good") + struct.pack("<I", 11))
    assert next(frames) == b"good"
    with pytest.raises(FramingError, match="11 bytes"):
        next(frames)


def test_a_frame_too_long_to_be_read_is_not_written() -> None:
    with pytest.raises(ValueError, match="maximum"):
        to_frame(AbortRequest("x" * (33 * 1024 * 1024)))
