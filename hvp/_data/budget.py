"""The memory limit: how large a batch may be, and how many linearizations are held.

To linearize a batch and to multiply by it takes about `W r` bytes, where `r` is the size of its
residuals and its data, and `W` is `_WORKING_FACTOR`. A limit `L` is divided between the batches
that are held and the one that is being processed:

    sum_b r_b + W max_b r_b <= L

The sum is over the batches that are held, the maximum over all batches seen so far. A batch with
`W r > L` is divided into `ceil(W r / L)` pieces.
"""

from __future__ import annotations

import numbers
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError, OutOfMemoryError, TooLargeError, line_of
from hvp._runtime.user_warning import warn

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS.update({f"{unit}i": 2 ** (10 * i) for i, unit in enumerate("KMGT", start=1)})
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?|)(?:B|bytes)?\s*", re.IGNORECASE)
# Bytes needed to linearize a batch and to multiply by it, per byte of its residuals and data.
_WORKING_FACTOR = 3.0
# If arrays are divided, the batch being processed takes this part of the limit, and the rest is for
# the batches that are held.
_BATCH_PART = 1 / 4
# Messages show amounts with three digits. This factor makes sure that rounding does not lower them.
_ROUND_UP = 1.01
# The limit that a message advises, as a part of the available memory or of the residuals, whichever
# is smaller.
_ADVISED_PART = 0.4


@dataclass(frozen=True)
class MemoryFraction:
    """A part, between 0 and 1, of a memory limit that several operators share.

    `limit` is the whole limit, as the user passed it.
    """

    limit: Any
    part: float

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return max(1, int(_bytes(self.limit) * self.part))


