"""`recompute_model`: a Keras model in segments, each recomputed."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._errors import RecomputeError
from hvp._graphs.parts import nbytes
from hvp._keras.losses import kept_losses
from hvp._keras.private import has_layers, layers_of, maker_of
from hvp._recompute.partition import fewest_bytes, smallest_largest
from hvp._recompute.recompute import recompute, refuse_losses
from hvp._runtime.interrupts import Uninterrupted


def recompute_model(model: Any, segments: int | Sequence[Any] | None = None) -> Callable[..., Any]:
    """Call a Keras model in segments that derivatives compute again, instead of keeping them.

    Parameters
    ----------
    model : keras.Model
        Sequential, functional or subclassed, and built. Its weights are used, not copied.
    segments : int or sequence of (str or keras.Layer), optional
        How many segments, or the sublayers that are to be segments, or their names. By default
        about the square root of the depth, chosen by the sizes of what the layers compute. A
        subclassed model has to be given its sublayers.

    Returns
    -------
    callable
        Called like the model, gives what the model gives. Attributes: `segments`, a list of the
        names of each segment's layers, and `__wrapped__`, the model.

    Raises
    ------
    RecomputeError
        If the model is not built, cannot be cut into so many segments, or has no such layer; if
        `segments` is missing for a subclassed model.

    Notes
    -----
    A sequential or functional model is cut where a single tensor, besides the model's inputs,
    passes from one side to the other, so that branches stay whole. What is kept of a Hessian-vector
    product are three tensors for each cut, and what the largest segment computes.

    See Also
    --------
    recompute : for functions and single layers; its notes on cost and state hold here too.

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
    >>> bool(np.allclose(segmented(x), model(x)))
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
            f"the model {model.name!r} is of tf_keras",
            "a Keras 3 model, or a list of its sublayers",
            "pass segments=[...] with the sublayers to recompute, or their names",
        )
    if not _has_outputs(model):
        is_sequential = type(model).__name__ == "Sequential"
        raise RecomputeError(
            f"the model {model.name!r} is "
            + (
                "not built" if is_sequential else "subclassed, so that its layers' order is unknown"
            ),
            "a model with known inputs and outputs, or a list of its sublayers",
            "call it on a batch first"
            if is_sequential
            else "pass segments=[...] with the sublayers to recompute, or their names",
        )
    return _by_cuts(model, segments)


def _has_outputs(model: Any) -> bool:
    """Whether the way from inputs to outputs is known."""
    try:
        return bool(model.outputs)
    except (AttributeError, ValueError):  # one or the other, by Keras' version
        return False


