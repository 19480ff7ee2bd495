"""The GGUF header parser against the gguf package, and against files made to hurt it."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader import gguf as header_module
from suimon.core_engine.loader.gguf import GGML_TYPES, read_header

U8, BOOL, STRING, ARRAY, U32 = 0, 7, 8, 9, 4


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str = "a", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    head = string(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


def make_gguf(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    metadata: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    metadata_count: int | None = None,
    tensor_count: int | None = None,
    data: bytes = bytes(64),
) -> bytes:
    counts = (len(tensors) if tensor_count is None else tensor_count,)
    counts += (len(metadata) if metadata_count is None else metadata_count,)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(metadata) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """Every kind of metadata value and several encodings, written by the gguf package."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 255)
    writer.add_int8("t.i8", -128)
    writer.add_uint16("t.u16", 65535)
    writer.add_int16("t.i16", -32768)
    writer.add_uint32("t.u32", 2**32 - 1)
    writer.add_int32("t.i32", -(2**31))
    writer.add_float32("t.f32", 1e-5)
    writer.add_uint64("t.u64", 2**64 - 1)
    writer.add_int64("t.i64", -(2**63))
    writer.add_float64("t.f64", 1e-300)
    writer.add_bool("t.yes", True)
    writer.add_bool("t.no", False)
    writer.add_string("t.text", "水門 🌊")
    writer.add_array("t.strings", ["", "a", "é", "水"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, -1.25])
    writer.add_array("t.flags", [True, False, True])
    generator = np.random.default_rng(0)
    writer.add_tensor("f32", generator.standard_normal((3, 5, 7), dtype=np.float32))
    writer.add_tensor("f16", generator.standard_normal((2, 9)).astype(np.float16))
    quantized = gguf.quants.quantize(
        generator.standard_normal((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("q8", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_as_package(path: Path) -> None:
    header, reader = read_header(path), gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(header.metadata) == list(fields)
    for name, field in fields.items():
        value = header.metadata[name]
        expected = field.contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected, name
        assert isinstance(value, bool) == isinstance(expected, bool), name
    assert list(header.tensors) == [item.name for item in reader.tensors]
    for item in reader.tensors:
        info = header.tensors[item.name]
        assert info.ggml_type.name == item.tensor_type.name
        assert info.shape == tuple(int(size) for size in item.shape)[::-1]
        assert (info.offset, info.nbytes) == (item.data_offset, item.n_bytes)


def test_small_file_reads_as_the_gguf_package_reads_it(small_gguf: Path) -> None:
    assert_same_as_package(small_gguf)


def test_demo_model_reads_as_the_gguf_package_reads_it(demo_gguf: Path) -> None:
    assert_same_as_package(demo_gguf)


def test_gemma_vocabulary_is_whole(gemma_gguf: Path) -> None:
    metadata = read_header(gemma_gguf).metadata
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert len(tokens) == len(scores) == 262_144
    assert [tokens[index] for index in (0, 1, 2, 105, 106)] == [
        "<pad>",
        "<eos>",
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
    ]


def test_encodings_have_the_sizes_of_the_gguf_package() -> None:
    package = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {code: (kind.name, kind.block_size, kind.block_bytes) for code, kind in GGML_TYPES.items()}
    shared = ours.keys() & package.keys()
    assert len(shared) >= 30
    assert {code: ours[code] for code in shared} == {code: package[code] for code in shared}


def test_bytes_that_are_not_utf8_come_back(tmp_path: Path) -> None:
    raw = b"\xff\xfe a \xe6"
    path = write(
        tmp_path,
        make_gguf(
            metadata=(
                entry("k", STRING, string(raw)),
                entry("l", ARRAY, struct.pack("<IQ", STRING, 1) + string(raw)),
            )
        ),
    )
    metadata = read_header(path).metadata
    assert metadata["k"].encode("utf-8", "surrogateescape") == raw
    assert metadata["l"][0].encode("utf-8", "surrogateescape") == raw


def test_alignment_of_the_file_is_obeyed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        make_gguf(
            metadata=(entry("general.alignment", U32, struct.pack("<I", 8)),),
            tensors=(tensor("a", (2,)), tensor("b", (2,), offset=8)),
        ),
    )
    header = read_header(path)
    assert header.data_offset % 8 == 0
    assert header.tensors["b"].offset == header.data_offset + 8


def test_truncated_anywhere_is_an_error(small_gguf: Path, tmp_path: Path) -> None:
    content = small_gguf.read_bytes()
    end = max(info.offset + info.nbytes for info in read_header(small_gguf).tensors.values())
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    for size in reversed(range(end)):
        os.truncate(path, size)
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            read_header(path)


def test_any_flipped_bits_parse_or_are_an_error(small_gguf: Path, tmp_path: Path) -> None:
    content, randomness = small_gguf.read_bytes(), random.Random(2)
    header_bytes = read_header(small_gguf).data_offset
    path, refused = tmp_path / "flipped.gguf", 0
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(randomness.randint(1, 3)):
            damaged[randomness.randrange(header_bytes)] ^= 1 << randomness.randrange(8)
        path.write_bytes(damaged)
        try:
            read_header(path)
        except ModelLoadError:
            refused += 1
    assert refused > 300


HUGE = 2**64 - 1
HOSTILE = {
    "empty": (b"", "too few"),
    "not gguf": (make_gguf(magic=b"GGML"), "not a GGUF file"),
    "old version": (make_gguf(version=1), "version 1"),
    "big endian": (make_gguf(version=3 << 24), "big-endian"),
    "metadata count": (make_gguf(metadata_count=HUGE), "metadata count is 18446744073709551615"),
    "tensor count": (make_gguf(tensor_count=2**40), "tensor count is 1099511627776"),
    "key length": (make_gguf(metadata=(struct.pack("<Q", HUGE),), data=bytes(99)), "more than 65535"),
    "string length": (make_gguf(metadata=(entry("k", STRING, struct.pack("<Q", 2**62)),)), "are left"),
    "strings count": (make_gguf(metadata=(entry("k", ARRAY, struct.pack("<IQ", STRING, HUGE)),)), "number of strings"),
    "string in array": (
        make_gguf(metadata=(entry("k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE)),)),
        "string 0 of 'k'",
    ),
    "numbers count": (make_gguf(metadata=(entry("k", ARRAY, struct.pack("<IQ", U32, 2**61)),)), "length of 'k'"),
    "nested array": (make_gguf(metadata=(entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1)),)), "array of type 9"),
    "unknown value type": (make_gguf(metadata=(entry("k", 13, b""),)), "value type 13"),
    "bool of 2": (make_gguf(metadata=(entry("k", BOOL, b"\2"),)), "neither 0 nor 1"),
    "key twice": (make_gguf(metadata=(entry("k", U8, b"\1"),) * 2), "'k' occurs twice"),
    "tensor twice": (make_gguf(tensors=(tensor(), tensor(offset=32))), "'a' occurs twice"),
    "no dimensions": (make_gguf(tensors=(tensor(dims=()),)), "0 dimensions"),
    "five dimensions": (make_gguf(tensors=(tensor(dims=(1,) * 5),)), "5 dimensions"),
    "empty tensor": (make_gguf(tensors=(tensor(dims=(8, 0)),)), "empty shape"),
    "size overflows": (make_gguf(tensors=(tensor(dims=(2**63, 2**63, 2, 2)),)), "needs bytes"),
    "offset overflows": (make_gguf(tensors=(tensor(offset=2**64 - 32),)), "needs bytes"),
    "beyond the end": (make_gguf(tensors=(tensor(dims=(17,)),)), "needs bytes"),
    "unaligned": (make_gguf(tensors=(tensor(offset=4),)), "no multiple of the alignment 32"),
    "overlap": (make_gguf(tensors=(tensor("a", (16,)), tensor("b", offset=32))), "overlap"),
    "ragged rows": (make_gguf(tensors=(tensor(dims=(33,), kind=8),)), "no multiple of the 32 of Q8_0"),
    "unknown encoding": (make_gguf(tensors=(tensor(kind=99),)), "ggml type 99"),
    "alignment 3": (make_gguf(metadata=(entry("general.alignment", U32, struct.pack("<I", 3)),)), "power of two"),
    "alignment text": (make_gguf(metadata=(entry("general.alignment", STRING, string("32")),)), "power of two"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_header_is_an_error_that_allocates_nothing(content: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match=message) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_too_many_strings_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "MAX_STRINGS", 2)
    strings = struct.pack("<IQ", STRING, 3) + string("") * 3
    with pytest.raises(ModelLoadError, match="3 strings, more than 2"):
        read_header(write(tmp_path, make_gguf(metadata=(entry("k", ARRAY, strings),))))


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_header(tmp_path / "none.gguf")


def test_kinds_of_gguf_that_are_not_read_are_unsupported(tmp_path: Path) -> None:
    for content in (make_gguf(version=9), make_gguf(tensors=(tensor(kind=99),))):
        with pytest.raises(UnsupportedModelError):
            read_header(write(tmp_path, content))
