"""Rotary position embeddings: the frequencies of each scaling method, and a step's cosines and sines.

Knows frequencies; the rotation itself is ``kernels.rotary``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One layer's rotary embedding. ``rotary_dim`` features of a head are rotated.

    ``kind`` is a key of FREQUENCIES. ``factor`` stretches positions; ``original_max_position`` is the context that the
    model was trained with before stretching. ``attention_factor`` multiplies cosines and sines (None: as the method
    says).
    """

    rotary_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


def _wavelengths(config: RopeConfig) -> torch.Tensor:
    """Positions per radian of each feature pair: (R / 2,)."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float, device="cpu") / config.rotary_dim
    wavelengths: torch.Tensor = config.theta**exponents
    return wavelengths


def _plain(config: RopeConfig) -> torch.Tensor:
    return 1.0 / _wavelengths(config)


def _linear(config: RopeConfig) -> torch.Tensor:
    return _plain(config) / config.factor


def _llama3(config: RopeConfig) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between interpolated (Llama 3.1)."""
    frequencies = _plain(config)
    turns = config.original_max_position / (2 * math.pi / frequencies)
    low, high = config.low_freq_factor, config.high_freq_factor
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / config.factor + smooth * frequencies


def _yarn(config: RopeConfig) -> torch.Tensor:
    """NTK-by-parts interpolation (Peng et al. 2023, YaRN, section 3.2)."""
    wavelengths = _wavelengths(config)

    def dimension(rotations: float) -> float:
        ratio = config.original_max_position / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(len(wavelengths), dtype=torch.float, device="cpu") - low) / width).clamp(0, 1)
    return 1.0 / (config.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


FREQUENCIES: dict[str, Callable[[RopeConfig], torch.Tensor]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _yarn_magnitude(config: RopeConfig) -> float:
    """YaRN's attention temperature (section 3.4), folded into cosines and sines."""

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def _magnitude(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    return _yarn_magnitude(config) if config.kind == "yarn" else 1.0


class RotaryEmbedding(nn.Module):
    """The cosines and sines of a step's positions, computed once and used by every layer of the same RopeConfig."""

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.frequencies = FREQUENCIES[config.kind](config)  # (R / 2,) float32
        self.magnitude = _magnitude(config)

    def to_device(self, device: torch.device | str) -> None:
        self.frequencies = self.frequencies.to(device)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (T,) -> cos, sin as ``kernels.rotary`` takes them, each (T, R) float32."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
