"""Products belong to the point of an operator: what their gradient in the variables is.

To a tape, a product is a function of the vector alone, unless the tape has recorded the evaluation
of the operator too. Its gradient in the variables, which is a third derivative of the loss, would
be None, as if it were zero. No tape therefore records how a product is computed, but an operation
that also takes the handles of all variables that the loss reads. Its gradient in these is that
derivative where it is known, and raises an error where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Union

import tensorflow as tf

from hvp._errors import HvpError, SecondDerivativeError
from hvp._graphs.private import gradient_of_type, may_record, record, replace_gradient_of_type
from hvp._vectors.strategies import local_copy

# What returns gradients in sources, from a vector, a cotangent and the places of the sources.
Gradient = Callable[[Any, Any, Sequence[int]], Sequence[tf.Tensor]]
# What returns tensors, or refuses to.
Check = Callable[[Sequence[tf.Tensor]], "list[tf.Tensor]"]
_KIND = "IdentityN"
# The type of a last input that tells these operations from others of their kind.
_MARK = tf.uint16


def may_be_recorded() -> bool:
    """Return whether a tape is open."""
    return bool(record.could_possibly_record())


def watched(sources: Sequence[Any]) -> tuple[list[tf.Tensor], list[int]]:
    """Return tensors, and the handles of variables, and the places of those that a tape watches."""
    own = [local_copy(source) for source in sources]
    for source in own:
        if getattr(source, "trainable", False):
            source.value()  # so that a tape which watches what is read watches this
    handles = [getattr(source, "handle", source) for source in own]
    return handles, [place for place, handle in enumerate(handles) if may_record([handle])]


def recorded_product(
    multiply: Callable[[Any], Any],
    vector: Any,
    sources: Sequence[Any],
    gradient: Gradient | None = None,
    adjoint: Callable[[Any], Any] | None = None,
    same_point: Callable[[], Check] = lambda: list,
) -> Any:
    """Multiply by a matrix, and record the product as a function of its `sources` as well.

    `multiply` takes vectors and returns products in one layout, and `adjoint` multiplies by the
    transpose; without it the matrix is symmetric. `gradient` takes a vector, a cotangent and the
    places of some of the sources, and returns the gradients in these. If it raises an error, they
    raise it when they are used; if it is None, they raise one as well. `same_point` is called after
    the product, and returns what refuses products of another point than that.
    """
    handles, recorded = watched(sources)
    with record.stop_recording():
        result = multiply(vector)
        linked = _linked(tf.nest.flatten(result), handles, recorded)
    transposed, same = adjoint or multiply, same_point()

    def backward(*upstream: tf.Tensor) -> list[Any]:
        same([])
        cotangent = tf.nest.pack_sequence_as(result, _dense(upstream, linked))
        swapped = gradient and (lambda u, v, which: gradient(v, u, which))
        again = recorded_product(transposed, cotangent, sources, swapped, multiply, lambda: same)
        own = same(tf.nest.flatten(again))
        return [*own, *_twice(_known(gradient, vector, cotangent, recorded))]

    def forward(*tangents: Any) -> list[tf.Tensor]:
        if any(tangent is not None for tangent in tangents[len(tensors) :]):
            return _Refused().values
        own = tf.nest.pack_sequence_as(vector, tangents[: len(tensors)])
        product = recorded_product(multiply, own, sources, gradient, adjoint, lambda: same)
        return tf.nest.flatten(product)

    tensors = tf.nest.flatten(vector)
    # By default, TensorFlow differentiates the gradient, which has to exist.
    record.record_operation(
        "HessianVectorProduct",
        linked,
        [*tensors, *2 * [handles[place] for place in recorded]],
        backward,
        None if gradient else forward,
    )
    return tf.nest.pack_sequence_as(result, linked)


def recorded_solution(
    solve: Callable[[tf.Tensor], tf.Tensor],
    right: tf.Tensor,
    sources: Sequence[Any],
    gradient: Gradient | None,
    same_point: Check,
) -> tf.Tensor:
    """Solve a symmetric system, and record the solution as a function of `sources` as well.

    `gradient` returns gradients of products with the matrix, as for `recorded_product`, and
    `same_point` refuses those of another point than that of the matrix.
    """
    handles, recorded = watched(sources)
    own = 2 * [handles[place] for place in recorded]
    with record.stop_recording():
        solution = tf.identity(solve(right))

    def backward(upstream: tf.Tensor) -> list[Any]:
        adjoint = recorded_solution(solve, upstream, sources, gradient, same_point)
        by_right = same_point([adjoint])
        return [*by_right, *_twice(_known(gradient, solution, -adjoint, recorded))]

    # Tapes have to know the solution before accumulators ask for its gradient.
    record.record_operation_backprop_only("Solution", [solution], [right, *own], backward)
    record.record_operation_forwardprop_only("Solution", [solution], [right, *own], backward, None)
    return solution


def recorded_result(
    result: Sequence[tf.Tensor],
    sources: Sequence[Any],
    gradient: Callable[[Sequence[tf.Tensor], Sequence[int]], Sequence[Any]] | None = None,
    same_point: Check = list,
) -> list[tf.Tensor]:
    """Return tensors, recorded as a function of `sources`.

    `gradient` takes cotangents and the places of some sources, and returns the gradients in these.
    What is None raises an error when it is used; so do all of them if `gradient` is None.
    """
    handles, recorded = watched(sources)
    with record.stop_recording():
        linked = _linked(result, handles, recorded)

    def backward(*upstream: tf.Tensor) -> list[Any]:
        try:
            known = gradient and gradient(_dense(upstream, linked), recorded)
        except HvpError as error:
            return _twice([_Refused(error) for _ in recorded])
        same_point([])
        slopes = known or [None] * len(recorded)
        return _twice([_Refused() if slope is None else slope for slope in slopes])

    record.record_operation("Gradient", linked, 2 * [handles[i] for i in recorded], backward)
    return linked


def _dense(cotangents: Sequence[Any], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return cotangents, with zeros for those that an accumulator does not know."""
    pairs = zip(cotangents, tensors)
    return [tf.zeros_like(tensor) if u is None else u for u, tensor in pairs]


