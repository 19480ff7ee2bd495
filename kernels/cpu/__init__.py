"""The operations in C++ for processors, compiled on the machine that runs them. No torch headers: it takes seconds.

``SUIMON_KERNELS=reference`` keeps to plain PyTorch. Without a compiler the same happens, with one warning.
"""

from __future__ import annotations

import logging
from functools import cache

from suimon.kernels import choose_provider
from suimon.kernels.cpu.build import BuildError
from suimon.kernels.cpu.library import library

logger = logging.getLogger(__name__)


@cache
def is_available() -> bool:
    """Whether the library is wanted and there; it is compiled now if it has not been. Logs once why it is not."""
    if choose_provider() != "cpu":
        return False
    try:
        library()
    except (BuildError, OSError) as error:
        logger.warning("the CPU kernels cannot be used, so PyTorch's slower operations are: %s", error)
        return False
    return True
