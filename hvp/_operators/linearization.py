"""The value of any function, and its derivative as a linear map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvp._engines.options import OnStale, declared
from hvp._operators.jacobian import OPTIONS, JacobianOperator


class Linearization(JacobianOperator):
    """The derivative of a function at one point: a `JacobianOperator` made by `hvp.linearize`.

    It uses some memory, the *residuals*, so that products need not evaluate the function again. It
    is a context manager, which releases the residuals when it is left.
    """


@declared(OPTIONS)
def linearize(
    f: Callable[..., Any],
    variables: Any,
    data: Any = None,
    *,
    on_stale: OnStale = "ignore",
    **options: Any,
) -> Linearization:
    """Evaluate a function, and keep its derivative as a linear map.

    The function is evaluated once, however many vectors its derivative is applied to afterwards.
    This uses some memory to make each product cheaper.

    Parameters
    ----------
    f : callable
        A function that reads the variables and returns a nest of floating-point tensors. It takes
        no arguments, or the elements of `data`.
    variables : nest
        `tf.Variable`, `keras.Variable`, modules, Keras layers or models; the latter stand for their
        trainable variables.
    data : tuple or dict of arrays, or iterable of such, optional
        The examples, as for `JacobianOperator`.
    on_stale : {"ignore", "raise", "refresh"}, optional
        What to do when the result is used after a variable changed that the function reads. By
        default it stays the derivative at the old values; for gradients of products in variables
        inside a `tf.function`, pass ``"raise"`` or ``"refresh"``.
    **options
        Further arguments of `JacobianOperator`.

    Returns
    -------
    Linearization
        The derivative at the values the variables have now: a `JacobianOperator`, with `value`,
        `jvp` and `vjp` for nests of tensors.

    Raises
    ------
    HvpError
        As `JacobianOperator`.

    Notes
    -----
    The function is traced once, and its graph runs once. With the tape engine its Python code runs
    a second time instead. State that it updates (moving averages, seeds) is restored.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0])
    >>> with hvp.linearize(lambda: w**3, w) as derivative:
    ...     derivative.value.numpy(), derivative.jvp(tf.constant([1.0, 1.0])).numpy()
    (array([1., 8.], dtype=float32), array([ 3., 12.], dtype=float32))
    """
    return Linearization(f, variables, data, on_stale=on_stale, **options)
