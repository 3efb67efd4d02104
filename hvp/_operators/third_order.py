"""The third derivative of a loss, multiplied by two vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import NO_DATA, checked_loss, convert_batch
from hvp._derivatives.gradient import check_scalar
from hvp._runtime.guard import refuse_forks
from hvp._taylor.products import gradient_of_products
from hvp._vectors.arrays import check_array, check_product
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables


def third_order_product(
    loss: Callable[..., Any], variables: Any, u: Any, v: Any, data: Any = None
) -> Any:
    """Multiply the third derivative of a loss by two vectors.

    The result is the gradient of `u @ H @ v` in the variables, where `H` is the Hessian and `u` and
    `v` are constants. It says how the curvature changes along the variables: geodesic acceleration
    and corrections for skewness need it. It costs a few gradients; each call traces the loss anew.

    Parameters
    ----------
    loss, variables, data
        As for `HessianOperator`, with `data` of one batch.
    u, v : nest of tensors, tf.Tensor or ndarray
        Vectors shaped like the variables, or flat ones of shape `(n,)`.

    Returns
    -------
    nest of tf.Tensor, tf.Tensor or ndarray
        The product, in the form of `u`.

    Raises
    ------
    InvalidVectorError
        If a vector has the wrong shape or type.
    NonFiniteError
        If `u` is an array, and the product is not finite.
    SecondDerivativeError
        If there is a loop or branch on tensors between the variables and the loss, or an operation
        without derivatives.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> loss = lambda: tf.reduce_sum(w**4)
    >>> hvp.third_order_product(loss, w, tf.ones(3), tf.ones(3)).numpy()
    array([24., 48., 72.], dtype=float32)
    """
    refuse_forks()
    nest = collect_variables(variables)
    space = Space.of_variables(nest)
    directions = [_parts(vector, space, name) for vector, name in ((u, "u"), (v, "v"))]
    loss = checked_loss(loss)
    elements = NO_DATA if data is None else convert_batch(data, "data")

    values = [variable.read_value() for variable in nest.variables]
    gradient = gradient_of_products(lambda: check_scalar(elements.call(loss)), nest)
    products = gradient(directions, [None], values)
    if not space.is_flat(u):
        return space.nest_of_parts(products)
    flat = space.join(products)
    return check_product(flat.numpy()) if isinstance(u, np.ndarray) else flat


def _parts(vector: Any, space: Space, name: str) -> list[tf.Tensor]:
    if isinstance(vector, np.ndarray) and vector.shape == (space.size,):
        check_array(vector, space.size, space.dtype.as_numpy_dtype, ndims=(1,), name=name)
    if space.is_flat(vector):
        return space.split(tf.cast(tf.convert_to_tensor(vector), space.dtype))
    return [tf.convert_to_tensor(part) for part in space.parts_of_nest(vector, name)]
