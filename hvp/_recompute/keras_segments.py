"""`recompute_model`: Keras models divided into segments that derivatives recompute."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._errors import RecomputeError
from hvp._graphs.sizes import nbytes
from hvp._keras.losses import preserved_losses
from hvp._keras.private import (
    has_layers,
    inputs_of_call,
    layers_of,
    maker_of,
    one_at_a_time,
)
from hvp._recompute.partition import fewest_bytes, smallest_largest
from hvp._recompute.recompute import recompute, refuse_losses
from hvp._runtime.interrupts import Uninterrupted


def recompute_model(model: Any, segments: int | Sequence[Any] | None = None) -> Callable[..., Any]:
    """Divide a Keras model into segments whose values derivatives recompute instead of keeping.

    Parameters
    ----------
    model : keras.Model
        A sequential, functional or subclassed model that is built. Its weights are used, not
        copied.
    segments : int or sequence of (str or keras.Layer), optional
        The number of segments, or the sublayers (or their names) that become segments. By default,
        the number is about the square root of the depth, and the sizes of the layers' results
        decide where to cut. For a subclassed model you have to list sublayers.

    Returns
    -------
    callable
        A function that you call like the model and that returns the same. Its attribute `segments`
        lists the names of the layers of each segment, and its attribute `__wrapped__` is the model.

    Raises
    ------
    RecomputeError
        If the model is not built, cannot be cut into that many segments, or has no such layer, or
        if you do not list sublayers of a subclassed model.

    Notes
    -----
    A sequential or functional model is cut where a single tensor, besides the model's inputs,
    passes from one side to the other, but not after a layer that is called more than once.
    Branches therefore stay whole. A Hessian-vector product holds three tensors for each cut, and
    the values that the largest segment computes.

    See Also
    --------
    recompute : The same for functions and layers. Its notes on cost and state apply here too.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hvp
    >>> model = keras.Sequential(
    ...     [keras.Input((4,)), *(keras.layers.Dense(4, "tanh") for _ in range(9))]
    ... )
    >>> segmented = hvp.recompute_model(model)
    >>> [len(names) for names in segmented.segments]
    [3, 3, 3]
    >>> x = np.ones((2, 4), "float32")
    >>> bool(np.allclose(segmented(x), model(x), atol=1e-6))
    True
    """
    if not has_layers(model):
        raise RecomputeError(f"the model is {type(model).__name__}", "a Keras model or layer")
    if segments is True:
        segments = None
    if isinstance(segments, (str, bool, float)):
        raise RecomputeError(
            f"the argument segments is {segments!r}",
            "a number of segments, or a list of sublayers or their names",
            f"pass [{segments!r}]" if isinstance(segments, str) else "",
        )
    if segments is not None and not isinstance(segments, int):
        return _by_layers(model, segments)
    if any(kind.__module__.startswith("tf_keras") for kind in type(model).__mro__):
        raise RecomputeError(
            f"the model {model.name!r} is a model of tf_keras",
            "a Keras 3 model, or a list of its sublayers",
            _LIST_THEM,
        )
    # A class of the caller may compute anything from the outputs.
    is_own = not type(model).call.__module__.startswith("keras.")
    if is_own or not _has_outputs(model):
        is_sequential = type(model).__name__ == "Sequential"
        raise RecomputeError(
            f"the model {model.name!r} is "
            + (
                "not built"
                if is_sequential
                else "subclassed, so the order of its layers is unknown"
            ),
            "a model with known inputs and outputs, or a list of its sublayers",
            "call it on a batch first" if is_sequential else _LIST_THEM,
        )
    return _by_cuts(model, segments)


_LIST_THEM = (
    "list the sublayers to recompute, or their names: recompute=[...] for an operator, "
    "segments=[...] for recompute_model"
)


def _has_outputs(model: Any) -> bool:
    """Whether the model knows its inputs and outputs."""
    try:
        return bool(model.outputs)
    except (AttributeError, ValueError):  # which of them depends on the version of Keras
        return False


def segments_of(
    variables: Any, segments: Any
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function that makes a context in which calls of a Keras model are recomputed.

    The `segments` are as for `recompute_model`; True stands for the default. If `variables` is not
    a Keras model, a `RecomputeError` is raised.
    """
    if not has_layers(variables):
        raise RecomputeError(
            f"the argument recompute is {segments!r}, but the variables are "
            f"{type(variables).__name__}",
            "a Keras model in place of the variables",
            "pass the model, or wrap parts of the loss in hvp.recompute",
        )
    segmented: Any = recompute_model(variables, None if segments is True else segments)

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        # Keras passes a nest of None to models of several inputs.
        if any(leaf is not None for leaf in tf.nest.flatten(mask)):
            raise RecomputeError(
                "the model is called with a mask, which its parts would not get",
                "masks that layers compute, as keras.layers.Masking does",
                "pass recompute=[...] with the sublayers to recompute, or their names",
            )
        return segmented(inputs, training=training)

    # If layers are listed, the call of each is replaced; otherwise that of the model as a whole.
    whole = functools.partial(_replaced_call, variables, call)
    return getattr(segmented, "replaced", whole)


