"""How much memory linearizations may take."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from hvp._errors import HvpError, TooLargeError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS.update({f"{unit}i": 2 ** (10 * i) for i, unit in enumerate("KMGT", start=1)})
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?|)B?\s*", re.IGNORECASE)
# What is needed to linearize a batch and to multiply by it, in units of what is kept of it.
_WORKING = 3.0
# Where arrays are cut, a batch at work takes one part in so many.
_PART = 4


class Budget:
    """A limit on what is kept of batches, and used for one of them.

    Parameters
    ----------
    limit : int, str or None
        Bytes, also as ``"2GiB"`` or ``"500 MB"``; None for all there is.
    """

    def __init__(self, limit: Any) -> None:
        self._limit = None if limit is None else _bytes(limit)
        self._largest = 0
        self._warned = False

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._limit is not None

    def fitting(self, shared: float, each: float) -> int:
        """Tell how many examples a batch should have, if arrays are to be cut.

        Parameters
        ----------
        shared : float
            Bytes that are kept of a batch of any size.
        each : float
            Bytes for each example besides.
        """
        assert self._limit is not None
        # Batches that leave most of the limit to what is kept, if that is possible.
        for part in (1 / _PART, 1.0):
            size = int((self._limit * part / _WORKING - shared) / max(each, 1.0))
            if size >= 1:
                return size
        raise self.too_small(round(shared + each), 1)

    def pieces(self, expected: int) -> int:
        """Tell in how many pieces to cut a batch of which so many bytes would be kept."""
        if self._limit is None:
            return 1
        return max(1, -int(-_WORKING * expected // self._limit))

    def saw(self, nbytes: int) -> None:
        """Note what is kept of a batch."""
        self._largest = max(self._largest, nbytes)

    def holds(self, nbytes: int) -> bool:
        """Whether so many bytes may be kept, with one batch more at work."""
        working = _WORKING * self._largest
        if self._limit is not None:
            return nbytes + working <= self._limit
        available = _available()
        if available is not None and available < working and not self._warned:
            self._warned = True
            warnings.warn(
                f"hvp keeps {_said(nbytes)} for products, and the machine has {_said(available)} "
                "left: pass memory_limit to keep less, at the cost of time",
                RuntimeWarning,
                stacklevel=2,
            )
        return True

    def too_small(self, expected: int, examples: int) -> HvpError:
        """Return the error for a batch that cannot be cut into pieces that fit."""
        least = _WORKING * expected / examples
        return TooLargeError(
            f"a batch of one example takes about {_said(least)}, and memory_limit is "
            f"{_said(self._limit or 0)}",
            f"a memory_limit of at least {_said(least)}",
            "raise it, or let layers be recomputed: recompute=True, hvp.recompute",
        )


def part_of_limit(limit: Any, count: int) -> int:
    """Return what each of several may take that share a limit."""
    return max(1, _bytes(limit) // count)


def _bytes(limit: Any) -> int:
    found = _SIZE.fullmatch(limit) if isinstance(limit, str) else None
    if found is not None:
        unit = found[2].upper().replace("I", "i")
        number = float(found[1]) * _UNITS[unit]
    elif isinstance(limit, (int, float)) and not isinstance(limit, bool):
        number = float(limit)
    else:
        number = 0.0
    if not 0 < number < float("inf"):
        raise HvpError(
            f"the argument memory_limit is {limit!r}", "a number of bytes, or such as '2GiB'"
        )
    return int(number)


def _available() -> int | None:
    """Bytes the machine has left; None where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _said(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if unit != "bytes" else f"{nbytes:.0f} bytes"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"
