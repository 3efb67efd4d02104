"""Multiplying on several workers in one call of TensorFlow, instead of several calls for each.

TensorFlow divides a function whose operations are on several devices: each worker gets its part
once, fetches the vector by itself, and sends its product. One such call takes less than half the
time of the calls that would otherwise send the vector, multiply, and fetch the product. But its
error does not tell which worker failed, so callers need the separate calls too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvp._devices.device import LostDeviceError, Runner
from hvp._devices.names import own_device_like
from hvp._devices.replica import DeviceReplica
from hvp._engines.graph_map import GraphMap
from hvp._engines.linear_map import LinearMap, Sum, Terms
from hvp._graphs.private import call_flat
from hvp._graphs.sizes import nbytes
from hvp._graphs.target import ExecutionTarget
from hvp._runtime.collector import no_collections
from hvp._runtime.recent import Recent
from hvp._vectors.space import Space

_log = logging.getLogger("hvp")

# So many functions are kept, and a function has at most so many terms: TensorFlow optimizes all of
# them together before the first call.
_FUNCTIONS, _TERMS = 8, 64


class JointProducts:
    """Functions that multiply on several workers; each is made before its first call."""

    def __init__(self) -> None:
        self._functions = Recent(_FUNCTIONS)
        self._runner = Runner()

    def start(
        self, weighted: Mapping[ExecutionTarget, Terms], v: tf.Tensor, space: Space, seconds: float
    ) -> Callable[[], tf.Tensor | None] | None:
        """Start to multiply on several workers at once.

        `weighted` are the linear maps that each worker multiplies, see `can_join`; `v` has shape
        `(n,)`, or `(k, n)` for rows. Return a function that waits for the product, and returns None
        if there is none: each worker then has to be asked by itself. Workers that do not answer
        within `seconds` count as lost from then on. `start` itself returns None if a joint call is
        not possible.
        """
        if not weighted or sum(map(len, weighted.values())) > _TERMS:
            return None
        home = own_device_like(v.device)
        maps = [one for terms in weighted.values() for _, one in _graph_maps(terms)]
        width = min(one.rows_at_once for one in maps) if len(v.shape) == 2 else 1
        # Blocks are compared with single vectors before, where a device that does not answer is
        # given up after some time.
        if width > 1 and not all(one.program.product.is_compared for one in maps):
            return None
        kinds = tuple(
            (site, *((weight, one.program) for weight, one in _graph_maps(terms)))
            for site, terms in weighted.items()
        )
        key = width > 1, home, kinds
        function = self._functions.get_or_make(
            key, lambda: _traced(kinds, space, home, in_rows=width > 1)
        )
        if function is None:
            return None
        residuals = [tensor for one in maps for tensor in one.residuals]

        def call(one: tf.Tensor) -> tf.Tensor:
            with tf.device(None), tf.device(home):
                tensors = [one, *residuals]
                return call_flat(
                    function, tensors, function.captured_inputs, light_optimization=False
                )

        def multiply() -> tf.Tensor:
            if len(v.shape) == 1:
                return call(v)
            if width == 1:
                return tf.stack([call(row) for row in tf.unstack(v)])
            size = -(-len(v) // -(-len(v) // width))  # all alike but the last
            return tf.concat([call(v[i : i + size]) for i in range(0, len(v), size)], axis=0)

        sites = [site for site in weighted if isinstance(site, DeviceReplica)]
        job = self._runner.start(multiply)

        def wait() -> tf.Tensor | None:
            devices = [site.device for site in sites if site.is_remote]
            try:
                product = job.wait(
                    seconds, lambda: all(device.takes_connections() for device in devices)
                )
            except LostDeviceError as error:
                self._runner = Runner()  # the one before may hang
                for device in devices:
                    if not device.answers():
                        device.give_up(str(error))
                return None
            except tf.errors.OpError as error:
                if not any(device.may_be_of_another(error) for device in devices):
                    _log.info("workers multiply one by one, as TensorFlow says: %s", error)
                    self._functions[key] = None
                return None
            for site in sites:
                site.sent += nbytes(v)
                site.received += nbytes(product)
            return product

        return wait


def can_join(site: ExecutionTarget, terms: Terms) -> bool:
    """Return whether one function can multiply here and on other devices."""
    if not _pays_at(site):
        return False
    maps = _graph_maps(terms)
    return all(one.program.product.has_flat for _, one in maps) and 0 < len(maps) == len(terms)


def _traced(kinds: Sequence[Any], space: Space, home: str, *, in_rows: bool) -> Any:
    """Return a function that multiplies on all devices, and adds up the products at home."""
    pairs = [pair for _, *weighted in kinds for pair in weighted]
    specs = [spec for _, program in pairs for spec in program.residual_specs]
    v_spec = tf.TensorSpec([None, space.size], space.dtype) if in_rows else space.flat_spec

    def multiply(v: tf.Tensor, *residuals: tf.Tensor) -> tf.Tensor:
        rest, products = iter(residuals), []
        for site, *weighted in kinds:
            terms: list[tuple[float, LinearMap]] = []
            for weight, program in weighted:
                own = [next(rest) for _ in program.residual_specs]
                one = GraphMap(program, own, space, space, site, whole_blocks=in_rows)
                terms.append((weight, one))
            total = Sum(terms, space, space)
            with site.scope():
                products.append(total.apply(v))
        with tf.device(home):
            return tf.add_n(products) if len(products) > 1 else tf.identity(products[0])

    function = tf.function(multiply, autograph=False)
    with no_collections(), tf.device(None):
        return function.get_concrete_function(v_spec, *specs)


def _graph_maps(terms: Terms) -> list[tuple[float, GraphMap]]:
    """Return the terms that are functions of a graph."""
    return [(weight, one) for weight, one in terms if isinstance(one, GraphMap)]


def _pays_at(site: ExecutionTarget) -> bool:
    """Return whether calls to a place take so long that a single call is better."""
    return site.is_remote
