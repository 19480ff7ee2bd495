"""The header of a GGUF file: metadata, and where each tensor lies. Knows the container, nothing of models or blocks.

A file is, little endian and without padding but where said:

    "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata count x ( key string | value type u32 | value )
    tensor count   x ( name string | dims u32 | dims x u64, fastest first | ggml type u32 | offset u64 )
    padding to general.alignment | tensor data, each tensor at its offset, aligned

A string is a length (u64) and that many bytes; an array is an element type (u32), a count (u64) and the elements.
Nothing that the file says is believed: every count is compared with the bytes that are left before anything is
allocated for it, so a hostile header costs at most its own size.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_NAME_BYTES = 65_535
MAX_DIMS = 4
MAX_STRINGS = 1 << 23  # of one array: thirty times the largest vocabulary in use

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_DAMAGED = "The file is truncated or damaged: fetch or convert it again."

# Smallest entries that can exist, which bound the counts: empty key + type + one byte; empty name + no dims + type.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

# GGUF metadata value types that have a fixed size, as numpy dtypes.
_SCALARS: Mapping[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {
        0: "<u1",
        1: "<i1",
        2: "<u2",
        3: "<i2",
        4: "<u4",
        5: "<i4",
        6: "<f4",
        7: "?",
        10: "<u8",
        11: "<i8",
        12: "<f8",
    }.items()
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A tensor encoding: ``block_size`` values are stored together in ``block_bytes`` bytes."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: Mapping[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """One tensor. ``shape`` is row-major as in torch; ``offset`` (from the file's start) and ``nbytes`` are bytes."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What stands before the tensor data.

    ``metadata`` values are int, float, bool, str, ``list[str]`` (an array of strings) or a numpy array (an array of
    numbers or bools). Bytes that are not UTF-8 become lone surrogates, so that
    ``value.encode("utf-8", "surrogateescape")`` gives the file's bytes back. ``size`` is the file's, in bytes.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensorInfo]
    data_offset: int
    size: int


