"""Checks that an operator is the Hessian that was meant.

Operations without a second derivative in TensorFlow are found before an operator is built. A check
finds errors that show only in numbers: a custom gradient whose own derivative is wrong, a loss that
is not deterministic, variables that the loss does not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._check.derivatives import GradientInspection
from hvp._check.examples import examples
from hvp._check.inspected_operator import InspectedOperator
from hvp._check.loss_graph import connected, operations
from hvp._check.predictions import prediction_differences
from hvp._check.products import ProductInspection
from hvp._check.report import CheckReport, Finding
from hvp._data.budget import amount, peak_nbytes
from hvp._errors import GraphModeError, HvpError
from hvp._operators.symmetric import SymmetricOperator, evaluation_of
from hvp._runtime.arguments import check_count, check_number, check_seed
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.progress import check_progress, progress_bar
from hvp._runtime.strategies import outside_strategies


@outside_strategies
@Uninterrupted()
def check(
    H: Any,
    *,
    rtol: float = 1e-5,
    max_products: int = 100,
    seed: int = 0,
    progress: Any = False,
) -> CheckReport:
    """Check that an operator is the matrix you intend, and look for negative curvature.

    Parameters
    ----------
    H : HessianOperator or operator like it
        The operator, evaluated at the current values of the variables.
    rtol : float, optional
        The relative tolerance with which you want to solve linear systems. The report says whether
        the dtype suffices for it.
    max_products : int, optional
        Upper bound on the products for the smallest eigenvalue. All other steps take at most 20.
    seed : int, optional
        Seed of the random vectors.
    progress : bool or "always", optional
        Whether to show a progress bar over the steps.

    Returns
    -------
    CheckReport
        A report that prints as a table, with the property `ok` and the method
        `raise_if_failed()`. Its findings are:

        *products*
            Whether products are finite, and the same when computed again. If those with random
            vectors are exactly zero, the outcome is a warning.
        *symmetry*, *linearity*, *blocks*
            Whether they are those of one symmetric matrix, for single vectors and for blocks.
        *same each time*
            Whether the loss, traced again and evaluated twice, is the one from which the operator
            was built. If not, the finding names the variables whose gradients differ, and the
            layers that draw random numbers.
        *differences*
            Whether a product along a random direction `v` agrees with the central difference of
            gradients `(g(w + h v) - g(w - h v)) / (2 h)`. The gradient is evaluated in float64 if
            that is possible (without loops, branches or recomputed parts), otherwise in the dtype
            of the variables. If the differences do not settle as `h` decreases, because of kinks or
            rounding, the outcome is a warning. For Gauss-Newton and Fisher matrices differences of
            the first batch's predictions, at four nearby points, take the place of gradients.
        *examples*
            Whether the loss of two, three and four examples is the mean of the losses of each. If
            it is not, the loss may be a sum, or labels may have been broadcast against predictions.
            Only for the Hessian of a loss with data.
        *connected*
            Whether the loss depends on all variables.
        *operations*
            Whether the loss contains custom gradients, random draws or Python code, or operations
            that have no correct derivative at some values, such as products of entries at zeros.
        *curvature*
            The signs of the eigenvalues: of all of them if the matrix has at most `max_products`
            rows. Otherwise `eigsh` looks for the smallest one, and the finding says what it found.
            If it found no negative eigenvalue in so many products, there may still be one. A
            negative eigenvalue of a matrix that is known to be positive semi-definite is a failure.
        *precision*
            Whether the dtype suffices for `rtol`, given a lower bound on the condition number.
        *low precision*
            By how much products in low precision differ from those in full precision, if the
            operator was made with `precision`. They are compared along three random directions; a
            difference above two percent is a warning.
        *cost*
            The time and memory that a product takes.

    Raises
    ------
    HvpError
        If an argument is invalid, or the operator is stale or closed.
    GraphModeError
        If the function is called while TensorFlow traces a graph.

    Notes
    -----
    The check costs at most 20 products (23, and one more evaluation of the gradient, for an
    operator in low precision), up to `max_products` for the smallest eigenvalue, and eight
    evaluations of the gradient (two if the loss differs between evaluations), from a separate trace
    that stores no residuals. If the gradient is not evaluated in float64, the variables are moved
    for the differences, by about the cube root of the rounding unit times their size, and restored
    afterwards, even after an error or an interrupt. Other threads that use the operator wait
    meanwhile.

    Agreement along one random direction does not prove agreement along all of them, but a missing
    term would go unnoticed only by chance.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0], name="w")
    >>> with hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w) as H:
    ...     report = hvp.check(H)
    >>> report.ok, report.eigenvalues.round(2), report.products
    (True, array([1., 4., 9.]), 13)
    >>> report["curvature"].message
    'positive: all eigenvalues are from 1 to 9'
    """
    if not isinstance(H, SymmetricOperator):
        raise HvpError(
            f"check was given {type(H).__name__}",
            "an operator of hvp with a symmetric matrix: Hessian, Gauss-Newton or Fisher",
            "if this is a sum or product of operators, check each of them",
        )
    check_number(rtol, "rtol", positive=True, below=1)
    check_seed(seed)
    if not tf.executing_eagerly():
        raise GraphModeError("check was called while TensorFlow traces a graph", "eager execution")
    check_count(max_products, "max_products")
    check_progress(progress)
    with evaluation_of(H).snapshot.exclusively():  # because the variables may be moved
        return _checked(H, rtol, max_products, seed, progress)


def _checked(
    H: SymmetricOperator, rtol: float, max_products: int, seed: int, progress: Any
) -> CheckReport:
    """Run all steps and assemble the report."""
    products_before, peak_before = H.stats.products, peak_nbytes()
    inspected = InspectedOperator(H, np.random.default_rng(seed))
    products, gradients = ProductInspection(inspected), GradientInspection(inspected)
    steps: list[Callable[[], Iterator[Finding]]] = [
        products.properties,
        gradients.same_each_time,
        lambda: _differences(inspected, gradients, products),
        lambda: examples(inspected),
        lambda: connected(inspected.evaluation),
        lambda: operations(inspected.evaluation),
        lambda: products.spectrum(rtol, max_products, seed),
        products.low_precision,
    ]
    findings: list[Finding] = []
    bar = progress_bar(progress, total=len(steps), unit="step")
    with bar, contextlib.closing(gradients):
        for step in steps:
            findings += step()
            bar.update()
    peak_after = peak_nbytes()
    increase = None if peak_before is None or peak_after is None else peak_after - peak_before
    seconds = float(np.median(inspected.seconds[1:] or inspected.seconds or [np.nan]))
    residual_bytes = H.stats.residual_bytes
    findings.append(_cost(seconds, residual_bytes, increase))
    return CheckReport(
        title=f"{type(H).__name__} of size {H.shape[0]}, {H.dtype.name}",
        findings=tuple(findings),
        eigenvalues=products.eigenvalues,
        seconds_per_product=seconds,
        residual_bytes=residual_bytes,
        peak_bytes=increase,
        products=H.stats.products - products_before,
        gradient_evaluations=gradients.evaluations,
    )


def _differences(
    inspected: InspectedOperator, gradients: GradientInspection, products: ProductInspection
) -> Iterator[Finding]:
    """Compare products with differences: of gradients for a Hessian, of predictions otherwise."""
    if inspected.evaluation.snapshot.is_hessian:
        return gradients.differences(products_are_finite=bool(products.eigenvalues.size))
    return prediction_differences(inspected)


def _cost(seconds: float, residual_bytes: int | None, increase: int | None) -> Finding:
    text = f"{1000 * seconds:.3g} ms per product" if np.isfinite(seconds) else "no product"
    if residual_bytes is not None:
        text += f"; {amount(residual_bytes)} of residuals"
    if increase is not None:
        rise = f"rose by {amount(increase)}" if increase else "did not rise"
        text += f"; peak memory {rise} during the check"
    return Finding("cost", "note", text)
