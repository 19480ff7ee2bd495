"""What ends the loading of a model in llama.cpp, and what is left behind: options, files, signals."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suimon.core_engine.config import EngineConfig
from suimon.core_engine.errors import InvalidRequestError, ModelLoadError
from suimon.plugins import llama_cpp_library
from suimon.plugins.llama_cpp_executor import LlamaCppEmbedder, _gpu_layers, _SignalWatch, make_executor
from suimon.plugins.llama_cpp_library import Interrupt, LlamaContext, free_gpu_memory, load_library
from suimon.plugins.llama_cpp_options import LlamaCppOptions

pytest.importorskip("llama_cpp")


def load(path: Path, options: dict[str, Any] | None = None, **config: Any) -> Any:
    return make_executor(EngineConfig(model="m", num_blocks=16, executor_options=options or {}, **config), path)


@pytest.mark.parametrize("layers", [-1, 1])
def test_layers_for_a_gpu_that_the_library_does_not_know_are_refused(demo_gguf: Path, layers: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"n_gpu_layers is {layers}, but the installed .* CPUs only"):
        load(demo_gguf, {"n_gpu_layers": layers})
    load(demo_gguf, {"n_gpu_layers": 0}).close()


@pytest.mark.parametrize(
    ("device", "asked", "expected"), [("auto", None, -1), ("cpu", None, 0), ("auto", 7, 7), ("cpu", 0, 0)]
)
def test_all_layers_go_to_a_gpu_unless_it_is_said_otherwise(device: str, asked: int | None, expected: int) -> None:
    config, options = EngineConfig(model="m", device=device), LlamaCppOptions(n_gpu_layers=asked)
    assert _gpu_layers(config, options, can_offload=True) == expected


def test_layers_on_a_gpu_and_the_device_cpu_contradict_each_other() -> None:
    with pytest.raises(InvalidRequestError, match="device is 'cpu'"):
        _gpu_layers(EngineConfig(model="m", device="cpu"), LlamaCppOptions(n_gpu_layers=7), can_offload=True)


def test_a_library_without_gpus_has_no_memory_there() -> None:
    """It asks the library's devices, of which the processor is one."""
    library = load_library()
    assert free_gpu_memory(library) == 0
    ggml = library.llama_cpp._lib
    assert ggml.ggml_backend_dev_count() >= 1


def test_the_memory_of_a_device_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = 0
    monkeypatch.setattr(llama_cpp_library, "_GPU_TYPES", (processor,))
    assert free_gpu_memory(load_library()) > 1 << 20


def test_a_model_that_cannot_compute_its_first_token_is_not_served(
    demo_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaContext, "decode", lambda *_: -3)
    with pytest.raises(ModelLoadError, match="code -3"):
        load(demo_gguf)


def test_vectors_need_a_way_to_make_one_of_many(demo_gguf: Path) -> None:
    with pytest.raises(ModelLoadError, match="set options"):
        load(demo_gguf, {"embedding": True})
    embedder = load(demo_gguf, {"embedding": True, "pooling": "mean"})
    assert np.linalg.norm(embedder.embed([1, 2, 3])) == pytest.approx(1.0)
    embedder.close()


def test_a_vector_that_is_none_is_an_error(demo_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = load(demo_gguf, {"embedding": True, "pooling": "mean"})
    assert isinstance(embedder, LlamaCppEmbedder)
    monkeypatch.setattr(LlamaContext, "embedding", lambda *_: np.array([1.0, np.nan], np.float32))
    with pytest.raises(RuntimeError, match="not finite"):
        embedder.embed([1, 2, 3])
    embedder.close()


def test_a_signal_while_the_library_loads_ends_the_loading(demo_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler may run, and raise, where the library calls back; ctypes would print that and go on."""

    def stop(*_: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(llama_cpp_library._lines, "take", stop)
    with pytest.raises(SystemExit):
        load(demo_gguf)
    monkeypatch.undo()
    load(demo_gguf).close()


def test_signals_are_told_to_nobody_once_the_executor_is_closed() -> None:
    watch = _SignalWatch(Interrupt())
    told = signal.set_wakeup_fd(-1)
    assert told != -1
    signal.set_wakeup_fd(told)
    watch.close()
    watch.close()
    assert signal.set_wakeup_fd(-1) == -1
