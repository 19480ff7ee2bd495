"""Which instructions the processor has, as far as an operation's best form depends on it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@cache
def has_bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bfloat16 itself (AVX512-BF16, AMX, Arm BF16); False where it is not told."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())
