"""What a model on this machine is, told from its headers alone: whether the engine has a chance with it.

Fetches nothing, imports no torch, reads no tensor. What only loading can tell is left to loading.
"""

from __future__ import annotations

from pathlib import Path

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader.json_file import read_object_if_there
from suimon.core_engine.loader.sources import fetched


def recognise(model: str) -> str | None:
    """One phrase on what ``model`` is: "GGUF architecture 'llama'", "LlamaForCausalLM"; None if it is not here yet.

    Raises UnsupportedModelError for what the engine does not run. A model that is damaged is taken for one that it
    runs: loading says better what is wrong.
    """
    path = _local(model)
    if path is None:
        return None
    try:
        return _gguf(path) if path.suffix == ".gguf" else _folder(path if path.is_dir() else path.parent)
    except UnsupportedModelError:
        raise
    except ModelLoadError as error:
        return f"a model that is damaged ({error})"


def gguf_file(model: str) -> Path | None:
    """The GGUF file that ``model`` is on this machine, if it is one: the file, or the only one in a folder."""
    path = _local(model)
    return path if path is not None and path.suffix == ".gguf" else None


def _local(model: str) -> Path | None:
    path = fetched(model)
    if path is None:
        return None
    try:
        files = [] if path.is_file() or any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))
    except OSError:  # a folder that may not be read: loading says so
        return None
    return files[0] if len(files) == 1 else path


def _gguf(path: Path) -> str:
    from suimon.core_engine.loader.gguf import read_header
    from suimon.core_engine.loader.gguf_config import architecture_of

    header = read_header(path)
    architecture_of(header)
    return f"GGUF architecture {header.metadata['general.architecture']!r}"


def _folder(folder: Path) -> str:
    config = read_object_if_there(folder / "config.json")
    text = config.get("text_config")
    if config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config")):
        raise UnsupportedModelError(f"{folder}: quantized checkpoints are not served by the native engine")
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "a folder"
