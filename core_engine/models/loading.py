"""Fills a model from a checkpoint, tensor by tensor. Knows names, parts and shapes; refuses to know file formats.

Every parameter of the model must be filled and every tensor of the file used, but for those a family ignores by name:
weights that are missing would be noise, and weights that are left over mean that this is another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

from suimon.core_engine.errors import ModelLoadError
from suimon.core_engine.layers.linear import MergedLinear
from suimon.core_engine.layers.norm import RMSNorm
from suimon.core_engine.loader.checkpoint import Checkpoint
from suimon.core_engine.models.base import DecoderModel

_SHOWN = 8  # names of each list in an error message


@dataclass(frozen=True, slots=True)
class _Part:
    """Checkpoint tensor ``name`` fills ``target``, a whole parameter or a slice of its first dimension."""

    name: str
    target: torch.Tensor


def fill_from_checkpoint(
    model: DecoderModel, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Allocate the parameters of ``model`` (built on the meta device) and fill them.

    Norm weights are float32, everything else ``dtype``. Raises ModelLoadError naming missing and unused tensors, or a
    tensor whose shape is not the model's.
    """
    prefix = _prefix(model, checkpoint)
    parts = [part for path, module in model.named_modules() for part in _allocate(path, module, dtype, device, prefix)]
    if model.config.tie_word_embeddings:
        parts = [part for part in parts if part.name != "lm_head.weight"]
    _check_names(model, checkpoint, {part.name for part in parts})
    _fill_all(parts, checkpoint)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.add_(module.offset)
    model.finish_loading(dtype, device)


def _prefix(model: DecoderModel, checkpoint: Checkpoint) -> str:
    for prefix in model.prefixes:
        if f"{prefix}embed_tokens.weight" in checkpoint.tensor_names:
            return prefix
    return model.prefixes[0]


def _allocate(
    path: str, module: nn.Module, dtype: torch.dtype, device: torch.device | str, prefix: str
) -> Iterator[_Part]:
    """Give the module's own parameters memory, and say what is to fill it."""
    kind = torch.float32 if isinstance(module, RMSNorm) else dtype
    for name, parameter in list(module.named_parameters(recurse=False)):
        memory = torch.empty(parameter.shape, dtype=kind, device=device)
        setattr(module, name, nn.Parameter(memory, requires_grad=False))
        parts = module.parts if isinstance(module, MergedLinear) else {path.rpartition(".")[2]: len(memory)}
        parent = "" if path == "lm_head" else prefix + path.rpartition(".")[0] + "." * ("." in path)
        slices = torch.split(memory, list(parts.values()))
        yield from (_Part(f"{parent}{part}.{name}", rows) for part, rows in zip(parts, slices, strict=True))


def _check_names(model: DecoderModel, checkpoint: Checkpoint, wanted: set[str]) -> None:
    ignored = [re.compile(pattern) for pattern in model.ignored_tensors]
    if model.config.tie_word_embeddings:
        ignored.append(re.compile(r"(.*\.)?lm_head\.weight"))
    missing = sorted(wanted - checkpoint.tensor_names)
    left = sorted(checkpoint.tensor_names - wanted)
    unused = [name for name in left if not any(pattern.fullmatch(name) for pattern in ignored)]
    if missing or unused:
        architecture = model.config.architecture
        raise ModelLoadError(
            f"{checkpoint.path} does not hold the tensors of {architecture}: missing {_names(missing)}; "
            f"unused {_names(unused)}. The file is incomplete, or its config describes another model."
        )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "none"


def _fill_all(parts: list[_Part], checkpoint: Checkpoint) -> None:
    """As many tensors at a time as there are threads, one thread each: most are too small to be shared out."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "load", initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in pool.map(lambda part: _fill(part, checkpoint), parts):
            pass
    torch.set_num_threads(threads)


def _fill(part: _Part, checkpoint: Checkpoint) -> None:
    tensor = checkpoint.tensor(part.name, part.target.dtype)
    if tensor.shape != part.target.shape:
        found, expected = tuple(tensor.shape), tuple(part.target.shape)
        raise ModelLoadError(f"{checkpoint.path}: tensor {part.name} has shape {found}, its config says {expected}")
    part.target.copy_(tensor)
