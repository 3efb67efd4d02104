"""`root` and `fixed_point`: solutions of equations as functions of what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError
from hvp._implicit.argmin import sources_of
from hvp._implicit.equation import Tensors
from hvp._implicit.unknowns import TapedEquation, Unknowns, check_search
from hvp._runtime.interrupts import Uninterrupted


@tf.autograph.experimental.do_not_convert
@Uninterrupted()
def root(
    function: Callable[..., Any],
    inner_variables: Any,
    outer_variables: Any,
    *,
    solver: Callable[..., Any] | None = None,
    rtol: float | None = None,
    maxiter: int | None = None,
) -> Any:
    """Solve an equation, and return the solution as a function of what the equation depends on.

    For a tape around the call the result has derivatives with respect to the outer variables, of
    any order, by the implicit function theorem, as that of `argmin`.

    Parameters
    ----------
    function : callable
        Returns what is to become zero, in the structure and shapes of the inner variables. With
        variables it takes no arguments and reads them; with tensors it takes these.
    inner_variables : nest of variables, or of tensors or arrays
        What to solve for. Variables are left at the solution; tensors are where the search begins.
    outer_variables : nest of variables or tensors
        What else the function reads, and derivatives are taken in. The derivative in anything else
        is taken to be zero.
    solver : callable, optional
        How to find the solution, if not by Newton's method: as for `argmin`.
    rtol : float, optional
        Tolerance of the last step of Newton's method, relative to the solution, and of the linear
        system. The default is `2/3` of the digits of the type.
    maxiter : int, optional
        Upper bound on the iterations for the linear system. The default is ten for each unknown,
        and 1000 at most.

    Returns
    -------
    nest of tf.Tensor
        The solution, in the structure of `inner_variables`.

    Warns
    -----
    ConvergenceWarning
        If the solution, or that of the linear system, is less accurate than requested. In a graph
        it is NaN then.

    Raises
    ------
    StaleOperatorError
        If variables have changed before a gradient is taken.
    HvpError
        If the function returns other shapes, or an argument is invalid.

    Notes
    -----
    Linear systems with the Jacobian, or its transpose, are solved by conjugate gradients for the
    normal equations. An iteration takes a few evaluations of the function. All of it runs in eager
    code, inside a `tf.function`, and compiled by XLA.

    Examples
    --------
    The square root as a root, and its derivative.

    >>> import tensorflow as tf
    >>> import hvp
    >>> t = tf.Variable(9.0)
    >>> with tf.GradientTape() as tape:
    ...     w = hvp.root(lambda w: w**2 - t, tf.constant(1.0), t)
    >>> round(float(w), 5), round(float(tape.gradient(w, t)), 5)
    (3.0, 0.16667)
    """
    return _root(function, inner_variables, outer_variables, solver, rtol, maxiter, False)


@tf.autograph.experimental.do_not_convert
@Uninterrupted()
def fixed_point(
    function: Callable[..., Any],
    inner_variables: Any,
    outer_variables: Any,
    *,
    solver: Callable[..., Any] | None = None,
    rtol: float | None = None,
    maxiter: int | None = None,
) -> Any:
    """Find where a function returns what it is passed; the result can be differentiated.

    It is the `root` of the difference: the layer of a deep equilibrium model [Bai]_, for example.

    Parameters
    ----------
    function : callable
        Returns its next iterate, in the structure and shapes of the inner variables.
    inner_variables, outer_variables, solver, rtol, maxiter
        As for `root`.

    Returns
    -------
    nest of tf.Tensor
        The fixed point, in the structure of `inner_variables`.

    References
    ----------
    .. [Bai] S. Bai, J. Z. Kolter, V. Koltun, "Deep equilibrium models", NeurIPS 2019.
       https://arxiv.org/abs/1909.01377

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> t = tf.Variable(2.0)
    >>> with tf.GradientTape() as tape:
    ...     w = hvp.fixed_point(lambda w: (w + t / w) / 2, tf.constant(1.0), t)
    >>> round(float(w), 5), round(float(tape.gradient(w, t)), 5)
    (1.41421, 0.35355)
    """
    return _root(function, inner_variables, outer_variables, solver, rtol, maxiter, True)


def _root(
    function: Callable[..., Any],
    inner: Any,
    outer: Any,
    solver: Callable[..., Any] | None,
    rtol: float | None,
    maxiter: int | None,
    is_fixed_point: bool,
) -> Any:
    if not callable(function):
        raise HvpError(f"the equation is {type(function).__name__}", "a function")
    check_search(solver, rtol, maxiter)
    unknowns = Unknowns(inner, "the inner variables")

    def force(parts: Sequence[Any]) -> Tensors:
        results = tf.nest.flatten(unknowns.called(function, parts))
        if any(result is None for result in results):
            raise HvpError("the function returns None", "what is to become zero")
        values = [tf.convert_to_tensor(result) for result in results]
        shapes = [tuple(value.shape) for value in values]
        if len(shapes) != len(parts) or not all(
            value.shape.is_compatible_with(part.shape) for value, part in zip(values, parts)
        ):
            raise HvpError(
                f"the function returns tensors of shapes {shapes}",
                f"those of the inner variables, {[tuple(part.shape) for part in parts]}",
            )
        cast = [tf.cast(value, unknowns.dtype) for value in values]
        return [part - value for part, value in zip(parts, cast)] if is_fixed_point else cast

    equation = TapedEquation(
        unknowns, sources_of(outer, unknowns), force, None, rtol=rtol, damping=0.0, maxiter=maxiter
    )
    return equation.solution(solver)
