"""Whether an operator is the Hessian that was meant.

What TensorFlow lacks is found before an operator is built; this looks at what only shows in
numbers: a gradient function somebody wrote that is right once and wrong twice, a loss that is
another one each time, variables the loss does not read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._check.report import CheckReport, Finding, Outcome
from hvp._data.budget import amount, peak_nbytes
from hvp._derivatives.missing import WRONG_AT_VALUES
from hvp._errors import GraphModeError, HvpError, NonFiniteError
from hvp._operators.operator import SymmetricOperator, core_of
from hvp._runtime.progress import check_progress, progress_bar
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.nearby import Gradients

# Steps of the Lanczos iteration, which are most of the products.
_STEPS = 10
# Differences are taken over three steps, in units of the best for a smooth function. They settle if
# two neighbours agree to this part; then they may differ from the product so many times as much.
_DIFFERENCES = (4.0, 1.0, 0.25)
_SETTLED, _APART = 0.05, 10.0
_SHOWN = 3
_FLOAT64 = float(np.finfo(np.float64).eps)


@outside_strategies
def check(H: Any, *, rtol: float = 1e-5, seed: int = 0, progress: Any = False) -> CheckReport:
    """Look whether an operator is the Hessian that was meant, in at most 20 products.

    Parameters
    ----------
    H : HessianOperator
        Evaluated at the values the variables have now.
    rtol : float, optional
        The relative tolerance with which linear systems are to be solved: whether the dtype is
        enough for it is told.
    seed : int, optional
        Of the vectors it is multiplied by.
    progress : bool or "always", optional
        Shows a bar over the steps.

    Returns
    -------
    CheckReport
        Prints as a table; `ok`, `raise_if_failed()`. What was looked at:

        *products*
            Are they finite, and the same when computed again?
        *symmetry*, *linearity*, *blocks*
            Are they those of a symmetric matrix, one by one and many at once?
        *same each time*
            Is the loss, traced anew and evaluated twice, the one the operator was built from? If
            not, the variables are named whose gradients differ, and the layers that draw.
        *differences*
            Are products differences of gradients? Along one direction, by central differences:
            in float64, of the traced gradient, where that can be had (no loops, branches or
            recomputed parts), else in the variables' dtype. Where they do not settle (kinks,
            rounding), this is a warning.
        *connected*
            Does the loss depend on all variables?
        *operations*
            Gradients the user wrote, random draws, Python code, products of entries.
        *curvature*
            The sign of the largest and smallest eigenvalues, estimated from inside.
        *precision*
            Is the dtype enough for `rtol`, with this condition number at least?
        *cost*
            Time and memory of a product.

    Raises
    ------
    HvpError
        If `H` is something else, and as `H @ v` where it is stale or closed.

    Notes
    -----
    Costs at most 20 products, and eight evaluations of the gradient (two where the loss is another
    one each time), by a trace of their own that keeps nothing. For the differences variables are
    moved, by about the cube root of rounding times their size, and put back, also if something
    raises or interrupts; other threads that use the operator wait.

    That products agree with differences along one random direction does not prove that they do
    along all; a term that is missing is missed only by chance.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0], name="w")
    >>> with hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w) as H:
    ...     report = hvp.check(H)
    >>> report.ok, report.eigenvalues.round(2), report.products
    (True, array([1., 4., 9.]), 10)
    >>> report["curvature"].said
    'positive: eigenvalues from 1 to 9'
    """
    if not isinstance(H, SymmetricOperator):
        raise HvpError(
            f"check was given {type(H).__name__}", "an hvp.HessianOperator", "check its parts"
        )
    if not (isinstance(rtol, (int, float)) and 0 < rtol < 1):
        raise HvpError(f"the argument rtol is {rtol!r}", "a number between 0 and 1")
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise HvpError(f"the argument seed is {seed!r}", "a whole number, not negative")
    if not tf.executing_eagerly():
        raise GraphModeError("check is called while TensorFlow traces a graph", "eager execution")
    check_progress(progress)
    with core_of(H).snapshot.exclusively():  # while the variables are moved
        return _checked(H, rtol, seed, progress)


def _checked(H: SymmetricOperator, rtol: float, seed: int, progress: Any) -> CheckReport:
    before, peak = H.stats.products, peak_nbytes()
    run = _Run(H, np.random.default_rng(seed))
    steps: list[Callable[[], Iterator[Finding]]] = [
        run.products,
        run.same_each_time,
        run.differences,
        run.connected,
        run.operations,
        lambda: run.spectrum(rtol),
    ]
    findings: list[Finding] = []
    with progress_bar(progress, total=len(steps), unit="step") as bar, contextlib.closing(run):
        for step in steps:
            findings += step()
            bar.update()
    after = peak_nbytes()
    grown = None if peak is None or after is None else after - peak
    seconds = float(np.median(run.seconds[1:] or run.seconds or [np.nan]))
    residuals = H.stats.residual_bytes
    findings.append(_cost(seconds, residuals, grown))
    return CheckReport(
        title=f"{type(H).__name__} of size {H.shape[0]}, {H.dtype.name}",
        findings=tuple(findings),
        eigenvalues=run.eigenvalues,
        seconds_per_product=seconds,
        residual_bytes=residuals,
        peak_bytes=grown,
        products=H.stats.products - before,
        gradient_evaluations=run.evaluations,
    )


class _Run:
    """The steps of a check; each gives what it found.

    Attributes
    ----------
    eigenvalues : ndarray
        Ritz values.
    seconds : list of float
        Of products with one vector.
    """

    def __init__(self, H: SymmetricOperator, rng: np.random.Generator) -> None:
        self._H, self._rng, self._core = H, rng, core_of(H)
        self._n, self._epsilon = H.shape[0], float(np.finfo(H.dtype).eps)
        self._close = 3 * np.sqrt(self._epsilon)  # of products of one matrix, relative to its norm
        self.eigenvalues = np.empty(0)
        self.seconds: list[float] = []
        self._norm = 0.0
        self._gradients: Gradients | None = None
        self._repeats = False

    @property
    def evaluations(self) -> int:
        """Evaluations of the gradient so far."""
        return 0 if self._gradients is None else self._gradients.evaluations

    def close(self) -> None:
        """Release what was evaluated."""
        if self._gradients is not None:
            self._gradients.close()

    def _unit(self) -> np.ndarray:
        v = self._rng.standard_normal(self._n)
        return (v / np.linalg.norm(v)).astype(self._H.dtype)

    def _multiply(self, v: np.ndarray) -> np.ndarray:
        start = time.perf_counter()
        product = self._H @ v
        self.seconds.append(time.perf_counter() - start)
        return product

    def products(self) -> Iterator[Finding]:
        """Look at products alone: by the Lanczos iteration, and a few more."""
        try:
            basis, asymmetry = self._lanczos()
            first = basis[0]
            Hv, u = self._multiply(first), self._unit()
            again = self._multiply(first)
            Hu = self._multiply(u)
            combined = self._multiply((2.5 * first - 0.7 * u).astype(first.dtype))
            block = self._H @ np.stack([first, u], axis=1)
        except NonFiniteError as error:
            yield Finding("products", "failed", str(error))
            return
        scale = max(self._norm, float(np.linalg.norm(Hv)), float(np.linalg.norm(Hu)))
        scale = scale or 1.0

        def compared(name: str, apart: float, said: str) -> Finding:
            outcome: Outcome = "ok" if apart <= self._close * scale else "failed"
            return Finding(name, outcome, f"{said} {apart / scale:.1g}")

        if np.array_equal(Hv, again):
            yield Finding("products", "ok", "finite, and the same to the bit when computed again")
        else:
            apart = float(np.linalg.norm(Hv - again))
            yield compared("products", apart, "computed again they differ by")
        yield compared("symmetry", asymmetry, "u'Hv and v'Hu differ by")
        apart = float(np.linalg.norm(combined - (2.5 * Hv - 0.7 * Hu)))
        yield compared("linearity", apart, "H(au + bv) and aHu + bHv differ by")
        apart = float(np.linalg.norm(block - np.stack([Hv, Hu], axis=1)))
        yield compared("blocks", apart, "H @ [u, v] and [H @ u, H @ v] differ by")

    def _lanczos(self) -> tuple[list[np.ndarray], float]:
        """Go through the Lanczos iteration; return its basis, and how asymmetric the matrix is.

        All coefficients are computed, also those that are zero or known of a symmetric matrix.
        """
        basis, coefficients = [self._unit()], np.zeros((_STEPS + 1, _STEPS))
        for step in range(min(_STEPS, self._n)):
            w = self._multiply(basis[step]).astype(np.float64)
            for _ in range(2):  # the second time takes away what rounding left
                for i, q in enumerate(basis):
                    part = float(q.astype(np.float64) @ w)
                    coefficients[i, step] += part
                    w -= part * q
            rest = float(np.linalg.norm(w))
            coefficients[step + 1, step] = rest
            size = step + 1
            largest = np.abs(coefficients[:size, :size]).max()
            if rest <= self._close * largest or size == min(_STEPS, self._n):
                break
            basis.append((w / rest).astype(self._H.dtype))
        T = coefficients[:size, :size]
        self.eigenvalues = np.linalg.eigvalsh((T + T.T) / 2)
        self._norm = float(np.abs(self.eigenvalues).max())
        return basis, float(np.abs(T - T.T).max())

    def same_each_time(self) -> Iterator[Finding]:
        """Evaluate the loss again, by a trace of its own, twice."""
        name = "same each time"
        remarks = self._core.remarks
        drawn = [] if remarks is None else remarks.random
        where = f"; it draws random numbers: {_listed(drawn)}" if drawn else ""
        self._gradients = self._core.gradients()
        if self._gradients is None:
            yield Finding(name, "warning", "not looked at: there is no loss to evaluate again")
            return
        known = (self._H.value, self._H.gradient)
        anew = self._gradients.last()
        again = self._gradients.again()
        for one, other, said in (
            (anew, again, "evaluated twice"),
            (known, anew, "traced anew"),
        ):
            differing = self._differing(one[1], other[1])
            value = abs(one[0] - other[0])
            if differing or value > self._rounding * max(abs(one[0]), abs(other[0])):
                yield Finding(
                    name,
                    "failed",
                    f"{said}, the loss is {one[0]:.6g} and {other[0]:.6g}; gradients differ by "
                    f"{_listed(differing) or 'none of the variables'}{where}",
                )
                return
        self._repeats = True
        yield Finding(name, "ok", "loss and gradient, traced anew and evaluated twice")

    @property
    def _rounding(self) -> float:
        """How far the same sums may be apart, in another order."""
        return 1000 * self._epsilon

    def _differing(self, one: np.ndarray, other: np.ndarray) -> list[str]:
        """Name the variables by which two gradients differ."""
        assert self._gradients is not None
        scale = self._rounding * max(np.linalg.norm(one), np.linalg.norm(other))
        parts = zip(self._gradients.parts(one), self._gradients.parts(other))
        apart = [np.linalg.norm(a - b) for a, b in parts]
        return [repr(n) for n, d in zip(self._core.variable_names, apart) if d > scale]

    def differences(self) -> Iterator[Finding]:
        """Compare a product with central differences of the gradient."""
        name = "differences"
        if self._gradients is None or not self._repeats or not self.eigenvalues.size:
            yield Finding(name, "warning", "not looked at: there is no one gradient, see above")
            return
        # Of each variable by its own scale, which may be quite another one than its neighbour's.
        scales = self._gradients.scales()
        direction = (scales * self._rng.standard_normal(self._n)).astype(self._H.dtype)
        got = self._multiply(direction) - self._H.damping * direction.astype(np.float64)
        # In float64 steps can be so short that there are no kinks within them.
        wide = self._gradients.in_float64()
        try:
            try:
                found, length = self._differences(direction, wide)
            except tf.errors.OpError:
                if wide is None:
                    raise
                wide = None  # there is no kernel for an operation in float64
                found, length = self._differences(direction, wide)
        except NonFiniteError as error:
            yield Finding(name, "warning", f"not looked at: nearby, {error}")
            return
        epsilon = self._epsilon if wide is None else _FLOAT64
        found = [scales * difference for difference in found]
        apart = [float(np.linalg.norm(a - b)) for a, b in zip(found, found[1:])]
        best = int(np.argmin(apart))
        want = (found[best] + found[best + 1]) / 2
        miss = scales * got - want
        # A direction of small curvature is judged by the rounding of the gradients it came from.
        floor = epsilon * float(np.linalg.norm(scales * self._H.gradient)) / length
        size = max(float(np.linalg.norm(scales * got)), float(np.linalg.norm(want)), floor) or 1.0
        settled, wrong = apart[best] / size, float(np.linalg.norm(miss)) / size
        where = " in float64" if wide is not None else ""
        said = f"central differences{where} and a product differ by {wrong:.1g}"
        if settled > _SETTLED:
            more = ""
            if epsilon > 1e-12:
                more = (
                    "; a model in float64 would tell more: "
                    "keras.config.set_dtype_policy('float64') before its layers are made"
                )
            yield Finding(
                name,
                "warning",
                f"not judged: {said}, but differences are good to {settled:.1g} only: kinks, or "
                f"rounding{more}",
            )
        elif wrong <= max(_APART * settled, self._close):
            yield Finding(name, "ok", said)
        else:
            yield Finding(
                name,
                "failed",
                f"{said}, most in {self._largest(miss)}; a tf.stop_gradient or a gradient "
                "somebody wrote would do that, or a loss that changes what it reads",
            )

    def _differences(
        self, direction: np.ndarray, wide: Callable[[np.ndarray], np.ndarray] | None
    ) -> tuple[list[np.ndarray], float]:
        """Return central differences along a direction over three steps, and their unit."""
        length = float(np.cbrt(self._epsilon if wide is None else _FLOAT64))
        found = []
        for step in _DIFFERENCES:
            change = step * length * direction
            ends = [self._gradient_at(sign * change, wide) for sign in (1.0, -1.0)]
            found.append((ends[0] - ends[1]) / (2 * step * length))
        return found, length

    def _gradient_at(
        self, change: np.ndarray, wide: Callable[[np.ndarray], np.ndarray] | None
    ) -> np.ndarray:
        """Return the gradient after a change of the variables, in float64 if that can be had."""
        assert self._gradients is not None
        if wide is not None:
            gradient = wide(change.astype(np.float64))
            if not np.isfinite(gradient).all():
                raise NonFiniteError("the gradient is not finite")
            return gradient
        with self._gradients.moved(change.astype(self._H.dtype)):
            return self._gradients.again()[1].astype(np.float64)

    def _largest(self, error: np.ndarray) -> str:
        assert self._gradients is not None
        norms = [np.linalg.norm(part) for part in self._gradients.parts(error)]
        return repr(self._core.variable_names[int(np.argmax(norms))])

    def connected(self) -> Iterator[Finding]:
        """Name the variables that the loss does not depend on."""
        names = self._core.unconnected()
        if not names:
            yield Finding("connected", "ok", "the loss depends on all variables")
            return
        said = f"the loss does not depend on {_listed(map(repr, names))}: rows of zeros"
        yield Finding("connected", "warning", said)

    def operations(self) -> Iterator[Finding]:
        """Tell what is known of the loss's graph."""
        name, remarks = "operations", self._core.remarks
        if remarks is None:
            yield Finding(
                name,
                "warning",
                "not known, for the loss could not be traced: of operations without a second "
                "derivative only those that answer None are seen",
            )
            return
        said = []
        if remarks.custom:
            said.append(f"gradients as tf.custom_gradient says: {_listed(remarks.custom)}")
        if remarks.python:
            said.append("Python code runs in the graph, where no variable is watched")
        if remarks.repeated:
            places = dict.fromkeys(doubt.place for doubt in remarks.repeated)
            said.append(f"random draws, the same each time, at {_listed(places)}")
        if remarks.wrong_at_values:
            values = sorted({WRONG_AT_VALUES[d.kind].values for d in remarks.wrong_at_values})
            said.append(f"refused at {' and '.join(values)}: {_listed(remarks.wrong_at_values)}")
        if said:
            yield Finding(name, "note", "; ".join(said))
        else:
            yield Finding(name, "ok", "all have second derivatives in TensorFlow")

    def spectrum(self, rtol: float) -> Iterator[Finding]:
        """Tell the signs of eigenvalues, and whether the dtype is enough."""
        if not self.eigenvalues.size:
            yield Finding("curvature", "warning", "not looked at: products are not finite")
            return
        low, high = float(self.eigenvalues[0]), float(self.eigenvalues[-1])
        noise = 100 * self._epsilon * self._norm
        below, above = ("", "") if self._n <= _STEPS else (" or below", " or above")
        if low < -noise:
            kind = "negative" if high <= noise else "indefinite"
            advice = f"; conjugate gradients want damping above {-low:.2g}, or use MINRES"
        elif low <= noise:
            kind, advice = "singular, or nearly", "; conjugate gradients want some damping"
        else:
            kind, advice = "positive", ""
        outcome: Outcome = "note" if advice else "ok"
        said = f"{kind}: eigenvalues from {low:.3g}{below} to {high:.3g}{above}{advice}"
        yield Finding("curvature", outcome, said)
        smallest = float(np.abs(self.eigenvalues).min())
        condition = self._norm / smallest if smallest else np.inf
        attainable = self._epsilon * condition
        said = f"condition number {condition:.2g} or more, rtol {rtol:.0e}"
        if attainable <= rtol:
            yield Finding("precision", "ok", f"{self._H.dtype.name} is enough: {said}")
            return
        advice = "add damping" if self._epsilon < 1e-12 else "build it in float64, or add damping"
        wrong = f"solutions may be wrong by {attainable:.1g} of their size"
        if attainable >= 1:
            wrong = "solutions are all rounding"
        yield Finding("precision", "warning", f"in {self._H.dtype.name}, {wrong}: {said}; {advice}")


def _cost(seconds: float, residuals: int | None, grown: int | None) -> Finding:
    said = f"{1000 * seconds:.3g} ms for a product" if np.isfinite(seconds) else "no product"
    if residuals is not None:
        said += f"; {amount(residuals)} kept for them"
    if grown is not None:
        said += f"; peak memory {f'{amount(grown)} higher' if grown else 'no higher'} for the check"
    return Finding("cost", "note", said)


def _listed(things: Any) -> str:
    things = list(map(str, things))
    more = f", and {len(things) - _SHOWN} more" if len(things) > _SHOWN else ""
    return ", ".join(things[:_SHOWN]) + more