def _known(
    gradient: Gradient | None, vector: Any, cotangent: Any, places: Sequence[int]
) -> Sequence[Any]:
    """Return gradients in sources, which raise an error when they are used if they are unknown."""
    try:
        return gradient(vector, cotangent, places) if gradient else [_Refused() for _ in places]
    except HvpError as error:
        return [_Refused(error) for _ in places]


def _twice(gradients: Sequence[Any]) -> list[Any]:
    """Return a tensor for each gradient that is refused, for the same source, and the gradients.

    TensorFlow adds up the gradients of a source in C++, through which no error can pass. It looks
    at the size of the first of many, and where one is a tensor it calls `tf.add_n`.
    """
    zeros = [tf.zeros([]) if type(gradient) is _Refused else None for gradient in gradients]
    return [*zeros, *gradients]


def _linked(
    tensors: Sequence[tf.Tensor], handles: Sequence[tf.Tensor], recorded: Sequence[int]
) -> list[tf.Tensor]:
    """Return tensors that a graph sees as functions of variables, and of what is recorded."""
    # Other tensors, such as the data, would live as long as the graph.
    own = [h for i, h in enumerate(handles) if h.dtype == tf.resource or i in recorded]
    linked = tf.raw_ops.IdentityN(input=[*tensors, *own, tf.constant(0, _MARK)])
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
            "this is the gradient of an operator's product with respect to variables, which is a "
            "third derivative of the loss",
            "a gradient with respect to the vector; or the product of a HessianOperator or "
            "JacobianOperator as a whole with one vector, without batch_size, memory_limit, weight "
            "and data sets, whose loss draws no random numbers that cannot be drawn again (inside "
            "a tf.function: none at all)",
            "leave these out if the data fit into memory; or pass the product through "
            "tf.stop_gradient if it is a constant to you",
        )

    def _refuse(self, *arguments: Any) -> Any:
        return self.values

    __repr__ = __str__ = __array__ = __neg__ = __len__ = __bool__ = _refuse  # type: ignore[assignment]
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __abs__ = _refuse
    __getitem__ = __iter__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


@tf.experimental.dispatch_for_api(tf.add_n, {"inputs": list[Union[tf.Tensor, _Refused]]})
def _sum(inputs: Sequence[Any], name: str | None = None) -> Any:
    """Return what is refused, of several gradients of a source; see `_twice`."""
    return next(part for part in inputs if type(part) is _Refused)


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
