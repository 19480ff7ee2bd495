"""The limits that a request is held to on arrival; why sequences end is tested with the scheduler."""

from __future__ import annotations

from types import ModuleType

import pytest

from suimon.core_engine.ending import resolve_max_tokens
from suimon.core_engine.errors import ContextLengthError


@pytest.mark.parametrize(("length", "ok"), [(31, True), (32, False), (33, False)])
def test_a_prompt_as_long_as_the_context_is_refused(build: ModuleType, length: int, ok: bool) -> None:
    # B40: room for one token must be left.
    blocks = build.make_blocks(64, 4)
    for max_tokens in (1, None):
        if ok:
            assert resolve_max_tokens(length, max_tokens, 32, blocks) == 1
            continue
        with pytest.raises(ContextLengthError, match=f"maximum context length is 32 tokens, but {length} prompt"):
            resolve_max_tokens(length, max_tokens, 32, blocks)


def test_the_refusal_gives_the_three_numbers(build: ModuleType) -> None:
    # B41
    message = "maximum context length is 2048 tokens, but 8 prompt tokens plus max_tokens 2045 make 2053"
    with pytest.raises(ContextLengthError, match=message):
        resolve_max_tokens(8, 2045, 2048, build.make_blocks(1000, 4))


def test_what_the_kv_cache_can_never_hold_is_refused_with_its_size(build: ModuleType) -> None:
    blocks = build.make_blocks(8, 4)
    assert resolve_max_tokens(20, None, 512, blocks) == resolve_max_tokens(20, 12, 512, blocks) == 12
    with pytest.raises(ContextLengthError, match=r"holds 32 tokens \(8 blocks of 4; .*512\), but 20 .* 13 make 33"):
        resolve_max_tokens(20, 13, 512, blocks)
