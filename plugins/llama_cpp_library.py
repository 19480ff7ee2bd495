"""llama.cpp's C interface as far as it is used here: a model, a context, one batch at a time, copies of sequences.

Knows the library's structs, return codes and pointers; refuses to know requests, scheduling and sampling. Imported in
the engine's process only: the library aborts the process on what it does not expect, and this one may end.

A context is used by one thread. The interpreter's lock is not held while it computes.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from suimon.core_engine.errors import ModelLoadError
from suimon.plugins.llama_cpp_options import INSTALL_HINT, LlamaCppOptions

logger = logging.getLogger(__name__)

# llama_decode's answers; what is below 0 is an error, what is below -1 one after which the context is not to be used.
DECODED, NO_ROOM, ABORTED, REFUSED = 0, 1, 2, -1

_CACHE_TYPES = {"f32": "GGML_TYPE_F32", "f16": "GGML_TYPE_F16", "bf16": "GGML_TYPE_BF16", "q8_0": "GGML_TYPE_Q8_0"}
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_GPU_TYPES = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU, _IGPU
_NO_POOLING, _RANK_POOLING = 0, 4
_POOLING = {"auto": -1, "mean": 1, "cls": 2, "last": 3}
# GGML_LOG_LEVEL_*: a model's hundreds of lines of information (2) are for those who debug it. 5 goes on with a line.
_LOG_LEVELS = {3: logging.WARNING, 4: logging.ERROR}
_CONTINUED = 5
# Warnings of what is meant to be so: all sequences share a pool, which is longer than one of them may get.
_EXPECTED = ("possible training context overflow", "the full capacity of the model will not be utilized")


def load_library() -> ModuleType:
    """The bindings, their log lines going to ours. Raises ModelLoadError with the command that installs them."""
    try:
        import llama_cpp
    except ImportError as error:
        raise ModelLoadError(f"llama-cpp-python cannot be imported ({error}): {INSTALL_HINT}") from error
    except (OSError, RuntimeError, AttributeError) as error:
        raise ModelLoadError(f"llama-cpp-python's library cannot be loaded: {error}") from error
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


class _LogLines:
    """Joins what the library says in pieces to lines, and hands them on."""

    def __init__(self) -> None:
        self._level = logging.DEBUG
        self._pieces: list[str] = []

    def take(self, level: int, text: bytes) -> None:
        if level != _CONTINUED:
            self._flush()
            self._level = _LOG_LEVELS.get(level, logging.DEBUG)
        self._pieces.append(text.decode("utf-8", "replace"))
        if self._pieces[-1].endswith("\n"):
            self._flush()

    def _flush(self) -> None:
        line = "".join(self._pieces).strip()
        self._pieces = []
        level = logging.DEBUG if any(text in line for text in _EXPECTED) else self._level
        if line.strip("."):  # a row of dots is a progress bar
            logger.log(level, "llama.cpp: %s", line)


_lines = _LogLines()


# What a signal's handler raised while the library called back: ctypes would print it and go on.
_raised: list[BaseException] = []


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _log(level: int, text: bytes | None, _: object) -> None:
    try:
        _lines.take(level, text or b"")
    except BaseException as error:
        _raised.append(error)


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
def _goes_on_loading(progress: float, _: object) -> bool:
    return not _raised


def _raise_what_came() -> None:
    if _raised:
        error = _raised[0]
        _raised.clear()
        raise error


def free_gpu_memory(library: ModuleType) -> int:
    """Free bytes of all GPUs together, 0 if the library knows of none."""
    ggml = library.llama_cpp._lib  # the bindings have no functions for devices, but their library has
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    total = 0
    for number in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(number)))
        free, size = ctypes.c_size_t(), ctypes.c_size_t()
        if ggml.ggml_backend_dev_type(device) in _GPU_TYPES:
            ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(size))
            total += free.value
    return total


def library_version() -> str:
    """The version of the installed bindings."""
    return metadata.version("llama-cpp-python")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSizes:
    """``num_tokens`` of KV for at most ``num_sequences``, ``batch_tokens`` and ``ubatch_tokens`` in one computation.

    With ``kv_unified`` they are one pool, else each sequence has an equal part.
    """

    num_tokens: int
    num_sequences: int
    batch_tokens: int
    ubatch_tokens: int
    num_threads: int
    num_threads_batch: int
    kv_unified: bool = True


class LlamaModel:
    """A loaded model. Raises ModelLoadError if the library refuses the file; why is in the log before that."""

    def __init__(self, library: ModuleType, path: Path, options: LlamaCppOptions, n_gpu_layers: int) -> None:
        self.library = library
        params = library.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.main_gpu = options.main_gpu
        params.load_mode = (1 if options.use_mmap else 0) | (2 if options.use_mlock else 0)
        params.progress_callback = _goes_on_loading
        self.pointer = library.llama_model_load_from_file(str(path).encode(), params)
        _raise_what_came()
        if not self.pointer:
            raise ModelLoadError(f"{path}: llama.cpp {library_version()} cannot load it; its log lines above say why")
        vocabulary = library.llama_model_get_vocab(self.pointer)
        self.vocab_size = int(library.llama_vocab_n_tokens(vocabulary))
        self.context_length = int(library.llama_model_n_ctx_train(self.pointer))
        self.embedding_size = int(library.llama_model_n_embd_out(self.pointer))

    @property
    def has_encoder(self) -> bool:
        return bool(self.library.llama_model_has_encoder(self.pointer))

    @property
    def has_decoder(self) -> bool:
        return bool(self.library.llama_model_has_decoder(self.pointer))

    @property
    def can_trim(self) -> bool:
        """Whether the end of a sequence can be forgotten, or its beginning copied. A recurrent state has no parts."""
        library = self.library
        return not (library.llama_model_is_recurrent(self.pointer) or library.llama_model_is_hybrid(self.pointer))

    def close(self) -> None:
        """Free the weights, once; after the contexts."""
        if self.pointer:
            self.library.llama_model_free(self.pointer)
            self.pointer = None


class Interrupt:
    """Makes a computation under way end early.

    The library asks a C function, at every node of its graph and from several threads, whether to stop; one of Python
    would wait for the interpreter's lock each time. ``strlen`` of a text of ours does it: its length is 0 or 1, which
    is false or true.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    def set(self) -> None:
        """Callable from any thread."""
        self._text[0] = b"!"

    def clear(self) -> None:
        self._text[0] = b"\0"

    def attach(self, library: ModuleType, context: Any) -> None:
        function = ctypes.cast(ctypes.CDLL(None).strlen, library.ggml_abort_callback)
        library.llama_set_abort_callback(context, function, ctypes.cast(self._text, ctypes.c_void_p))


