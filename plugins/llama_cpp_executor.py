"""llama.cpp as a StepExecutor: a step is one llama_batch, of prompts' chunks and decodes together.

Knows which of the library's sequences stands for which of ours. Refuses to sample: logits go, where they lie, to the
common Sampler, so that what a request may ask for is what it may ask of every backend. Runs in the engine's process.
"""

from __future__ import annotations

import heapq
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from suimon.core_engine.batch import CacheOp, CopySequence, FreeSequence, MoveSequence, ScheduledBatch, TrimSequence
from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import InvalidRequestError, ModelLoadError
from suimon.core_engine.executor import (
    PER_SEQUENCE,
    ExecutorCapabilities,
    ExecutorDeadError,
    ForwardExecutor,
    LostSequencesError,
    OutOfSlotsError,
    Pending,
    StepExecutor,
)
from suimon.core_engine.loader.end_tokens import config_end_tokens
from suimon.core_engine.loader.gguf import GGUFHeader
from suimon.core_engine.loader.gguf_config import translate_generation_config
from suimon.core_engine.sampler import SamplingRow
from suimon.plugins.llama_cpp_library import (
    ABORTED,
    DECODED,
    NO_ROOM,
    REFUSED,
    ContextSizes,
    Interrupt,
    LlamaContext,
    LlamaModel,
    free_gpu_memory,
    library_version,
    load_library,
)
from suimon.plugins.llama_cpp_options import LlamaCppOptions, OptionError, read_options
from suimon.plugins.llama_cpp_plan import (
    LlamaCppPlan,
    check_architecture,
    checked_header,
    find_file,
    is_embedding_model,
    make_plan,
)

_CPU_BUILD = "the installed llama-cpp-python computes on CPUs only: install a build of it for your GPU"


def make_executor(config: EngineConfig, model_path: Path) -> StepExecutor:
    """The executor of the GGUF file at ``model_path``: of text, or of embeddings if it is made for those.

    Raises ModelLoadError for a file that cannot be served, InvalidRequestError for an option that cannot be met.
    """
    options = _options(config)
    path = find_file(model_path)
    header = checked_header(path)
    embeds = is_embedding_model(header, options)
    library = load_library()
    layers = _gpu_layers(config, options, can_offload=bool(library.llama_supports_gpu_offload()))
    model = LlamaModel(library, path, options, layers)
    # What the weights have left of a GPU's memory is known once they are there.
    free = free_gpu_memory(library) if layers else None
    plan = make_plan(config, options, header, on_gpu=layers != 0, embeds=embeds, free_memory=free)
    check_architecture(header, has_encoder=model.has_encoder, has_decoder=model.has_decoder, embeds=embeds)
    torch.set_num_threads(1)  # for what is done beside the library, whose idle threads go on spinning for a while
    kind = LlamaCppEmbedder if embeds else LlamaCppExecutor
    return kind(model, plan, options, header)


def _options(config: EngineConfig) -> LlamaCppOptions:
    try:
        return read_options(config.executor_options)
    except OptionError as error:
        raise InvalidRequestError(str(error), param=f"options.{error.option}") from error


def _gpu_layers(config: EngineConfig, options: LlamaCppOptions, *, can_offload: bool) -> int:
    if config.device.startswith("cuda") and not can_offload:
        raise InvalidRequestError(f"device is {config.device!r}, but {_CPU_BUILD}", param="device")
    if options.n_gpu_layers is None:
        return -1 if can_offload and config.device != "cpu" else 0
    if options.n_gpu_layers and not can_offload:
        message = f"options.n_gpu_layers is {options.n_gpu_layers}, but {_CPU_BUILD}, or leave it out"
        raise InvalidRequestError(message, param="options.n_gpu_layers")
    if options.n_gpu_layers and config.device == "cpu":
        message = f"options.n_gpu_layers is {options.n_gpu_layers}, but device is 'cpu': leave out one of them"
        raise InvalidRequestError(message, param="options.n_gpu_layers")
    return options.n_gpu_layers


