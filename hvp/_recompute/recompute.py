"""`recompute`: functions whose derivatives of every order recompute intermediate values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import RecomputeError
from hvp._keras.losses import layers_with_new_losses, preserved_losses
from hvp._keras.private import logits_of, mask_of, set_logits, set_mask
from hvp._keras.scope import KerasScope
from hvp._recompute.segment import Segment
from hvp._runtime.guard import refuse_forks


def recompute(f: Callable[..., Any]) -> Callable[..., Any]:
    """Let derivatives of a function recompute its intermediate values instead of keeping them.

    This is like `tf.recompute_grad`, except that the result can be differentiated any number of
    times: derivatives of every order are themselves recomputed.

    Parameters
    ----------
    f : callable
        A function, a `tf.function`, or a Keras layer or model. It takes and returns nests of
        tensors. It is traced again for each new value of an argument that is not a tensor or
        array. It may read variables, draw random numbers, and update state (moving averages,
        seeds).

    Returns
    -------
    callable
        A function that returns the same as `f`. Its derivatives of every order, by its arguments
        and by the variables and tensors it uses, equal those of `f` to rounding. Its attribute
        `__wrapped__` is `f`.

    Raises
    ------
    RecomputeError
        If `f` is not callable. When you call the result, if `f` returns something other than
        tensors, or has a state that cannot be replayed. When you differentiate it, if the Python
        code of `f` does not do the same as in the first trace.
    SecondDerivativeError
        When you differentiate the result twice or more, if TensorFlow lacks a derivative of an
        operation in `f`.

    Notes
    -----
    A tape keeps only the inputs of a call: the arguments, and the values of variables, which share
    the variables' memory. A call costs as much as a call of `f`. A first derivative costs one more
    evaluation of `f`. A Hessian-vector product costs one more evaluation of `f` and one of its
    gradient. If `f` calls other recomputed functions, these are recomputed in turn, so that nested
    calls need memory logarithmic in depth.

    `f` is traced for each new signature of its arguments (dtypes, shapes, other arguments), and
    once for each order of derivative. Its Python code does not run at other times. State changes
    only when you call the function, and derivatives use the random numbers and variables of that
    call. Draws of `tf.random.normal`, `uniform` and `truncated_normal` come from a seed that is
    drawn in their place, so the numbers differ from those without `recompute`. Draws of Keras
    layers and of `tf.random.stateless_*` are the same.

    `tf.saved_model.save` and `model.export` raise an error for a model that calls a recomputed
    function. Save the model without recomputation instead.

    With XLA (``jit_compile=True``) results are right, but XLA may keep values instead of
    recomputing them.

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
            f"the object to be recomputed is {type(f).__name__}, which cannot be called",
            "a function, a tf.function, or a Keras layer or model",
        )
    traced: dict[Any, _Traced] = {}

    @tf.autograph.experimental.do_not_convert  # f itself may be, when it is traced
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        refuse_forks()
        signature, tensors = _signature_of((args, kwargs))
        # Each replica has variables of its own, so a trace serves one call only.
        serves_once = signature.scope.passes or tf.distribute.has_strategy()
        function = None if serves_once else traced.get(signature.key)
        if function is None:
            function = _Traced(f, signature)
            if not (function.segment.depends_on_graph or serves_once):
                traced[signature.key] = function
        results = function(tensors)
        for leaf, is_unmasked in zip(tf.nest.flatten((args, kwargs)), function.unmasked):
            if is_unmasked:  # attention layers remove the masks of their inputs
                set_mask(leaf, None)
        return results

    functools.update_wrapper(recomputed, f, updated=())
    if not hasattr(f, "__name__"):
        recomputed.__name__ = recomputed.__qualname__ = name_of(f)
    return recomputed


def name_of(f: Any) -> str:
    """Return the name of a function for messages."""
    return str(getattr(f, "__name__", None) or getattr(f, "name", None) or type(f).__name__)


class _Signature:
    """The structure, types and shapes of the arguments of a call, without their values.

    The `specs` include those of Keras masks, and `scope` has the settings of Keras around the call.
    Calls with equal keys can share a trace.
    """

    def __init__(self, arguments: Any, leaves: list[_Leaf], tensors: list[tf.Tensor]) -> None:
        self._structure = tf.nest.map_structure(lambda _: 0, arguments)
        self._leaves = leaves
        self.specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        self.scope = KerasScope()
        self.key = (str(self._structure), self.scope.key, *(leaf.key for leaf in leaves))

    def arguments(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, Any]:
        """Return arguments of this signature that hold these tensors."""
        rest = iter(tensors)
        leaves = [leaf.assemble(rest) for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves)


def _signature_of(arguments: Any) -> tuple[_Signature, list[tf.Tensor]]:
    """Return the signature of arguments, and the tensors in them."""
    parts = [_leaf_of(value) for value in tf.nest.flatten(arguments)]
    tensors = [tensor for _, part in parts for tensor in part]
    return _Signature(arguments, [leaf for leaf, _ in parts], tensors), tensors


