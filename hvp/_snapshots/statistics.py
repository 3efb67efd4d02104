"""The counts that an operator shows as its `stats`."""

from __future__ import annotations

from dataclasses import dataclass

from hvp._devices.statistics import DeviceStatistics


@dataclass
class Statistics:
    """Counts of an operator's work, shared by all operators that `damped` derived from it.

    Attributes
    ----------
    gradient_evaluations : int
        Number of evaluations of the loss and its gradient over all data.
    batches, batches_kept : int or None
        Number of batches, and number of batches whose residuals are kept. None if the data are not
        divided.
    batch_evaluations : int
        Number of evaluations of the loss and its gradient over single batches, or pieces of them.
    products : int
        Number of products with a vector. Each column of a block counts as one.
    traces : int
        Number of times the loss was traced into a graph.
    residual_bytes : int or None
        Upper bound on the size of the residuals; 0 when the operator is closed, None if the size is
        not known.
    engine : str
        The engine that computes products: ``"graph"`` or ``"tape"``.
    jit_compile : bool or None
        Whether XLA computes products with one vector; None before the first product.
    precision : str
        The type in which matrix products and convolutions are computed, and residuals stored: that
        of the operator, unless ``precision`` asks for a lower one in which the device is fast.
    devices : tuple of DeviceStatistics
        Counts for each device, if ``devices`` names any.
    note : str
        Why something works less well than requested; empty otherwise.
    """

    gradient_evaluations: int = 0
    batches: int | None = None
    batches_kept: int | None = None
    batch_evaluations: int = 0
    products: int = 0
    traces: int = 0
    residual_bytes: int | None = 0
    engine: str = ""
    jit_compile: bool | None = None
    precision: str = ""
    devices: tuple[DeviceStatistics, ...] = ()
    note: str = ""
