"""Truncated Newton: a trust region around each point, conjugate gradients in a graph inside."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf
from scipy.optimize import OptimizeResult

from hvp._errors import GraphModeError, HvpError, NonFiniteError
from hvp._keras.compiled_loss import compiled_problem
from hvp._minimize.models import SampledModel, WholeModel
from hvp._minimize.non_finite import log_non_finite, non_finite_said
from hvp._minimize.objective import check_options
from hvp._minimize.points import Point, Points
from hvp._minimize.steihaug import Outcome, SteihaugResult
from hvp._minimize.subproblem import Subproblem, norm_of, wide
from hvp._operators.operator import SymmetricOperator
from hvp._runtime.arguments import check_count
from hvp._runtime.guard import OneProcess, refuse_forks
from hvp._runtime.progress import check_progress, progress_bar
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.watch import Watch
from hvp._solve.preconditioners import PRECONDITIONERS
from hvp._vectors.resources import Resource

# A step is taken if the loss falls by this part of what the model promised; the region shrinks
# below the second, and grows above the third (Conn, Gould and Toint 2000, chapter 6).
_TAKEN, _POOR, _GOOD = 1e-4, 0.25, 0.75
_SHRINK, _GROW = 0.25, 2.0
# Damping, where there is some, follows the same ratio (Martens 2010).
_LESS_DAMPING, _MORE_DAMPING = 2 / 3, 3 / 2
# Eisenstat and Walker 1996, their second choice, with its safeguard.
_FORCING, _FORCING_POWER, _SAFE = 0.9, (1 + math.sqrt(5)) / 2, 0.1
_FIRST_FORCING = 0.5
# Below so many roundings of the loss its difference means nothing.
_ROUNDINGS = 100
# So many steps in a row that fail below the rounding of the loss are the end.
_IDLE = 3


@dataclass(frozen=True)
class NewtonStep:
    """What one step of `NewtonCG` did.

    Attributes
    ----------
    iteration : int
        Which step it was, from 1.
    loss : float
        Where the variables are after it.
    gradient_norm : float
        The Euclidean norm of the gradient there.
    accepted : bool
        Whether the variables moved.
    ratio : float
        By how much the loss fell, in units of what the model promised; minus infinity if the loss
        or its gradient was not finite at the trial point, NaN if there was none.
    radius : float
        Of the trust region for the next step.
    damping : float
        For the next step.
    forcing : float
        How small the model's gradient had to become, in units of the gradient.
    cg_iterations : int
        Products with the Hessian in this step.
    outcome : str
        Why conjugate gradients ended: ``"converged"``, ``"boundary"`` (of the trust region),
        ``"negative curvature"`` or ``"maxiter"``.
    from_gradients : bool
        Whether the decrease was computed from gradients, being less than the loss's rounding.
    """

    iteration: int
    loss: float
    gradient_norm: float
    accepted: bool
    ratio: float
    radius: float
    damping: float
    forcing: float
    cg_iterations: int
    outcome: str
    from_gradients: bool


class _History(list[NewtonStep]):
    """The steps of a run; shown in one line, for a run may have a thousand."""

    def __repr__(self) -> str:
        if not self:
            return "[no steps]"
        taken = sum(step.accepted for step in self)
        return (
            f"[{len(self)} steps, {taken} taken, loss {self[0].loss:.4g} ... {self[-1].loss:.4g}]"
        )


class NewtonCG(OneProcess, tf.Module):
    """A truncated Newton method whose conjugate gradients run inside a graph.

    Each step minimizes the quadratic model of the loss in a trust region, approximately, by
    Steihaug's conjugate gradients [ST]_: some tens of iterations in one call of a graph, no Python
    for each product. Directions of negative curvature are followed to the boundary of the region.

    Parameters
    ----------
    loss : callable or HessianOperator
        As for `HessianOperator`; an operator stands for its loss, variables and data.
    variables, data
        As for `HessianOperator`.
    hessian_batch_size : int, optional
        Take the Hessian over so many examples, drawn anew for each step, `data` being a tuple or
        dict of arrays. By default it is over all, from the same evaluation as the gradient.
    gradient_batch_size : int, optional
        With `hessian_batch_size`, take loss and gradient over so many examples, drawn anew for each
        step, the same at both its ends, no fewer than for the Hessian. By default over all.
    radius : float, optional
        Of the trust region at first, in the units of the variables (of the preconditioner's norm,
        if there is one).
    damping : float, optional
        Multiple of the identity that is added to the Hessian at first; if not zero, it grows and
        shrinks with the ratio of the loss's decrease to the model's, as the region does.
    forcing : float or "eisenstat-walker", optional
        Conjugate gradients end where the model's gradient is so many times the gradient; by default
        after Eisenstat and Walker [EW]_: the fewer iterations the farther the minimum.
    max_cg_iterations : int, optional
        Of one step.
    preconditioner : {"diagonal", "nystrom"}, optional
        The diagonal's absolute values, estimated from 16 products with random signs, or a sketch of
        the largest eigenvalues of positive curvature from `rank` products [NY]_. Made anew when
        conjugate gradients have used four times the products it took.
    rank : int, optional
        Of the sketch.
    seed : int, optional
        Of samples and sketches.
    **options
        Of `HessianOperator`: `batch_size`, `memory_limit`, `reduction`, `regularization`, `weight`,
        `engine`, `jit_compile`, `recompute`.

    Raises
    ------
    HvpError
        As `HessianOperator`; if an argument is not what it should be.

    Notes
    -----
    A step costs one evaluation of loss and gradient, at the trial point, and one product for each
    iteration of conjugate gradients. Where the model's promise is below the rounding of the loss,
    the decrease is computed from the gradients at both ends of the step, so that the gradient
    converges as far as its own rounding allows.

    A `tf.Module`: ``tf.train.Checkpoint(optimizer=newton)`` saves the variables and the method's
    own state. A run that is ended between two steps and restored goes on with the same iterates.
    If variables are changed between steps, the next begins where they are.

    References
    ----------
    .. [ST] T. Steihaug, "The conjugate gradient method and trust regions in large scale
       optimization", SIAM Journal on Numerical Analysis 20(3), 626-637, 1983.
       https://doi.org/10.1137/0720042
    .. [EW] S. C. Eisenstat, H. F. Walker, "Choosing the forcing terms in an inexact Newton method",
       SIAM Journal on Scientific Computing 17(1), 16-32, 1996. https://doi.org/10.1137/0917003
    .. [NY] Z. Frangella, J. A. Tropp, M. Udell, "Randomized Nystrom preconditioning", SIAM Journal
       on Matrix Analysis and Applications 44(2), 718-752, 2023. https://doi.org/10.1137/21M1466244

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([-1.2, 1.0], dtype=tf.float64)
    >>> rosenbrock = lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2
    >>> newton = hvp.NewtonCG(rosenbrock, w)
    >>> newton.step().accepted
    True
    >>> result = newton.minimize(gtol=1e-10)
    >>> w.numpy().round(8), result.success
    (array([1., 1.]), True)
    """

    @outside_strategies
    def __init__(
        self,
        loss: Any,
        variables: Any = None,
        data: Any = None,
        *,
        hessian_batch_size: int | None = None,
        gradient_batch_size: int | None = None,
        radius: float = 1.0,
        damping: float = 0.0,
        forcing: float | Literal["eisenstat-walker"] = "eisenstat-walker",
        max_cg_iterations: int = 250,
        preconditioner: Literal["diagonal", "nystrom"] | None = None,
        rank: int = 20,
        seed: int = 0,
        **options: Any,
    ) -> None:
        refuse_forks()
        super().__init__(name="newton_cg")
        later = sorted({"gtol", "rtol", "maxiter", "callback", "progress"} & set(options))
        if later:
            raise HvpError(
                f"given to NewtonCG: {', '.join(later)}", "an argument of its method minimize"
            )
        check_options(options, "NewtonCG")
        _check_arguments(
            radius=radius,
            damping=damping,
            forcing=forcing,
            max_cg_iterations=max_cg_iterations,
            preconditioner=preconditioner,
            rank=rank,
            seed=seed,
        )
        if hessian_batch_size is None:
            if gradient_batch_size is not None:
                raise HvpError(
                    "gradient_batch_size is given without hessian_batch_size",
                    "both, the gradient over no fewer examples than the Hessian",
                )
            model = WholeModel(Points.of(loss, variables, data, **options))
        else:
            if isinstance(loss, SymmetricOperator):
                raise HvpError("hessian_batch_size goes with an operator", "a loss and data")
            model = SampledModel(
                loss, variables, data, hessian_batch_size, gradient_batch_size, seed, options
            )
        position = model.points.position
        rank = min(rank, position.size)
        self._model, self._position = model, position
        self._subproblem = Subproblem(preconditioner, rank, max_cg_iterations, seed)
        self._chosen_forcing = forcing
        self._watch = Watch([Resource.of(variable) for variable in position.variables])
        self._watch.set()
        self._seconds = 0.0
        # What a checkpoint has to hold.
        self._trained = position.variables
        self._radius = _number(radius)
        self._damping = _number(damping)
        self._forcing = _number(_FIRST_FORCING)
        self._norm_before = _number(0.0)
        self._iterations = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._served = tf.Variable(-1, dtype=tf.int64, trainable=False)
        self._tensors = [
            tf.Variable(tf.zeros(shape, position.dtype), trainable=False)
            for shape in self._subproblem.shapes(position.size)
        ]
        self._state = [
            *(self._radius, self._damping, self._forcing, self._norm_before),
            *(self._iterations, self._served),
        ]
        self._beginning = tuple(variable.numpy().item() for variable in self._state)

    @classmethod
    def from_keras(
        cls,
        model: Any,
        data: Any,
        *,
        variables: Any = None,
        training: bool = False,
        **options: Any,
    ) -> NewtonCG:
        """Return the method for the loss that a Keras model was compiled with.

        Parameters
        ----------
        model : keras.Model
            Compiled. Loss weights, several outputs and regularizers count as in `model.evaluate`.
        data : tuple of arrays, or iterable of such
            `(x, y)` or `(x, y, sample_weight)`, as for `model.fit`, or batches of them.
        variables : nest, optional
            What to minimize over; the model's trainable variables by default.
        training : bool, optional
            Whether layers behave as in training (dropout, batch normalization).
        **options
            Of `NewtonCG`.

        Returns
        -------
        NewtonCG

        Raises
        ------
        HvpError
            As `NewtonCG` and `HessianOperator.from_keras`.

        Examples
        --------
        >>> import keras
        >>> import numpy as np
        >>> import hvp
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> x = np.random.default_rng(0).standard_normal((20, 3))
        >>> newton = hvp.NewtonCG.from_keras(model, (x, x @ [1.0, -2.0, 0.5]))
        >>> newton.minimize(gtol=1e-4).success
        True
        >>> model.layers[0].kernel.numpy().round(3).ravel()
        array([ 1. , -2. ,  0.5], dtype=float32)
        """
        loss, variables = compiled_problem(model, data, variables, training, options)
        return cls(loss, variables, data, **options)

    def __repr__(self) -> str:
        return (
            f"NewtonCG({self._position.size} variables, {self.iterations} steps, "
            f"radius {self.radius:.3g}, damping {self.damping:.3g})"
        )

    @property
    def iterations(self) -> int:
        """Steps so far."""
        return int(self._iterations)

    @property
    def radius(self) -> float:
        """Of the trust region, now."""
        return float(self._radius)

    @property
    def damping(self) -> float:
        """Multiple of the identity that is added to the Hessian, now."""
        return float(self._damping)

    @property
    def gradient_evaluations(self) -> int:
        """How often loss and gradient were evaluated; samples' Hessians apart."""
        return self._model.points.work.evaluations

    @property
    def products(self) -> int:
        """How many products with the Hessian there were."""
        return self._model.products

    @outside_strategies
    def step(self) -> NewtonStep:
        """Take one step, or find that it is none and make the trust region smaller.

        Returns
        -------
        NewtonStep

        Raises
        ------
        NonFiniteError
            If the loss or its gradient is not finite where the variables are, or a product with the
            Hessian is not.
        StaleOperatorError
            If a variable that the loss reads, and that is not minimized over, has changed.

        Notes
        -----
        If it raises, the variables are where they were.
        """
        _check_eager()
        with self._position.restored(only_if_it_fails=True):
            return self._step(self._here(), 0.0)

    @outside_strategies
    def minimize(
        self,
        *,
        gtol: float = 1e-5,
        rtol: float = 0.0,
        maxiter: int = 1000,
        leave_saddles: bool = True,
        callback: Callable[[NewtonStep], Any] | None = None,
        progress: bool | Literal["always"] = False,
    ) -> OptimizeResult:
        """Take steps until the gradient is small.

        Parameters
        ----------
        gtol, rtol : float, optional
            The Euclidean norm of the gradient that is small enough: `gtol`, or `rtol` times what it
            is at the beginning, whichever is larger.
        maxiter : int, optional
            How many steps to take.
        leave_saddles : bool, optional
            Whether to look for negative curvature where the gradient is small, by up to 22
            products, and go on along it if there is some.
        callback : callable, optional
            Called with each `NewtonStep`; ends the run by raising `StopIteration`.
        progress : bool or "always", optional
            Shows the steps, the loss and the norm of its gradient, by tqdm, on a terminal; with
            ``"always"`` anywhere.

        Returns
        -------
        scipy.optimize.OptimizeResult
            `x`, `fun`, `jac`, `success`, `status`, `message`, `nit`; `history`, a list of
            `NewtonStep`; `gradient_evaluations`, `products`, `non_finite` (at how many points the
            loss or its gradient was not finite); `seconds` and, of them, `evaluation_seconds` and
            `cg_seconds`. Counts are of this call. `status` is 0 where the gradient is small, 1
            after `maxiter`, 2 where rounding allows no more, 3 where a product with the Hessian is
            not finite, 99 after `StopIteration`.

        Raises
        ------
        NonFiniteError, StaleOperatorError
            As `step`.

        Notes
        -----
        The variables are at the best point so far, also after an exception or an interrupt: with
        loss and gradient over all data each step that is taken lowers the loss.
        """
        _check_tolerances(gtol, rtol, maxiter)
        if not (callback is None or callable(callback)):
            raise HvpError(f"the argument callback is {callback!r}", "a function, or None")
        _check_eager()
        check_progress(progress)
        run = _Run(self, callback)
        with progress_bar(progress, total=None, unit=" steps") as bar:
            return run(bar, gtol, rtol, maxiter, leave_saddles)

    def reset(self) -> None:
        """Forget all steps: trust region, damping and preconditioner are as at the beginning.

        The variables stay where they are, and counts of evaluations and products go on.
        """
        for variable, value in zip(self._state, self._beginning):
            variable.assign(value)

    def close(self) -> None:
        """Release what is kept; the next step evaluates again."""
        self._model.close()

    def _here(self) -> Point:
        """Return the loss where the variables are."""
        point = self._model.here(self.iterations + 1, bool(self._watch.changed()))
        self._watch.set()
        if not point.finite:
            raise NonFiniteError(
                "the loss or its gradient is not finite where the variables are",
                "a point where both are",
            )
        return point

    def _step(self, here: Point, wanted: float) -> NewtonStep:
        """Take one step from a point whose gradient is wanted as small as this."""
        gradient, norm = here.gradient_tensor, here.gradient_norm
        forcing = self._next_forcing(norm, wanted)
        if norm == 0:
            nothing = SteihaugResult(tf.zeros_like(gradient), Outcome.CONVERGED, 0, 0.0, 0.0)
            return self._try(here, nothing, forcing)
        start = time.perf_counter()
        operator = self._model.operator(self.iterations + 1)
        if self._subproblem.is_due(int(self._served)):
            self._subproblem.make(operator, self.iterations + 1, self._tensors)
            self._served.assign(0)
        result = self._subproblem.solve(
            operator,
            gradient,
            radius=self.radius,
            tolerance=forcing * norm,
            damping=self.damping,
            tensors=self._tensors,
        )
        self._seconds += time.perf_counter() - start
        self._served.assign_add(result.iterations)
        return self._try(here, result, forcing)

    def _try(self, here: Point, result: SteihaugResult, forcing: float) -> NewtonStep:
        """Evaluate where a step leads, take it or not, and adapt the region and the damping."""
        if result.outcome == Outcome.NOT_FINITE or not math.isfinite(result.predicted):
            raise NonFiniteError(
                "a product with the Hessian is not finite",
                "a loss that is twice differentiable where the variables are, and bounded below",
                "look for norms and square roots near zero, and for overflow",
            )
        ratio, there = math.nan, here
        accepted = below = False
        if result.predicted > 0:
            before = self._position.read()
            there = self._model.there(before + result.step)
            below = self._is_below_rounding(here, there, result)
            ratio = self._ratio(here, there, result, below)
            accepted = ratio > _TAKEN
            if accepted:
                self._model.accept(there)
                self._norm_before.assign(here.gradient_norm)
                self._forcing.assign(forcing)
            else:
                self._position.write(before)
        self._adapt(ratio, result)
        self._iterations.assign_add(1)
        self._watch.set()
        now = there if accepted else here
        return NewtonStep(
            iteration=self.iterations,
            loss=now.value,
            gradient_norm=now.gradient_norm,
            accepted=accepted,
            ratio=ratio,
            radius=self.radius,
            damping=self.damping,
            forcing=forcing,
            cg_iterations=result.iterations,
            outcome=str(result.outcome),
            from_gradients=below,
        )

    def _is_below_rounding(self, here: Point, there: Point, result: SteihaugResult) -> bool:
        """Whether a difference of losses would say nothing."""
        if not there.finite:
            return False
        size = max(abs(here.value), abs(there.value))
        return result.predicted < _ROUNDINGS * self._eps * size

    def _ratio(self, here: Point, there: Point, result: SteihaugResult, below: bool) -> float:
        """Return by how much the loss falls, in units of what the model promises."""
        if not there.finite:
            log_non_finite()
            return -math.inf
        if not below:
            return (here.value - there.value) / result.predicted
        both = wide(here.gradient_tensor) + wide(there.gradient_tensor)
        fall = -float(tf.tensordot(both, wide(result.step), 1)) / 2
        inside = result.outcome in (Outcome.CONVERGED, Outcome.MAXITER)
        if inside and there.gradient_norm >= here.gradient_norm:
            fall = min(fall, 0.0)  # the gradient is at its rounding too
        return fall / result.predicted

    def _adapt(self, ratio: float, result: SteihaugResult) -> None:
        """Make the region and the damping larger or smaller."""
        if result.norm == 0:
            return
        boundary = result.outcome in (Outcome.BOUNDARY, Outcome.NEGATIVE_CURVATURE)
        if not ratio >= _POOR:
            self._radius.assign(_SHRINK * min(result.norm, self.radius))
        elif ratio > _GOOD and boundary:
            self._radius.assign(_GROW * self.radius)
        if self.damping and not ratio >= _POOR:
            self._damping.assign(_MORE_DAMPING * self.damping)
        elif self.damping and ratio > _GOOD:
            self._damping.assign(_LESS_DAMPING * self.damping)

    def _next_forcing(self, norm: float, wanted: float) -> float:
        if self._chosen_forcing != "eisenstat-walker":
            return float(self._chosen_forcing)
        before, last = float(self._norm_before), float(self._forcing)
        if before == 0 or norm == 0:
            return _FIRST_FORCING
        forcing = _FORCING * (norm / before) ** _FORCING_POWER
        safe = _FORCING * last**_FORCING_POWER
        forcing = max(forcing, safe) if safe > _SAFE else forcing
        # No more than is needed to get where the run is to end.
        return min(max(forcing, wanted / (2 * norm)), _FIRST_FORCING)

    def _leave_saddle(self, here: Point) -> NewtonStep | None:
        """Take a step along negative curvature, if some is found."""
        operator = self._model.operator(self.iterations + 1)
        gradient = here.gradient_tensor
        found = self._subproblem.negative_curvature(operator, gradient, self.iterations + 1)
        if found is None:
            return None
        direction, curvature, products = found
        radius = self.radius
        step = direction * tf.constant(radius, direction.dtype)
        promised = -float(tf.tensordot(gradient, step, 1)) - curvature * radius**2 / 2
        result = SteihaugResult(step, Outcome.NEGATIVE_CURVATURE, products, radius, promised)
        return self._try(here, result, float(self._forcing))

    def _is_exhausted(self) -> bool:
        """Whether no step in the trust region would change the variables."""
        eps = self._eps
        return self.radius < math.sqrt(eps) and self.radius < eps * norm_of(self._position.read())

    @property
    def _eps(self) -> float:
        return float(np.finfo(self._position.dtype).eps)