class LlamaContext:
    """KV memory and scratch for one model. ``embedding`` computes vectors instead of logits.

    Raises ModelLoadError if there is no memory for it.
    """

    def __init__(
        self, model: LlamaModel, sizes: ContextSizes, options: LlamaCppOptions, *, embedding: bool = False
    ) -> None:
        library = self._library = model.library
        params = library.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sizes.num_tokens, sizes.num_sequences
        params.n_batch, params.n_ubatch = sizes.batch_tokens, sizes.ubatch_tokens
        params.n_threads, params.n_threads_batch = sizes.num_threads, sizes.num_threads_batch
        params.type_k = getattr(library, _CACHE_TYPES[options.type_k])
        params.type_v = getattr(library, _CACHE_TYPES[options.type_v])
        params.flash_attn_type = _FLASH_ATTENTION[options.flash_attention]
        params.kv_unified = self._is_pool = sizes.kv_unified  # what either costs is in docs/llama-cpp.md
        params.swa_full = True  # else what a sliding window has left behind is lost to whoever copies the sequence
        params.embeddings, params.pooling_type = embedding, _POOLING[options.pooling]
        params.no_perf = True
        self.pointer = library.llama_init_from_model(model.pointer, params)
        _raise_what_came()
        if not self.pointer:
            raise ModelLoadError(f"llama.cpp cannot make a context of {sizes.num_tokens} tokens: its log says why")
        self.num_tokens = int(library.llama_n_ctx(self.pointer))
        self.interrupt = Interrupt()
        self.interrupt.attach(library, self.pointer)
        self._memory = library.llama_get_memory(self.pointer)
        self._vocab_size, self._embedding_size = model.vocab_size, model.embedding_size
        self._batch = _Batch(library, sizes.batch_tokens)

    def decode(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[int],
        wanted: Sequence[int],
    ) -> int:
        """Compute tokens, one entry each in the first three; ``wanted`` are the rows whose output is. DECODED or not.

        With NO_ROOM nothing has changed. Logits are those of the latest call.
        """
        self.interrupt.clear()
        code = self._library.llama_decode(self.pointer, self._batch.fill(token_ids, positions, sequences, wanted))
        _raise_what_came()
        return int(code)

    def logits(self, num_rows: int) -> npt.NDArray[np.float32]:
        """The rows wanted of the latest ``decode``, in its order, (num_rows, vocab): the library's memory, no copy."""
        pointer = self._library.llama_get_logits(self.pointer)
        return np.ctypeslib.as_array(pointer, shape=(num_rows, self._vocab_size))

    def check_pooling(self) -> None:
        """Raise ModelLoadError unless the tokens of an input become one vector."""
        kind = self._library.llama_pooling_type(self.pointer)
        if kind == _NO_POOLING:
            message = "the file does not say how its tokens become one vector: set options.pooling to mean, cls or last"
            raise ModelLoadError(message)
        if kind == _RANK_POOLING:
            raise ModelLoadError("the model ranks texts, which is not served; options.pooling makes vectors of it")

    def embedding(self, sequence: int) -> npt.NDArray[np.float32]:
        """A copy of the pooled vector of a sequence of the latest ``decode``."""
        pointer = self._library.llama_get_embeddings_seq(self.pointer, sequence)
        if not pointer:
            raise RuntimeError("llama.cpp computed no embedding")
        return np.array(np.ctypeslib.as_array(pointer, shape=(self._embedding_size,)))

    def copy(self, source: int, target: int, length: int) -> None:
        """Give ``target``, which has none, the first ``length`` tokens of ``source``."""
        if self._is_pool:
            self._library.llama_memory_seq_cp(self._memory, source, target, 0, length)
            return
        # Asked for a part of what is not in a pool, the library aborts the process.
        self._library.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        self.trim(target, length)

    def trim(self, sequence: int, length: int) -> bool:
        """Forget positions from ``length`` on. False, with nothing changed, if the model's memory has no parts."""
        return bool(self._library.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def free(self, sequence: int) -> None:
        """Forget the sequence."""
        self._library.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear(self) -> None:
        """Forget everything."""
        if self._memory:
            self._library.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        """Free the memory, once."""
        if self.pointer:
            self._library.llama_free(self.pointer)
            self.pointer = None


class _Batch:
    """Arrays for up to ``size`` tokens, each of one sequence, and the struct that points to them."""

    def __init__(self, library: ModuleType, size: int) -> None:
        self._tokens, self._positions, self._sequences = (np.zeros(size, np.int32) for _ in range(3))
        self._counts, self._wanted = np.ones(size, np.int32), np.zeros(size, np.int8)
        # seq_id is an array of pointers, one to each token's sequences.
        self._pointers = self._sequences.ctypes.data + 4 * np.arange(size, dtype=np.uintp)
        arrays = {
            "token": self._tokens,
            "pos": self._positions,
            "n_seq_id": self._counts,
            "seq_id": self._pointers,
            "logits": self._wanted,
        }
        kinds = dict(library.llama_batch._fields_)
        fields = {name: ctypes.cast(array.ctypes.data, kinds[name]) for name, array in arrays.items()}
        self._struct = library.llama_batch(n_tokens=0, **fields)

    def fill(
        self, token_ids: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Sequence[int]
    ) -> Any:
        count = len(token_ids)
        self._tokens[:count] = token_ids
        self._positions[:count] = positions
        self._sequences[:count] = sequences
        self._wanted[:count] = 0
        self._wanted[wanted] = 1
        self._struct.n_tokens = count
        return self._struct
