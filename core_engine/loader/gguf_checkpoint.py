"""GGUFCheckpoint: a GGUF file as the models see it, with Hugging Face names, layout and conventions."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.loader.content_hash import hash_file
from suimon.core_engine.loader.gguf import GGUFHeader, GGUFTensorInfo, read_header
from suimon.core_engine.loader.gguf_config import architecture_of, translate_config, translate_generation_config
from suimon.core_engine.loader.gguf_dequantize import dequantize
from suimon.core_engine.loader.gguf_names import ROPE_TABLES, hugging_face_name


class GGUFCheckpoint:
    """A Checkpoint (see checkpoint.py) over one GGUF file; ``header`` is its parsed header, tokenizer included.

    The file stays mapped while this lives; the tensors handed out are copies and do not depend on it.
    Raises ModelLoadError (or UnsupportedModelError) naming the file and the key or tensor at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: GGUFHeader = read_header(path)
        self._architecture = architecture_of(self.header)
        # A private writable mapping: nothing is ever written, but torch takes no read-only buffers.
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), self.header.size, access=mmap.ACCESS_COPY)
        self._by_name = self._rename()
        tables = {
            name: self._decode(info, torch.float32).flatten().tolist() for name, info in self._rope_tables().items()
        }
        self.config: Mapping[str, Any] = translate_config(self.header, tables)
        self.generation_config: Mapping[str, Any] = translate_generation_config(self.header)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    @property
    def content_hash(self) -> str:
        return hash_file(self.path)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor of this Hugging Face name, dequantised; conversions that need care are done in float32."""
        if name not in self._by_name:
            raise ModelLoadError(f"{self.path}: there is no tensor for {name!r}")
        info = self._by_name[name]
        if self._architecture.norm_offset and info.name.endswith("norm.weight"):
            return (self._decode(info, torch.float32) - self._architecture.norm_offset).to(dtype)
        tensor = self._decode(info, dtype)
        heads = self._permuted_heads(name)
        if heads and tensor.shape[0] % (2 * heads):
            raise ModelLoadError(
                f"{self.path}: tensor {info.name!r} of {info.shape} does not divide into {heads} heads"
            )
        return unpermute(tensor, heads) if heads else tensor

    def _rename(self) -> dict[str, GGUFTensorInfo]:
        by_name: dict[str, GGUFTensorInfo] = {}
        for info in self.header.tensors.values():
            name = hugging_face_name(self._architecture, info.name)
            if name in by_name:
                raise ModelLoadError(f"{self.path}: tensors {by_name[name].name!r} and {info.name!r} are both {name!r}")
            if name is not None:
                by_name[name] = info
        return by_name

    def _rope_tables(self) -> dict[str, GGUFTensorInfo]:
        return {name: self.header.tensors[name] for name in ROPE_TABLES if name in self.header.tensors}

    def _decode(self, info: GGUFTensorInfo, dtype: torch.dtype) -> torch.Tensor:
        raw = torch.frombuffer(self._data, dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return dequantize(raw, info.ggml_type, info.shape, dtype, name=info.name)

    def _permuted_heads(self, name: str) -> int:
        """How many heads the rows of this tensor belong to, if a converter permuted them; else 0."""
        if not self._architecture.permuted:
            return 0
        keys = {".self_attn.q_proj.": "num_attention_heads", ".self_attn.k_proj.": "num_key_value_heads"}
        return next((int(self.config[key]) for part, key in keys.items() if part in name), 0)


def unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order of interleaved rotation: pairs (2i, 2i + 1) of a head become (i, i + half).

    ``tensor`` is a weight [heads * head_dim, hidden] or a bias [heads * head_dim].
    """
    pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