def read_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Parse and check the header of the GGUF file at ``path``.

    Raises ModelLoadError naming the file, the field and the numbers when the file is not GGUF, is damaged or shorter
    than its header says, and UnsupportedModelError when it is a kind of GGUF that is not read here.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelLoadError(f"{path}: {size} bytes are too few for a GGUF header (24). {_DAMAGED}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFHeader:
    reader = _Reader(path, data)
    version = _check_version(reader)
    tensor_count = reader.count("tensor count", _MIN_TENSOR_BYTES)
    metadata_count = reader.count("metadata count", _MIN_METADATA_BYTES)
    metadata = _read_metadata(reader, metadata_count)
    raw_infos = [_read_tensor_entry(reader, index) for index in range(tensor_count)]
    alignment = _alignment(reader, metadata)
    data_offset = -(-reader.position // alignment) * alignment
    tensors = _place_tensors(reader, raw_infos, data_offset, alignment)
    return GGUFHeader(path, version, metadata, tensors, data_offset, reader.end)


def _check_version(reader: _Reader) -> int:
    magic = reader.take(4, "magic")
    if magic != MAGIC:
        raise ModelLoadError(f"{reader.path}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = reader.u32("version")
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0 and version != 0:
        raise UnsupportedModelError(f"{reader.path}: a big-endian GGUF file; only little-endian files are read")
    raise UnsupportedModelError(
        f"{reader.path}: GGUF version {version}; versions {VERSIONS} are read. Convert the model again."
    )


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = reader.name(f"metadata key {index}")
        if key in metadata:
            reader.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = reader.value(key)
    return metadata


_RawInfo = tuple[str, tuple[int, ...], int, int]


def _read_tensor_entry(reader: _Reader, index: int) -> _RawInfo:
    name = reader.name(f"name of tensor {index}")
    dims = reader.u32(f"tensor {name!r} number of dimensions")
    if not 1 <= dims <= MAX_DIMS:
        reader.fail(f"tensor {name!r} has {dims} dimensions, expected 1 to {MAX_DIMS}")
    sizes = tuple(reader.u64(f"tensor {name!r} dimension") for _ in range(dims))
    ggml_type = reader.u32(f"tensor {name!r} type")
    return name, sizes[::-1], ggml_type, reader.u64(f"tensor {name!r} offset")


def _alignment(reader: _Reader, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = type(alignment) is int and 1 <= alignment <= 1 << 20 and alignment & (alignment - 1) == 0
    if not valid:
        reader.fail(f"general.alignment is {str(alignment)[:40]}, expected a power of two up to {1 << 20}")
    return int(alignment)


def _place_tensors(reader: _Reader, raw: list[_RawInfo], start: int, alignment: int) -> dict[str, GGUFTensorInfo]:
    tensors: dict[str, GGUFTensorInfo] = {}
    for name, shape, type_code, offset in raw:
        if name in tensors:
            reader.fail(f"tensor {name!r} occurs twice")
        ggml_type = _ggml_type(reader, name, type_code)
        nbytes = _tensor_bytes(reader, name, shape, ggml_type)
        if offset % alignment:
            reader.fail(f"tensor {name!r} lies at offset {offset}, no multiple of the alignment {alignment}")
        if start + offset + nbytes > reader.end:
            reader.fail(
                f"tensor {name!r} needs bytes {start + offset} to {start + offset + nbytes} of a file of {reader.end}"
            )
        tensors[name] = GGUFTensorInfo(name, shape, ggml_type, start + offset, nbytes)
    _check_disjoint(reader, tensors)
    return tensors


def _ggml_type(reader: _Reader, name: str, code: int) -> GGMLType:
    if code not in GGML_TYPES:
        raise UnsupportedModelError(f"{reader.path}: tensor {name!r} has ggml type {code}, which is not known here")
    return GGML_TYPES[code]


def _tensor_bytes(reader: _Reader, name: str, shape: tuple[int, ...], ggml_type: GGMLType) -> int:
    if 0 in shape:
        reader.fail(f"tensor {name!r} has the empty shape {shape}")
    if shape[-1] % ggml_type.block_size:
        reader.fail(
            f"tensor {name!r} has rows of {shape[-1]}, no multiple of the {ggml_type.block_size} of {ggml_type.name}"
        )
    return prod(shape) // ggml_type.block_size * ggml_type.block_bytes


def _check_disjoint(reader: _Reader, tensors: Mapping[str, GGUFTensorInfo]) -> None:
    by_offset = sorted(tensors.values(), key=lambda info: info.offset)
    for left, right in pairwise(by_offset):
        if left.offset + left.nbytes > right.offset:
            reader.fail(f"tensors {left.name!r} and {right.name!r} overlap at byte {right.offset}")


class _Reader:
    """A cursor over the mapped file that never reads past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self.end = len(data)
        self._data = data

    def fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: {problem}. {_DAMAGED}")

    def take(self, size: int, field: str) -> bytes:
        self._require(size, field)
        start = self.position
        self.position += size
        return self._data[start : start + size]

    def u32(self, field: str) -> int:
        return int(_U32.unpack(self.take(4, field))[0])

    def u64(self, field: str) -> int:
        return int(_U64.unpack(self.take(8, field))[0])

    def count(self, field: str, min_bytes: int) -> int:
        """A number of entries of at least ``min_bytes`` each, all of which must still fit the file."""
        count = self.u64(field)
        left = self.end - self.position
        if count * min_bytes > left:
            self.fail(f"{field} is {count}, which needs at least {count * min_bytes} bytes, but {left} are left")
        return count

    def name(self, field: str) -> str:
        size = self.u64(f"length of {field}")
        if size > MAX_NAME_BYTES:
            self.fail(f"{field} has {size} bytes, more than {MAX_NAME_BYTES}")
        return self.take(size, field).decode("utf-8", "surrogateescape")

    def value(self, key: str) -> Any:
        code = self.u32(f"type of {key!r}")
        if code in _SCALARS:
            return self._numbers(code, 1, key)[0].item()
        readers: dict[int, Callable[[str], Any]] = {_STRING: self._string, _ARRAY: self._array}
        if code not in readers:
            self.fail(f"{key!r} has value type {code}, which does not exist")
        return readers[code](key)

    def _string(self, key: str) -> str:
        size = self.u64(f"length of {key!r}")
        return self.take(size, key).decode("utf-8", "surrogateescape")

    def _array(self, key: str) -> Any:
        code = self.u32(f"element type of {key!r}")
        if code == _STRING:
            return self._strings(self.count(f"number of strings of {key!r}", 8), key)
        if code not in _SCALARS:
            self.fail(f"{key!r} is an array of type {code}; arrays of numbers, bools and strings are read")
        return self._numbers(code, self.count(f"length of {key!r}", _SCALARS[code].itemsize), key)

    def _numbers(self, code: int, count: int, key: str) -> np.ndarray[Any, Any]:
        raw = self.take(count * _SCALARS[code].itemsize, key)
        if code == _BOOL and raw.strip(b"\0\1"):
            self.fail(f"{key!r} is a bool that is neither 0 nor 1")
        return np.frombuffer(raw, _SCALARS[code])

    def _strings(self, count: int, key: str) -> list[str]:
        # A vocabulary has 10^5 of them: the cursor stays in locals.
        if count > MAX_STRINGS:
            self.fail(f"{key!r} has {count} strings, more than {MAX_STRINGS}")
        data, position, end, unpack = self._data, self.position, self.end, _U64.unpack_from
        strings = []
        for index in range(count):
            start = position + 8
            stop = start + unpack(data, position)[0] if start <= end else start
            if stop > end:
                self.fail(f"string {index} of {key!r} ends at byte {stop} of a file of {end}")
            strings.append(data[start:stop].decode("utf-8", "surrogateescape"))
            position = stop
        self.position = position
        return strings

    def _require(self, size: int, field: str) -> None:
        left = self.end - self.position
        if size > left:
            self.fail(f"{field} needs {size} bytes at byte {self.position}, but {left} are left")
