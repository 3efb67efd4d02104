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


def belonging_to(
    result: Any, variables: Sequence[tf.Variable], evaluated: Sequence[Any] = ()
) -> Any:
    """Return the tensors of a product, whose gradient in the variables raises an error.

    `evaluated` is what was computed from the variables before the product. A tape that recorded it
    has recorded the product as well.
    """
    if not variables or (tf.executing_eagerly() and not is_recorded(evaluated)):
        return result
    tensors, handles = tf.nest.flatten(result), _handles(variables)
    with record.stop_recording():
        linked = _linked(tensors, handles)

    def backward(*upstream: tf.Tensor) -> list[Any]:
        # A gradient in the vector is a product as well, which belongs to the same point.
        again = belonging_to(list(upstream), variables, evaluated)
        return [*again, *(_Refused() for _ in handles)]

    def forward(*tangents: Any) -> list[tf.Tensor]:
        return belonging_to(_of_vector(tangents, len(tensors)), variables, evaluated)

    record.record_operation("Product", linked, [*tensors, *handles], backward, forward)
    return tf.nest.pack_sequence_as(result, linked)


def may_be_recorded() -> bool:
    """Return whether a tape is open."""
    return bool(record.could_possibly_record())


def is_recorded(evaluated: Sequence[Any]) -> bool:
    """Return whether a tape records a product, and has not recorded what it is computed from."""
    if not record.could_possibly_record():
        return False
    return not record.should_record_backprop([t for t in evaluated if t is not None])


def recorded_product(
    multiply: Callable[[Any], Any],
    vector: Any,
    variables: Sequence[tf.Variable],
    gradient: Callable[[Any, Any], Sequence[tf.Tensor]] | None,
) -> Any:
    """Multiply by a symmetric matrix, and record the product as a function of variables as well.

    `multiply` takes and returns vectors in one layout. `gradient` takes a vector and a cotangent in
    it, and returns the gradients in the variables. If it raises an error, these raise it when they
    are used; if it is None, they raise one as well.
    """
    handles = _handles(variables)
    with record.stop_recording():
        result = multiply(vector)
        linked = _linked(tf.nest.flatten(result), handles)

    def backward(*upstream: tf.Tensor) -> list[Any]:
        cotangent = tf.nest.pack_sequence_as(result, upstream)
        by_vector = recorded_product(multiply, cotangent, variables, gradient)
        by_variables: Sequence[Any] = [_Refused() for _ in handles]
        try:
            by_variables = gradient(vector, cotangent) if gradient else by_variables
        except HvpError as error:
            by_variables = [_Refused(error) for _ in handles]
        return [*tf.nest.flatten(by_vector), *by_variables]

    def forward(*tangents: Any) -> list[tf.Tensor]:
        own = _of_vector(tangents, len(tensors))
        tangent = tf.nest.pack_sequence_as(vector, own)
        return tf.nest.flatten(recorded_product(multiply, tangent, variables, gradient))

    tensors = tf.nest.flatten(vector)
    # By default, TensorFlow differentiates the gradient, which has to exist.
    record.record_operation(
        "HessianVectorProduct",
        linked,
        [*tensors, *handles],
        backward,
        None if gradient else forward,
    )
    return tf.nest.pack_sequence_as(result, linked)


def recorded_solution(
    solve: Callable[[tf.Tensor], tf.Tensor],
    multiply: Callable[[tf.Tensor], tf.Tensor],
    right: tf.Tensor,
) -> tf.Tensor:
    """Solve a symmetric system, and record the solution as a function of variables as well.

    `multiply` is a product with the matrix, as tapes around it see it: it says which variables.
    """
    with record.stop_recording():
        solution = tf.identity(solve(right))
    # Before it is needed: within a gradient that a forward accumulator asks for, no tape records.
    with tf.GradientTape(persistent=True) as tape:
        product = multiply(solution)
    variables = tape.watched_variables()

    def backward(upstream: tf.Tensor) -> list[Any]:
        adjoint = recorded_solution(solve, multiply, upstream)
        return [adjoint, *tape.gradient(product, variables, -adjoint)]

    record.record_operation("Solution", [solution], [right, *_handles(variables)], backward)
    return solution


def recorded_result(
    result: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    gradient: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]],
) -> list[tf.Tensor]:
    """Return tensors, recorded as a function of variables; `gradient` takes cotangents."""
    handles = _handles(variables)
    with record.stop_recording():
        linked = _linked(result, handles)
    record.record_operation("Gradient", linked, handles, lambda *upstream: list(gradient(upstream)))
    return linked


def _of_vector(tangents: Sequence[Any], count: int) -> list[Any]:
    """Return the first tangents; the others are those of variables, which have to be None."""
    if any(tangent is not None for tangent in tangents[count:]):
        return _Refused().values
    return list(tangents[:count])


def _handles(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    # Of a variable of a strategy, the copy of this process.
    copies = [getattr(variable, "values", (variable,))[0] for variable in variables]
    for variable in copies:
        variable.value()  # so that a tape which watches what is read watches this
    return [variable.handle for variable in copies]


def _linked(tensors: Sequence[tf.Tensor], handles: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors that a graph sees as functions of variables, too."""
    linked = tf.raw_ops.IdentityN(input=[*tensors, *handles, tf.constant(0, _MARK)])
    return list(linked[: len(tensors)])


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
            "this is the gradient of a product with respect to the variables of its operator, "
            "which is a third derivative of the loss",
            "a gradient with respect to the vector; an operator belongs to the point at which it "
            "was evaluated",
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
            "a gradient with respect to the vector; an operator belongs to the point at which it "
            "was evaluated",
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
