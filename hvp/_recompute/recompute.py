"""`recompute`: a function whose intermediate values are computed again, in every derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import RecomputeError
from hvp._keras.losses import kept_losses, layers_with_new_losses
from hvp._keras.private import mask_of, set_mask
from hvp._keras.scope import KerasScope
from hvp._recompute.segment import Segment
from hvp._runtime.guard import refuse_forks


def recompute(f: Callable[..., Any]) -> Callable[..., Any]:
    """Let derivatives of a function compute its intermediate values again, not keep them.

    Like `tf.recompute_grad`, but differentiable as often as wanted: the derivative of each order is
    itself recomputed.

    Parameters
    ----------
    f : callable
        A function, a `tf.function`, or a Keras layer or model. Takes and returns nests of tensors;
        arguments that are no tensors or arrays are fixed: each new one means another trace. May
        read variables, draw random numbers, and update state (moving averages, seeds).

    Returns
    -------
    callable
        Gives what `f` gives. Derivatives of every order by its arguments and by the variables and
        tensors it uses equal those of `f` to rounding. Its attribute `__wrapped__` is `f`.

    Raises
    ------
    RecomputeError
        If `f` cannot be called; when it is called, if it returns something else than tensors, or
        has a state that cannot be replayed; when it is differentiated, if its Python code then does
        something else than before.
    SecondDerivativeError
        When differentiated twice or more, if TensorFlow lacks a derivative of an operation in `f`.

    Notes
    -----
    A tape keeps the inputs of a call: arguments, and the values of variables, which share their
    memory. One call costs what `f` costs; a first derivative one more evaluation of `f`; a product
    with the Hessian, one more of `f` and one of its gradient besides. Calls inside `f` to other
    recomputed functions are recomputed within: nesting makes memory logarithmic in depth.

    `f` is traced for each new signature of its arguments (dtypes, shapes, fixed arguments), and
    once more for each order of derivative; its Python code does not run at other times. State
    changes once, when it is called: derivatives see the random numbers and variables of that call.
    Draws of `tf.random.normal`, `uniform` and `truncated_normal` come from a seed drawn in their
    place, so that they are other numbers than without `recompute`; those of Keras layers and of
    `tf.random.stateless_*` are the same.

    `tf.saved_model.save` and `model.export` raise where a recomputed function is in what they
    save; save the model without.

    Inside XLA (``jit_compile=True``) results are right, but XLA may keep what would be recomputed.

    References
    ----------
    A. Griewank and A. Walther, "Algorithm 799: revolve: an implementation of checkpointing for the
    reverse or adjoint mode of computational differentiation", ACM Transactions on Mathematical
    Software 26(1), 19-45, 2000. https://doi.org/10.1145/347837.347846

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0])
    >>> cube = hvp.recompute(lambda x: (w * x) ** 3)
    >>> with tf.GradientTape() as outer:
    ...     with tf.GradientTape() as inner:
    ...         y = tf.reduce_sum(cube(tf.constant([1.0, 1.0])))
    ...     gradient = inner.gradient(y, w)
    >>> gradient.numpy(), outer.gradient(gradient, w).numpy()
    (array([ 3., 12.], dtype=float32), array([ 6., 12.], dtype=float32))
    """
    if not callable(f):
        raise RecomputeError(
            f"what is to be recomputed is {type(f).__name__}, which cannot be called",
            "a function, a tf.function, or a Keras layer or model",
        )
    traced: dict[Any, _Traced] = {}

    @tf.autograph.experimental.do_not_convert  # f itself is, if need be, when it is traced
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        refuse_forks()
        signature, tensors = _signature_of((args, kwargs))
        # Replicas have other variables each.
        passes = signature.scope.passes or tf.distribute.has_strategy()
        found = None if passes else traced.get(signature.key)
        if found is None:
            found = _Traced(f, signature)
            if not (found.segment.depends_on_graph or passes):
                traced[signature.key] = found
        made = found(tensors)
        for leaf, there in zip(tf.nest.flatten((args, kwargs)), found.unmasked):
            if there:  # as attention layers do to their inputs
                set_mask(leaf, None)
        return made

    functools.update_wrapper(recomputed, f, updated=())
    if not hasattr(f, "__name__"):
        recomputed.__name__ = recomputed.__qualname__ = name_of(f)
    return recomputed


def name_of(f: Any) -> str:
    """Return what to call a function in messages."""
    return str(getattr(f, "__name__", None) or getattr(f, "name", None) or type(f).__name__)


class _Signature:
    """What the arguments of a call are, without the values of their tensors.

    Attributes
    ----------
    specs : list of tf.TensorSpec
        Of the tensors in the arguments, and of their Keras masks.
    scope : KerasScope
        What Keras layers around the call tell it.
    key : hashable
        Equal for calls that one trace can serve.
    """

    def __init__(self, arguments: Any, leaves: list[_Leaf], tensors: list[tf.Tensor]) -> None:
        self._structure = tf.nest.map_structure(lambda _: 0, arguments)
        self._leaves = leaves
        self.specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        self.scope = KerasScope()
        self.key = (str(self._structure), self.scope.key, *(leaf.key for leaf in leaves))

    def arguments(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, Any]:
        """Make arguments of other tensors."""
        rest = iter(tensors)
        leaves = [leaf.put_together(rest) for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _signature_of(arguments: Any) -> tuple[_Signature, list[tf.Tensor]]:
    """Return what arguments are, and the tensors in them."""
    parts = [_take_signature_of(value) for value in tf.nest.flatten(arguments)]
    tensors = [tensor for _, part in parts for tensor in part]
    return _Signature(arguments, [leaf for leaf, _ in parts], tensors), tensors


class _Traced:
    """A function traced for arguments of one kind."""

    def __init__(self, f: Callable[..., Any], signature: _Signature) -> None:
        self._structure: Any = None
        self._leaves: list[_Leaf] = []
        # Which arguments had a Keras mask that the function took away.
        self.unmasked: list[bool] = []

        def function(*tensors: tf.Tensor) -> list[tf.Tensor]:
            args, kwargs = signature.arguments(tensors)
            given = [(leaf, mask_of(leaf)) for leaf in tf.nest.flatten((args, kwargs))]
            with kept_losses(f), signature.scope.resumed():
                made = f(*args, **kwargs)
                refuse_losses(f)
            self.unmasked = [mask is not None and mask_of(leaf) is None for leaf, mask in given]
            results = tf.nest.flatten(made)
            some = any(leaf is not None for leaf in results)
            parts = [
                _take_signature_of(None if leaf is None and some else _result(leaf, f))
                for leaf in results
            ]
            self._structure = tf.nest.map_structure(lambda _: 0, made)
            self._leaves = [leaf for leaf, _ in parts]
            return [tensor for _, part in parts for tensor in part]

        self.segment = Segment(function, signature.specs)

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        rest = iter(self.segment(*tensors))
        leaves = [leaf.put_together(rest) for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves)


@dataclass(frozen=True)
class _Leaf:
    """What an argument or result is, without the values of its tensors.

    Attributes
    ----------
    spec : tf.TypeSpec or None
        Of tensors, ragged and sparse tensors; None for anything else.
    fixed : object
        Anything else.
    mask : tf.TensorSpec or None
        Of the mask that Keras has put on a tensor.
    """

    spec: Any
    fixed: Any = None
    mask: Any = None

    @property
    def key(self) -> Any:
        """Equal where one trace serves."""
        if self.spec is not None:
            return self.spec, self.mask
        return type(self.fixed), self.fixed, repr(self.fixed) if self.fixed == 0 else None

    def put_together(self, tensors: Iterator[tf.Tensor]) -> Any:
        """Make the argument or result, of the next tensors."""
        if self.spec is None:
            return self.fixed
        parts = [next(tensors) for _ in tf.nest.flatten(self.spec, expand_composites=True)]
        value = tf.nest.pack_sequence_as(self.spec, parts, expand_composites=True)
        if self.mask is not None:
            set_mask(value, next(tensors))
        return value


def _take_signature_of(value: Any) -> tuple[_Leaf, list[tf.Tensor]]:
    """Tell what an argument or result is, and its tensors."""
    if type(value).__name__ == "KerasTensor":
        raise RecomputeError(
            "a recomputed function is called to build a Keras functional model",
            "tensors",
            "build the model without, and pass it to hvp.recompute_model",
        )
    if isinstance(value, (np.ndarray, np.generic, tf.Variable)) or _is_keras_variable(value):
        value = tf.convert_to_tensor(value)
    if not isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        if isinstance(value, tf.TensorArray) or not isinstance(value, Hashable):
            raise RecomputeError(
                f"an argument of a recomputed function is {type(value).__name__}",
                "nests of tensors and arrays, and other arguments that can be hashed",
                "pass tensors, or a tuple",
            )
        return _Leaf(None, value), []
    # Keras hands masks on from layer to layer as an attribute.
    mask = mask_of(value)
    spec = tf.type_spec_from_value(value)
    tensors = tf.nest.flatten(value, expand_composites=True)
    if mask is None:
        return _Leaf(spec), tensors
    return _Leaf(spec, mask=tf.TensorSpec(mask.shape, mask.dtype)), [*tensors, mask]


def _is_keras_variable(value: Any) -> bool:
    return isinstance(getattr(value, "value", None), tf.Variable)


def _result(leaf: Any, f: Any) -> Any:
    """Refuse a result that is no tensor."""
    if isinstance(leaf, tf.Variable) or _is_keras_variable(leaf):
        leaf = tf.convert_to_tensor(leaf)
    if not isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        raise RecomputeError(
            f"the function {name_of(f)!r} returned {type(leaf).__name__}",
            "a tensor, or a nest of tensors",
            "return tensors only; .numpy() and float() cut them off from what they are made of",
        )
    return leaf


def refuse_losses(f: Any) -> None:
    """Refuse a layer that notes a loss when it is called, which would be noted in the trace."""
    for layer in layers_with_new_losses(f):
        raise RecomputeError(
            f"the layer {layer!r} adds a loss when it is called",
            "layers whose losses depend on their weights only",
            "leave out its activity regularizer or add_loss, and add that term to the loss itself",
        )