class Budget:
    """Decides how large batches may be and how many are held, given a memory limit.

    The limit is in bytes, a text such as "2GiB" or "500 MB", or None for no limit. For a
    `MemoryFraction`, messages name the whole limit.
    """

    def __init__(self, limit: Any) -> None:
        share = limit if isinstance(limit, MemoryFraction) else MemoryFraction(limit, 1.0)
        self._share = share
        self._limit = None if limit is None else share.nbytes
        self._largest = 0
        self._warned = False

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._limit is not None

    def batch_size(self, shared: float, per_example: float) -> int:
        """Return the number of examples in a batch, where arrays are to be divided into batches.

        It is the largest `n` with `W (shared + n per_example) <= L / 4`, which leaves three
        quarters of the limit to batches that are held. If there is no such `n`, it is the largest
        with `W (shared + n per_example) <= L`; TooLargeError is raised if one example does not fit.
        Both sizes are in bytes: `shared` is the part of the residuals that does not depend on the
        number of examples, and `per_example` what each example adds to residuals and data.
        """
        assert self._limit is not None
        for part in (_BATCH_PART, 1.0):
            size = int((self._limit * part / _WORKING_FACTOR - shared) / max(per_example, 1.0))
            if size >= 1:
                return size
        raise self.too_small(round(shared + per_example), 1)

    def pieces(self, expected: int) -> int:
        """Return into how many pieces to divide a batch with residuals of the expected size."""
        if self._limit is None:
            return 1
        return max(1, -int(-_WORKING_FACTOR * expected // self._limit))  # rounded up

    def record(self, nbytes: int) -> None:
        """Record the size of the residuals and data of a batch."""
        self._largest = max(self._largest, nbytes)

    def can_hold(self, nbytes: int) -> bool:
        """Return whether `nbytes` may be held while another batch is processed.

        Without a limit the answer is always yes, with a warning if memory runs short.
        """
        working = _WORKING_FACTOR * self._largest
        if self._limit is not None:
            return nbytes + working <= self._limit
        available = _available()
        if available is not None and available < working and not self._warned:
            self._warned = True
            warn(
                f"hvp holds {amount(nbytes)} for products, and the machine has {amount(available)} "
                "left: pass memory_limit to hold less, at the cost of time",
                RuntimeWarning,
            )
        return True

    def too_small(self, expected: int, examples: int) -> HvpError:
        """Return the error to raise if a single example of a batch exceeds the limit."""
        needed, part = _WORKING_FACTOR * expected / examples, self._share.part
        least = needed / part
        available = "" if part == 1 else f" ({amount(self._limit or 0)} of it available here)"
        return TooLargeError(
            f"a batch of one example takes about {amount(needed)}, and memory_limit is "
            f"{amount(_bytes(self._share.limit))}{available}",
            f"a memory_limit of at least {amount(_ROUND_UP * least)}",
            "raise it, or let layers be recomputed: recompute=True, hvp.recompute",
        )


def out_of_memory(error: Exception, doing: str, nbytes: int | None) -> HvpError:
    """Return the error for a lack of memory, which advises a limit that would fit.

    `doing` is what was being done when TensorFlow raised `error`. `nbytes` is the size of the
    residuals that products need, if it is known.
    """
    available = _available()
    sizes = [size for size in (available, nbytes) if size]
    limit = "a memory_limit"
    if sizes:
        limit = f"memory_limit='{max(1, int(min(sizes) * _ADVISED_PART / 2**20))}MiB'"
    residuals = f"; products need {amount(nbytes)} of residuals" if nbytes else ""
    left = f", and {amount(available)} is available" if available else ""
    reason = line_of(error, about="OOM")
    return OutOfMemoryError(
        f"there was not enough memory for {doing}{residuals}{left} (TensorFlow: {reason})",
        "an evaluation that fits into memory",
        f"pass {limit}, with the examples as data; or let layers be "
        "recomputed: recompute=True for a Keras model, hvp.recompute for parts of a function",
    )


def peak_nbytes() -> int | None:
    """Return the peak memory use so far in bytes; None if unknown.

    It is that of the first GPU if there is one, otherwise that of the process.
    """
    for device in tf.config.list_logical_devices("GPU"):
        return int(tf.config.experimental.get_memory_info(device.name)["peak"])
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def _bytes(limit: Any) -> int:
    match = _SIZE.fullmatch(limit) if isinstance(limit, str) else None
    if match is not None:
        unit = match[2].upper().replace("I", "i")
        number = float(match[1]) * _UNITS[unit]
    elif isinstance(limit, numbers.Real) and not isinstance(limit, bool):
        number = float(limit)
    else:
        number = 0.0
    if not 1 <= number < float("inf"):
        raise HvpError(
            f"the argument memory_limit is {limit!r}",
            "a number of bytes, or text such as '2GiB'",
            f"pass '{limit}GiB' for this part of a GiB" if 0 < number < 1 else "",
        )
    return int(number)


def _available() -> int | None:
    """Return the available memory in bytes, on the first GPU if there is one; None if unknown."""
    for device in tf.config.list_logical_devices("GPU"):
        info = tf.config.experimental.get_memory_info(device.name)
        # When memory runs out, the peak is close to all the memory of the device.
        return int(info["peak"] - info["current"])
    limits = [_from_proc("/proc/meminfo", "MemAvailable:")]
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]  # negative if there is none
        used = _from_proc("/proc/self/status", "VmSize:")
        limits.append(None if limit < 0 or used is None else limit - used)
    limits.append(_left_in_container())
    known = [size for size in limits if size is not None]
    return max(0, min(known)) if known else None


# Where Linux tells the limit of a container, what it uses, and what could be freed at once.
_CONTAINERS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def _left_in_container() -> int | None:
    """Return the bytes that a container may still use; None if there is no limit."""
    for folder, limit, usage, freeable in _CONTAINERS:
        try:
            most = (Path(folder) / limit).read_text().strip()
            used = int((Path(folder) / usage).read_text())
            entries = (Path(folder) / "memory.stat").read_text().split()
        except (OSError, ValueError):
            continue
        if not most.isdigit() or int(most) >= 2**60:  # "max", or a number that stands for it
            continue
        files = dict(zip(entries[::2], entries[1::2])).get(freeable, "0")
        return int(most) - used + int(files)
    return None


def _from_proc(path: str, name: str) -> int | None:
    """Return the value, in bytes, of an entry of a file in /proc; None if there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in lines if line.startswith(name)]
    return int(kibibytes[0]) * 1024 if kibibytes else None


def amount(nbytes: float) -> str:
    """Return a number of bytes as text, such as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        # Three digits, but never with an exponent: such a text can be passed as a limit.
        digits = 0 if unit == "bytes" or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
        shown = f"{nbytes:.{digits}f}"
        if float(shown) < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{shown.rstrip('0').rstrip('.') if digits else shown} {unit}"
