"""What is reported about one sampled token's probability. Knows no tensors, so clients import it freely."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The sampled token's natural-log probability and those of the likeliest tokens at its position, best first.

    They are the model's own, before temperature, penalties and filters, and always finite. ``rank`` is 1 for the most
    likely token. ``top`` holds (token id, logprob) pairs, as many as the request asked for; the sampled token need not
    be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
