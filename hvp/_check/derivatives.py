"""Steps of a check that evaluate the loss and its gradient again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from hvp._check.inspected_operator import InspectedOperator, settled
from hvp._check.report import Finding, shortened
from hvp._errors import NonFiniteError
from hvp._snapshots.nearby import Gradients

# Three step lengths of central differences, in units of the best one for a smooth function.
_STEPS = (4.0, 1.0, 0.25)
_FLOAT64_EPSILON = float(np.finfo(np.float64).eps)

Float64Gradient = Callable[[np.ndarray], np.ndarray]


class GradientInspection:
    """Compares an operator with gradients from a new trace of the loss."""

    def __init__(self, inspected: InspectedOperator) -> None:
        self._inspected = inspected
        self._gradients: Gradients | None = None
        self._is_repeatable = False
        # The scales of the variables' entries, a random direction in these scales, and the product
        # with it, in the same scales; empty if the product is not finite.
        self._scales = self._direction = self._product = np.empty(0)

    @property
    def evaluations(self) -> int:
        """The number of evaluations of the gradient."""
        return 0 if self._gradients is None else self._gradients.evaluations

    def close(self) -> None:
        """Release the memory of the gradients."""
        if self._gradients is not None:
            self._gradients.close()

    def same_each_time(self) -> Iterator[Finding]:
        """Check that the loss, traced anew and evaluated twice, is the operator's loss."""
        name = "same each time"
        inspected = self._inspected
        self._gradients = inspected.evaluation.gradients()
        if self._gradients is None:
            yield Finding(name, "warning", "not checked: there is no loss to evaluate again")
            return
        self._multiply_in_scale()
        original = (inspected.operator.value, inspected.operator.gradient)
        retraced = self._gradients.last()
        repeated = self._gradients.again()
        for (value, gradient), (other_value, other_gradient), occasion in (
            (retraced, repeated, "evaluated twice"),
            (original, retraced, "traced again"),
        ):
            variables = self._differing_variables(gradient, other_gradient)
            differences = []
            if abs(value - other_value) > self._rounding * max(abs(value), abs(other_value)):
                differences.append(f"the loss is {value:.8g} and {other_value:.8g}")
            if variables:
                distance = float(np.linalg.norm(gradient - other_gradient))
                differences.append(f"gradients in {shortened(variables)} differ by {distance:.2g}")
            if differences:
                remarks = inspected.evaluation.remarks
                draws = remarks.random if remarks is not None else []
                if draws:
                    differences.append(f"the loss draws random numbers: {shortened(draws)}")
                yield Finding(name, "failed", f"{occasion}, {'; '.join(differences)}")
                return
        self._is_repeatable = True
        yield Finding(name, "ok", "loss and gradient, traced again and evaluated twice")

    @property
    def _rounding(self) -> float:
        """The relative difference that may result from summing in another order."""
        return 1000 * self._inspected.epsilon

    def _multiply_in_scale(self) -> None:
        """Multiply by a random direction whose entries are in proportion to their own scales.

        Scales may differ widely. The product is scaled too, so that its entries are comparable.
        """
        assert self._gradients is not None
        inspected = self._inspected
        self._scales = self._gradients.scales()
        direction = self._scales * inspected.rng.standard_normal(inspected.size)
        self._direction = direction.astype(inspected.operator.dtype)
        damping_part = inspected.operator.damping * self._direction.astype(np.float64)
        try:
            product = inspected.multiply(self._direction)
        except NonFiniteError:
            return  # another step says so
        self._product = self._scales * (product - damping_part)

    def _differing_variables(self, one: np.ndarray, other: np.ndarray) -> list[str]:
        """Return the names of the variables for which two gradients differ.

        Near a minimum, all that remains of the gradient is rounding error. It is about as large as
        the change of the gradient when the variables change by a rounding unit.
        """
        assert self._gradients is not None
        one, other = self._scales * one, self._scales * other
        sizes = [float(np.linalg.norm(vector)) for vector in (one, other, self._product)]
        rounding = self._rounding * max(sizes)
        parts = zip(self._gradients.parts(one), self._gradients.parts(other))
        distances = [np.linalg.norm(a - b) for a, b in parts]
        names = self._inspected.evaluation.variable_names
        return [repr(name) for name, distance in zip(names, distances) if distance > rounding]

    def differences(self, products_are_finite: bool) -> Iterator[Finding]:
        """Compare a product, if products are finite, with central differences of the gradient."""
        name, gradients = "differences", self._gradients
        if gradients is None or not (
            self._is_repeatable and products_are_finite and len(self._product)
        ):
            yield Finding(
                name, "warning", "not checked: there is no repeatable gradient or finite product"
            )
            return
        scales, direction, product = self._scales, self._direction, self._product
        # In float64 the steps can be so short that there are no kinks within them.
        in_float64 = gradients.in_float64()
        try:
            try:
                differences, unit = self._central_differences(direction, in_float64)
            except tf.errors.OpError:
                if in_float64 is None:
                    raise
                in_float64 = None  # an operation has no kernel for float64
                differences, unit = self._central_differences(direction, in_float64)
        except NonFiniteError as error:
            yield Finding(name, "warning", f"not checked: at a nearby point, {error}")
            return
        differences = [scales * difference for difference in differences]
        yield self._compared(product, differences, unit, scales, in_float64 is not None)

    def _compared(
        self,
        product: np.ndarray,
        differences: list[np.ndarray],
        unit: float,
        scales: np.ndarray,
        in_float64: bool,
    ) -> Finding:
        """Return the finding about a product and the central differences for several steps.

        The product is compared with the mean of the two neighbouring differences that agree best.
        Their distance from each other is the uncertainty of the comparison.
        """
        inspected = self._inspected
        estimate, distance = settled(differences)
        discrepancy = product - estimate
        # Along a direction of small curvature, rounding of the gradients bounds the accuracy.
        epsilon = _FLOAT64_EPSILON if in_float64 else inspected.epsilon
        rounding = epsilon * float(np.linalg.norm(scales * inspected.operator.gradient)) / unit
        norms = float(np.linalg.norm(product)), float(np.linalg.norm(estimate))
        size = max(*norms, rounding) or 1.0
        relative_error = float(np.linalg.norm(discrepancy)) / size
        precision = " in float64" if in_float64 else ""
        comparison = f"central differences{precision} and a product differ by {relative_error:.1g}"
        advice = (
            "; for a verdict, build the model in float64: call keras.config.set_floatx('float64') "
            "and set_dtype_policy('float64') before you create its layers"
        )
        narrow = "a loss of which parts are computed in a narrower type, " * inspected.is_narrow
        return inspected.verdict(
            comparison,
            relative_error,
            distance / size,
            causes=f", most in {self._largest_part(discrepancy)}; possible causes are {narrow}"
            "tf.stop_gradient, a gradient written by hand, or a loss that changes what it reads",
            advice=advice if epsilon > 1e-12 else "",
        )

    def _central_differences(
        self, direction: np.ndarray, in_float64: Float64Gradient | None
    ) -> tuple[list[np.ndarray], float]:
        """Return central differences of the gradient `g` along a direction `v`, and the unit `h`.

        For three steps `s` in units of `h`, the cube root of the rounding unit, they are
        `(g(w + s h v) - g(w - s h v)) / (2 s h)`. Their error is of the order of `(s h)**2`, from
        the third derivative, plus rounding divided by `s h`. `in_float64` is the gradient in
        float64 as a function of the change of the variables, if there is one.
        """
        epsilon = self._inspected.epsilon if in_float64 is None else _FLOAT64_EPSILON
        unit = float(np.cbrt(epsilon))
        differences = []
        for step in _STEPS:
            change = step * unit * direction
            after, before = (self._gradient_at(sign * change, in_float64) for sign in (1.0, -1.0))
            differences.append((after - before) / (2 * step * unit))
        return differences, unit

    def _gradient_at(self, change: np.ndarray, in_float64: Float64Gradient | None) -> np.ndarray:
        """Return the gradient after a change of the variables."""
        assert self._gradients is not None
        if in_float64 is not None:
            gradient = in_float64(change.astype(np.float64))
            if not np.isfinite(gradient).all():
                raise NonFiniteError("the gradient is not finite")
            return gradient
        with self._gradients.moved(change.astype(self._inspected.operator.dtype)):
            return self._gradients.again()[1].astype(np.float64)

    def _largest_part(self, vector: np.ndarray) -> str:
        """Return the name of the variable with the largest part of a vector."""
        assert self._gradients is not None
        norms = [np.linalg.norm(part) for part in self._gradients.parts(vector)]
        return repr(self._inspected.evaluation.variable_names[int(np.argmax(norms))])
