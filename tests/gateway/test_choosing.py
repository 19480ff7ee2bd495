"""backend = "auto": the best offer wins, whoever makes it, and what is refused says why."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import msgspec
import pytest

from suimon.core_engine.loader import pypi
from suimon.gateway.choosing import resolve
from suimon.gateway.config import ConfigError, ModelSettings, Settings
from suimon.gateway.hookspecs import Offer, hookimpl
from suimon.gateway.plugin_manager import PluginManager
from suimon.plugins import llama_cpp as llama_cpp_plugin

PLUGINS = ("suimon.plugins.native", "suimon.plugins.llama_cpp", "suimon.plugins.tensorrt_llm", "suimon.plugins.echo")


class Offering:
    """A plugin of one offer."""

    def __init__(self, backend: str, rank: int, reason: str = "because") -> None:
        self.offer = Offer(backend=backend, rank=rank, reason=reason)

    @hookimpl
    def offer_model(self, model: ModelSettings) -> Offer | None:
        return self.offer if model.model else None


def loaded(names: tuple[str, ...]) -> PluginManager:
    manager = PluginManager()
    for name in names:
        manager.load(name)
    return manager


def chosen(*plugins: Any, built_in: tuple[str, ...] = PLUGINS, **model: Any) -> tuple[str, str | None]:
    """(backend, reason) of one model."""
    manager = loaded(built_in)
    for plugin in plugins:
        manager.register(plugin)
    settings, reasons = resolve(Settings(models=(ModelSettings(**{"backend": "auto"} | model),)), manager)
    return settings.models[0].backend, reasons.get(0)


def refusal(*plugins: Any, **model: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        chosen(*plugins, **model)
    return str(caught.value)


def write_gguf(path: Path, architecture: str) -> str:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32("any.key", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def write_config(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-cpp-python is here, whether it is or not."""
    monkeypatch.setattr(llama_cpp_plugin, "find_spec", lambda name: SimpleNamespace(name=name))


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not."""
    monkeypatch.setattr(llama_cpp_plugin, "find_spec", lambda name: None)


# --- Offers -----------------------------------------------------------------------------------------------------------


def test_the_highest_rank_wins_and_its_reason_is_kept() -> None:
    plugins = (Offering("low", 5), Offering("high", 90, "it is the best"), Offering("middle", 20), Offering("no", 0))
    assert chosen(*plugins, model="m") == ("high", "auto: it is the best")


def test_of_equal_offers_the_last_plugins_wins() -> None:
    """Those that the operator names are loaded last."""
    assert chosen(Offering("mine", Offer.USUAL), model="m") == ("mine", "auto: because")


def test_a_backend_that_was_named_is_kept_and_nobody_is_asked() -> None:
    assert chosen(Offering("high", 90), model="m", backend="echo") == ("echo", None)


def test_only_models_left_to_choose_are_changed() -> None:
    models = (
        ModelSettings(model="a", backend="auto", seed=3),
        ModelSettings(backend="echo"),
        ModelSettings(model="b", backend="auto"),
    )
    before = Settings(port=77, models=models)
    after, reasons = resolve(before, loaded(PLUGINS))
    expected = [msgspec.structs.replace(m, backend="native") if m.backend == "auto" else m for m in models]
    assert after == msgspec.structs.replace(before, models=tuple(expected))
    assert set(reasons) == {0, 2} and before.models == models


def test_where_nobody_offers_anything_the_model_is_left_to_whoever_registers_it() -> None:
    assert chosen(Offering("x", 9), built_in=(), model="") == ("auto", "no plugin made an offer")


def test_every_refusal_is_told_for_every_model() -> None:
    manager = loaded(())
    manager.register(Offering("one", 0, "too small"))
    manager.register(Offering("two", 0, "too large"))
    settings = Settings(models=tuple(ModelSettings(model=name, backend="auto") for name in ("m", "n")))
    with pytest.raises(ConfigError) as caught:
        resolve(settings, manager)
    assert str(caught.value).splitlines() == [
        f"model {name!r}: no backend can serve it (one: too small; two: too large); set `backend` to one that can"
        for name in ("m", "n")
    ]


# --- The built-in plugins ---------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of fetched models."""
    monkeypatch.setenv("SUIMON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("model", ["", "smollm2-135m-instruct", "org/name", "pypi:p==1/x.gguf", "no-such-file.gguf"])
def test_native_takes_what_is_not_here_yet(model: str, installed: None, cache: Path) -> None:
    assert chosen(model=model) == ("native", "auto: it is not on this machine yet, and native comes first")


@pytest.mark.parametrize(("architecture", "backend"), [("llama", "native"), ("mamba", "llama_cpp")])
def test_what_was_fetched_is_looked_at(architecture: str, backend: str, installed: None, cache: Path) -> None:
    spec = pypi.parse_spec("pypi:p==1/p/x.gguf")
    folder = cache / "models" / spec.folder_name
    folder.mkdir(parents=True)
    write_gguf(folder / "x.gguf", architecture)
    assert chosen(model=spec.text)[0] == "native"  # half a download is none
    record = {"spec": spec.text, "size": (folder / "x.gguf").stat().st_size, "sha256": ""}
    (folder / "x.gguf.complete").write_text(json.dumps(record))
    found, reason = chosen(model=spec.text)
    assert found == backend and reason is not None and "not on this machine" not in reason


def test_a_source_that_is_no_name_is_left_to_loading(installed: None, cache: Path) -> None:
    assert chosen(model="pypi:nonsense")[0] == chosen(model="x" * 5000)[0] == "native"


def test_native_takes_a_gguf_of_its_architectures_and_llama_cpp_the_others(tmp_path: Path, installed: None) -> None:
    ours, other = write_gguf(tmp_path / "a.gguf", "qwen3"), write_gguf(tmp_path / "b.gguf", "mamba")
    assert chosen(model=ours) == ("native", "auto: the native engine runs GGUF architecture 'qwen3'")
    backend, reason = chosen(model=other)
    assert (backend, reason) == ("llama_cpp", "auto: llama.cpp runs GGUF files that nothing else takes")


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path, installed: None) -> None:
    write_gguf(tmp_path / "b.gguf", "mamba")
    assert chosen(model=str(tmp_path))[0] == "llama_cpp"
    write_gguf(tmp_path / "c.gguf", "mamba")  # which of them loading asks
    assert chosen(model=str(tmp_path))[0] == "native"


