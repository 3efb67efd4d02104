"""What an operator has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counts of an operator's work, shared by the operators made from it by `damped`.

    Attributes
    ----------
    gradient_evaluations : int
        Whole evaluations of the loss and its gradient over all data.
    batches, batches_kept : int or None
        How many batches the data are, and of how many the linearizations are kept; None where the
        data are one batch.
    batch_evaluations : int
        Evaluations of the loss and its gradient over single batches, or pieces of them.
    products : int
        Products with a vector; the columns of a block count one each.
    traces : int
        How often the loss was traced into a graph.
    residual_bytes : int or None
        Size of what is kept for products, at most; 0 when closed, None where it cannot be told.
    engine : str
        What computes products: ``"graph"`` or ``"tape"``.
    jit_compile : bool or None
        Whether XLA computes products with one vector; None until the first.
    note : str
        Why something is not as good as it could be; empty if nothing is.
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
    note: str = ""
