"""How much memory linearizations may take."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError, OutOfMemoryError, TooLargeError, line_of

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS.update({f"{unit}i": 2 ** (10 * i) for i, unit in enumerate("KMGT", start=1)})
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?|)(?:B|bytes)?\s*", re.IGNORECASE)
# What is needed to linearize a batch and to multiply by it, in units of what is kept of it.
_WORKING = 3.0
# Where arrays are cut, a batch at work takes one part in so many.
_PART = 4
# An amount is told with three digits; so it is raised by this, to be enough as it is told.
_ROUNDED_UP = 1.01
# What part of the memory that is left an advised limit takes.
_FITTING = 0.4


@dataclass(frozen=True)
class Share:
    """Part of a limit that several share.

    Attributes
    ----------
    limit : int or str
        The whole, as the user gave it.
    part : float
        Which part of it.
    """

    limit: Any
    part: float

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return max(1, int(_bytes(self.limit) * self.part))


class Budget:
    """A limit on what is kept of batches, and used for one of them.

    Parameters
    ----------
    limit : int, str, Share or None
        Bytes, also as ``"2GiB"`` or ``"500 MB"``; None for all there is. Messages speak of the
        whole of which it is a share.
    """

    def __init__(self, limit: Any) -> None:
        share = limit if isinstance(limit, Share) else Share(limit, 1.0)
        self._share = share
        self._limit = None if limit is None else share.nbytes
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
                f"hvp keeps {amount(nbytes)} for products, and the machine has {amount(available)} "
                "left: pass memory_limit to keep less, at the cost of time",
                RuntimeWarning,
                stacklevel=2,
            )
        return True

    def too_small(self, expected: int, examples: int) -> HvpError:
        """Return the error for a batch that cannot be cut into pieces that fit."""
        needed, part = _WORKING * expected / examples, self._share.part
        least = needed / part
        shared = "" if part == 1 else f", of which {amount(self._limit or 0)} are for it"
        return TooLargeError(
            f"a batch of one example takes about {amount(needed)}, and memory_limit is "
            f"{amount(_bytes(self._share.limit))}{shared}",
            f"a memory_limit of at least {amount(_ROUNDED_UP * least)}",
            "raise it, or let layers be recomputed: recompute=True, hvp.recompute",
        )


def out_of_memory(error: Exception, doing: str, nbytes: int | None) -> HvpError:
    """Tell a lack of memory in words, with a limit that would fit.

    Parameters
    ----------
    error : Exception
        TensorFlow's.
    doing : str
        What was done when it was raised.
    nbytes : int or None
        Of what is kept for products, as far as it is known.
    """
    available = _available()
    fits = [size for size in (available, nbytes) if size]
    limit = f"memory_limit='{max(1, int(min(fits) * _FITTING / 2**20))}MiB'" if fits else ""
    kept = f"; products need {amount(nbytes)} of residuals" if nbytes else ""
    left = f", and {amount(available)} are left" if available else ""
    reason = line_of(error, about="OOM")
    return OutOfMemoryError(
        f"there was not enough memory for {doing}{kept}{left} (TensorFlow: {reason})",
        "an evaluation that fits",
        f"pass {limit or 'a memory_limit'}, with the examples as data; or let layers be "
        "recomputed: recompute=True for a Keras model, hvp.recompute for parts of a function",
    )


def peak_nbytes() -> int | None:
    """Bytes in use at most so far, on the device if there is one; None where it is not told."""
    for device in tf.config.list_logical_devices("GPU"):
        return int(tf.config.experimental.get_memory_info(device.name)["peak"])
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


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
    """Bytes that are left, on the device if there is one; None where that cannot be told."""
    for device in tf.config.list_logical_devices("GPU"):
        found = tf.config.experimental.get_memory_info(device.name)
        return int(found["peak"] - found["current"])  # nearly all of it was in use at the peak
    limits = [_from_proc("/proc/meminfo", "MemAvailable:")]
    if resource is not None:
        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        used = _from_proc("/proc/self/status", "VmSize:")
        limits.append(None if most < 0 or used is None else most - used)
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _from_proc(path: str, name: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(name)]
    return int(found[0]) * 1024 if found else None


def amount(nbytes: float) -> str:
    """Return a number of bytes in words, such as ``"1.5 GiB"``."""
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}" if unit != "bytes" else f"{nbytes:.0f} bytes"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"