class LlamaCppExecutor(ForwardExecutor):
    """Runs ``model`` in a pool of ``plan.num_tokens`` tokens of KV."""

    def __init__(self, model: LlamaModel, plan: LlamaCppPlan, options: LlamaCppOptions, header: GGUFHeader) -> None:
        super().__init__()
        self._model, self._plan = model, plan
        num_seats = plan.num_seats if model.can_trim else plan.max_num_seqs  # without parts, nothing is kept
        sizes = _sizes(plan, num_seats)
        self._context = LlamaContext(model, sizes, options)
        self._seats: dict[int, int] = {}  # our seq_id -> the library's
        self._free_seats = list(range(num_seats))  # a heap
        self._capabilities = ExecutorCapabilities(
            vocab_size=model.vocab_size,
            max_model_len=plan.max_model_len,
            num_blocks=min(sizes.num_tokens, self._context.num_tokens),
            block_size=1,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            partial_trim=model.can_trim,
            kv_kind=PER_SEQUENCE,
            max_residents=num_seats,
            max_kept_tokens=plan.max_kept_tokens,
            min_shared_tokens=plan.min_shared_tokens,
        )
        self.eos_token_ids = config_end_tokens(translate_generation_config(header))
        self.plan = [f"llama.cpp through llama-cpp-python {library_version()}", *plan.describe()]
        self._warm_up()
        self._watch = _SignalWatch(self._context.interrupt)

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return self._capabilities

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """One llama_decode. The logits (batch.num_logits, vocab) lie in the library's memory until the next one.

        Raises LostSequencesError for those whose KV cannot be trimmed; OutOfSlotsError for the last for whom there is
        no room, one at a time; RuntimeError if the library fails, ExecutorDeadError if it cannot be used after that.
        """
        lost = [seq_id for operation in batch.cache_ops for seq_id in self._execute(operation)]
        if lost:
            raise LostSequencesError(lost)
        token_ids: list[int] = []
        positions: list[int] = []
        seats: list[int] = []
        wanted: list[int] = []
        for sequence in batch.sequences:
            count = len(sequence.token_ids)
            token_ids += sequence.token_ids
            positions += range(sequence.start, sequence.start + count)
            seats += [self._seat(sequence.seq_id)] * count
            wanted += range(len(token_ids) - sequence.num_logits, len(token_ids))
        self._decode(batch, token_ids, positions, seats, wanted)
        return torch.from_numpy(self._context.logits(len(wanted)))

    def _decode(
        self, batch: ScheduledBatch, token_ids: list[int], positions: list[int], seats: list[int], wanted: list[int]
    ) -> None:
        code = self._context.decode(token_ids, positions, seats, wanted)
        if code == NO_ROOM:
            raise OutOfSlotsError([batch.sequences[-1].seq_id])
        if code == ABORTED:
            raise RuntimeError("the computation was interrupted")
        _check_decoded(code)

    def close(self) -> None:
        """Free the library's memory."""
        self._watch.close()
        self._context.close()
        self._model.close()

    # --- the library's sequences ---

    def _seat(self, seq_id: int) -> int:
        if seq_id not in self._seats:
            # The lowest first: sequences with memory of their own are computed together if their seats are neighbours.
            self._seats[seq_id] = heapq.heappop(self._free_seats)
        return self._seats[seq_id]

    def _execute(self, operation: CacheOp) -> tuple[int, ...]:
        """Those that it cost all of their KV: a sequence whose end cannot be forgotten, and who was to begin with it.

        Raises ValueError for an operation that is for another kind of executor.
        """
        match operation:
            case CopySequence(source, target) | MoveSequence(source, target) if source not in self._seats:
                return source, target  # an operation before it was too much for the source
            case CopySequence(source, target, length):
                self._context.copy(self._seats[source], self._seat(target), length)
                return self._trim(target, length)
            case MoveSequence(source, target, length):
                self._seats[target] = self._seats.pop(source)
                return self._trim(target, length)
            case FreeSequence(seq_id) | TrimSequence(seq_id, 0):
                self._leave(seq_id)
            case TrimSequence(seq_id, length):
                return self._trim(seq_id, length) if seq_id in self._seats else ()
            case _:
                raise ValueError(f"llama.cpp keeps KV per sequence and cannot execute {operation}")
        return ()

    def _trim(self, seq_id: int, length: int) -> tuple[int, ...]:
        if self._context.trim(self._seats[seq_id], length):
            return ()
        self._leave(seq_id)
        return (seq_id,)

    def _leave(self, seq_id: int) -> None:
        seat = self._seats.pop(seq_id, None)
        if seat is not None:
            self._context.free(seat)
            heapq.heappush(self._free_seats, seat)

    def _warm_up(self) -> None:
        """Put one token through the model: what is mapped or allocated at first use is, while loading."""
        code = self._context.decode([0], [0], [0], [0])
        if code != DECODED:
            raise ModelLoadError(f"llama.cpp cannot compute a first token (code {code}): its log says why")
        self._context.clear()


