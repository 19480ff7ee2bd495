"""Cutting streams, in pieces of every size."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suimon.plugins.remote_streams import EventReader, JsonLineReader, LineSplitter, StreamTooLong


def pieces(raw: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    return [raw[start:end] for start, end in itertools.pairwise(edges)]


def events(raw: bytes, cuts: list[int] | None = None) -> list[bytes]:
    reader = EventReader()
    found = [event for piece in (pieces(raw, cuts) if cuts else [raw]) for event in reader.feed(piece)]
    return found + reader.end()


STREAM = (
    b'\xef\xbb\xbfdata: {"a": 1}\n\n'
    b": a comment\n\n"
    b'event: x\nid: 7\ndata:{"no": "space"}\r\n\r\n'
    b"data: one\rdata:  two\r\r"
    b"retry: 5\n\n"
    b"data\n\n"
    b"data: \xe6\xb0\xb4\n\n\n\n"
    b"data: cut off"
)
EXPECTED = [b'{"a": 1}', b'{"no": "space"}', b"one\n two", "水".encode()]


def test_events_whatever_ends_their_lines() -> None:
    assert events(STREAM) == [*EXPECTED[:3], b"", EXPECTED[3]]


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
def test_events_split_at_any_byte(cut: int) -> None:
    assert events(STREAM, [cut]) == events(STREAM)


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_events_in_pieces_of_any_size(cuts: list[int]) -> None:
    assert events(STREAM, cuts) == events(STREAM)


def test_byte_by_byte() -> None:
    assert events(STREAM, list(range(len(STREAM)))) == events(STREAM)


@given(
    st.lists(st.binary(max_size=6).filter(lambda b: not {10, 13} & set(b)), max_size=8),
    st.data(),
)
def test_lines_are_what_was_joined_by_line_ends(lines: list[bytes], data: st.DataObject) -> None:
    ends = [data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"])) for _ in lines]
    for index in reversed(range(len(lines) - 1)):  # a CR before an empty line's LF would be one CR LF
        if ends[index] == b"\r" and not lines[index + 1] and ends[index + 1].startswith(b"\n"):
            ends[index] = b"\n"
    raw = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    splitter = LineSplitter()
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=10))
    assert [line for piece in pieces(raw, cuts) for line in splitter.feed(piece)] == lines
    assert splitter.rest() == b""


def test_a_line_beyond_the_limit_is_refused_whole_or_trickling() -> None:
    with pytest.raises(StreamTooLong):
        LineSplitter(10).feed(b"x" * 11 + b"\n")
    splitter = LineSplitter(10)
    assert splitter.feed(b"x" * 10 + b"\n") == [b"x" * 10]
    for _ in range(10):
        assert splitter.feed(b"x") == []
    with pytest.raises(StreamTooLong):
        splitter.feed(b"x")


def test_an_event_of_many_short_lines_is_bounded_too() -> None:
    reader = EventReader(max_line=100, max_event=50)
    with pytest.raises(StreamTooLong):
        reader.feed(b"data:\n" * 60)
    reader = EventReader(max_line=100, max_event=50)
    for _ in range(200):
        assert reader.feed(b"data: x\n\n") == [b"x"]


def test_json_lines_with_and_without_a_last_line_end() -> None:
    reader = JsonLineReader()
    assert reader.feed(b'{"a":1}\n\n  \r\n{"b"') == [b'{"a":1}']
    assert reader.feed(b":2}\r\n{") == [b'{"b":2}']
    assert reader.feed(b'"c":3}') == []
    assert reader.end() == [b'{"c":3}']
    assert JsonLineReader().end() == []
