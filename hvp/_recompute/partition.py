"""Dividing a chain into segments."""

from __future__ import annotations

from collections.abc import Sequence

# Tensors that a Hessian-vector product keeps for each cut: the value, its cotangent, and the
# cotangent of the second reverse sweep.
_TENSORS_PER_CUT = 3
# Upper bound on the number of segments that are tried.
_MAX_SEGMENTS = 256


def smallest_largest(sizes: Sequence[int], count: int) -> list[int]:
    """Divide a chain into `count` segments so that the largest segment is as small as possible.

    With the size ``s(a, b) = sizes[a] + ... + sizes[b - 1]`` of a segment, this finds cuts
    ``0 = c[0] < c[1] < ... < c[count] = n`` that minimize ``max(s(c[i], c[i + 1]))``, and returns
    those between the first and the last. The minimum is found by bisection: a bound can be met with
    `count` segments if and only if it is met by filling one segment after another up to the bound.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled_up_to(sizes, middle)) < count:
            high = middle
        else:
            low = middle + 1
    cuts = _filled_up_to(sizes, low)
    # Fewer segments than `count` may do; further cuts do not make the largest segment larger.
    spare = [i for i in range(1, len(sizes)) if i not in cuts]
    return sorted([*cuts, *spare[: count - 1 - len(cuts)]])


def fewest_bytes(sizes: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """Divide a chain so that a Hessian-vector product needs little memory.

    A link computes `sizes` bytes, and the tensor between it and the next has `boundaries` bytes. A
    product holds three tensors for each cut, and about everything that the segment being recomputed
    computes. Among the cuts of `smallest_largest` for each number of segments, this returns those
    with the least ::

        3 * (boundaries[c[1] - 1] + ... + boundaries[c[k - 1] - 1]) + max(s(c[i], c[i + 1]))
    """
    best: list[int] = []
    least = sum(sizes)
    for count in range(2, min(len(sizes), _MAX_SEGMENTS) + 1):
        cuts = smallest_largest(sizes, count)
        starts = [0, *cuts, len(sizes)]
        largest = max(sum(sizes[a:b]) for a, b in zip(starts, starts[1:]))
        total = _TENSORS_PER_CUT * sum(boundaries[cut - 1] for cut in cuts) + largest
        if total < least:
            best, least = cuts, total
    return best


def _filled_up_to(sizes: Sequence[int], bound: int) -> list[int]:
    """Return the cuts if each segment is filled up to a bound before the next begins."""
    cuts, filled = [], 0
    for i, size in enumerate(sizes):
        if filled + size > bound and i > 0:
            cuts.append(i)
            filled = 0
        filled += size
    return cuts
