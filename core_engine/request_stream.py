"""One request between the dispatcher that receives its outputs and the reader that takes them.

A reader that does not read costs no more than its request: outputs that pile up are joined, so what waits is bounded by
the tokens the request may generate. Lives on the event loop and needs no lock.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from suimon.core_engine.errors import EngineError
from suimon.core_engine.messages import AddRequest, SequenceOutput
from suimon.core_engine.sequence import Timing

MAX_CRASHES = 2  # a request that was in so many engines when they crashed may well be the cause


@dataclass(slots=True, eq=False)
class RequestStream:
    """``open_choices`` are those the engine still works on; ``timing`` holds its latest stamps of the first choice."""

    message: AddRequest
    open_choices: set[int]
    is_sent: bool = False
    has_started: bool = False
    crashes: int = 0
    timing: Timing = field(default_factory=Timing)
    _waiting: dict[int, SequenceOutput] = field(default_factory=dict)
    _error: EngineError | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_wanted(self) -> bool:
        """Whether an engine should be working on it: not done, not failed."""
        return bool(self.open_choices) and self._error is None

    @property
    def may_be_replayed(self) -> bool:
        """Whether another engine may take it: nothing of it was seen, and it is not under suspicion."""
        return not self.has_started and self.crashes < MAX_CRASHES

    def push(self, output: SequenceOutput) -> None:
        """Take in what the engine says about one choice."""
        self.has_started = True
        if output.timing is not None and output.index == 0:
            self.timing = output.timing
        if output.finish_reason is not None:
            self.open_choices.discard(output.index)
        earlier = self._waiting.get(output.index)
        self._waiting[output.index] = output if earlier is None else _join(earlier, output)
        self._arrived.set()

    def fail(self, error: EngineError) -> None:
        """End the stream with ``error``; what has arrived before is still read first."""
        self._error = error
        self._arrived.set()

    async def next(self) -> list[SequenceOutput]:
        """What has arrived since the last call, one output a choice; waits for it. Raises what ``fail`` was given."""
        await self._arrived.wait()
        if not self._waiting and self._error is not None:
            raise self._error
        arrived = list(self._waiting.values())
        self._waiting.clear()
        if self._error is None:
            self._arrived.clear()
        return arrived


def _join(earlier: SequenceOutput, later: SequenceOutput) -> SequenceOutput:
    """Both as one. The lists of ``earlier`` are extended, not copied: it is not used again."""
    earlier.token_ids.extend(later.token_ids)
    if earlier.logprobs is not None and later.logprobs is not None:
        earlier.logprobs.extend(later.logprobs)
    return SequenceOutput(
        later.request_id,
        later.index,
        earlier.token_ids,
        later.finish_reason,
        later.stop_reason,
        later.num_cached_tokens,
        earlier.logprobs,
        later.error,
        later.error_kind,
        later.timing,
    )
