"""Compiling a part of a graph as a function of some of its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import KEPT_WHOLE
from hvp._graphs.graph import Graph
from hvp._graphs.low_precision import in_low_precision
from hvp._graphs.private import NO_INLINE
from hvp._graphs.schedule import in_order
from hvp._graphs.simplify import simplified
from hvp._recompute.order import spec_of
from hvp._runtime.interrupts import Uninterrupted

# Compiled functions by what they compute: equal layers share a function, which TensorFlow then
# prepares only once.
_shared: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


def compile_part(
    part: Graph,
    captured: dict[str, tf.Tensor],
    inputs: Sequence[str],
    specs: Sequence[tf.TensorSpec],
    results: Sequence[str],
    *,
    whole: bool,
    precision: tf.DType | None = None,
) -> Any:
    """Compile a part of a graph as a function of its tensors `inputs`, which returns `results`.

    The function captures those tensors of `captured` that it uses. If `whole`, its operations are
    scheduled for little memory, with large products and convolutions in `precision`, and its calls
    are never inlined.

    Recomputation has to depend on the upstream cotangent. Otherwise its inputs are available in the
    forward pass already, and TensorFlow may run it then and hold the intermediate values until the
    backward pass. It may also merge the operations with those of the forward pass, or fold them to
    constants. Either way, the values stay in memory as if nothing were recomputed. A call that is
    not inlined begins only when all of its inputs are available, and the cotangents are among them.
    Its operations are not merged with operations outside.
    """
    used = {*results, *(tensor for node in part.graph_def.node for tensor in node.input)}
    captured = {name: tensor for name, tensor in captured.items() if name in used}
    key = (whole, precision, part.key(inputs, results), tuple(specs))
    # A function that captures tensors is good for these only.
    shared = None if captured else _shared.get(key)
    if shared is not None:
        return shared
    name = KEPT_WHOLE
    captured_specs = {name: spec_of(tensor) for name, tensor in captured.items()}
    known = {**captured_specs, **dict(zip(inputs, specs))}
    part = simplified(part.copy().graph_def, results, known)
    if whole:
        part = part.without_unused(results)
        if precision is not None:
            part, _, count = in_low_precision(part, precision, {}, results)
            name += f"_{precision.name}" if count else ""
        part = in_order(part, results)

    def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return part.imported({**captured, **dict(zip(inputs, tensors))}, results)

    # TensorFlow names a graph's function after the Python function.
    def hvp_recomputed(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return run(*tensors)

    hvp_recomputed.__name__ = name
    function = tf.function(
        hvp_recomputed if whole else run,
        autograph=False,
        experimental_attributes={NO_INLINE: True} if whole else None,
    )
    with Uninterrupted():
        compiled = function.get_concrete_function(*specs)
    if not captured:
        _shared[key] = compiled
    return compiled
