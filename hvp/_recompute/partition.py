"""Dividing a chain into segments."""

from __future__ import annotations

from collections.abc import Sequence

# A product with a Hessian keeps three tensors for each cut (the value, its cotangent, and the
# second sweep's cotangent); in the segment that is being computed, about what it computes.
_PER_CUT = 3
_MOST = 256


def smallest_largest(sizes: Sequence[int], count: int) -> list[int]:
    """Divide a chain into segments so that the largest is as small as can be.

    Parameters
    ----------
    sizes : sequence of int
        Of the links of the chain.
    count : int
        How many segments, at most as many as there are links.

    Returns
    -------
    list of int
        Where each segment but the first begins.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(sizes, middle)) < count:
            high = middle
        else:
            low = middle + 1
    cuts = _cuts(sizes, low)
    # Fewer may do for the largest; as many were asked for.
    spare = [i for i in range(1, len(sizes)) if i not in cuts]
    return sorted([*cuts, *spare[: count - 1 - len(cuts)]])


def fewest_bytes(sizes: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """Divide a chain so that a product with the Hessian needs the least memory.

    Parameters
    ----------
    sizes : sequence of int
        Bytes that the links compute.
    boundaries : sequence of int
        Bytes of the tensors between one link and the next.

    Returns
    -------
    list of int
        Where each segment but the first begins.
    """
    best: list[int] = []
    least = sum(sizes)
    for count in range(2, min(len(sizes), _MOST) + 1):
        cuts = smallest_largest(sizes, count)
        starts = [0, *cuts, len(sizes)]
        largest = max(sum(sizes[a:b]) for a, b in zip(starts, starts[1:]))
        total = _PER_CUT * sum(boundaries[cut - 1] for cut in cuts) + largest
        if total < least:
            best, least = cuts, total
    return best


def _cuts(sizes: Sequence[int], most: int) -> list[int]:
    """Fill one segment after another, up to `most`."""
    cuts, filled = [], 0
    for i, size in enumerate(sizes):
        if filled + size > most and i > 0:
            cuts.append(i)
            filled = 0
        filled += size
    return cuts
