"""Gauss-Newton steps from a factorization as large as there are residuals."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.data_sets import Terms, parts_of
from hvp._data.elements import NO_DATA, Elements, convert_batch
from hvp._derivatives.exact import exact_functions
from hvp._engines.options import Options
from hvp._engines.taped import TapedGradient
from hvp._errors import InvalidLossError, NonFiniteError, TooLargeError
from hvp._minimize.models import SampledModel, WholeModel
from hvp._operators.example_rows import ExampleRows
from hvp._operators.jacobian import JacobianOperator
from hvp._solve.outcome import SolveOutcome
from hvp._solve.steihaug import SteihaugResult
from hvp._taylor.curves import Curves
from hvp._taylor.series import Series
from hvp._taylor.traced import TracedFunction
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest, collect_variables

# The largest matrix that is factorized, and the largest Jacobian that is kept, in entries.
_LARGEST, _MOST_ENTRIES = 4096, 2**27
# The length of a step on the boundary is right to this accuracy, after so many factorizations.
_ON_BOUNDARY, _FACTORIZATIONS = 0.1, 20
# An acceleration is used if it is at most this part of the length of the step.
_ACCELERATION = 0.375
# How far the gradient of the loss may be from that of the residuals, relative to their scale.
_APART, _APART_LOW = 1e-8, 1e-4


def residuals_of(
    rule: Any, variables: Any, data: Any, model: WholeModel, weights: Any
) -> list[TermResiduals]:
    """Return the residuals of a loss: those of its only term, or of each data set."""
    whole: Any = NO_DATA
    if isinstance(rule, Terms):
        rule, whole = rule.on(data, Options(weight=weights))
    elif data is not None:
        whole = convert_batch(data, "data")
    elements = model.elements if isinstance(model, SampledModel) else lambda: whole
    nest = collect_variables(variables)
    if not isinstance(rule, Terms):
        return [TermResiduals(rule, 1.0, elements, nest)]

    def of(name: str) -> Callable[[], Elements]:
        return lambda: dict(parts_of(elements()))[name]

    pairs = rule.rules.items()
    return [TermResiduals(one, rule.factors.get(k, 1.0), of(k), nest) for k, one in pairs]


class ResidualSpace:
    """Minimizes Gauss-Newton models in a trust region, through the space of residuals.

    Let `J` be the Jacobian of the predictions, and `c` and `diag(b)` the gradient and Hessian of
    the output loss in them. With `A = sqrt(b) J` and `y = c / sqrt(b)`, the Gauss-Newton model is
    `norm(y + A p)**2 / 2` up to a constant, and its minimizer with damping `mu` is

        `p = q - A' z`,  where  `(A A' + mu I) z = y + A q`

    and `q` is zero, or `momentum` times the previous step [1]_. The matrix `A A'` is as large as
    there are residuals; if there are fewer variables, `A' A` takes its place. The damping is the
    smallest one that is at least that of the caller and for which `norm(p - q) <= radius`. All
    this is in units of `scale`, in float64, and computed by TensorFlow: threads of NumPy's matrix
    products would keep the cores busy when TensorFlow needs them.

    With `accelerates`, half the second-order correction of the path [2]_ is added.

    References
    ----------
    .. [1] G. Goldshlager, N. Abrahamsen, L. Lin, "A Kaczmarz-inspired approach to accelerate the
       optimization of neural network wavefunctions", Journal of Computational Physics 516, 2024.
       https://doi.org/10.1016/j.jcp.2024.113351
    .. [2] M. K. Transtrum, J. P. Sethna, "Improvements to the Levenberg-Marquardt algorithm for
       nonlinear least-squares minimization", 2012. https://arxiv.org/abs/1201.5885
    """

    def __init__(
        self,
        terms: Sequence[TermResiduals],
        momentum: float,
        accelerates: bool,
        scale: np.ndarray | float,
    ) -> None:
        self._terms, self._space = terms, terms[0].space
        self._momentum, self._accelerates, self._scale = momentum, accelerates, scale
        self._gradient: tf.Tensor | None = None
        self._mu = 0.0

    def shapes(self, size: int) -> list[list[int]]:
        """Return the shapes of what is kept: the damping of the last step, and the step itself."""
        return [[1], [size]] if self._momentum else [[1]]

    def kept(self, step: tf.Tensor) -> list[tf.Tensor]:
        """Return the values of these tensors after a step."""
        return [tf.constant([self._mu], step.dtype), *([step] if self._momentum else [])]

    def solve(
        self,
        gradient: tf.Tensor,
        *,
        radius: float,
        damping: float = 0.0,
        mask: tf.Tensor | None = None,
        tensors: Sequence[tf.Tensor],
    ) -> SteihaugResult:
        """Minimize the model at the current values; `tensors` are those of `shapes`.

        Entries of the step where the `mask` is zero are zero.
        """
        self._evaluate(gradient, mask)
        start, residual = tf.zeros(gradient.shape, tf.float64), self._offset
        self._mu = float(tensors[0][0])
        if self._momentum:
            previous = self._momentum * tf.cast(tensors[1], tf.float64) / self._scale
            start = tf.clip_by_norm(previous * self._mask, radius)
            residual = residual + tf.linalg.matvec(self._matrix, start)
        factor, z, count = self._within(radius, damping, self._rows_of(residual))
        moved = -self._columns_of(z)
        length = _norm(moved)
        if length > (1 + 2 * _ON_BOUNDARY) * radius:  # there were too few factorizations
            length, moved = radius, moved * (radius / length)
        step = start + moved
        predicted = self._decrease(step, damping * _norm(moved) ** 2)
        if self._accelerates:
            parts = self._space.split(tf.cast(self._scale * step, self._space.dtype))
            curved = tf.concat([term.accelerations(parts) for term in self._terms], 0)
            correction = -self._columns_of(_solved(factor, self._rows_of(curved))) / 2
            if _norm(correction) <= _ACCELERATION * _norm(step):
                step = step + correction
        on_boundary = self._mu > max(damping, self._least)
        return SteihaugResult(
            tf.cast(self._scale * step, gradient.dtype),
            SolveOutcome.BOUNDARY if on_boundary else SolveOutcome.CONVERGED,
            count,
            length,
            predicted,
        )

    def predicted(self, step: tf.Tensor, damping: float) -> float:
        """Return the decrease of the last model along a step."""
        own = tf.cast(step, tf.float64) / self._scale
        return self._decrease(own, damping * _norm(own) ** 2)

    def _decrease(self, step: tf.Tensor, penalty: float) -> float:
        change = tf.linalg.matvec(self._matrix, step)
        return -float(tf.tensordot(change, self._offset + change / 2, 1)) - penalty / 2

    def _evaluate(self, gradient: tf.Tensor, mask: tf.Tensor | None) -> None:
        """Compute the residuals and their Jacobian, unless the gradient is that of before."""
        if self._gradient is not None and np.array_equal(gradient, self._gradient):
            return
        self._gradient = None
        pairs = [term.evaluate() for term in self._terms]
        self._offset = tf.concat([offset for offset, _ in pairs], 0)
        matrix = tf.concat([rows for _, rows in pairs], 0)
        scale = _norm(matrix) * _norm(self._offset)
        if not math.isfinite(scale):
            raise NonFiniteError(
                "a residual or its gradient is not finite",
                "a model that is differentiable where the variables are",
                "look for norms and square roots near zero, and for overflow",
            )
        given = tf.cast(gradient, tf.float64)
        error = _norm(tf.linalg.matvec(matrix, self._offset, transpose_a=True) - given)
        if error > (_APART if gradient.dtype == tf.float64 else _APART_LOW) * scale:
            raise InvalidLossError(
                "the gradient of the loss is not that of its residuals (they differ by "
                f"{error:.3g}, and the gradient has the norm {_norm(given):.3g})",
                "a model that treats examples independently, and an output loss without further "
                "terms",
                "leave out space='residuals' and keep the loss as it is",
            )
        self._mask = 1.0 if mask is None else tf.cast(mask, tf.float64)
        units = self._scale * self._mask
        self._matrix = matrix = matrix if isinstance(units, float) else matrix * units
        self._is_wide = wide = matrix.shape[0] <= matrix.shape[1]
        self._square = tf.matmul(matrix, matrix, transpose_a=not wide, transpose_b=wide)
        self._least = 10 * np.finfo(np.float64).eps * float(tf.linalg.trace(self._square))
        self._gradient = gradient

    def _within(
        self, radius: float, damping: float, right: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, int]:
        """Return a factor and the solution with it within the trust region; keep its damping.

        Also return the number of factorizations.

        Newton's method for `1 / norm(p) = 1 / radius` as a function of the damping, which is
        concave, converges in a few factorizations from that of the last step.
        """
        least, square = max(damping, self._least), self._square
        mu, diagonal = max(self._mu, least), tf.linalg.diag_part(square)

        def inner(a: tf.Tensor, b: tf.Tensor) -> float:
            return float(tf.tensordot(a, tf.linalg.matvec(square, b) if self._is_wide else b, 1))

        for count in range(1, _FACTORIZATIONS + 1):
            found = _cholesky(tf.linalg.set_diag(square, diagonal + mu))
            if found is None:
                mu *= 10
                continue
            factor = found
            z = _solved(factor, right)
            w = _solved(factor, z)
            squared = inner(z, z)
            length = math.sqrt(max(squared, 0.0))
            short = length < (1 - _ON_BOUNDARY) * radius and length > 0 and mu > least
            if (not short and length <= (1 + _ON_BOUNDARY) * radius) or count == _FACTORIZATIONS:
                break
            mu = max(least, mu + squared / inner(z, w) * (length - radius) / radius)
        self._mu = mu
        return factor, z, count

    def _rows_of(self, residual: tf.Tensor) -> tf.Tensor:
        """Return the right-hand side of a residual, as long as the matrix that is factorized."""
        if self._is_wide:
            return residual
        return tf.linalg.matvec(self._matrix, residual, transpose_a=True)

    def _columns_of(self, z: tf.Tensor) -> tf.Tensor:
        """Return the step of a solution with the matrix that is factorized."""
        return tf.linalg.matvec(self._matrix, z, transpose_a=True) if self._is_wide else z


def _norm(x: tf.Tensor) -> float:
    return float(tf.norm(x))


def _cholesky(matrix: tf.Tensor) -> tf.Tensor | None:
    """Return the Cholesky factor, or None if the matrix is not positive definite."""
    try:
        factor = tf.linalg.cholesky(matrix)
    except tf.errors.InvalidArgumentError:  # of the kernel for CPUs; that for GPUs returns NaN
        return None
    return factor if math.isfinite(_norm(factor)) else None


def _solved(factor: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    return tf.linalg.cholesky_solve(factor, right[:, tf.newaxis])[:, 0]


class TermResiduals:
    """The residuals of one term of a loss, a `PredictionRule`, at the elements that it is over.

    `weight` multiplies the term.
    """

    def __init__(
        self, rule: Any, weight: float, elements: Callable[[], Elements], nest: VariableNest
    ) -> None:
        self._rule, self._weight, self._elements, self._nest = rule, weight, elements, nest
        self.space = Space.of_variables(nest)
        self._rows = ExampleRows(rule.predict, nest)
        # Partial functions, since TensorFlow counts traces of methods together, and would warn.
        self._scale = tf.function(functools.partial(self._of_tensors), autograph=False)
        self._pushed = tf.function(functools.partial(self._push), autograph=False)
        self._jacobian: JacobianOperator | None = None
        self._root = np.zeros(0)

    def evaluate(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return `y`, and `A` of shape `(residuals, n)`, in float64."""
        elements = self._elements()
        gradient, curvature, is_diagonal = self._scale(*elements.tensors)
        c, b = (part.numpy().astype(np.float64) for part in (gradient, curvature))
        if not is_diagonal or b.min() < 0 or (c[b == 0] != 0).any():
            problem = (
                "is not diagonal"
                if not is_diagonal
                else "is negative"
                if b.min() < 0
                else "is zero where the loss is not stationary"
            )
            raise InvalidLossError(
                "the second derivative of the output loss with respect to the predictions "
                f"{problem}",
                "a convex loss of each prediction for itself, such as the mean of squares",
                "leave out space='residuals', which is for least squares and the like",
            )
        size = self.space.size
        if min(len(b), size) > _LARGEST or len(b) * size > _MOST_ENTRIES:
            raise TooLargeError(
                f"there are {len(b)} residuals of {size} variables",
                f"at most {_LARGEST} of the fewer, and {_MOST_ENTRIES} derivatives",
                "pass preconditioner='nystrom' in place of space='residuals': conjugate gradients "
                "search in the same space, without these matrices",
            )
        self._root = root = np.sqrt(self._weight * b)
        y = np.divide(self._weight * c, root, out=np.zeros_like(c), where=root > 0)
        rows = tf.cast(self._dense(elements, len(b)), tf.float64)
        return tf.constant(y), root[:, np.newaxis] * rows

    def accelerations(self, step: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the second derivatives of the residuals along a step, in units of `y`.

        They are those of the point at which `evaluate` was called last.
        """
        second = self._pushed(self._elements().tensors, list(step))
        return self._root * tf.cast(second, tf.float64)

    def _dense(self, elements: Elements, count: int) -> np.ndarray:
        rows = self._rows.of(elements) if elements.has_examples else None
        if rows is None:
            if self._jacobian is None:
                data = elements if elements.has_examples else None
                self._jacobian = JacobianOperator(
                    self._rule.predict, self._nest.source, data, on_stale="ignore"
                )
            else:
                self._jacobian.refresh()
            return self._jacobian.to_dense(max_size=max(count, self.space.size))
        return rows

    def _of_tensors(self, *tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Return the gradient and the diagonal of the Hessian of the loss in the predictions.

        Then whether the Hessian is diagonal.
        """
        elements, rule = self._elements().with_tensors(tensors), self._rule
        with exact_functions():
            predictions = elements.call(rule.predict)
            # A copy has no logits attached, which a loss would take instead.
            values = [tf.identity(part) for part in tf.nest.flatten(predictions)]
            packed = tf.nest.pack_sequence_as(predictions, values)
            output = TapedGradient(
                lambda: elements.call(lambda *own: rule.output_loss(packed, *own[1:])), values
            )
            ones = output.vjp([tf.ones_like(part) for part in values])
            signs = [
                tf.cast(
                    2 * tf.random.stateless_uniform(tf.shape(part), [i, 0], 0, 2, tf.int32) - 1,
                    part.dtype,
                )
                for i, part in enumerate(values)
            ]
            images = output.vjp(signs)
        flat = [self._joined(parts, values) for parts in (output.outputs, ones, signs, images)]
        gradient, diagonal, signs_flat, images_flat = flat
        error = tf.norm(images_flat - signs_flat * diagonal)
        return gradient, diagonal, error <= 1e-4 * tf.norm(diagonal)

    def _joined(self, parts: Sequence[Any], like: Sequence[tf.Tensor]) -> tf.Tensor:
        full = [tf.zeros_like(x) if part is None else part for part, x in zip(parts, like)]
        return tf.concat([tf.cast(tf.reshape(x, [-1]), self.space.dtype) for x in full], 0)

    def _push(self, tensors: Sequence[tf.Tensor], step: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the second derivatives of the predictions along a step."""
        elements, variables = self._elements(), self._nest.variables

        def predict(*given: tf.Tensor) -> Any:
            return tf.nest.flatten(elements.with_tensors(given).call(self._rule.predict))

        specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
        traced, curves = TracedFunction(predict, specs, variables), Curves(1, 2, collapsed=True)
        inputs = [curves.constant(tensor) for tensor in tensors]
        pairs = zip(variables, step)
        inputs += [Series(tf.identity(v), (part[tf.newaxis], None)) for v, part in pairs]
        results = [series.with_full_terms() for series in traced.push(inputs, curves)]
        return self._joined([one.terms[1] for one in results], [one.value for one in results])
