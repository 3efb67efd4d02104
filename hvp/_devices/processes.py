"""The processes that a `tf.distribute.Strategy` connects, and sums over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._devices.device import LostDeviceError, in_new_thread
from hvp._devices.names import device_names
from hvp._errors import DeviceError, HvpError, line_of
from hvp._vectors.packing import Packing
from hvp._vectors.resources import bits_of
from hvp._vectors.strategies import process_count

# A digest travels in pieces of this many bits, each as one number: sums over processes of their
# squares are then exact in float32 for 70,000 processes.
_BITS, _PIECES = 4, 8


def processes_of(strategy: tf.distribute.Strategy | None, seconds: float) -> Processes | None:
    """Return the processes of a strategy, or None if there is only this one.

    `seconds` is how long to wait for the others.
    """
    count = process_count(strategy)
    return Processes(strategy, count, seconds) if strategy is not None and count > 1 else None


class Processes:
    """Processes that each hold a part of the data, and add up what they compute from it.

    All of them make the same calls in the same order, and receive the same bits. They wait for each
    other for up to `seconds`.
    """

    def __init__(self, strategy: tf.distribute.Strategy, count: int, seconds: float) -> None:
        self.count = count
        self._strategy, self._seconds = strategy, seconds
        self._devices = device_names(strategy)
        self._options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=seconds)

    def sum(
        self,
        compute: Callable[[], Sequence[tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
        digest: int,
    ) -> list[tf.Tensor]:
        """Return the sums over all processes of the tensors that each of them computes.

        If `compute` raises an error, it is raised here, and the other processes are notified.
        `specs` are the shapes and dtypes of its tensors. `digest` is that of everything that must
        be the same in all processes, such as the vector in a product; raise `HvpError` if it
        differs. Raise `DeviceError` if another process failed, or did not make this call in time.
        """
        error: Exception | None = None
        try:
            tensors = list(compute())
        except Exception as caught:
            error, tensors = caught, [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        flags = tf.constant([float(error is not None), *_pieces(digest)], specs[0].dtype)
        packing = Packing([*specs, tf.TensorSpec(flags.shape, flags.dtype)])
        try:
            sums = [self._sum(buffer) for buffer in packing.pack([*tensors, flags])]
        except (LostDeviceError, tf.errors.OpError) as failure:
            raise self._failed(failure) from error or failure
        *results, flags = packing.unpack(sums)
        total = flags.numpy().tolist()
        if error is not None:
            raise error
        if total[0]:
            raise DeviceError(
                f"{total[0]:.0f} of the {self.count} processes could not compute their share",
                "all processes",
                "see what these raised",
            )
        self._check_same(total[1:])
        return results

    def _sum(self, buffer: tf.Tensor) -> tf.Tensor:
        """Return the sum of one buffer over all processes, after waiting for them."""
        devices = self._devices

        def of_replica(context: Any) -> tf.Tensor:
            # The first replica of each process brings its share.
            index = context.replica_id_in_sync_group % len(devices)
            with tf.device(devices[index]):
                return tf.identity(buffer) if index == 0 else tf.zeros_like(buffer)

        def everywhere() -> tf.Tensor:
            with self._strategy.scope():
                shares = self._strategy.experimental_distribute_values_from_function(of_replica)
                return self._strategy.extended.reduce_to(
                    tf.distribute.ReduceOp.SUM, shares, devices[0], self._options
                )

        # In another thread, so that this one can be interrupted. TensorFlow ends the wait.
        return in_new_thread(everywhere).wait(None)

    def _check_same(self, total: Sequence[float]) -> None:
        sums, squares = total[:_PIECES], total[_PIECES:]
        # Equal if, and only if, all processes have the same numbers.
        if all(square * self.count == one * one for one, square in zip(sums, squares)):
            return
        raise HvpError(
            "the processes multiply by different vectors, or make different calls",
            "the same calls with the same vectors, in the same order, in all processes",
            "give the same seed, start vector or right-hand side in all of them, such as v0 for "
            "scipy.sparse.linalg.eigsh",
        )

    def _failed(self, failure: Exception) -> DeviceError:
        reason = f"{type(failure).__name__}: {line_of(failure)}"
        return DeviceError(
            f"the sum over {self.count} processes failed ({reason})",
            f"that all processes make the same call within {self._seconds:g} seconds",
            "see whether one of them has ended; all of them have to be started again",
        )


# A large odd number, by which the places of numbers are told apart.
_ODD = 2654435761


def digest_of(kind: str, *tensors: tf.Tensor) -> int:
    """Return 32 bits that very likely differ for different tensors, all of floating type.

    `kind` says what the tensors are for, and is part of the digest.
    """
    total = sum(ord(letter) << (8 * (index % 4)) for index, letter in enumerate(kind))
    for tensor in tensors:
        bits = tf.reshape(tf.cast(bits_of(tensor), tf.int64), [-1])
        places = tf.range(1, 1 + tf.size(bits, tf.int64))
        # By the place, so that the same numbers in another order make another digest.
        total = 31 * total + int(tf.reduce_sum(bits * (2 * places * _ODD + 1)))
    return (total ^ (total >> 32)) & 0xFFFFFFFF


def _pieces(digest: int) -> list[float]:
    pieces = [float((digest >> (_BITS * index)) % 2**_BITS) for index in range(_PIECES)]
    return [*pieces, *(piece * piece for piece in pieces)]
