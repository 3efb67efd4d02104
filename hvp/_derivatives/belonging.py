"""Products belong to the point of an operator: what their gradient in the variables is.

To a tape, a product is a function of the vector alone. Its gradient in the variables, which is a
third derivative of the loss, would be None, as if it were zero. Products therefore pass through an
operation that also takes the variables' handles. Its gradient in these is that derivative where it
is known, and raises an error where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError, SecondDerivativeError
from hvp._graphs.private import gradient_of_type, record, replace_gradient_of_type

_KIND = "IdentityN"
# The type of a last input that tells these operations from others of their kind.
_MARK = tf.uint16


# Takes the cotangents of a product, and returns its gradients in the variables.
Gradient = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def belonging_to(
    result: Any,
    variables: Sequence[tf.Variable],
    evaluated: Sequence[Any] = (),
    recorded: Callable[[], Gradient] | None = None,
) -> Any:
    """Return the tensors of a product, with a gradient in the variables, or one that raises.

    `evaluated` is what was computed from the variables before the product. A tape that recorded it
    has recorded the product as well. `recorded` is called if a tape records the product here, and
    returns its gradient in the variables.
    """
    if tf.executing_eagerly():
        tensors = [tensor for tensor in evaluated if tensor is not None]
        if not record.could_possibly_record() or record.should_record_backprop(tensors):
            return result
    # Of a variable of a strategy, the copy of this process.
    copies = [getattr(variable, "values", (variable,))[0] for variable in variables]
    for variable in copies:
        variable.value()  # so that a tape which watches what is read watches this
    tensors = tf.nest.flatten(result)
    handles = [variable.handle for variable in copies]
    inputs = [*tensors, *handles, tf.constant(0, _MARK)]
    if recorded is None:
        linked = tf.raw_ops.IdentityN(input=inputs)
        return tf.nest.pack_sequence_as(result, linked[: len(tensors)])
    gradient = recorded()
    with record.stop_recording():
        linked = tf.raw_ops.IdentityN(input=inputs)[: len(tensors)]

    def backward(*upstream: tf.Tensor) -> list[Any]:
        try:
            return [*upstream, *gradient(upstream)]
        except HvpError as error:
            # As long as nobody uses it, there is no error: see `_Refused`.
            return [*upstream, *(_Refused(error) for _ in handles)]

    record.record_operation("HessianVectorProduct", linked, [*tensors, *handles], backward)
    return tf.nest.pack_sequence_as(result, linked)


class _Refused(tf.IndexedSlices):
    """A gradient that raises an error when it is used.

    TensorFlow asks for the gradients of all inputs that a tape watches, even if the caller of
    `tape.gradient` did not list them. Raising at once would forbid gradients in the vector.
    """

    def __init__(self, error: HvpError | None = None) -> None:
        self.error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__del__"):
            return object.__getattribute__(self, name)
        error = object.__getattribute__(self, "error")
        if error is not None:
            raise error
        raise SecondDerivativeError(
            "this is the gradient of a product in the variables of its operator, which would be a "
            "third derivative of the loss",
            "a gradient in the vector; an operator belongs to the point at which it was evaluated",
            "pass the product through tf.stop_gradient if it is a constant to you",
        )

    def _refuse(self, *arguments: Any) -> Any:
        return self.values

    __repr__ = __str__ = __array__ = __neg__ = __len__ = __bool__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _refuse


def _gradient(operation: Any, *upstream: Any) -> Sequence[Any]:
    dtypes = [tf.as_dtype(dtype) for dtype in operation.get_attr("T")]
    is_own = dtypes[-1] == _MARK
    handles = {i for i, dtype in enumerate(dtypes) if dtype == tf.resource} if is_own else set()
    if handles and isinstance(operation, tf.Operation):
        # The gradient of a whole function, which does not depend on what is asked for.
        raise SecondDerivativeError(
            "a tf.function that multiplies by an operator is differentiated, in its variables too, "
            "which would be a third derivative of the loss",
            "a gradient in the vector; an operator belongs to the point at which it was evaluated",
            "open the tape inside the function; or pass the product through tf.stop_gradient if it "
            "is a constant to you",
        )
    gradients = _original(operation, *upstream)
    return (
        [_Refused() if i in handles else g for i, g in enumerate(gradients)]
        if handles
        else gradients
    )


_, _original = gradient_of_type(_KIND)
replace_gradient_of_type(_KIND, _gradient)
