"""The compiled library as Python sees it: its structs, its functions, and one team of threads.

Knows pointers and layouts. Refuses to know models. Whoever passes a tensor keeps it alive and contiguous.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER, Structure, c_double, c_float, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from suimon.kernels.cpu.build import BuildError, library_path

VERSION = 3
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class LinearStruct(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("in_features", c_int64), ("out_features", c_int64))


class LayerStruct(Structure):
    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int64),
        ("rope", c_int64),
    )


class DecoderStruct(Structure):
    _fields_ = (
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("rotary_dim", c_int64),
        ("block_size", c_int64),
        ("num_layers", c_int64),
        ("dtype", c_int64),
        ("activation", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("padding", c_float),
        ("layers", POINTER(LayerStruct)),
        ("final_norm", c_void_p),
    )


class SequencesStruct(Structure):
    _fields_ = (
        ("count", c_int64),
        ("max_blocks", c_int64),
        ("query_starts", c_void_p),
        ("context_lengths", c_void_p),
        ("block_tables", c_void_p),
    )


class StepStruct(Structure):
    _fields_ = (
        ("num_tokens", c_int64),
        ("sequences", SequencesStruct),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("key_caches", c_void_p),
        ("value_caches", c_void_p),
        ("hidden", c_void_p),
    )


class AttentionStruct(Structure):
    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class SampleStruct(Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("position", c_uint64),
        ("top_p", c_double),
        ("top_k", c_int64),
        ("temperature", c_float),
        ("min_p", c_float),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "suimon_version": (c_int64, ()),
    "suimon_sizes": (None, (POINTER(c_int64),)),
    "suimon_pool_new": (c_void_p, (c_int64,)),
    "suimon_pool_delete": (None, (c_void_p,)),
    "suimon_pack": (None, (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "suimon_linear": (None, (c_void_p, POINTER(LinearStruct), c_int64, c_void_p, c_int64, c_void_p)),
    "suimon_attend": (
        None,
        (c_void_p, POINTER(AttentionStruct), c_int64, *[c_void_p] * 3, POINTER(SequencesStruct), c_void_p),
    ),
    "suimon_sample": (None, (c_void_p, c_void_p, *[c_int64] * 3, POINTER(SampleStruct), c_void_p, c_void_p)),
    "suimon_decode": (None, (c_void_p, POINTER(DecoderStruct), POINTER(StepStruct))),
}


@cache
def library() -> ctypes.CDLL:
    """The library, compiled if need be, checked to have the structs above. Raises BuildError.

    A file in the cache that is no such library, as a power cut leaves one, is compiled anew.
    """
    path = library_path()
    try:
        return _opened(path)
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)
    try:
        return _opened(library_path())
    except (OSError, AttributeError) as error:
        raise BuildError(f"the compiled CPU kernels cannot be loaded: {error}") from error


def _opened(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    sizes = (c_int64 * 5)()
    loaded.suimon_sizes(sizes)
    ours = [ctypes.sizeof(struct) for struct in (LinearStruct, LayerStruct, DecoderStruct, StepStruct, SampleStruct)]
    if loaded.suimon_version() != VERSION or list(sizes) != ours:
        raise RuntimeError(f"the compiled CPU kernels do not fit this version: sizes {list(sizes)}, expected {ours}")
    return loaded


class Pool:
    """A team of ``threads`` threads, the caller's included. ``with`` it there is its handle, for one call at a time.

    A call lets other Python threads run, and two models of one process may have the same team.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._library = library()
        self._lock = threading.Lock()
        self._handle = self._library.suimon_pool_new(threads)

    def __enter__(self) -> int:
        self._lock.acquire()
        return int(self._handle)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.suimon_pool_delete(self._handle)


@cache
def pool_of(threads: int) -> Pool:
    """The process's team of that size."""
    return Pool(threads)


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
