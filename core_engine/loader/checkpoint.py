"""What a model file looks like to the models: a config and tensors, both by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch


class Checkpoint(Protocol):
    """An open model, whatever its format.

    ``config`` uses Hugging Face ``config.json`` keys (a GGUF header is translated). ``tensor_names`` are Hugging Face
    names (``model.layers.0.self_attn.q_proj.weight``). ``tensor`` returns the values in Hugging Face layout and
    convention (a GGUF's permuted q and k, its folded ``1 + weight`` norms are undone). ``content_hash`` is a sha256 hex
    digest that changes when the weights do.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    @property
    def tensor_names(self) -> frozenset[str]: ...

    @property
    def content_hash(self) -> str: ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor: ...
