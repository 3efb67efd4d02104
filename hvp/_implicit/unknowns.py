"""Equations that are functions of tensors, or read variables, and are differentiated by tapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._derivatives.exact import exact_functions, pulled_back
from hvp._errors import ConvergenceWarning, HvpError, InvalidVariablesError, quoted
from hvp._implicit.equation import Equation, Tensors, at_tensors, refuse_changes
from hvp._implicit.newton import newton
from hvp._runtime.arguments import check_count, check_number
from hvp._runtime.user_warning import warn
from hvp._solve.conjugate_gradients import CONJUGATE_GRADIENTS
from hvp._solve.in_graph import RowSolution, solve_in_graph
from hvp._solve.outcome import SolveOutcome
from hvp._vectors.resources import Resource
from hvp._vectors.variables import collect_variables
from hvp._vectors.watch import Watch

# Steps of Newton's method, and iterations of conjugate gradients: for each unknown, and at most.
_STEPS, _ITERATIONS, _MOST_ITERATIONS = 100, 10, 1000
# The residual of the system for a step, relative to what is to become zero.
_FORCING = 1e-3


def tolerance_of(rtol: float | None, dtype: tf.DType) -> float:
    """Return the tolerance, by default one that is a little above rounding errors."""
    return float(np.finfo(dtype.as_numpy_dtype).eps ** (2 / 3)) if rtol is None else float(rtol)


def check_search(solver: Any, rtol: Any, maxiter: Any) -> None:
    """Raise `HvpError` unless the arguments of a search are None or right."""
    if not (solver is None or callable(solver)):
        raise HvpError(f"the argument solver is {solver!r}", "a function")
    if rtol is not None:
        check_number(rtol, "rtol", positive=True)
    if maxiter is not None:
        check_count(maxiter, "maxiter")


class Unknowns:
    """What an equation is solved for: variables, which it reads, or tensors, which it is passed.

    `parts` are the variables, or the tensors that iterations begin from.
    """

    def __init__(self, inner: Any, name: str) -> None:
        leaves = tf.nest.flatten(inner)
        self.are_variables = any(not _is_tensor(leaf) for leaf in leaves) or not leaves
        self.structure = inner
        if self.are_variables:
            nest = collect_variables(inner)
            self.structure, self.parts = nest.structure, list(nest.variables)
        else:
            self.parts = [tf.convert_to_tensor(leaf) for leaf in leaves]
        dtypes = {part.dtype for part in self.parts}
        if len(dtypes) > 1 or not self.parts[0].dtype.is_floating:
            raise InvalidVariablesError(
                f"{name} have the types {', '.join(sorted(d.name for d in dtypes))}",
                "one floating-point type",
            )
        self.dtype = self.parts[0].dtype

    def nest_of(self, parts: Sequence[Any]) -> Any:
        """Arrange parts as the caller passed them."""
        return tf.nest.pack_sequence_as(self.structure, list(parts))

    def called(self, function: Callable[..., Any], parts: Sequence[Any]) -> Any:
        """Call the function of the equation for some parts, or for the variables that it reads."""
        return function() if self.are_variables else function(self.nest_of(parts))

    def at(self, flat: tf.Tensor) -> list[Any]:
        """Return the parts of a flat point; variables are assigned it."""
        parts = self.split(flat)
        if not self.are_variables:
            return parts
        for variable, part in zip(self.parts, parts):
            variable.assign(part)
        return self.parts

    def join(self, parts: Sequence[Any]) -> tf.Tensor:
        """Return parts as one flat tensor."""
        return tf.concat([tf.reshape(part, [-1]) for part in parts], axis=0)

    def split(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """Return the parts of a flat tensor."""
        shapes = [tf.shape(part) for part in self.parts]
        pieces = tf.split(flat, [tf.reduce_prod(shape) for shape in shapes])
        return [
            tf.ensure_shape(tf.reshape(piece, shape), part.shape)
            for piece, shape, part in zip(pieces, shapes, self.parts)
        ]


class TapedEquation:
    """The equation that `force`, a function of the parts of `unknowns`, is zero.

    With a `loss` it is its gradient. The derivatives are those of tapes.
    """

    def __init__(
        self,
        unknowns: Unknowns,
        sources: Sequence[Any],
        force: Callable[[Sequence[Any]], Tensors],
        loss: Callable[[Sequence[Any]], tf.Tensor] | None,
        *,
        rtol: float | None,
        damping: float,
        maxiter: int | None,
    ) -> None:
        self._unknowns, self._sources, self._force, self._loss = unknowns, sources, force, loss
        self._damping, self._maxiter = damping, maxiter
        self._rtol = tolerance_of(rtol, unknowns.dtype)
        # Watches the trainable variables that are read; none in graphs.
        self._watch = Watch([])

    def solution(self, solver: Callable[..., Any] | None) -> Any:
        """Return the solution as a function of the sources, in the caller's structure."""
        self._refuse_unconnected()
        equation = Equation(self._sources, self._pullback, self._solved)

        def find() -> Tensors:
            found = self._found(solver)
            self._watch.set()
            return found

        return self._unknowns.nest_of(equation.solution(find))

    def _refuse_unconnected(self) -> None:
        """Refuse unknowns and sources without influence: gradients of zero would hide that."""
        parts, of_all = self._unknowns.parts, self._loss or self._force
        names = [f"inner tensor {place}" for place in range(len(parts))]
        names += [f"outer tensor {place}" for place in range(len(self._sources))]
        whole = [*parts, *self._sources]
        with exact_functions():
            with tf.GradientTape() as tape:
                tape.watch(whole)
                result = of_all(parts)
            slopes = tape.gradient(result, whole)
        if tf.executing_eagerly():
            self._watch = Watch([Resource.of(v) for v in tape.watched_variables()])
        unused = [
            part.name if isinstance(part, tf.Variable) else name
            for name, part, slope in zip(names, whole, slopes)
            if slope is None
        ]
        if unused:
            raise unconnected(unused)

    def _found(self, solver: Callable[..., Any] | None) -> Tensors:
        unknowns = self._unknowns
        if solver is None:
            flat, is_small = newton(
                self._evaluated,
                self._direction,
                unknowns.join(unknowns.parts),
                rtol=self._rtol,
                maxiter=_STEPS,
            )
            checked = _checked(flat, is_small, "Newton's method has not converged")
            return [tf.identity(part) for part in unknowns.at(checked)]
        if unknowns.are_variables:
            solver()
            return [tf.convert_to_tensor(variable) for variable in unknowns.parts]
        found = tf.nest.flatten(solver(unknowns.nest_of(unknowns.parts)))
        shapes = [None if part is None else tuple(part.shape) for part in found]
        if shapes != [tuple(part.shape) for part in unknowns.parts]:
            raise HvpError(f"the solver returns tensors of shapes {shapes}", "those of the start")
        return [tf.cast(part, unknowns.dtype) for part in found]

    def _evaluated(self, flat: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the merit of a point, and what is to become zero there."""
        parts = self._unknowns.at(flat)
        with exact_functions():
            force = self._unknowns.join(self._force(parts))
            if self._loss is None:
                return tf.reduce_sum(force**2) / 2, force
            return tf.reshape(self._loss(parts), []), force

    def _direction(
        self, flat: tf.Tensor, force: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return a step, the slope of the merit along it, and whether it is Newton's."""
        parts = self._unknowns.at(flat)
        step, found = self._krylov(parts, force, _FORCING, transposed=False, damping=0.0)
        is_newton = tf.equal(found.outcome[0], int(SolveOutcome.CONVERGED))
        if self._loss is None:
            return -step, -tf.reduce_sum(force**2), is_newton
        # Conjugate gradients that meet negative curvature at once have not moved.
        step = tf.where(tf.reduce_any(step != 0), step, force)
        return -step, -tf.reduce_sum(step * force), is_newton

    def _pulled(self, parts: Sequence[Any], cotangent: Sequence[Any], damping: float) -> Tensors:
        """Return `A^T v`, with damping, and `B^T v` for the cotangent `v`."""
        slopes = pulled_back(lambda: self._force(parts), [*parts, *self._sources], list(cotangent))
        dense = [tf.convert_to_tensor(slope) for slope in slopes]
        damped = [slope + damping * v for slope, v in zip(dense, cotangent)] if damping else dense
        return [*damped[: len(parts)], *dense[len(parts) :]]

    def _pullback(self, w: Tensors, outer: Tensors, cotangent: Tensors) -> Tensors:
        count, parts = len(w), self._unknowns.parts
        if self._unknowns.are_variables:
            sources = [*parts, *self._sources]
            return at_tensors(
                lambda *v: self._pulled(parts, v, self._damping),
                sources,
                [*w, *outer],
                list(cotangent),
            )
        return at_tensors(
            lambda *both: self._pulled(both[:count], both[count:], self._damping),
            self._sources,
            outer,
            [*w, *cotangent],
        )

    def _solved(self, w: Tensors, right: Tensors, transposed: bool) -> Tensors:
        parts = self._unknowns.parts if self._unknowns.are_variables else w
        flat = self._unknowns.join(right)
        # Outside of the graph that tape.jacobian traces.
        with tf.init_scope():
            refuse_changes(self._watch.changed())
        x, found = self._krylov(parts, flat, self._rtol, transposed, self._damping)
        outcome = found.outcome[0]
        is_negative = tf.equal(outcome, int(SolveOutcome.NEGATIVE_CURVATURE))
        if tf.executing_eagerly() and is_negative and self._loss is not None:
            raise not_a_minimum(int(found.iterations[0]))
        text = (
            f"the system for the derivative of the solution has not been solved to {self._rtol:.1e}"
        )
        is_solved = tf.equal(outcome, int(SolveOutcome.CONVERGED))
        return self._unknowns.split(_checked(x, is_solved, text))

    def _krylov(
        self,
        parts: Sequence[Any],
        right: tf.Tensor,
        rtol: float,
        transposed: bool,
        damping: float,
    ) -> tuple[tf.Tensor, RowSolution]:
        """Solve with `A^T` or `A` by conjugate gradients, for the normal equations of a root."""
        unknowns = self._unknowns

        def pulled(v: tf.Tensor) -> tf.Tensor:
            image = self._pulled(parts, unknowns.split(v), damping)
            return unknowns.join(image[: len(unknowns.parts)])

        def pushed(v: tf.Tensor) -> tf.Tensor:
            zero = tf.zeros_like(v)
            return pulled_back(lambda: pulled(zero), [zero], v)[0]

        first, second = (pushed, pulled) if transposed else (pulled, pushed)

        def multiply(rows: tf.Tensor) -> tf.Tensor:
            row = rows[0]
            return (pulled(row) if self._loss is not None else second(first(row)))[tf.newaxis]

        tolerance = rtol * tf.norm(right, keepdims=True)
        most = tf.minimum(_ITERATIONS * tf.size(right), _MOST_ITERATIONS)
        most = most if self._maxiter is None else self._maxiter
        found = solve_in_graph(CONJUGATE_GRADIENTS, multiply, right[tf.newaxis], tolerance, most)
        return (found.rows[0] if self._loss is not None else first(found.rows[0])), found


def unconnected(names: Sequence[str]) -> HvpError:
    """Return the error for inner or outer variables that the function does not depend on."""
    return HvpError(
        f"the function does not depend on {quoted(names)}",
        "inner and outer variables, or tensors, that it reads",
        "if it reads a tensor that was computed from these, list that tensor: a tape around the "
        "call finds the way from there",
    )


def not_a_minimum(products: int) -> HvpError:
    """Return the error for a Hessian with negative curvature at a solution."""
    return HvpError(
        "the Hessian at the solution is not positive definite: the linear system for the "
        f"derivative met negative curvature or none, in {products} products, so that this is no "
        "strict minimum",
        "a strict minimum, where the solution is a function of the outer variables",
        "start closer to a minimum, or pass damping",
    )


def _checked(flat: tf.Tensor, is_right: tf.Tensor, text: str) -> tf.Tensor:
    """Return the numbers; warn if they are not right, and in a graph return NaN then."""
    if not tf.executing_eagerly():
        return tf.where(is_right, flat, tf.cast(np.nan, flat.dtype))
    if not is_right:
        warn(text, ConvergenceWarning)
    return flat


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, float)) or (
        tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)
    )
