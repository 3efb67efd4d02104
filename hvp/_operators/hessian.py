"""The Hessian of a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.data_sets import hessian_rule
from hvp._derivatives.belonging import Gradient, may_be_recorded, recorded_result
from hvp._engines.options import Options, declared
from hvp._keras.from_keras import FromKeras
from hvp._operators.damping import check_damping
from hvp._operators.matrix import evaluated
from hvp._operators.symmetric import SymmetricOperator
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.arrays import check_array
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables


@declared()
class HessianOperator(FromKeras, SymmetricOperator):
    """The Hessian of a loss, as a scipy `LinearOperator`.

    The gradient of the loss is evaluated once, at the values the variables have now, and the
    intermediate results that its derivative needs are kept as *residuals*. Every product `H @ v`
    reuses them: `H v` is the derivative of `gradient . v` (Pearlmutter 1994 [1]_).

    Parameters
    ----------
    loss : callable
        A function that returns a real scalar tensor; it may be a `tf.function`. Without `data` it
        takes no arguments. With `data` it takes the elements of a batch and returns the mean over
        its examples. A dict of such functions is the sum of their losses, each over a data set of
        its own: `data` is then a dict with the same keys.
    variables : nest
        The variables that the second derivatives are taken with respect to: any nest of
        `tf.Variable` and `keras.Variable`. A `tf.Module`, Keras layer or model stands for its
        trainable variables. Variables in float16 and bfloat16 give a float32 operator.
    data : tuple or dict of arrays, or iterable of such, optional
        The examples. Elements of a tuple are passed to the loss as positional arguments, entries of
        a dict as keyword arguments. An iterable provides batches: a `tf.data.Dataset`, a Keras
        `PyDataset`, a list, or any object that yields the same batches each time it is iterated
        over. The operator is the Hessian of the mean over all examples, regardless of batching,
        for which the loss must return the mean over the batch that it is given.
    damping : float, optional
        Add `damping * v` to every product.
    {options}

    Attributes
    ----------
    shape : tuple of int
        `(n, n)`, where `n` is the number of entries of all variables.
    dtype : numpy.dtype
        The widest type among the variables, at least float32.

    Raises
    ------
    InvalidLossError
        If the loss is not a function that returns a real scalar tensor; or is a sum over examples
        although batches are averaged or `reduction` is ``"sum"``.
    InvalidVariablesError
        If `variables` contains anything else, or the loss depends on none of them.
    InvalidDataError
        If `data` is empty, the first axes of its elements differ, or the loss takes other
        arguments.
    NonFiniteError
        If the loss or its gradient is not finite.
    SecondDerivativeError
        If TensorFlow has no second derivative of an operation in the loss.
    DeviceError
        If none of the devices can be reached, or another process of a strategy fails.
    HvpError
        If another argument is invalid, all batches have weight zero, or batches would have to be
        evaluated again although the loss draws random numbers that cannot be repeated.
    TooLargeError
        If a single example does not fit in `memory_limit`.
    RecomputeError
        If the model cannot be divided as `recompute` asks, or the loss does not call it.

    Notes
    -----
    The constructor traces the loss once, together with its gradient and product, to learn which
    variables it reads and whether its second derivatives exist. It then evaluates the gradient
    once. With the graph engine the Python code of the loss runs for the trace only: everything the
    loss reads besides variables keeps the value it had then, even after `refresh`. Variables that
    the loss updates are restored afterwards. Each use checks whether the variables that the loss
    reads have changed.

    The operator is a context manager, which releases the residuals when it is left.

    References
    ----------
    .. [1] B. A. Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1),
       147-160, 1994. https://doi.org/10.1162/neco.1994.6.1.147

    Examples
    --------
    The Hessian of `sum(w**4) / 12` is diagonal, with entries `w**2`:

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> H @ np.ones(3)
    array([1., 4., 9.], dtype=float32)
    >>> H.stats.gradient_evaluations, H.stats.products
    (1, 1)

    You can pass it to any of scipy's solvers:

    >>> from scipy.sparse.linalg import cg
    >>> x, info = cg(H, H.gradient)
    >>> np.allclose(x, H.gradient / [1, 4, 9], rtol=1e-4), info
    (True, 0)
    """

    @outside_strategies
    def __init__(
        self,
        loss: Callable[..., Any],
        variables: Any,
        data: Any = None,
        *,
        damping: float = 0.0,
        **options: Any,
    ) -> None:
        damping = check_damping(damping)
        checked = Options.of(type(self).__name__, options)
        matrix = evaluated(hessian_rule(loss), variables, data, checked)
        super().__init__(matrix.damped(damping))

    def _gradient_parts(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        if not may_be_recorded():
            return parts
        snapshot, twin = self._snapshot, self.damped(-self.damping)
        slopes = snapshot.slopes()

        def gradient(upstream: Sequence[tf.Tensor], places: Sequence[int]) -> list[Any]:
            others = [place for place in places if place >= len(parts)]
            known = dict(enumerate(twin._multiplied(list(upstream))))
            if others and slopes is not None:
                known.update(zip(others, slopes([upstream], [None], others)))
            dtypes = [source.dtype for source in snapshot.sources]
            return [tf.cast(known[i], dtypes[i]) if i in known else None for i in places]

        return recorded_result(parts, snapshot.sources, gradient, snapshot.same_point())

    def _gradient_of_products(self, adjoint: bool) -> Gradient | None:
        slopes, space = self._snapshot.slopes(), self.linear_map.domain
        if slopes is None:
            return None

        def gradient(vector: Any, cotangent: Any, places: Sequence[int]) -> list[tf.Tensor]:
            return slopes([space.parts_of(v) for v in (vector, cotangent)], [None], places)

        return gradient


@outside_strategies
@Uninterrupted()
def hessian_vector_product(
    loss: Callable[..., Any], variables: Any, v: Any, data: Any = None
) -> Any:
    """Multiply the Hessian of a loss by one vector.

    Each call traces the loss and evaluates its gradient anew. For more than one vector, create a
    `HessianOperator`, which does both only once.

    Parameters
    ----------
    loss, variables, data
        As for `HessianOperator`.
    v : nest of tensors, tf.Tensor or ndarray
        A vector shaped like the variables, or a flat one of shape `(n,)`.

    Returns
    -------
    nest of tf.Tensor, tf.Tensor or ndarray
        The product, in the form of `v`.

    Raises
    ------
    HvpError
        As `HessianOperator` and its `product`.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> loss = lambda: tf.reduce_sum(w**4) / 12
    >>> hvp.hessian_vector_product(loss, w, tf.ones(3)).numpy()
    array([1., 4., 9.], dtype=float32)
    """
    space = Space.of_variables(collect_variables(variables))
    is_array = isinstance(v, np.ndarray) and v.shape == (space.size,)
    if is_array:
        check_array(v, space.size, space.dtype.as_numpy_dtype, ndims=(1,))
    elif not space.is_flat(v):
        space.parts_of_nest(v)
    operator = HessianOperator(loss, variables, data)
    # A tape may ask for gradients later.
    with contextlib.nullcontext() if may_be_recorded() else operator:
        if is_array:
            return operator.matvec(v)
        return operator.product(v)
