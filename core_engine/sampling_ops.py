"""The sampler's arithmetic on rows of logits: the best entries, exact draws, log-probabilities.

Knows tensors only; refuses to know requests. Legend: N rows, V entries a row (a multiple of BLOCK, see ``pad``), B =
V / BLOCK blocks, K candidates. Entries are ordered by logit, and equal logits by the lower id: a total order, so that
"the k best" and "the nucleus" are the same entries in whatever batch and on whatever device.

Nothing here sorts a vocabulary. The k best entries of a row lie in the k blocks with the best maxima: a block left
out is beaten by k maxima, each a different entry. One pass for the maxima then leaves k * BLOCK entries to look at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Given the rows (n,) int64 that draw again, their next random numbers (n,) fp64 in [0, 1).
UniformSource = Callable[[torch.Tensor], torch.Tensor]
Comparison = Callable[..., torch.Tensor]

# Entries in a block. Large enough that a pass over the maxima is cheap, small enough that k blocks are.
BLOCK = 64


def pad(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` (N, V) as they are if V is a multiple of BLOCK, else a copy with -inf up to the next multiple."""
    missing = -logits.shape[-1] % BLOCK
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def blocks(rows: torch.Tensor) -> torch.Tensor:
    """A view of (N, V) as (N, B, BLOCK)."""
    return rows.view(rows.shape[0], -1, BLOCK)


def block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """(N, V) to (N, B), same dtype. A NaN anywhere makes its block's maximum NaN."""
    return blocks(logits).amax(-1)


def argmax(logits: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
    """The best entry of each row, (N,) int64; ``maxima`` are the rows' block maxima.

    Ten times faster on CPUs than one argmax over V, which is not vectorised there.
    """
    block = maxima.argmax(-1)
    return block * BLOCK + _pick(blocks(logits), block).argmax(-1)


def largest(logits: torch.Tensor, maxima: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best entries of each row, best first: logits (N, K) fp32 and ids (N, K) int64."""
    count, num_blocks = maxima.shape
    values, ids = logits, torch.arange(logits.shape[-1], device=logits.device).expand(count, -1)
    if k < num_blocks:
        block_ids = torch.arange(num_blocks, device=logits.device)
        picked = _order_keys(maxima, block_ids).topk(k).indices
        row = torch.arange(count, device=logits.device).unsqueeze(-1)
        values = blocks(logits)[row, picked].flatten(1)
        ids = (picked.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    best = _order_keys(values, ids).topk(k).indices
    return values.gather(-1, best).float(), ids.gather(-1, best)


def _order_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different, larger for larger ``values`` and among equals for lower ``ids`` (below 2**31)."""
    bits = (values.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (0x7FFFFFFF - ids)


def drop_below(weight: torch.Tensor, least: torch.Tensor) -> None:
    """Make entries of ``weight`` (N, V) that are under their row's ``least`` (N,) zero, in place."""
    weight.mul_(torch.ge(weight, least.unsqueeze(-1), out=torch.empty_like(weight)))


def count_better(logits: torch.Tensor, than: torch.Tensor) -> torch.Tensor:
    """How many entries of each row are larger than ``than`` (N,); (N,) int64, exact for V up to 2**24."""
    return _flags(torch.gt, logits, than.unsqueeze(-1)).sum(-1).long()


def _flags(compare: Comparison, logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A comparison as fp32 ones and zeros: on CPUs booleans are several times slower to add or to multiply by."""
    return compare(logits, other, out=torch.empty_like(logits, dtype=torch.float32))


def weights(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """exp((logit - best) / temperature) in fp32, (N, V); ``best`` (N,) are the rows' largest logits, fp32.

    The best entry weighs 1, so nothing overflows at any temperature.
    """
    shifted = torch.sub(logits, best.unsqueeze(-1))
    return shifted.div_(temperature.unsqueeze(-1)).exp_()


def block_sums(weight: torch.Tensor) -> torch.Tensor:
    """(N, V) fp32 to (N, B) fp64."""
    return blocks(weight).sum(-1).double()


def draw_everywhere(weight: torch.Tensor, sums: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One entry per row with probability proportional to ``weight`` (N, V); ids (N,) int64.

    Inversion of the cumulative distribution (Devroye 1986, ch. III.2) in two levels: first the block, by ``sums`` (N,
    B), then the entry inside it, both accumulated in fp64. ``uniform`` is (N,) fp64 in [0, 1).
    """
    block, rest = _invert(sums, uniform)
    inside, _ = _invert(_pick(blocks(weight), block).double(), rest)
    return block * BLOCK + inside


def draw(weight: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One index per row with probability proportional to ``weight`` (N, K) fp64; (N,) int64."""
    return _invert(weight, uniform)[0]


def _invert(weight: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index at which the cumulative weight passes ``uniform``, and how far into that index's share it lies.

    Never an index of weight zero: it is the first whose cumulative weight exceeds the target, and rounding at the upper
    end is cut off at the last one that adds anything.
    """
    cumulative = weight.cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform.unsqueeze(-1) * total
    index = torch.minimum((cumulative <= target).sum(-1), (cumulative < total).sum(-1)).unsqueeze(-1)
    share = weight.gather(-1, index)
    rest = (target - (cumulative.gather(-1, index) - share)) / share
    return index.squeeze(-1), rest.squeeze(-1).clamp(0.0, 1.0)


def _pick(grouped: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """(N, G, M) and (N,) to (N, M): the chosen group of each row."""
    return grouped[torch.arange(index.shape[0], device=index.device), index]


def draw_from_nucleus(
    logits: torch.Tensor, weight: torch.Tensor, mass: torch.Tensor, next_uniform: UniformSource
) -> torch.Tensor:
    """One entry per row from the smallest set of best entries whose weight reaches ``mass`` (N,) fp64; ids (N,).

    For nuclei too wide to list. Draw from everything; an entry is in the nucleus exactly if what is better than it
    weighs less than ``mass``. If not, the nucleus lies among the better ones: draw from those. Every accepted entry is
    distributed as in the nucleus, whatever was rejected before it (rejection with a rising pivot, as in FlashInfer, Ye
    et al. 2025). ``weight`` (N, V) is overwritten. ``next_uniform(rows)`` gives the next draw's numbers, fp64.
    """
    ids = torch.arange(logits.shape[-1], device=logits.device)
    chosen = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    pending = torch.arange(logits.shape[0], device=logits.device)
    sums = block_sums(weight)
    while pending.numel():
        drawn = draw_everywhere(weight, sums, next_uniform(pending))
        chosen[pending] = drawn
        pivot = logits.gather(-1, drawn.unsqueeze(-1))
        equal = _flags(torch.eq, logits, pivot).mul_(ids < drawn.unsqueeze(-1))
        weight.mul_(_flags(torch.gt, logits, pivot).add_(equal))
        sums = block_sums(weight)
        rejected = sums.sum(-1) >= mass
        if not rejected.all():
            logits, weight, sums = logits[rejected], weight[rejected], sums[rejected]
            mass, pending = mass[rejected], pending[rejected]
    return chosen