class LlamaCppEmbedder:
    """Computes embeddings. A StepExecutor of whom nobody asks a step: it says that it ``generates`` nothing."""

    def __init__(self, model: LlamaModel, plan: LlamaCppPlan, options: LlamaCppOptions, header: GGUFHeader) -> None:
        self._model = model
        self._context = LlamaContext(model, _sizes(plan, 1), options, embedding=True)
        self._context.check_pooling()
        self.capabilities = ExecutorCapabilities(
            vocab_size=model.vocab_size,
            max_model_len=plan.max_model_len,
            num_blocks=plan.num_tokens,
            block_size=1,
            max_num_seqs=1,
            kv_kind=PER_SEQUENCE,
            max_residents=1,
            generates=False,
            embeds=True,
        )
        self.eos_token_ids = config_end_tokens(translate_generation_config(header))
        size, length = model.embedding_size, plan.max_model_len
        self.plan = [
            f"llama.cpp through llama-cpp-python {library_version()}",
            f"embeddings of {size} numbers, from inputs of up to {length:,} tokens, {plan.num_threads} threads",
        ]
        self._watch = _SignalWatch(self._context.interrupt)

    def embed(self, token_ids: Sequence[int]) -> list[float]:
        """The vector of one input, of length 1.

        Raises RuntimeError if the library fails, ExecutorDeadError if it cannot be used after that.
        """
        self._context.clear()
        count = len(token_ids)
        code = self._context.decode(token_ids, range(count), [0] * count, range(count))
        _check_decoded(code)
        vector = self._context.embedding(0).astype(np.float64)
        norm = float(np.linalg.norm(vector))
        if not np.isfinite(norm):
            raise RuntimeError("llama.cpp computed an embedding that is not finite")
        return [float(value) for value in vector / norm] if norm > 0.0 else [0.0] * len(vector)

    def submit(self, batch: ScheduledBatch, sampling: Sequence[SamplingRow]) -> Pending:
        """Never called: the engine refuses requests for text."""
        raise RuntimeError("an embedding model computes no logits")

    def close(self) -> None:
        """Free the library's memory."""
        self._watch.close()
        self._context.close()
        self._model.close()


def _check_decoded(code: int) -> None:
    if code == DECODED:
        return
    message = f"llama_decode failed with code {code}; its log line says why"
    raise ExecutorDeadError(message) if code < REFUSED else RuntimeError(message)


def _sizes(plan: LlamaCppPlan, num_sequences: int) -> ContextSizes:
    """The plan's for fewer sequences, which take no more memory in parts of their own than they need."""
    is_pool = plan.kv_unified
    return ContextSizes(
        num_tokens=plan.num_tokens if is_pool else plan.num_tokens // plan.num_seats * num_sequences,
        num_sequences=num_sequences,
        batch_tokens=plan.max_num_batched_tokens,
        ubatch_tokens=plan.num_ubatch_tokens,
        num_threads=plan.num_threads,
        num_threads_batch=plan.num_threads_batch,
        kv_unified=is_pool,
    )


class _SignalWatch:
    """A signal that the process handles in Python also ends the computation that keeps it from doing so.

    Only where nobody else (an event loop) is told of signals in this way, and only on the main thread, which alone may
    ask for it. ``close`` on the same thread.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self._writing: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._writing = writing

        def watch() -> None:
            while os.read(reading, 64):
                interrupt.set()
            os.close(reading)

        threading.Thread(target=watch, name="interrupt", daemon=True).start()

    def close(self) -> None:
        """Signals are again told to nobody."""
        if self._writing is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._writing)
            self._writing = None
