"""The linear map whose terms are on several devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._data.device_evaluation import DeviceEvaluation
from hvp._devices.membership import leave_lost
from hvp._devices.processes import Processes, digest_of
from hvp._engines.linear_map import LinearMap
from hvp._errors import HvpError
from hvp._vectors.space import Space


class DealtSum(LinearMap):
    """The sum of the linear maps of all batches, each of them multiplied where it is.

    A vector goes to each device once, in one piece, and one product comes back.

    Parameters
    ----------
    deal : DeviceEvaluation
        What devices hold.
    space : Space
        The space of vectors and products; the map is symmetric.
    stream : callable
        Takes the deal, numbers of batches that no device holds, and a vector or rows; returns
        products with these batches.
    processes : Processes or None
        The processes that hold the other shares of the data.
    """

    def __init__(
        self,
        deal: DeviceEvaluation,
        space: Space,
        stream: Callable[..., list[tf.Tensor]],
        processes: Processes | None,
    ) -> None:
        self._deal, self._stream, self._processes = deal, stream, processes
        self.domain = self.codomain = space

    @property
    def streams(self) -> bool:  # type: ignore[override]
        """Whether a batch is held by no device; after a loss the others may have no room for it."""
        return bool(self._deal.streamed)

    @property
    def batches_held(self) -> int:  # type: ignore[override]
        """How many batches devices hold."""
        return self._deal.held

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Size of what devices hold, with the data of their batches, in bytes."""
        return self._deal.nbytes

    def apply(self, vector: Any, *, adjoint: bool = False) -> Any:
        """Multiply by a vector in any layout; the map is symmetric."""
        if isinstance(vector, (list, tuple)):
            return self.codomain.split(self.apply(self.domain.join(vector)))
        if self._processes is None:
            return self._apply_here(vector)
        specs = [tf.TensorSpec(vector.shape, vector.dtype)]
        digest = digest_of(f"product {len(vector.shape)}", vector)
        return self._processes.sum(lambda: [self._apply_here(vector)], specs, digest)[0]

    def close(self) -> None:
        """Release what devices hold."""
        self._deal.close()

    def _apply_here(self, v: tf.Tensor) -> tf.Tensor:
        try:
            products, counted = self._deal.multiply(v, self.domain)
            streamed = self._deal.streamed - counted
            if streamed:
                products += self._stream(self._deal, streamed, v)
        finally:
            leave_lost()
        if not products:
            raise HvpError("no batch is held, and none is evaluated again")
        return products[0] if len(products) == 1 else tf.add_n(products)
