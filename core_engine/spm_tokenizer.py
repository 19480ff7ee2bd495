"""SentencePiece BPE vocabularies (pieces with scores) as ``tokenizers.Tokenizer``. Knows scores and merges, no files.

SentencePiece (Kudo & Richardson 2018) joins, again and again, the neighbours whose union is the piece of the highest
score. ``tokenizers`` wants that as a list of merges in order of preference instead: every way to cut a piece into two
pieces is a merge, ranked by the piece's score, then the longer left part first. For a vocabulary of 262,144 pieces that
takes 1.7 s, so the ranked list is kept in the user's cache, keyed by what it was computed from.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.loader.cache import write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.normalizers import Normalizer

logger = logging.getLogger(__name__)

# Kinds of piece, as sentencepiece_model.proto and GGUF number them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "▁"  # U+2581 stands for a space inside pieces

# Below this many pieces, ranking takes less time than reading a file is worth.
_MIN_CACHED_PIECES = 16_384
_CACHE_VERSION = b"merges-1"

Merges = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpmOptions:
    """How text is prepared before pieces are looked up.

    ``add_space_prefix`` puts one space before each stretch of text. ``remove_extra_whitespaces`` trims, and makes one
    space of several. ``charsmap`` is SentencePiece's compiled normalisation table.
    """

    add_space_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""


def build_spm(
    pieces: Sequence[str], merges: Merges, *, unk_token: str | None, byte_fallback: bool, options: SpmOptions
) -> Backend:
    """The tokenizer over ``pieces`` (id = index) with ``merges`` [n, 2] of piece ids, best first; no added tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    left, right = (map(pieces.__getitem__, column.tolist()) for column in merges.T)
    pairs = list(zip(left, right, strict=True))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, pairs, unk_token=unk_token, fuse_unk=True, byte_fallback=byte_fallback)
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(_normalizers(options))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if options.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _normalizers(options: SpmOptions) -> list[Normalizer]:
    from tokenizers import Regex, normalizers

    steps: list[Normalizer] = []
    if options.charsmap:
        steps.append(normalizers.Precompiled(options.charsmap))
    if options.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if options.add_space_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return [*steps, normalizers.Replace(" ", SPACE)]


def ranked_merges(pieces: Sequence[str], scores: Sequence[float], cache_dir: Path | None) -> Merges:
    """All merges [n, 2] of piece ids, best first; from ``cache_dir`` when they were ranked before.

    Raises ModelLoadError when a piece occurs twice.
    """
    if len(pieces) < _MIN_CACHED_PIECES or cache_dir is None:
        return _rank(pieces, scores)
    path = cache_dir / f"{_cache_key(pieces, scores)}.merges"
    merges = _read_cache(path, len(pieces))
    if merges is None:
        merges = _rank(pieces, scores)
        _write_cache(path, merges)
    return merges


def _rank(pieces: Sequence[str], scores: Sequence[float]) -> Merges:
    left, right, whole = _cuts(pieces)
    piece_scores = np.asarray(scores, dtype=np.float32)
    lengths = np.fromiter(map(len, pieces), dtype=np.int32, count=len(pieces))
    # lexsort: the last key decides first.
    order = np.lexsort((right, left, whole, -lengths[right], -lengths[left], -piece_scores[whole]))
    return np.stack((left[order], right[order]), axis=1)


def _cuts(pieces: Sequence[str]) -> tuple[Merges, Merges, Merges]:
    """Ids of (left part, right part, whole) for every cut of a piece into two pieces."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise ModelLoadError(f"the vocabulary names {len(pieces) - len(ids)} of its {len(pieces)} pieces twice")
    find = ids.get
    left, right, whole = array("i"), array("i"), array("i")
    for index, piece in enumerate(pieces):
        for cut in range(1, len(piece)):
            left_id = find(piece[:cut])
            if left_id is not None and (right_id := find(piece[cut:])) is not None:
                left.append(left_id)
                right.append(right_id)
                whole.append(index)
    return np.array(left, np.int32), np.array(right, np.int32), np.array(whole, np.int32)


def _cache_key(pieces: Sequence[str], scores: Sequence[float]) -> str:
    digest = hashlib.sha256(_CACHE_VERSION)
    digest.update("\0".join(pieces).encode())
    digest.update(np.asarray(scores, dtype=np.float32).tobytes())
    return digest.hexdigest()


# A cache file is the sha256 of the rest, then the pairs as little-endian int32. Anything else is computed anew.


def _read_cache(path: Path, size: int) -> Merges | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, payload = content[:32], content[32:]
    if hashlib.sha256(payload).digest() != digest or len(payload) % 8:
        logger.warning("%s is damaged; it is written anew", path)
        return None
    merges = np.frombuffer(payload, "<i4").reshape(-1, 2).astype(np.int32, copy=False)
    return merges if merges.size == 0 or (merges.min() >= 0 and merges.max() < size) else None


def _write_cache(path: Path, merges: Merges) -> None:
    """A cache that cannot be written costs time, nothing else."""
    payload = merges.astype("<i4").tobytes()
    try:
        write_atomically(path, hashlib.sha256(payload).digest() + payload)
    except OSError as error:
        logger.info("the merges are not cached: %s", error)
