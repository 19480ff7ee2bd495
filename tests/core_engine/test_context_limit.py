"""The limits that a request is held to on arrival."""

from __future__ import annotations

from types import ModuleType

import pytest

from suimon.core_engine.context_limit import resolve_max_tokens
from suimon.core_engine.errors import ContextLengthError


@pytest.mark.parametrize(("length", "ok"), [(31, True), (32, False), (33, False)])
def test_a_prompt_as_long_as_the_context_is_refused(length: int, ok: bool) -> None:
    # B40: room for one token must be left.
    for max_tokens in (1, None):
        if ok:
            assert resolve_max_tokens(length, max_tokens, 32) == 1
            continue
        with pytest.raises(ContextLengthError, match=f"maximum context length is 32 tokens, but {length} prompt"):
            resolve_max_tokens(length, max_tokens, 32)


def test_the_refusal_gives_the_three_numbers_and_names_the_field() -> None:
    # B41
    message = "maximum context length is 2048 tokens, but 8 prompt tokens plus max_tokens 2045 make 2053"
    with pytest.raises(ContextLengthError, match=message) as caught:
        resolve_max_tokens(8, 2045, 2048, param="prompt")
    assert caught.value.param == "prompt"


def test_what_the_kv_cache_can_never_hold_is_refused_with_its_size(build: ModuleType) -> None:
    engine = build.make_engine(num_blocks=8, block_size=4)
    assert engine.context_limit == resolve_max_tokens(20, None, engine.context_limit) + 20 == 32
    engine.add_request("fits", build.make_prompt(20), build.make_params(max_tokens=12))
    message = r"is 32 tokens \(the whole KV cache: 8 blocks of 4; .* 512\), but 20 .* 13 make 33"
    with pytest.raises(ContextLengthError, match=message):
        engine.add_request("never", build.make_prompt(20), build.make_params(max_tokens=13))
