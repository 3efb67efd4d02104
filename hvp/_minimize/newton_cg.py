"""`NewtonCG`: a truncated Newton method with a trust region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf
from scipy.optimize import OptimizeResult

from hvp._engines.options import Options, declared
from hvp._errors import HvpError
from hvp._keras.compiled_loss import CompiledModel
from hvp._keras.from_keras import FromKeras
from hvp._minimize.constraints import box_of
from hvp._minimize.curved_loss import check_operator, compiled_loss
from hvp._minimize.models import SampledModel, WholeModel
from hvp._minimize.newton_arguments import check_eager, check_preconditioner, check_space
from hvp._minimize.newton_iteration import NewtonIteration
from hvp._minimize.newton_run import NewtonRun
from hvp._minimize.newton_state import NewtonState
from hvp._minimize.newton_step import NewtonStep
from hvp._minimize.norms import kind_of, scale_of
from hvp._minimize.objective import OPERATOR_OPTIONS
from hvp._minimize.points import Points
from hvp._minimize.residuals import ResidualSpace, residuals_of
from hvp._minimize.subproblem import Subproblem
from hvp._operators.curvature import Curvature
from hvp._operators.symmetric import SymmetricOperator
from hvp._runtime.arguments import check_count, check_number, check_seed
from hvp._runtime.guard import OneProcess, refuse_forks
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.progress import check_progress, progress_bar
from hvp._runtime.strategies import outside_strategies

__all__ = ["NewtonCG", "NewtonStep"]

_INSTEAD = dict.fromkeys(
    ("gtol", "rtol", "maxiter", "callback", "progress"), "pass it to the method minimize"
)


class _NotForCompile(type(tf.Module)):  # type: ignore[misc]
    """The type of a class that `model.compile` does not take, and names in its error."""

    def __str__(cls) -> str:
        return (
            f"{super().__str__()}, which minimizes over all data by its method minimize(); "
            "model.compile takes hvp.keras.optimizers.KFAC, SOAP or Sophia"
        )


@declared(OPERATOR_OPTIONS)
class NewtonCG(FromKeras, OneProcess, tf.Module, metaclass=_NotForCompile):
    """A truncated Newton method whose conjugate gradients run inside a graph.

    Each step approximately minimizes the quadratic model of the loss in a trust region,

        `m(p) = g' p + p' (H + damping I) p / 2`  subject to  `norm(p) <= radius`,

    by Steihaug's conjugate gradients [ST]_. One call of a graph runs tens of iterations, without
    Python overhead for each product. Directions of negative curvature are followed to the boundary
    of the region.

    Parameters
    ----------
    loss : callable, pair of callables, dict of these, or HessianOperator
        As for `HessianOperator`; the pair `(model, output_loss)`, as for `GaussNewtonOperator`, if
        `curvature` is ``"gauss-newton"``. An operator stands for its loss, variables and data; a
        `GaussNewtonOperator` or `FisherOperator` takes the place of the Hessian.
    variables, data
        As for `HessianOperator`.
    curvature : {"hessian", "gauss-newton"}, optional
        The matrix of the quadratic model. With ``"gauss-newton"`` and a `damping` that is not zero
        this is the method of Levenberg and Marquardt, in a trust region [LM]_.
    hessian_batch_size : int, optional
        Number of examples for the Hessian. They are redrawn for each step, from `data`, which must
        be a tuple or dict of arrays. By default the Hessian is over all examples, and comes from
        the same evaluation as the gradient.
    gradient_batch_size : int, optional
        Number of examples for the loss and the gradient, at least `hessian_batch_size`. They are
        redrawn for each step, and are the same at both ends of the step. The default is all
        examples.
    space : {"variables", "residuals"}, optional
        With ``"residuals"`` a step is not found by conjugate gradients, but from a factorization
        of the matrix `J J^T` of the residuals, to rounding errors. It suits models with fewer
        residuals than variables, such as physics-informed networks, whose loss is a sum of
        squares, or another convex function of each prediction for itself. It needs
        ``curvature="gauss-newton"``, and arrays as `data`, or none. The fewer, of residuals and
        variables, may be up to 4096. With `hessian_batch_size` a step is that of the sample, whose
        gradient differs from that of `gradient_batch_size` examples.
    momentum : float, optional
        With ``space="residuals"``: the part of the previous step, at least 0 and below 1, from
        which the next one departs as little as it has to [SP]_. It is meant for samples.
    geodesic : bool, optional
        With ``space="residuals"``: whether to add the second-order correction of the path to
        each step, if it is small enough [GA]_. It costs a derivative of second order.
    radius : float, optional
        Initial radius of the trust region, in the units of the variables (with a preconditioner: in
        its norm).
    damping : float, optional
        Initial multiple of the identity that is added to the Hessian. If it is not zero, it is
        adapted to the quality of the model, as the radius is.
    forcing : float or "eisenstat-walker", optional
        Conjugate gradients end when the norm of the model's gradient is at most `forcing` times
        that of the gradient. By default it follows the rule of Eisenstat and Walker [EW]_, which
        takes few iterations far from the minimum and many close to it.
    max_cg_iterations : int, optional
        Maximum number of iterations of conjugate gradients in one step.
    preconditioner : {"diagonal", "nystrom", "recycled", "sparse"}, LinearOperator or callable
        ``"diagonal"`` is the absolute value of the diagonal, estimated from 16 products with random
        signs. ``"nystrom"`` is a sketch of the largest positive eigenvalues from `rank` products
        [NY]_. Either is rebuilt when conjugate gradients have used four times the products that it
        cost. ``"recycled"`` is the same approximation from the directions of the last steps and
        their products, and costs no further product. It pays if a product takes longer than the
        algebra of `rank` vectors, and if the Hessian changes slowly. If that algebra takes longer
        than conjugate gradients do, a warning with both times is logged after ten steps.
        ``"sparse"`` is for Hessians most of whose entries are zero: they are factorized at each new
        point, with a shift if they are not positive definite (`SparseInverse`), so that conjugate
        gradients take a few iterations whatever the condition.
        A symmetric, positive definite operator or matrix stands for the inverse of the Hessian; a
        function takes the operator of the Hessian, and makes such a one at each new point.
    rank : int, optional
        Rank of the approximation. For ``"recycled"``, 100 is a good choice.
    x_scale : number, array or nest, optional
        Units of the entries of the variables, of shape `(n,)` or shaped like the variables. The
        trust region is a ball in these units.
    bounds : pair of numbers, arrays or nests, or scipy.optimize.Bounds, optional
        Lower and upper bounds of the entries, which may be infinite. The variables must be between
        them at the start. Steps leave out entries that are at a bound and would cross it, and are
        cut off at the bounds of others. A preconditioner has to be diagonal.
    fixed : array or nest of bool, optional
        Which entries stay as they are.
    seed : int, optional
        Seed of samples and sketches.
    on_stale : {"raise", "refresh"}, optional
        What to do if, between two steps of a run, a variable changes that the loss reads but that
        is not minimized over: raise `StaleOperatorError`, or evaluate the loss again. A new run
        always uses the values at its start.
    **options
        As for `HessianOperator`: {option_names}. With `hessian_batch_size` a sample is evaluated on
        the first of the devices.

    Raises
    ------
    HvpError
        As `HessianOperator`, and if another argument is invalid.

    Notes
    -----
    A step costs one evaluation of loss and gradient, at the trial point, and one product for each
    iteration of conjugate gradients.

    With `ratio = (f(x) - f(x + p)) / (m(0) - m(p))`, a step is accepted if `ratio > 1e-4`. The
    radius becomes `min(norm(p), radius) / 4` if `ratio < 1/4`, and doubles if `ratio > 3/4` and the
    step ends on the boundary [TR]_. The damping is multiplied by `3/2` and `2/3` in these cases,
    regardless of the boundary [HF]_. If the predicted decrease is below the rounding error of the
    loss, the decrease is computed from the gradients at both ends of the step, so that the gradient
    converges to its own rounding error. The norm of the gradient is that of the entries that may
    move, if there are bounds or fixed entries.

    `NewtonCG` is a `tf.Module`: ``tf.train.Checkpoint(optimizer=newton)`` saves the variables and
    the state of the method. A run that is stopped between two steps and restored continues with the
    same iterates. If you change the variables between steps, the next step starts from the new
    values.

    References
    ----------
    .. [ST] T. Steihaug, "The conjugate gradient method and trust regions in large scale
       optimization", SIAM Journal on Numerical Analysis 20(3), 626-637, 1983.
       https://doi.org/10.1137/0720042
    .. [EW] S. C. Eisenstat, H. F. Walker, "Choosing the forcing terms in an inexact Newton method",
       SIAM Journal on Scientific Computing 17(1), 16-32, 1996. https://doi.org/10.1137/0917003
    .. [NY] Z. Frangella, J. A. Tropp, M. Udell, "Randomized Nystrom preconditioning", SIAM Journal
       on Matrix Analysis and Applications 44(2), 718-752, 2023. https://doi.org/10.1137/21M1466244
    .. [TR] A. R. Conn, N. I. M. Gould, P. L. Toint, "Trust-Region Methods", SIAM, 2000, chapter 6.
       https://doi.org/10.1137/1.9780898719857
    .. [LM] D. W. Marquardt, "An algorithm for least-squares estimation of nonlinear parameters",
       Journal of SIAM 11(2), 431-441, 1963. https://doi.org/10.1137/0111030
    .. [HF] J. Martens, "Deep learning via Hessian-free optimization", ICML 2010.
    .. [SP] G. Goldshlager, N. Abrahamsen, L. Lin, "A Kaczmarz-inspired approach to accelerate the
       optimization of neural network wavefunctions", Journal of Computational Physics 516, 2024.
       https://doi.org/10.1016/j.jcp.2024.113351
    .. [GA] M. K. Transtrum, J. P. Sethna, "Improvements to the Levenberg-Marquardt algorithm for
       nonlinear least-squares minimization", 2012. https://arxiv.org/abs/1201.5885

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
    @Uninterrupted()
    def __init__(
        self,
        loss: Any,
        variables: Any = None,
        data: Any = None,
        *,
        curvature: Curvature = "hessian",
        hessian_batch_size: int | None = None,
        gradient_batch_size: int | None = None,
        space: Literal["variables", "residuals"] = "variables",
        momentum: float = 0.0,
        geodesic: bool = False,
        radius: float = 1.0,
        damping: float = 0.0,
        forcing: float | Literal["eisenstat-walker"] = "eisenstat-walker",
        max_cg_iterations: int = 250,
        preconditioner: Any = None,
        rank: int = 20,
        x_scale: Any = None,
        bounds: Any = None,
        fixed: Any = None,
        seed: int = 0,
        on_stale: Literal["raise", "refresh"] = "raise",
        **options: Any,
    ) -> None:
        refuse_forks()
        super().__init__(name="newton_cg")
        Options.of("NewtonCG", options, OPERATOR_OPTIONS, _INSTEAD)
        check_number(radius, "radius", positive=True)
        check_number(damping, "damping")
        if forcing != "eisenstat-walker":
            named = "'eisenstat-walker'"
            check_number(forcing, "forcing", positive=True, below=1, instead=named)
        check_count(max_cg_iterations, "max_cg_iterations")
        check_count(rank, "rank")
        check_seed(seed)
        check_preconditioner(preconditioner)
        loss = check_operator(loss, variables, data, curvature, options)
        in_residuals = check_space(space, momentum, geodesic, loss, preconditioner, options)
        options["on_stale"] = on_stale
        if hessian_batch_size is None:
            if gradient_batch_size is not None:
                raise HvpError(
                    "gradient_batch_size is given without hessian_batch_size",
                    "both, with a gradient over no fewer examples than the Hessian",
                )
            if in_residuals:
                options["products"] = False
            model = WholeModel(Points.of(loss, variables, data, **options))
        else:
            if isinstance(loss, SymmetricOperator):
                raise HvpError(
                    "hessian_batch_size is given together with an operator",
                    "a loss, variables and data",
                )
            model = SampledModel(
                loss, variables, data, hessian_batch_size, gradient_batch_size, seed, options
            )
        position = model.points.position
        rank = min(rank, position.size)
        box = box_of(bounds, fixed, position)
        scale = scale_of(x_scale, preconditioner, position)
        units = 1.0 if scale is None else scale
        kind = kind_of(preconditioner, scale, box, position)
        residuals = None
        if in_residuals:
            terms = residuals_of(loss, variables, data, model, options.get("weight"))
            residuals = ResidualSpace(terms, momentum, geodesic, units)
        subproblem = Subproblem(
            kind, rank, max_cg_iterations, seed, residuals, masked=box is not None
        )
        shapes = subproblem.shapes(position.size)
        # The only attribute that `tf.train.Checkpoint` saves.
        self._state = NewtonState(position.variables, radius, damping, shapes, position.dtype)
        self._iteration = NewtonIteration(model, subproblem, self._state, forcing, box, units)

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        return compiled_loss(compiled), variables

    def __repr__(self) -> str:
        return (
            f"NewtonCG({self._iteration.position.size} variables, {self.iterations} steps, "
            f"radius {self.radius:.3g}, damping {self.damping:.3g})"
        )

    @property
    def iterations(self) -> int:
        """Number of steps so far."""
        return int(self._state.iterations)

    @property
    def radius(self) -> float:
        """Current radius of the trust region."""
        return float(self._state.radius)

    @property
    def damping(self) -> float:
        """Current multiple of the identity that is added to the Hessian."""
        return float(self._state.damping)

    @property
    def gradient_evaluations(self) -> int:
        """Number of evaluations of loss and gradient, without those for Hessians of samples."""
        return self._iteration.model.points.work.evaluations

    @property
    def products(self) -> int:
        """Number of Hessian-vector products so far."""
        return self._iteration.model.products

    @outside_strategies
    @Uninterrupted()
    def step(self) -> NewtonStep:
        """Take one step.

        If the loss does not decrease enough, the variables stay where they are, and the trust
        region shrinks.

        Returns
        -------
        NewtonStep

        Raises
        ------
        NonFiniteError
            If the loss, its gradient or a product with the Hessian is not finite at the current
            values of the variables.
        StaleOperatorError
            If a variable changed that the loss reads but that is not minimized over.

        Notes
        -----
        If the step raises an error, the variables are restored.
        """
        check_eager()
        with self._iteration.position.restored(only_on_error=True):
            return self._iteration.step(self._iteration.current_point(), 0.0)

    @outside_strategies
    @Uninterrupted()
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
            The run ends when the Euclidean norm of the gradient is at most
            `max(gtol, rtol * norm(g0))`, where `g0` is the gradient at the start. By default `gtol`
            is 1e-5 and `rtol` is zero. A smaller `rtol` alone has no effect: pass ``gtol=0`` too.
        maxiter : int, optional
            Maximum number of steps.
        leave_saddles : bool, optional
            Whether to search for negative curvature when the gradient is small, with up to 22
            products, and to follow it if there is some. There is no search with another matrix,
            which does not show negative curvature.
        callback : callable, optional
            Called with each `NewtonStep`. It may raise `StopIteration` to end the run.
        progress : bool or "always", optional
            Whether to show a tqdm progress bar with the loss and the gradient norm on a terminal;
            ``"always"`` shows it on any stream.

        Returns
        -------
        scipy.optimize.OptimizeResult
            `x`, `fun`, `jac`, `success`, `status`, `message` and `nit` as in scipy, where `nit`
            counts steps that were rejected, too; `history`, a list of `NewtonStep`;
            `gradient_evaluations`, `products` and `non_finite` (the number of points at which the
            loss or its gradient was not finite); `seconds`, which includes `evaluation_seconds` and
            `cg_seconds`, the time of the search for steps, by whatever method. All counts are for
            this call. The `status` is 0
            if the gradient is small, 1 after `maxiter` steps, 2 if rounding errors allow no further
            step, 3 if a product with the Hessian is not finite, 4 if the minimum appears to be at
            infinity, and 99 after `StopIteration`.

        Raises
        ------
        NonFiniteError, StaleOperatorError
            As `step`.

        Notes
        -----
        With loss and gradient over all data, each accepted step lowers the loss. The variables are
        therefore always at the best point so far, even after an error or an interrupt.
        """
        check_number(gtol, "gtol")
        check_number(rtol, "rtol")
        check_count(maxiter, "maxiter", least=0)
        if not (callback is None or callable(callback)):
            raise HvpError(f"the argument callback is {callback!r}", "a function, or None")
        check_eager()
        check_progress(progress)
        run = NewtonRun(self._iteration, callback)
        with progress_bar(progress, total=None, unit=" steps") as bar:
            return run(bar, gtol, rtol, maxiter, leave_saddles)

    def reset(self) -> None:
        """Reset the trust region, the damping and the preconditioner to their initial state.

        The variables keep their values. The counts of evaluations and products continue.
        """
        self._state.reset()
        self._iteration.model.begin()

    def close(self) -> None:
        """Release the linearizations; the next step evaluates the loss again."""
        self._iteration.model.close()
