"""Random numbers that are a function of (seed, position, draw) and of nothing else.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011): a keyed
bijection of a counter, so there is no state to keep, to order, or to restore after a preemption. The key is the
sequence's seed; the counter is the position of the token to sample and the number of the draw at that position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ROUNDS = 10

Words = npt.NDArray[np.uint64]


def philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10. ``counter`` (4, N) and ``key`` (2, N) hold 32-bit words; returns (4, N) random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _WORD) ^ c1 ^ k0, product1 & _LOW
        c2, c3 = (product0 >> _WORD) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int], draw: int = 0) -> npt.NDArray[np.float64]:
    """One number in [0, 1), a multiple of 2**-52, for each (seed, position) at this ``draw``.

    Seeds and positions are taken modulo 2**64, so negative seeds are seeds of their own.
    """
    seed = np.array([value % 2**64 for value in seeds], dtype=np.uint64)
    position = np.array([value % 2**64 for value in positions], dtype=np.uint64)
    zero = np.zeros_like(position)
    counter = np.stack((position & _LOW, position >> _WORD, zero + np.uint64(draw), zero))
    words = philox(counter, np.stack((seed & _LOW, seed >> _WORD)))
    mantissa = (words[0] >> np.uint64(6) << np.uint64(26)) | (words[1] >> np.uint64(6))
    numbers: npt.NDArray[np.float64] = np.multiply(mantissa, 2.0**-52, dtype=np.float64)
    return numbers
