"""Digests of arrays that are the same in every process."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def digest(values: Any) -> str:
    """Return a hexadecimal digest of an array's values (numbers or strings), shape and dtype."""
    array = np.ascontiguousarray(values)
    checksum = hashlib.blake2b(f"{array.shape}{array.dtype}".encode(), digest_size=16)
    # The entries of an object array are strings. Its bytes are only their addresses.
    checksum.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return checksum.hexdigest()
