"""``tokenizer.model``, the file that SentencePiece trains. Knows the fields it needs of its protocol buffer.

ModelProto      1: pieces (repeated SentencePiece)   2: TrainerSpec   3: NormalizerSpec
SentencePiece   1: piece string   2: score float   3: type enum
TrainerSpec     3: model_type enum (1 unigram, 2 BPE, ...)   35: byte_fallback bool
NormalizerSpec  2: precompiled_charsmap bytes   3: add_dummy_prefix bool   4: remove_extra_whitespaces bool
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.spm_tokenizer import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SpmOptions,
    build_spm,
    ranked_merges,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types

Field = tuple[int, int | bytes]


def load_spm_model(content: bytes, *, source: object, cache_dir: Path | None = None) -> Backend:
    """The tokenizer in the bytes of a ``tokenizer.model`` file, its special tokens added; adds no BOS or EOS.

    Raises ModelLoadError when the bytes are no such file, UnsupportedModelError when the pieces are no BPE pieces.
    """
    try:
        fields = list(_fields(content))
        entries = [_piece(value) for number, value in fields if number == 1]
        trainer = dict(_fields(_last_message(fields, 2)))
        normalizer = dict(_fields(_last_message(fields, 3)))
    except (IndexError, struct.error, UnicodeDecodeError, TypeError) as error:
        raise ModelLoadError(f"{source}: is no SentencePiece model: {error}") from error
    if not entries:
        raise ModelLoadError(f"{source}: is no SentencePiece model: it has no pieces")
    if trainer.get(3, 1) != _BPE:
        raise UnsupportedModelError(
            f"{source}: a SentencePiece model that is not BPE; only BPE is read without a "
            "tokenizer.json. Save the tokenizer in the tokenizers library's format."
        )
    pieces, scores, types = (list(column) for column in zip(*entries, strict=True))
    options = SpmOptions(
        add_space_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        charsmap=bytes(normalizer.get(2, b"")),
    )
    unk = next((piece for piece, kind in zip(pieces, types, strict=True) if kind == UNKNOWN), None)
    merges = ranked_merges(pieces, scores, cache_dir)
    backend = build_spm(pieces, merges, unk_token=unk, byte_fallback=bool(trainer.get(35, 0)), options=options)
    _add_tokens(backend, pieces, types)
    return backend


def _add_tokens(backend: Backend, pieces: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    added = (UNKNOWN, CONTROL, USER_DEFINED)
    backend.add_tokens(
        [
            AddedToken(piece, special=kind != USER_DEFINED, normalized=False)
            for piece, kind in zip(pieces, types, strict=True)
            if kind in added
        ]
    )


def _piece(message: int | bytes) -> tuple[str, float, int]:
    fields = dict(_fields(message))
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise TypeError("a piece has a field of the wrong type")
    return text.decode(), struct.unpack("<f", score)[0], int(fields.get(3, NORMAL))


def _last_message(fields: list[Field], number: int) -> int | bytes:
    return next((value for found, value in reversed(fields) if found == number), b"")


def _fields(message: int | bytes) -> Iterator[Field]:
    """(field number, value) of each field; a value is an int (varint), or bytes (the rest)."""
    if isinstance(message, int):
        raise TypeError("a message was expected, not a number")
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            number_value, position = _varint(message, position)
            yield number, number_value
            continue
        sizes = {_FIXED64: 8, _FIXED32: 4}
        size, position = _varint(message, position) if wire == _BYTES else (sizes.get(wire, -1), position)
        if size < 0 or position + size > len(message):
            _damaged(position)
        yield number, message[position : position + size]
        position += size


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    return _damaged(position)


def _damaged(position: int) -> NoReturn:
    raise IndexError(f"the protocol buffer is damaged near byte {position}")