@contextlib.contextmanager
def _replaced_call(layer: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Replace the `call` of a layer in a context."""
    # Python looks up `call` on the instance before the class. Keras tracks normal assignments.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


def _by_layers(model: Any, listed: Sequence[Any]) -> Callable[..., Any]:
    """Recompute the listed layers whenever the model calls them."""
    by_name = {layer.name: layer for layer in layers_of(model, include_self=False)}
    shown = ", ".join(list(by_name)[:8]) + (", ..." if len(by_name) > 8 else "")
    layers = []
    for layer in listed:
        own = by_name.get(layer if isinstance(layer, str) else getattr(layer, "name", None))
        if own is None or not (isinstance(layer, str) or own is layer):
            raise RecomputeError(
                f"the model {model.name!r} has no layer {layer!r}",
                f"layers of the model: {shown}",
            )
        layers.append(own)
    if not layers:
        raise RecomputeError("the list of layers to recompute is empty", "at least one layer")
    calls: dict[int, Callable[..., Any]] = {}

    @contextlib.contextmanager
    def replaced(without: Any = None) -> Iterator[None]:
        # While a listed layer is recomputed, its own call is the original one. Other listed layers
        # inside it are replaced.
        with one_at_a_time(), contextlib.ExitStack() as stack:
            for layer in layers:
                if layer is without or "call" in vars(layer):
                    continue
                stack.enter_context(_replaced_call(layer, calls[id(layer)]))
            yield

    def recomputed_call(layer: Any) -> Callable[..., Any]:
        original = layer.call

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with replaced(without=layer), preserved_losses(layer):
                results = original(*args, **kwargs)
                refuse_losses(layer)
                return results

        return recompute(call)

    calls.update({id(layer): recomputed_call(layer) for layer in layers})

    def segmented(*args: Any, **kwargs: Any) -> Any:
        with replaced():
            return model(*args, **kwargs)

    named = _with_attributes(segmented, model, [[layer.name] for layer in layers])
    named.replaced = replaced
    return named


@dataclass(frozen=True)
class _Link:
    """Part of a functional model, from one tensor that separates the model to the next.

    It ends with the tensor `end`, which is None for the last link, and has the layers and
    operations `names`. The inputs `crossing` of the model are used after this link.
    """

    end: Any
    names: list[str]
    crossing: list[Any]


def _by_cuts(model: Any, count: int | None) -> Callable[..., Any]:
    """Cut a functional model at tensors that separate it into two parts."""
    links = _links(model)
    if count is not None and not 1 <= count <= len(links):
        raise RecomputeError(
            f"the model {model.name!r} cannot be cut into {count} segments",
            f"between 1 and {len(links)} segments, since branches stay whole, and no segment ends "
            "with a layer that is called more than once",
        )
    sizes = _link_sizes(model, links)
    if count is None:
        cuts = fewest_bytes(sizes, [nbytes(link.end) for link in links[:-1]])
    else:
        cuts = smallest_largest(sizes, count)
    parts, names = [], []
    for start, end in zip([0, *cuts], [*cuts, len(links)]):
        names.append([name for link in links[start:end] for name in link.names])
        parts.append(_part(model, links, start, end))

    def segmented(inputs: Any, training: Any = None) -> Any:
        tensors = dict(zip(map(id, model.inputs), _flat_inputs(model, inputs)))
        value = None
        for (run, crossing), start in zip(parts, [0, *cuts]):
            extra = [tensors[id(tensor)] for tensor in crossing]
            value = run([*extra] if start == 0 else [value, *extra], training=training)
        return value

    return _with_attributes(segmented, model, names)


def _part(model: Any, links: list[_Link], start: int, end: int) -> tuple[Any, list[Any]]:
    """Return the recomputed model of some links, and the inputs of the model that it takes."""
    import keras

    last = end == len(links)
    outputs = model.compute_output_spec(_input(model)) if last else None
    crossing = list(model.inputs) if start == 0 else links[start - 1].crossing
    inputs = crossing if start == 0 else [links[start - 1].end, *crossing]
    ends = model.outputs if last else links[end - 1].end
    part = keras.Model(inputs, ends)

    def run(tensors: list[Any], training: Any) -> Any:
        with warnings.catch_warnings():
            # Keras warns about masks, but the layers of the part take the mask or compute it.
            warnings.filterwarnings("ignore", message=".*input with a mask attached")
            with preserved_losses(part):
                results = part(tensors, training=training)
                refuse_losses(part)
        if outputs is None:
            return results
        if isinstance(outputs, (list, tuple)) and len(outputs) == 1:
            return tf.nest.flatten(results)[0]  # as from the model itself
        return tf.nest.pack_sequence_as(outputs, tf.nest.flatten(results))

    return recompute(run), crossing


def _links(model: Any) -> list[_Link]:
    """Return the links of a functional model.

    A tensor separates the model if, once it has been computed, only this tensor and inputs of the
    model are used later. It must not be an output of the model, nor the result of a layer that is
    called more than once: Keras builds no model that begins with a call of a layer and contains
    another one.
    """
    makers = _in_order(model)
    calls = Counter(id(operation) for operation, _ in makers)
    last_use: dict[int, int] = {}
    for place, (_, node) in enumerate(makers):
        for tensor in node.input_tensors:
            last_use[id(tensor)] = place
    for tensor in model.outputs:
        last_use[id(tensor)] = len(makers)
    links, names = [], []
    # Tensors that have been computed and are used later.
    alive: dict[int, Any] = {}
    for place, (operation, node) in enumerate(makers):
        names.append(operation.name)
        alive.update({id(t): t for t in node.output_tensors if id(t) in last_use})
        alive = {key: t for key, t in alive.items() if last_use[key] > place}
        separate = [t for t in alive.values() if not any(t is o for o in model.outputs)]
        once = calls[id(operation)] == 1
        if once and place < len(makers) - 1 and len(alive) == 1 and len(separate) == 1:
            crossing = [t for t in model.inputs if last_use.get(id(t), -1) > place]
            links.append(_Link(separate[0], names, crossing))
            names = []
    return [*links, _Link(None, names, [])]


def _in_order(model: Any) -> list[tuple[Any, Any]]:
    """Return the operations of a functional model and their nodes in topological order."""
    order: list[tuple[Any, Any]] = []
    done = {id(tensor) for tensor in model.inputs}
    seen: set[int] = set()
    stack = [(tensor, False) for tensor in reversed(model.outputs)]
    while stack:
        tensor, expanded = stack.pop()
        operation, node = maker_of(tensor)
        if id(tensor) in done or id(node) in seen:
            continue
        if expanded:
            seen.add(id(node))
            order.append((operation, node))
            continue
        stack.append((tensor, True))
        stack += [(t, False) for t in reversed(node.input_tensors)]
    return order


def _link_sizes(model: Any, links: list[_Link]) -> list[int]:
    """Count the bytes that each link computes, in a trace of the model's operations."""

    def run(*tensors: tf.Tensor) -> None:
        graph = tf.compat.v1.get_default_graph()
        values = dict(zip(map(id, model.inputs), tensors))
        for place, (operation, node) in enumerate(_in_order(model)):
            before = len(graph.get_operations())
            args, kwargs = inputs_of_call(node, values)
            with tf.name_scope("link"):  # an outermost name may not begin with an underscore
                results = tf.nest.flatten(operation(*args, **kwargs))
            values.update(zip(map(id, node.output_tensors), results))
            new = graph.get_operations()[before:]
            sizes[place] = sum(nbytes(tensor) for added in new for tensor in added.outputs)

    sizes: dict[int, int] = {}
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in model.inputs]
    with Uninterrupted(), preserved_losses(model):
        tf.function(run, autograph=False).get_concrete_function(*specs)
    each = iter(sizes.values())
    return [max(1, sum(next(each) for _ in link.names)) for link in links]


def _input(model: Any) -> Any:
    """Return the model's inputs in the structure that the model takes."""
    return model.inputs[0] if len(model.inputs) == 1 else model.input


def _flat_inputs(model: Any, inputs: Any) -> list[Any]:
    is_dict = isinstance(inputs, dict)
    structure = model.input if is_dict or len(model.inputs) > 1 else model.inputs
    if is_dict and isinstance(structure, dict):
        inputs = {key: inputs[key] for key in structure}
    elif is_dict:
        return [inputs[tensor.name] for tensor in model.inputs]
    leaves = map(id, tf.nest.flatten(structure))
    by_input = dict(zip(leaves, tf.nest.flatten(inputs)))
    return [by_input[id(tensor)] for tensor in model.inputs]


def _with_attributes(segmented: Any, model: Any, names: list[list[str]]) -> Any:
    segmented.__wrapped__ = model
    segmented.__name__ = segmented.__qualname__ = f"recomputed_{model.name}"
    segmented.segments = names
    return segmented
