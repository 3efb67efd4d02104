"""The inverse of the damped Hessian, applied by the solver that the user chose."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from hvp._errors import ConvergenceWarning, HvpError
from hvp._operators.hessian import HessianOperator
from hvp._runtime.digest import digest
from hvp._runtime.user_warning import warn
from hvp._solve.inverses import ExactInverse, NeumannInverse
from hvp._solve.solve import solve
from hvp._solve.solver import Solver
from hvp._spectra.eigsh import eigsh

_KrylovMethod = Literal["cg", "block_cg", "minres"]
_KRYLOV_METHODS: tuple[_KrylovMethod, ...] = ("cg", "block_cg", "minres")
_INVERSES: dict[str, Any] = {
    "exact": ExactInverse,
    "neumann": NeumannInverse,
}
# "auto" stands for "exact" up to this many variables, and for "block_cg" beyond.
_MAX_EXACT = 1024
# A block has at most this many right-hand sides. A solver needs this many vectors for each of them,
# which take at most this many bytes by default. The part _RECYCLED of that is for directions of
# earlier solves, at most _MAX_DIRECTIONS of them with their products.
_MAX_WIDTH, _VECTORS, _BYTES = 128, 12, 2**30
_RECYCLED, _MAX_DIRECTIONS = 0.25, 512
# Products to find how much damping is missing.
_LOOK = 200


def check_solver(solver: Any) -> None:
    """Raise `HvpError` unless `solver` is the name of a solver, or a function."""
    names = ("auto", *_INVERSES, *_KRYLOV_METHODS, "ekfac", "kfac")
    if solver not in names and not callable(solver):
        raise HvpError(f"the solver is {solver!r}", " or ".join(map(repr, names)))


class DampedInverse:
    """The inverse of `H + damping I`, applied to `width` right-hand sides at once.

    The `solver` is as for `InfluenceFunctions`; as an attribute it is what ``"auto"`` stands for.
    Only the Krylov methods use `rtol` and `maxiter`. The vectors of the solver take at most
    `nbytes` bytes.
    """

    def __init__(
        self,
        operator: HessianOperator,
        solver: str | Callable[[HessianOperator], Any],
        rtol: float,
        maxiter: int | None,
        nbytes: int | None,
    ) -> None:
        self._operator, self._rtol, self._maxiter = operator, rtol, maxiter
        size = operator.shape[0]
        if solver == "auto":
            solver = "exact" if size <= _MAX_EXACT else "block_cg"
        self.solver = solver
        bytes_per_side = size * operator.dtype.itemsize * _VECTORS
        nbytes = nbytes or _BYTES
        directions = int(_RECYCLED * nbytes) // (2 * size * operator.dtype.itemsize)
        self._solver = Solver(operator, capacity=max(1, min(_MAX_DIRECTIONS, directions)))
        self.width = max(1, min(_MAX_WIDTH, int((1 - _RECYCLED) * nbytes) // bytes_per_side))
        self._inverse: Any = None
        # Number of evaluations of the operator when `_inverse` was built.
        self._evaluations = -1

    def apply(self, rows: np.ndarray, checkpoint: Any = None) -> np.ndarray:
        """Return the solution for each row, of shape `(k, n)` like `rows`.

        Only the Krylov methods use `checkpoint`, which is as for `solve`.
        """
        for method in _KRYLOV_METHODS:
            if method == self.solver:
                return self._solve(method, rows, checkpoint)
        if self._inverse is None or self._evaluations != self._operator.stats.gradient_evaluations:
            self._build_inverse()
        return np.ascontiguousarray(np.asarray(self._inverse @ rows.T).T, rows.dtype)

    def fingerprint(self) -> dict[str, str]:
        """Return a fingerprint of the solver and its settings."""
        if isinstance(self.solver, str):
            solver = self.solver
        else:  # a function is identified by its effect on one vector
            ones = np.ones((1, self._operator.shape[0]), self._operator.dtype)
            solver = digest(self.apply(ones))
        settings = [self._operator.damping, self._rtol, self._maxiter]
        return {"solver": solver, "settings": repr(settings)}

    def _solve(self, method: _KrylovMethod, rows: np.ndarray, checkpoint: Any) -> np.ndarray:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            b = np.asarray(rows.T, order="C")
            options: Any = {"rtol": self._rtol, "maxiter": self._maxiter}
            if method == "block_cg" and checkpoint is None:
                result = self._solver.solve(b, method=method, **options)
            else:  # what resumes must not depend on what came before
                result = solve(self._operator, b, method=method, checkpoint=checkpoint, **options)
        if "negative curvature" in result.outcomes:
            self._refuse_curvature(result.negative_curvature)
        for warning in caught:
            warn(warning.message)
        return np.ascontiguousarray(result.x.T)

    def _build_inverse(self) -> None:
        operator = self._operator
        evaluations = operator.stats.gradient_evaluations
        build: Any = _INVERSES[self.solver] if isinstance(self.solver, str) else self.solver
        inverse = build(operator)
        shape = getattr(inverse, "shape", None)
        if shape != operator.shape:
            raise HvpError(
                f"the solver function returned {type(inverse).__name__} of shape {shape}",
                f"the inverse of its argument, as an operator of shape {operator.shape}",
            )
        self._inverse, self._evaluations = inverse, evaluations
        if isinstance(inverse, ExactInverse):
            lowest = float(inverse.eigenvalues[0])
            if lowest < 0 and inverse.is_nonzero[0]:
                warn(
                    f"hvp.InfluenceFunctions: the damped Hessian has the eigenvalue {lowest:.3g}, "
                    "so the weights are not a minimum: train further, or raise damping (now "
                    f"{operator.damping:g})",
                    ConvergenceWarning,
                )

    def _refuse_curvature(self, directions: np.ndarray) -> None:
        """Raise an error that says how much damping is missing.

        The columns of `directions` are directions of negative curvature, or zero if there is none.
        """
        norms = np.linalg.norm(directions, axis=0)
        units = directions[:, norms > 0] / norms[norms > 0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # an upper bound is enough
            [lowest], _ = eigsh(self._operator, 1, "SA", tol=0.01, max_products=_LOOK, v0=units)
        damping = self._operator.damping
        raise HvpError(
            "the damped Hessian is not positive definite, so the weights are not a minimum: it has "
            f"the eigenvalue {lowest:.3g} or a smaller one",
            "a model that is trained to a minimum, or more damping",
            f"raise damping (now {damping:g}) above {damping - lowest:.2g}; or pass "
            "curvature='gauss-newton', which is never negative (of plain functions, with the pair "
            "(model, output_loss) as loss)",
        )