class _Run:
    """One call of `NewtonCG.minimize`."""

    def __init__(self, newton: NewtonCG, callback: Callable[[NewtonStep], Any] | None) -> None:
        self._newton, self._callback = newton, callback
        self._start = time.perf_counter()
        self._history = _History()
        self._work = dataclasses.replace(newton._model.points.work)
        self._products, self._cg_seconds = newton.products, newton._seconds

    def __call__(
        self, bar: Any, gtol: float, rtol: float, maxiter: int, leave_saddles: bool
    ) -> OptimizeResult:
        """Take steps."""
        newton, wanted, idle = self._newton, None, 0
        while True:
            with newton._position.restored(only_if_it_fails=True):
                here = newton._here()
                norm = here.gradient_norm
                wanted = max(gtol, rtol * norm) if wanted is None else wanted
                small, over = norm <= wanted, len(self._history) >= maxiter
                if small and (over or not leave_saddles):
                    return self._told(here, 0, "The gradient is small enough.")
                if over:
                    return self._told(here, 1, "As many steps were taken as were allowed.")
                if idle >= _IDLE or newton._is_exhausted():
                    return self._told(here, 2, "Rounding of the loss allows no further step.")
                try:
                    step = newton._leave_saddle(here) if small else newton._step(here, wanted)
                except NonFiniteError as error:
                    if not self._history:
                        raise
                    return self._told(here, 3, str(error))
            if step is None:
                return self._told(here, 0, "The gradient is small enough, no curvature negative.")
            idle = 0 if step.accepted else idle + step.from_gradients
            self._history.append(step)
            if not bar.disable:
                shown = f"loss {step.loss:.6g}, gradient {step.gradient_norm:.3g}"
                bar.set_postfix_str(shown, False)
                bar.update()
            if self._callback is not None:
                try:
                    self._callback(step)
                except StopIteration:
                    return self._told(newton._here(), 99, "`callback` raised `StopIteration`.")

    def _told(self, here: Point, status: int, message: str) -> OptimizeResult:
        newton, work = self._newton, self._newton._model.points.work
        non_finite = work.non_finite - self._work.non_finite
        return OptimizeResult(
            x=wide(newton._position.read()).numpy(),
            fun=here.value,
            jac=here.gradient,
            success=status == 0,
            status=status,
            message=message + non_finite_said(non_finite),
            nit=len(self._history),
            history=self._history,
            gradient_evaluations=work.evaluations - self._work.evaluations,
            products=newton.products - self._products,
            non_finite=non_finite,
            seconds=time.perf_counter() - self._start,
            evaluation_seconds=work.evaluation_seconds - self._work.evaluation_seconds,
            cg_seconds=newton._seconds - self._cg_seconds,
        )