def segments_of(
    variables: Any, segments: Any
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return contexts in which a Keras model, wherever it is called, is recomputed in segments.

    Parameters
    ----------
    variables : keras.Model
        The model.
    segments : True, int or sequence
        As for `recompute_model`, which chooses them if True.

    Returns
    -------
    callable
        Makes a context.
    """
    if not has_layers(variables):
        raise RecomputeError(
            f"the argument recompute is {segments!r}, and the variables are "
            f"{type(variables).__name__}",
            "a Keras model in place of the variables",
            "pass the model, or wrap parts of the loss in hvp.recompute",
        )
    segmented: Any = recompute_model(variables, None if segments is True else segments)

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        del mask
        return segmented(inputs, training=training)

    # Of listed layers each is replaced where it stands; else the model as a whole.
    whole = functools.partial(_replaced_call, variables, call)
    return getattr(segmented, "replaced", whole)


@contextlib.contextmanager
def _replaced_call(layer: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Let a layer compute something else when it is called."""
    # On the instance, where Keras looks it up before the class.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


def _by_layers(model: Any, given: Sequence[Any]) -> Callable[..., Any]:
    """Recompute some layers of a model, wherever it calls them."""
    by_name = {layer.name: layer for layer in layers_of(model, include_self=False)}
    shown = ", ".join(list(by_name)[:8]) + (", ..." if len(by_name) > 8 else "")
    layers = []
    for layer in given:
        found = by_name.get(layer if isinstance(layer, str) else getattr(layer, "name", None))
        if found is None or not (isinstance(layer, str) or found is layer):
            raise RecomputeError(
                f"the model {model.name!r} has no layer {layer!r}",
                f"layers of the model: {shown}",
            )
        layers.append(found)
    if not layers:
        raise RecomputeError("the list of layers to recompute is empty", "at least one layer")
    calls: dict[int, Callable[..., Any]] = {}

    @contextlib.contextmanager
    def replaced(without: Any = None) -> Iterator[None]:
        there = [layer for layer in layers if layer is not without and "call" not in vars(layer)]
        with contextlib.ExitStack() as stack:
            for layer in there:
                stack.enter_context(_replaced_call(layer, calls[id(layer)]))
            yield

    def of(layer: Any) -> Callable[..., Any]:
        original = layer.call

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with replaced(without=layer), kept_losses(layer):
                made = original(*args, **kwargs)
                refuse_losses(layer)
                return made

        return recompute(call)

    calls.update({id(layer): of(layer) for layer in layers})

    def segmented(*args: Any, **kwargs: Any) -> Any:
        with replaced():
            return model(*args, **kwargs)

    finished = _finished(segmented, model, [[layer.name] for layer in layers])
    finished.replaced = replaced
    return finished


@dataclass(frozen=True)
class _Link:
    """Part of a functional model, from one tensor that separates it to the next.

    Attributes
    ----------
    end : KerasTensor or None
        Where it ends; None for the last.
    names : list of str
        Of its layers and operations.
    crossing : list of KerasTensor
        Inputs of the model that are used after it.
    """

    end: Any
    names: list[str]
    crossing: list[Any]


def _by_cuts(model: Any, count: int | None) -> Callable[..., Any]:
    """Cut a functional model where single tensors separate it."""
    links = _links(model)
    if count is not None and not 1 <= count <= len(links):
        raise RecomputeError(
            f"the model {model.name!r} is to be cut into {count} segments",
            f"between 1 and {len(links)}: branches stay whole",
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
        given = dict(zip(map(id, model.inputs), _flat_inputs(model, inputs)))
        value = None
        for (run, crossing), start in zip(parts, [0, *cuts]):
            extra = [given[id(tensor)] for tensor in crossing]
            value = run([*extra] if start == 0 else [value, *extra], training=training)
        return value

    return _finished(segmented, model, names)


def _part(model: Any, links: list[_Link], start: int, end: int) -> tuple[Any, list[Any]]:
    """Return a recomputed model of some links, and which inputs of the model it takes."""
    import keras

    last = end == len(links)
    outputs = model.compute_output_spec(_input(model)) if last else None
    crossing = list(model.inputs) if start == 0 else links[start - 1].crossing
    inputs = crossing if start == 0 else [links[start - 1].end, *crossing]
    wanted = model.outputs if last else links[end - 1].end
    try:
        part = keras.Model(inputs, wanted)
    except ValueError as error:  # a layer that is called more than once
        raise RecomputeError(
            f"the model {model.name!r} cannot be cut before {_named(links[end - 1])}: {error}",
            "layers that are called once, on either side of a cut",
            "pass segments=[...] with sublayers to recompute, or their names",
        ) from error

    def run(tensors: list[Any], training: Any) -> Any:
        with warnings.catch_warnings():
            # The layers inside take the mask, or the model computes it where it is needed.
            warnings.filterwarnings("ignore", message=".*input with a mask attached")
            with kept_losses(part):
                made = part(tensors, training=training)
                refuse_losses(part)
        if outputs is None:
            return made
        return tf.nest.pack_sequence_as(outputs, tf.nest.flatten(made))

    return recompute(run), crossing


def _named(link: _Link) -> str:
    return repr(link.names[-1]) if link.names else "the end"


def _links(model: Any) -> list[_Link]:
    """Walk through a functional model, and find the tensors that separate it."""
    makers = _in_order(model)
    last_use: dict[int, int] = {}
    for place, (_, node) in enumerate(makers):
        for tensor in node.input_tensors:
            last_use[id(tensor)] = place
    for tensor in model.outputs:
        last_use[id(tensor)] = len(makers)
    found, names = [], []
    alive: dict[int, Any] = {}
    for place, (operation, node) in enumerate(makers):
        names.append(operation.name)
        alive.update({id(t): t for t in node.output_tensors if id(t) in last_use})
        alive = {key: t for key, t in alive.items() if last_use[key] > place}
        separate = [t for t in alive.values() if not any(t is o for o in model.outputs)]
        if place < len(makers) - 1 and len(alive) == 1 and len(separate) == 1:
            crossing = [t for t in model.inputs if last_use.get(id(t), -1) > place]
            found.append(_Link(separate[0], names, crossing))
            names = []
    return [*found, _Link(None, names, [])]


def _in_order(model: Any) -> list[tuple[Any, Any]]:
    """Return the operations of a functional model and their nodes, makers before takers."""
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
            args, kwargs = node.arguments.fill_in(values)
            with tf.name_scope("link"):  # outermost, a name may not begin with an underscore
                made = tf.nest.flatten(operation(*args, **kwargs))
            values.update(zip(map(id, node.output_tensors), made))
            new = graph.get_operations()[before:]
            sizes[place] = sum(nbytes(tensor) for made_by in new for tensor in made_by.outputs)

    sizes: dict[int, int] = {}
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in model.inputs]
    with Uninterrupted(), kept_losses(model):
        tf.function(run, autograph=False).get_concrete_function(*specs)
    each = iter(sizes.values())
    return [max(1, sum(next(each) for _ in link.names)) for link in links]


def _input(model: Any) -> Any:
    """Return the model's inputs in the form in which it takes them."""
    return model.inputs[0] if len(model.inputs) == 1 else model.input


def _flat_inputs(model: Any, inputs: Any) -> list[Any]:
    if isinstance(inputs, dict):
        return [inputs[tensor.name] for tensor in model.inputs]
    return list(tf.nest.flatten(inputs))


def _finished(segmented: Any, model: Any, names: list[list[str]]) -> Any:
    segmented.__wrapped__ = model
    segmented.__name__ = segmented.__qualname__ = f"recomputed_{model.name}"
    segmented.segments = names
    return segmented