class _Traced:
    """A function traced for arguments of one signature."""

    def __init__(self, f: Callable[..., Any], signature: _Signature) -> None:
        self._structure: Any = None
        self._leaves: list[_Leaf] = []
        # For each argument, whether the function removed its Keras mask.
        self.unmasked: list[bool] = []

        def function(*tensors: tf.Tensor) -> list[tf.Tensor]:
            args, kwargs = signature.arguments(tensors)
            masks = [(leaf, mask_of(leaf)) for leaf in tf.nest.flatten((args, kwargs))]
            with preserved_losses(f), signature.scope.resumed():
                results = f(*args, **kwargs)
                refuse_losses(f)
            self.unmasked = [mask is not None and mask_of(leaf) is None for leaf, mask in masks]
            leaves = tf.nest.flatten(results)
            # None is allowed as one of several results, but not as the only one.
            any_result = any(leaf is not None for leaf in leaves)
            parts = [
                _leaf_of(None if leaf is None and any_result else _result(leaf, f))
                for leaf in leaves
            ]
            self._structure = tf.nest.map_structure(lambda _: 0, results)
            self._leaves = [leaf for leaf, _ in parts]
            return [tensor for _, part in parts for tensor in part]

        self.segment = Segment(function, signature.specs)

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        rest = iter(self.segment(*tensors))
        leaves = [leaf.assemble(rest) for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves)


@dataclass(frozen=True)
class _Leaf:
    """The type and shape of an argument or result.

    `spec` is None for an object that is not a tensor; `fixed` is then this object. Keras attaches a
    `mask`, and the `logits` of a softmax, to a tensor; these are their specs.
    """

    spec: Any
    fixed: Any = None
    mask: Any = None
    logits: Any = None

    @property
    def key(self) -> Any:
        """Equal for arguments that can share a trace."""
        if self.spec is not None:
            return self.spec, self.mask, self.logits
        # 0.0 and -0.0 are equal, but their reciprocals are not.
        return type(self.fixed), self.fixed, repr(self.fixed) if self.fixed == 0 else None

    def assemble(self, tensors: Iterator[tf.Tensor]) -> Any:
        """Build the argument or result out of the next tensors."""
        if self.spec is None:
            return self.fixed
        parts = [next(tensors) for _ in tf.nest.flatten(self.spec, expand_composites=True)]
        value = tf.nest.pack_sequence_as(self.spec, parts, expand_composites=True)
        if self.mask is not None:
            set_mask(value, next(tensors))
        if self.logits is not None:
            set_logits(value, next(tensors))
        return value


def _leaf_of(value: Any) -> tuple[_Leaf, list[tf.Tensor]]:
    """Return the description of an argument or result, and its tensors."""
    if type(value).__name__ == "KerasTensor":
        raise RecomputeError(
            "a recomputed function is called on a KerasTensor, to build a functional model",
            "tensors",
            "build the model without recomputation, and pass it to hvp.recompute_model",
        )
    if isinstance(value, (np.ndarray, np.generic, tf.Variable)) or _is_keras_variable(value):
        value = tf.convert_to_tensor(value)
    if not isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        if isinstance(value, tf.TensorArray) or not isinstance(value, Hashable):
            raise RecomputeError(
                f"an argument of a recomputed function is {type(value).__name__}",
                "nests of tensors and arrays, and other arguments that are hashable",
                "pass tensors, or a tuple",
            )
        return _Leaf(None, value), []
    spec = tf.type_spec_from_value(value)
    tensors = tf.nest.flatten(value, expand_composites=True)
    # Keras passes these from layer to layer, and to losses, as attributes of the tensor.
    attached = {"mask": mask_of(value), "logits": logits_of(value)}
    attached = {name: tensor for name, tensor in attached.items() if tensor is not None}
    specs = {name: tf.TensorSpec(t.shape, t.dtype) for name, t in attached.items()}
    return _Leaf(spec, **specs), [*tensors, *attached.values()]


def _is_keras_variable(value: Any) -> bool:
    return isinstance(getattr(value, "value", None), tf.Variable)


def _result(leaf: Any, f: Any) -> Any:
    """Convert variables to tensors, and refuse a result that is not a tensor."""
    if isinstance(leaf, tf.Variable) or _is_keras_variable(leaf):
        leaf = tf.convert_to_tensor(leaf)
    if not isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
        raise RecomputeError(
            f"the function {name_of(f)!r} returned {type(leaf).__name__}",
            "a tensor, or a nest of tensors",
            "return tensors only; .numpy() and float() disconnect them from the function's inputs",
        )
    return leaf


def refuse_losses(f: Any) -> None:
    """Refuse a layer that adds a loss when it is called: the loss would be lost with the trace."""
    for layer in layers_with_new_losses(f):
        raise RecomputeError(
            f"the layer {layer!r} adds a loss when it is called",
            "layers whose losses depend on their weights alone",
            "remove its activity regularizer or add_loss, and add that term to the loss yourself",
        )