def _check_eager() -> None:
    if not tf.executing_eagerly():
        raise GraphModeError(
            "a step is to be taken while TensorFlow traces a graph",
            "eager execution",
            "call it outside the tf.function",
        )


def _number(value: float) -> tf.Variable:
    return tf.Variable(value, dtype=tf.float64, trainable=False)


def _check_arguments(**given: Any) -> None:
    """Refuse what is not a number of the kind that is wanted."""
    for name in ("radius", "damping", "forcing"):
        value = given[name]
        if name == "forcing" and value == "eisenstat-walker":
            continue
        least, most = (0.0, 1.0 if name == "forcing" else math.inf)
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if not (is_number and least <= value < most) or (value == 0 and name != "damping"):
            expected = {
                "radius": "a finite positive number",
                "damping": "a finite number, zero or positive",
                "forcing": "'eisenstat-walker', or a number between 0 and 1",
            }
            raise HvpError(f"the argument {name} is {value!r}", expected[name])
    for name, least in (("max_cg_iterations", 1), ("rank", 1), ("seed", 0)):
        check_count(given[name], name, least)
    if given["preconditioner"] not in (None, *PRECONDITIONERS):
        raise HvpError(
            f"the argument preconditioner is {given['preconditioner']!r}",
            "None, " + " or ".join(map(repr, PRECONDITIONERS)),
        )


def _check_tolerances(gtol: float, rtol: float, maxiter: int) -> None:
    for name, value in (("gtol", gtol), ("rtol", rtol)):
        if not (isinstance(value, (int, float, np.number)) and 0 <= value < math.inf):
            raise HvpError(f"the argument {name} is {value!r}", "a number, zero or positive")
    check_count(maxiter, "maxiter", least=0)
