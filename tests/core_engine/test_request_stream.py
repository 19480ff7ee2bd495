"""What waits for a reader: joined, bounded, in order; and who may be sent to another engine."""

from __future__ import annotations

import asyncio

import pytest

from suimon.core_engine.errors import EngineDeadError
from suimon.core_engine.logprobs import TokenLogprobs
from suimon.core_engine.messages import AddRequest, SequenceOutput
from suimon.core_engine.request_stream import RequestStream
from suimon.core_engine.sampling_params import SamplingParams
from suimon.core_engine.sequence import Timing


def make_stream(n: int = 1) -> RequestStream:
    message = AddRequest(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(n=n))
    return RequestStream(message, set(range(n)))


def output(*token_ids: int, index: int = 0, finish: str | None = None, timing: Timing | None = None) -> SequenceOutput:
    logprobs = [TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids]
    return SequenceOutput("a", index, list(token_ids), finish, logprobs=logprobs, timing=timing)


async def read(stream: RequestStream) -> list[SequenceOutput]:
    return await asyncio.wait_for(stream.next(), 10)


def test_outputs_that_pile_up_are_joined_by_choice() -> None:
    async def test() -> None:
        stream = make_stream(n=2)
        for number in range(1000):
            stream.push(output(number, index=number % 2, finish="length" if number >= 998 else None))
        first, second = await read(stream)
        assert (first.index, first.token_ids, first.finish_reason) == (0, list(range(0, 1000, 2)), "length")
        assert [entry.token_id for entry in second.logprobs] == second.token_ids == list(range(1, 1000, 2))
        assert stream.open_choices == set()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.next(), 0.01)

    asyncio.run(test())


def test_what_came_before_an_error_is_read_first() -> None:
    async def test() -> None:
        stream = make_stream()
        stream.push(output(5))
        stream.fail(EngineDeadError("gone"))
        assert [o.token_ids for o in await read(stream)] == [[5]]
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await read(stream)

    asyncio.run(test())


def test_a_reader_that_waits_is_woken() -> None:
    async def test() -> None:
        stream = make_stream()
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        stream.push(output(7))
        assert [o.token_ids for o in await reading] == [[7]]

    asyncio.run(test())


def test_who_may_be_replayed() -> None:
    async def test() -> None:
        fresh, begun, suspect = make_stream(), make_stream(), make_stream()
        begun.push(output(1))
        suspect.crashes = 2
        assert [stream.may_be_replayed for stream in (fresh, begun, suspect)] == [True, False, False]
        assert fresh.is_wanted
        begun.push(output(2, finish="stop"))
        suspect.fail(EngineDeadError("x"))
        assert not begun.is_wanted and not suspect.is_wanted

    asyncio.run(test())


def test_the_first_choices_stamps_are_kept() -> None:
    async def test() -> None:
        stream = make_stream(n=2)
        stream.push(output(1, timing=Timing(1.0, 2.0, 3.0)))
        stream.push(output(1, index=1, timing=Timing(1.0, 9.0, 9.0)))
        assert stream.timing == Timing(1.0, 2.0, 3.0)

    asyncio.run(test())