def test_what_nobody_takes_says_what_each_lacks(tmp_path: Path, missing: None) -> None:
    said = refusal(model=write_gguf(tmp_path / "b.gguf", "mamba"))
    assert "native: " in said and "'mamba' is not read" in said
    assert 'llama_cpp: llama-cpp-python is not installed: pip install "suimon[llama-cpp]"' in said
    folder = write_config(tmp_path, architectures=["LlamaForCausalLM"], quantization_config={"quant_method": "awq"})
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "quantized checkpoints are not served by the native engine" in refusal(model=folder)


def test_a_folder_is_taken_by_its_architecture(tmp_path: Path) -> None:
    folder = write_config(tmp_path, architectures=["LlamaForCausalLM"])
    assert chosen(model=folder) == ("native", "auto: the native engine runs LlamaForCausalLM")


def test_a_damaged_file_goes_to_native_which_says_what_is_wrong(tmp_path: Path, installed: None) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03")
    backend, reason = chosen(model=str(tmp_path / "x.gguf"))
    assert backend == "native" and reason is not None and "damaged" in reason


def test_options_choose_the_plugin_that_knows_them(tmp_path: Path, installed: None) -> None:
    ours = write_gguf(tmp_path / "a.gguf", "llama")
    assert chosen(model=ours, options={"n_ubatch": 64})[0] == "llama_cpp"
    said = refusal(model=ours, options={"no_such": 1})
    assert (
        all(f"{name}: " in said for name in ("native", "llama_cpp", "tensorrt_llm"))
        and "options.no_such: is not known" in said
    )
    assert "tensorrt_llm: is not installed: pip install" in refusal(model="m", options={"tensor_parallel_size": 1})


def test_a_remote_server_is_never_chosen() -> None:
    options = {"url": "http://127.0.0.1:1", "base_url": "http://127.0.0.1:1"}
    assert "openai_remote" not in refusal(model="m", options=options)
