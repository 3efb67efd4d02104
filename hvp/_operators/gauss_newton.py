"""The Gauss-Newton matrix of a model and a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvp._engines.options import Options, declared
from hvp._keras.compiled_loss import CompiledModel
from hvp._keras.from_keras import FromKeras
from hvp._operators.curvature import gauss_newton_rule
from hvp._operators.damping import check_damping
from hvp._operators.matrix import evaluated
from hvp._operators.symmetric import SymmetricOperator
from hvp._runtime.arguments import check_flag
from hvp._runtime.strategies import outside_strategies


@declared()
class GaussNewtonOperator(FromKeras, SymmetricOperator):
    """The generalized Gauss-Newton matrix of a model and a loss, as a scipy `LinearOperator`.

    It is the matrix `J^T B J`, where `J` is the Jacobian of the model's predictions with respect to
    the variables and `B` the Hessian of the loss with respect to the predictions: the Hessian of
    the loss without the terms that contain second derivatives of the model (Schraudolph 2002
    [Sch]_). It is positive semi-definite if the loss is convex in the predictions.

    Parameters
    ----------
    model : callable
        Returns the predictions, a tensor or a nest of floating-point tensors. It is called with the
        first element of `data`, or with several arguments if that is a tuple. If `data` is None, it
        takes no arguments.
    output_loss : callable
        Takes the predictions and the other elements of `data`; returns the mean over the examples,
        a real scalar tensor. Dicts of models and of output losses, with a dict of data sets, stand
        for the sum of the losses.
    variables : nest
        The variables that `J` is taken with respect to, as for `HessianOperator`.
    data : tuple of arrays, or iterable of such, optional
        The examples, such as ``(x, y)``, as for `HessianOperator`.
    damping : float, optional
        Adds `damping * v` to every product.
    convex : bool, optional
        Whether to check, at every evaluation, that the output loss is convex in the predictions, so
        that the matrix is positive semi-definite. The check takes up to 12 products with `B`. They
        find all of its eigenvalues if an example has up to 12 predictions, and otherwise the
        outermost ones.
    **options
        As for `HessianOperator`: {option_names}. A `regularization` adds its Hessian.

    Raises
    ------
    InvalidLossError
        If `model` or `output_loss` is not a function, if the predictions are not floating-point
        tensors, or if the loss is not a real scalar; if it is a sum over examples, or depends on
        several of them at once although the data are divided; if it is not convex, and `convex` is
        True.
    InvalidDataError
        If `data` is a dict, or anything that `HessianOperator` refuses.
    HvpError
        As `HessianOperator`.

    Notes
    -----
    The predictions and the gradient of the loss are evaluated once, at the values the variables
    have now. `value` and `gradient` are those of the loss as a whole.

    References
    ----------
    .. [Sch] N. N. Schraudolph, "Fast curvature matrix-vector products for second-order gradient
       descent", Neural Computation 14(7), 2002. https://doi.org/10.1162/08997660260028683

    Examples
    --------
    The predictions `w**2` have the Jacobian `diag(2 w)`, and half the sum of squared errors has
    the identity for its Hessian:

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> half_squares = lambda predictions: tf.reduce_sum((predictions - 1.0) ** 2) / 2
    >>> G = hvp.GaussNewtonOperator(lambda: w**2, half_squares, w)
    >>> G @ np.ones(3)
    array([ 4., 16., 36.], dtype=float32)
    """

    @outside_strategies
    def __init__(
        self,
        model: Callable[..., Any],
        output_loss: Callable[..., Any],
        variables: Any,
        data: Any = None,
        *,
        damping: float = 0.0,
        convex: bool = False,
        **options: Any,
    ) -> None:
        checked = Options.of(type(self).__name__, options)
        damping = check_damping(damping)
        convex = check_flag(convex, "convex")
        rule = gauss_newton_rule(model, output_loss, data, options, convex=convex)
        super().__init__(evaluated(rule, variables, data, checked).damped(damping))

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        compiled.options["regularization"] = compiled.regularization
        return compiled.model, compiled.output_loss, variables
