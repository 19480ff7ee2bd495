"""Model files: where they come from (sources.py) and what they hold (a Checkpoint, whatever the format)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from suimon.core_engine.loader.checkpoint import Checkpoint

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LOOKED_FOR = "model.safetensors.index.json or a .safetensors file with config.json, or one .gguf file"


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model at ``path``: a folder, a .gguf file or a .safetensors file.

    Raises ModelLoadError naming what was looked for, and UnsupportedModelError for pickled weights, which are never
    read because reading them runs the code in them.
    """
    path = Path(path)
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or folder")
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _open_folder(folder: Path) -> Checkpoint:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return _open_safetensors(folder)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return _open_gguf(folder / ggufs[0])
    if ggufs:
        raise ModelLoadError(f"{folder}: several GGUF files; name one of them: {', '.join(ggufs)}")
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise UnsupportedModelError(_pickle_message(folder / pickles[0]))
    raise ModelLoadError(f"{folder}: no model found; looked for {_LOOKED_FOR}")


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in _PICKLES:
        raise UnsupportedModelError(_pickle_message(path))
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    return _open_gguf(path)


def _open_safetensors(path: Path) -> Checkpoint:
    from suimon.core_engine.loader.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def _open_gguf(path: Path) -> Checkpoint:
    from suimon.core_engine.loader.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _pickle_message(path: Path) -> str:
    return (
        f"{path}: pickled weights are not read, because reading them runs code. Use the model's safetensors files, or "
        "convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder) writes safetensors"
    )
