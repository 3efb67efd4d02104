"""Steps of a check that look only at products."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from hvp._check.inspected_operator import InspectedOperator
from hvp._check.report import Finding, Verdict
from hvp._errors import ConvergenceWarning, NonFiniteError
from hvp._spectra.eigsh import eigsh

# Steps of the Lanczos iteration, which needs most of the products.
_STEPS = 10
# Residual norm at which the smallest eigenvalue counts as found, relative to the largest.
_TOLERANCE = 1e-3
# Products in low precision are compared along this many random directions, and may be wrong by so
# much, relative to their norm.
_COMPARED, _LARGE_ERROR = 3, 0.02


class ProductInspection:
    """Checks whether products are those of a symmetric matrix, and examines its spectrum.

    `eigenvalues` are Ritz values in increasing order, or empty if the products are not finite.
    """

    def __init__(self, inspected: InspectedOperator) -> None:
        self._inspected = inspected
        self.eigenvalues = np.empty(0)
        self._norm = 0.0

    def properties(self) -> Iterator[Finding]:
        """Check that products are finite, repeatable, symmetric, linear and the same in blocks."""
        inspected = self._inspected
        try:
            v, asymmetry = self._lanczos()
            Hv, u = inspected.multiply(v), inspected.random_unit_vector()
            Hv_again = inspected.multiply(v)
            Hu = inspected.multiply(u)
            combined = inspected.multiply((2.5 * v - 0.7 * u).astype(v.dtype))
            block = inspected.operator @ np.stack([v, u], axis=1)
        except NonFiniteError as error:
            yield Finding("products", "failed", str(error))
            return
        scale = max(self._norm, float(np.linalg.norm(Hv)), float(np.linalg.norm(Hu)))
        scale = scale or 1.0

        def judged(name: str, difference: float, description: str) -> Finding:
            verdict: Verdict = "ok" if difference <= inspected.tolerance * scale else "failed"
            return Finding(name, verdict, f"{description} {difference / scale:.1g}")

        if not (Hv.any() or Hu.any()):
            text = (
                "exactly zero for random vectors: at these values the matrix is zero, as the "
                "Hessian of a loss that is linear in the variables"
            )
            yield Finding("products", "warning", text)
        elif np.array_equal(Hv, Hv_again):
            yield Finding("products", "ok", "finite, and bit for bit the same when computed again")
        else:
            difference = float(np.linalg.norm(Hv - Hv_again))
            yield judged("products", difference, "finite, but when computed again they differ by")
        yield judged("symmetry", asymmetry, "u'Hv and v'Hu differ by")
        difference = float(np.linalg.norm(combined - (2.5 * Hv - 0.7 * Hu)))
        if not inspected.evaluation.is_low:
            inspected.noise = max(asymmetry, difference) / scale
        yield judged("linearity", difference, "H(au + bv) and aHu + bHv differ by")
        difference = float(np.linalg.norm(block - np.stack([Hv, Hu], axis=1)))
        yield judged("blocks", difference, "H @ [u, v] and [H @ u, H @ v] differ by")

    def low_precision(self) -> Iterator[Finding]:
        """Compare products in low precision with those in full precision."""
        inspected = self._inspected
        if not (inspected.evaluation.is_low and self.eigenvalues.size):
            return
        low, full = inspected.operator.stats.precision, inspected.operator.dtype.name
        vectors = [inspected.random_unit_vector() for _ in range(_COMPARED)]
        products = [inspected.multiply(v) for v in vectors]
        with inspected.evaluation.in_full_precision() as evaluation:
            exact = [evaluation.linear_map.apply(tf.constant(v)).numpy() for v in vectors]
        pairs = [
            (float(np.linalg.norm(product - want)), float(np.linalg.norm(want)))
            for product, want in zip(products, exact)
        ]
        error = max(difference / (norm or 1.0) for difference, norm in pairs)
        text = f"products in {low} differ from those in {full} by {error:.1g} of their norm"
        if error <= _LARGE_ERROR:
            yield Finding("low precision", "ok", f"{text}; hvp.solve refines its solutions")
            return
        advice = "leave out precision, or look for values that nearly cancel"
        yield Finding("low precision", "warning", f"{text}; {advice}")

    def _lanczos(self) -> tuple[np.ndarray, float]:
        """Estimate the spectrum and the asymmetry by the Lanczos iteration.

        From a random unit vector `q_0`, with full orthogonalization (C. Lanczos, Journal of
        Research of the National Bureau of Standards 45(4), 1950,
        https://doi.org/10.6028/jres.045.026)::

            t_ij = (q_i, H q_j)                     for i <= j
            w = H q_j - sum_{i <= j} t_ij q_i
            t_{j+1,j} = |w|,  q_{j+1} = w / |w|

        For a symmetric `H` the matrix `T` is tridiagonal and symmetric. Here all of its entries are
        computed, so that its asymmetry shows that of `H`. The Ritz values are the eigenvalues of
        the symmetric part of `T`. The results are `q_0` and the largest entry of `T - T'`.
        """
        inspected = self._inspected
        max_steps = min(_STEPS, inspected.size)
        basis = [inspected.random_unit_vector()]
        coefficients = np.zeros((_STEPS + 1, _STEPS))
        for step in range(max_steps):
            w = inspected.multiply(basis[step]).astype(np.float64)
            for _ in range(2):  # the second pass removes the rounding errors of the first
                for i, q in enumerate(basis):
                    coefficient = float(q.astype(np.float64) @ w)
                    coefficients[i, step] += coefficient
                    w -= coefficient * q
            remainder = float(np.linalg.norm(w))
            coefficients[step + 1, step] = remainder
            size = step + 1
            largest = np.abs(coefficients[:size, :size]).max()
            if remainder <= inspected.tolerance * largest or size == max_steps:
                break
            basis.append((w / remainder).astype(inspected.operator.dtype))
        T = coefficients[:size, :size]
        self.eigenvalues = np.linalg.eigvalsh((T + T.T) / 2)
        self._norm = float(np.abs(self.eigenvalues).max())
        return basis[0], float(np.abs(T - T.T).max())

    def spectrum(self, rtol: float, max_products: int, seed: int) -> Iterator[Finding]:
        """Report the signs of the eigenvalues, and whether the dtype suffices for `rtol`."""
        if not self.eigenvalues.size:
            yield Finding("curvature", "warning", "not checked: products are not finite")
            return
        inspected = self._inspected
        if inspected.operator.is_positive_semidefinite:
            yield self._of_semidefinite()
        elif inspected.size <= max_products and not inspected.evaluation.is_low:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # where products are asymmetric
                result = eigsh(inspected.operator, inspected.size, "SA", seed=seed)
            self.eigenvalues = np.sort(result.eigenvalues.astype(np.float64))
            yield self._of_all()
        else:
            yield self._of_some(max_products, seed)
        yield self._precision(rtol)

    @property
    def _rounding(self) -> float:
        """The absolute value below which an eigenvalue may be zero but for rounding errors."""
        return max(100 * self._inspected.epsilon, self._inspected.evaluation.rounding) * self._norm

    def _of_semidefinite(self) -> Finding:
        lowest, highest = self.eigenvalues[[0, -1]]
        if lowest < -self._rounding:
            text = f"an eigenvalue of {lowest:.3g} or below, of a matrix that should have none"
            return Finding("curvature", "failed", text)
        text = (
            "positive semi-definite by construction; eigenvalues from "
            f"{max(lowest, 0):.3g} or below to {highest:.3g} or above"
        )
        return Finding("curvature", "ok", text)

    def _of_all(self) -> Finding:
        """Report the signs of all eigenvalues."""
        lowest, highest = self.eigenvalues[[0, -1]]
        rounding = self._rounding
        text = f"all eigenvalues are from {lowest:.3g} to {highest:.3g}"
        if lowest > rounding:
            return Finding("curvature", "ok", f"positive: {text}")
        if lowest < -rounding:
            kind = "negative" if highest < -rounding else "indefinite"
            kind = "not positive" if -rounding <= highest <= rounding else kind
            return Finding("curvature", "note", f"{kind}: {text}; {_need_damping(-lowest)}")
        text += "; conjugate gradients need some damping"
        return Finding("curvature", "note", f"singular up to rounding: {text}")

    def _of_some(self, max_products: int, seed: int) -> Finding:
        """Look for negative curvature, and report the outcome."""
        inspected = self._inspected
        lowest, highest = self.eigenvalues[[0, -1]]
        products, is_smallest, error = len(self.eigenvalues), False, 0.0
        if not inspected.evaluation.is_low:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the text says so
                smallest = eigsh(
                    inspected.operator,
                    1,
                    "SA",
                    tol=_TOLERANCE,
                    max_products=max(4, max_products),
                    seed=seed,
                )
            products += smallest.products
            if smallest.eigenvalues[0] <= lowest + self._rounding:
                is_smallest, error = bool(smallest.converged[0]), float(smallest.residual_norms[0])
            lowest = min(lowest, float(smallest.eigenvalues[0]))
            self.eigenvalues[0] = lowest
        below = "" if is_smallest else " or below"
        found = f"found in {products} products"
        text = f"the eigenvalues {found} are from {lowest:.3g}{below} to {highest:.3g} or above"
        if lowest >= -self._rounding:
            return Finding("curvature", "note", f"no negative curvature {found}: {text}")
        kind = "indefinite" if highest > self._rounding else "negative curvature"
        return Finding("curvature", "note", f"{kind}: {text}; {_need_damping(error - lowest)}")

    def _precision(self, rtol: float) -> Finding:
        inspected = self._inspected
        dtype = inspected.operator.dtype.name
        smallest = float(np.abs(self.eigenvalues).min())
        condition = self._norm / smallest if smallest else np.inf
        attainable = max(inspected.epsilon, inspected.noise) * condition
        facts = f"condition number {condition:.2g} or more, rtol {rtol:.0e}"
        if inspected.is_narrow:
            text = (
                f"products have a relative error of {inspected.noise:.1g}, as if parts of the loss "
                f"were computed in a narrower type than {dtype}: with Keras, call keras.config."
                f"set_floatx({dtype!r}) and set_dtype_policy({dtype!r}) before the model is made"
            )
            return Finding("precision", "warning", text)
        if attainable <= rtol:
            text = f"nothing speaks against {dtype}: {facts}"
            return Finding("precision", "ok", text)
        error = f"solutions of linear systems may have a relative error of {attainable:.1g}"
        if attainable >= 1:
            error = "solutions of linear systems may consist of rounding errors"
        is_float64 = inspected.epsilon < 1e-12
        advice = "add damping" if is_float64 else "build the operator in float64, or add damping"
        return Finding("precision", "warning", f"in {dtype}, {error}: {facts}; {advice}")


def _need_damping(least: float) -> str:
    return f"conjugate gradients need damping above {_rounded_up(least)}, or use MINRES"


def _rounded_up(number: float) -> str:
    """Return a positive number, rounded up to two digits."""
    return f"{number:.2g}" if float(f"{number:.2g}") >= number else f"{number * 1.05:.2g}"
