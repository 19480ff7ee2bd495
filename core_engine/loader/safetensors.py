"""SafetensorsCheckpoint: a Hugging Face folder of safetensors files. The index, where there is one, decides.

A sharded model's index names the file of every tensor. A file that it does not name is not opened, and a copy of a
tensor in a file that the index does not give it to is not seen. Knows folders and files; nothing of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from suimon.core_engine.errors import ModelLoadError, UnsupportedModelError
from suimon.core_engine.loader.content_hash import hash_files
from suimon.core_engine.loader.json_file import read_object, read_object_if_there

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# float8 weights come with scales beside them: without those, their values are not the model's.
_PLAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class SafetensorsCheckpoint:
    """A Checkpoint (see checkpoint.py) over ``path``, a folder with config.json, or one .safetensors file beside it.

    Files stay mapped while this lives; the tensors handed out are copies. Raises ModelLoadError naming the file that
    is missing or damaged, or the tensor that a file should have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path if path.is_dir() else path.parent
        self.config: Mapping[str, Any] = read_object(self._folder / "config.json")
        self.generation_config: Mapping[str, Any] = read_object_if_there(self._folder / "generation_config.json")
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    @cached_property
    def content_hash(self) -> str:
        return hash_files([self._folder / "config.json", *(self._folder / name for name in self._files)])

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of this name, as a copy. Raises UnsupportedModelError when it is stored as no plain float."""
        if name not in self._file_of:
            raise ModelLoadError(f"{self.path}: there is no tensor {name!r}")
        tensor: torch.Tensor = self._files[self._file_of[name]].get_tensor(name)
        if tensor.dtype not in _PLAIN_DTYPES:
            raise UnsupportedModelError(
                f"{self._folder / self._file_of[name]}: tensor {name!r} is stored as {tensor.dtype}: "
                "quantized safetensors are not served yet; use the unquantized model or a GGUF file"
            )
        return tensor.to(dtype, copy=True)

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name, every file opened and every name found in it."""
        index = self._folder / INDEX
        weight_map = _read_weight_map(index) if index.exists() else {}
        if weight_map and (self.path.is_dir() or self.path.name in weight_map.values()):
            return self._check_weight_map(weight_map)
        file = self.path.name if self.path.is_file() else _single_file(self._folder).name
        return dict.fromkeys(self._open(file), file)

    def _check_weight_map(self, weight_map: dict[str, str]) -> dict[str, str]:
        present = {file: self._open(file) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in present[file]:
                raise ModelLoadError(
                    f"{self._folder / file}: has no tensor {name!r}, which {INDEX} says is there. "
                    "The index and the file are of different models or downloads: fetch both again."
                )
        return weight_map

    def _open(self, file: str) -> frozenset[str]:
        path = self._folder / file
        if not path.is_file():
            raise ModelLoadError(f"{path}: this file of the model is missing. Fetch the model again.")
        path.open("rb").close()  # safetensors takes a file that it may not read for one that is not there
        try:
            self._files[file] = safe_open(path, framework="pt", device="cpu")
            return frozenset(self._files[file].keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: not a sound safetensors file: {error}. Fetch it again.") from error


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).exists():
        return folder / SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ModelLoadError(f"{folder}: neither {INDEX} nor {SINGLE}, and not exactly one .safetensors file ({names})")
    return files[0]


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: 'weight_map' is missing or no object of tensor names and files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise ModelLoadError(
                f"{index}: tensor {name!r} is given to {file!r}, which is no .safetensors file beside it"
            )
    return weight_map


def _is_plain_name(file: str) -> bool:
    return file.endswith(".safetensors") and not any(mark in file for mark in ("/", "\\", "\0", ":"))
