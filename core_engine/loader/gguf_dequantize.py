"""GGUF tensor encodings to floating point. Knows the block layouts, nothing of files, names or models.

Shapes: N blocks in a chunk, B bytes of a block, V values of a block (32, or 256 for the K types).

    value = d * q            Q8_0 (q int8), Q4_0 (q - 8), Q5_0 (q - 16)
    value = d * q + m        Q4_1, Q5_1
    value = (d * s) * q - (dmin * m)        Q4_K, Q5_K: s and m are 6-bit integers of each 32 values
    value = (d * s) * (q - 32)              Q6_K: s is an int8 of each 16 values

The types that files are mostly made of are decoded here, in the same order of float32 operations as the ``gguf``
package, so that both give the same bits; the rarer ones are handed to that package, which is several times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch

from suimon.core_engine.errors import UnsupportedModelError
from suimon.core_engine.loader.gguf import GGMLType

# Values decoded at once: the float32 scratch (1 MiB) stays in a core's second-level cache.
_CHUNK_VALUES = 1 << 18

_Decoder = Callable[[torch.Tensor, torch.Tensor], None]


def dequantize(
    raw: torch.Tensor, ggml_type: GGMLType, shape: tuple[int, ...], dtype: torch.dtype, *, name: str
) -> torch.Tensor:
    """The values of ``raw`` ([nbytes] uint8) as a new tensor of ``shape`` and ``dtype`` (a floating-point one).

    ``name`` is the tensor's, for the message. Raises UnsupportedModelError for an encoding that is not read.
    """
    if ggml_type.name in _FLOATS:
        return raw.view(_FLOATS[ggml_type.name]).to(dtype, copy=True).view(shape)
    decode = _decoder(ggml_type, name)
    blocks = raw.view(-1, ggml_type.block_bytes)
    out = torch.empty(prod(shape), dtype=dtype)
    rows = out.view(-1, ggml_type.block_size)
    step = _CHUNK_VALUES // ggml_type.block_size
    scratch = torch.empty(min(step, len(rows)), ggml_type.block_size)
    for start in range(0, len(rows), step):
        target = rows[start : start + step]
        values = target if dtype == torch.float32 else scratch[: len(target)]
        decode(blocks[start : start + step], values)
        if values is not target:
            target.copy_(values)
    return out.view(shape)


def _decoder(ggml_type: GGMLType, name: str) -> _Decoder:
    if ggml_type.name in _DECODERS:
        return _DECODERS[ggml_type.name]
    if ggml_type.name in _PACKAGE_TYPES:
        return _package_decoder(ggml_type.name)
    raise UnsupportedModelError(
        f"tensor {name!r} is encoded as {ggml_type.name}, which is not read; "
        f"these are: {', '.join(SUPPORTED_TYPES)}. Use a file quantized to one of them."
    )


def _package_decoder(type_name: str) -> _Decoder:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as package_dequantize

    quantization_type = GGMLQuantizationType[type_name]

    def decode(blocks: torch.Tensor, out: torch.Tensor) -> None:
        row = blocks.numpy().reshape(1, -1)  # one row: the package works on 16 rows at a time
        out.copy_(torch.from_numpy(package_dequantize(row, quantization_type)).view_as(out))

    return decode


# Each decoder below: blocks [N, B] uint8 -> out [N, V] float32, overwritten. The integers q are put together eight to
# an int64 word, one byte each, which is several times faster than byte by byte.


def _half(blocks: torch.Tensor, index: int) -> torch.Tensor:
    """The ``index``-th float16 of each block, as float32 [N, 1]."""
    return blocks.view(torch.float16)[:, index : index + 1].float()


def _words(packed: torch.Tensor, *shape: int) -> torch.Tensor:
    """[N, P] uint8 -> int64 words [N, *shape]."""
    return packed.contiguous().view(torch.int64).view(-1, *shape)


def _each_byte(value: int) -> int:
    return value * 0x0101_0101_0101_0101


def _nibbles(packed: torch.Tensor, group: int) -> torch.Tensor:
    """[N, P] -> words [N, 2P / 8]: of every ``group`` bytes the low nibbles, then the high ones."""
    words = _words(packed, packed.shape[1] // group, 1, group // 8)
    return torch.cat((words & _each_byte(15), words >> 4 & _each_byte(15)), dim=2).flatten(1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[N, 4], a little-endian mask of 32 bits -> words [N, 4] whose bytes are 0 or 16."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    bytes_of_mask = (bits << 4).to(torch.uint8).view(torch.int64).flatten()
    return bytes_of_mask[packed.long()]


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    q = _nibbles(blocks[:, 2:], 16)
    out.copy_(q.view(torch.uint8)).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    q = _nibbles(blocks[:, 4:], 16)
    out.copy_(q.view(torch.uint8)).mul_(_half(blocks, 0)).add_(_half(blocks, 1))


def _q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    q = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    out.copy_(q.view(torch.uint8)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    q = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    out.copy_(q.view(torch.uint8)).mul_(_half(blocks, 0)).add_(_half(blocks, 1))


def _six_bit_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 12] -> scales and minima, each float32 [N, 8].

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits, and in their top two bits those of scales and
    minima 4-7, whose low four bits are the nibbles of bytes 8-11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=1)
    return scales.float(), minima.float()


def _scale_and_shift(blocks: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = _six_bit_scales(blocks[:, 4:16])
    scales, minima = scales.mul_(_half(blocks, 0)), minima.mul_(_half(blocks, 1))
    out.copy_(q.view(torch.uint8))
    out.view(-1, 8, 32).mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1))


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _scale_and_shift(blocks, _nibbles(blocks[:, 16:], 32), out)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # Bit g of byte i is the fifth bit of value i of group g.
    groups = torch.arange(8).view(8, 1)
    fifth = (_words(blocks[:, 16:48], 1, 4) >> groups & _each_byte(1)) << 4
    _scale_and_shift(blocks, _nibbles(blocks[:, 48:], 32) | fifth.flatten(1), out)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    # Each half of a block: 64 bytes of nibbles, and 32 bytes of four 2-bit fields, one for each 32 of its 128 values.
    fields = torch.arange(0, 8, 2).view(4, 1)
    high = (_words(blocks[:, 128:192], 2, 1, 4) >> fields & _each_byte(3)) << 4
    q = _nibbles(blocks[:, :128], 64) | high.flatten(1)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 104)
    out.copy_(q.view(torch.uint8)).sub_(32).view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_FLOATS: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DECODERS: Mapping[str, _Decoder] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_PACKAGE_TYPES = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")
SUPPORTED_TYPES = (*_FLOATS, *_DECODERS, *_PACKAGE_TYPES)
