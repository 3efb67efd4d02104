"""The counts that an operator shows for each of its devices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceStatistics:
    """Counts of one device's share of the work.

    Attributes
    ----------
    name : str
        The full name of the device.
    batches : int
        Number of batches whose residuals it holds.
    residual_bytes : int
        Upper bound on the size of these, with the data of the batches.
    bytes_sent, bytes_received : int
        Bytes moved to the device and from it, for variables, data, vectors and products.
    lost : str
        Why the device is no longer used; empty while it is.
    """

    name: str
    batches: int
    residual_bytes: int
    bytes_sent: int
    bytes_received: int
    lost: str
