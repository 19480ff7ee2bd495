"""What of an error may leave the machine."""

from __future__ import annotations

import pytest

from suimon.core_engine.drain_rate import LONGEST, SHORTEST, DrainRate
from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.public_text import MAX_CHARACTERS, clean, public_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/models/x.gguf: no such file", "x.gguf: no such file"),
        ("cannot read '/srv/a-b/c.json'", "cannot read 'c.json'"),
        ("~/models/x.gguf and ./y.gguf", "x.gguf and ./y.gguf"),
        ("object at 0x7f00aa11bb22 failed", "object at 0x… failed"),
        ("model org/name@v1: see https://example.org/a/b", "model org/name@v1: see https://example.org/a/b"),
        ("8 / 2 tokens, 16/32 blocks", "8 / 2 tokens, 16/32 blocks"),
    ],
)
def test_folders_and_addresses_go_and_the_rest_stays(text, shown) -> None:
    assert clean(text) == shown


def test_errors_raised_on_purpose_speak_for_themselves_and_others_do_not() -> None:
    assert public_text(ModelLoadError("/a/b/c.gguf: broken")) == "c.gguf: broken"
    assert "secret" not in public_text(ValueError("secret"))
    assert "ValueError" in public_text(ValueError("secret"))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes")])
def test_out_of_memory_comes_with_a_remedy(error) -> None:
    assert "max_num_seqs" in public_text(error)


def test_length_is_bounded() -> None:
    assert len(clean("x" * 10**6)) <= MAX_CHARACTERS + 1


def test_advice_to_come_back_follows_the_pace_of_departures() -> None:
    now = [0.0]
    rate = DrainRate(lambda: now[0])
    assert rate.seconds_for(100) == SHORTEST
    for _ in range(11):
        rate.count()
        now[0] += 0.5
    assert rate.seconds_for(20) == 10.0
    assert rate.seconds_for(10**6) == LONGEST
    assert rate.seconds_for(1) == SHORTEST
