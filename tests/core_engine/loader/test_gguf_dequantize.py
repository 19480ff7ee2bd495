"""Dequantised values, bit for bit those of the gguf package."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
import torch

from suimon.core_engine.errors import UnsupportedModelError
from suimon.core_engine.loader.gguf import GGML_TYPES, GGMLType
from suimon.core_engine.loader.gguf_dequantize import SUPPORTED_TYPES, dequantize

TYPES = {kind.name: kind for kind in GGML_TYPES.values()}
ASKED_FOR = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
ASKED_FOR += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
# More than one chunk, and the last one not full.
SHAPE = (1030, 256)


def random_raw(kind: GGMLType, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """Any bytes are a valid block: infinities and NaN among the scales included."""
    nbytes = shape[0] * shape[1] // kind.block_size * kind.block_bytes
    return torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))


def package_values(raw: torch.Tensor, kind: GGMLType) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # overflow of random scales
        values = gguf.quants.dequantize(raw.numpy().reshape(SHAPE[0], -1), gguf.GGMLQuantizationType[kind.name])
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(SHAPE))


def test_every_type_that_was_asked_for_is_supported() -> None:
    assert set(SUPPORTED_TYPES) == set(ASKED_FOR)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ASKED_FOR)
def test_values_are_those_of_the_gguf_package(name: str, dtype: torch.dtype) -> None:
    raw = random_raw(TYPES[name])
    values = dequantize(raw, TYPES[name], SHAPE, dtype, name="w")
    assert values.dtype == dtype
    torch.testing.assert_close(values, package_values(raw, TYPES[name]).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0"])
def test_result_does_not_share_the_files_memory(name: str) -> None:
    raw = torch.zeros(64 // TYPES[name].block_size * TYPES[name].block_bytes, dtype=torch.uint8)
    dtype = torch.float16 if name == "F16" else torch.float32
    dequantize(raw, TYPES[name], (2, 32), dtype, name="w").fill_(1.0)
    assert not raw.any()


@pytest.mark.parametrize("name", sorted(TYPES.keys() - set(ASKED_FOR)))
def test_other_types_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        dequantize(random_raw(TYPES[name]), TYPES[name], SHAPE, torch.float32, name="blk.3.ffn_up.weight")
    message = str(caught.value)
    assert "'blk.3.ffn_up.weight'" in message
    assert name in message
    assert all(supported in message for supported in ASKED_FOR)
