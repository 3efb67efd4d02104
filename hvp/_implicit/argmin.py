"""`argmin`: minima as functions of what the loss depends on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._derivatives.exact import pulled_back
from hvp._derivatives.gradient import check_scalar
from hvp._errors import ConvergenceWarning, GraphModeError, HvpError
from hvp._implicit.equation import Equation, Tensors, at_tensors, refuse_changes
from hvp._implicit.unknowns import (
    TapedEquation,
    Unknowns,
    check_search,
    not_a_minimum,
    tolerance_of,
    unconnected,
)
from hvp._minimize.newton_cg import NewtonCG
from hvp._operators.damping import check_damping
from hvp._operators.hessian import HessianOperator
from hvp._operators.symmetric import evaluation_of
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import in_another_thread
from hvp._runtime.user_warning import warn
from hvp._solve.solve import solve
from hvp._vectors.variables import collect_variables
from hvp._vectors.watch import Watch

# Ends of Newton's method at a minimum: the gradient is small, or as small as rounding allows.
_SUCCESS = (0, 2)


@tf.autograph.experimental.do_not_convert
@Uninterrupted()
def argmin(
    loss: Any,
    inner_variables: Any,
    outer_variables: Any,
    *,
    solver: Callable[..., Any] | None = None,
    damping: float = 0.0,
    rtol: float | None = None,
    maxiter: int | None = None,
    M: Any = None,
) -> Any:
    """Minimize a loss, and return the minimum as a function of what the loss depends on.

    For a tape around the call the result has derivatives with respect to the outer variables, by
    the implicit function theorem: with `g` the gradient of something with respect to the minimum
    `w`, that with respect to the outer variables `t` is `-B u`, where `H u = g` with the Hessian
    `H = d2L/dw2`, and `B = d2L/dt dw` [Blo]_. How the minimum was found does not matter, and no
    iterations are kept.

    Parameters
    ----------
    loss : callable or HessianOperator
        With `inner_variables` that are variables, a function of no arguments that reads them; with
        tensors, a function of these. An operator stands for its loss; its variables have to contain
        the inner and outer ones, and its data, batches and other options hold here, too.
    inner_variables : nest of variables, or of tensors or arrays
        What to minimize over. Variables are left at the minimum. Tensors are where the search
        begins.
    outer_variables : nest of variables or tensors
        What else the loss reads, and derivatives are taken in. The derivative in anything else is
        taken to be zero.
    solver : callable, optional
        How to find the minimum, if not by Newton's method. For variables a function without
        arguments that leaves them there, such as ``lambda: hvp.minimize(loss, w)``, or the method
        `minimize` of a `NewtonCG`, which keeps what it has traced from one call to the next. For
        tensors it takes those where the search begins, and returns those of the minimum.
    damping : float, optional
        Multiple of the identity that is added to the Hessian for derivatives. It makes up for
        minima that are not strict, and for a solver that stops early, as in [Raj]_.
    rtol : float, optional
        Tolerance of the search and of the linear system, as for `solve`. The default is `2/3` of
        the digits of the variables' type.
    maxiter : int, optional
        Upper bound on the iterations for the linear system. The default is ten for each unknown, as
        for `solve`, and 1000 at most for tensors and in graphs.
    M : optional
        A preconditioner of the linear system, as for `solve`, where the result of `argmin` is
        computed by operators; see the notes.

    Returns
    -------
    nest of tf.Tensor
        The minimum, in the structure of `inner_variables`.

    Warns
    -----
    ConvergenceWarning
        If the minimum, or the solution of the linear system, is less accurate than requested.

    Raises
    ------
    HvpError
        If the Hessian at the solution turns out not to be positive definite; a derivative would
        have no meaning then. Or if an argument is invalid.
    StaleOperatorError
        If variables have changed before a gradient is taken.

    Notes
    -----
    Outside of graphs, and where all is variables, the loss is traced once as a `HessianOperator`,
    whose products serve `NewtonCG` and `solve`. If you call `argmin` many times, pass an operator:
    it is traced once for all calls, and each linear system begins at the last one's solution.

    For tensors, and inside a `tf.function`, both run as loops of TensorFlow's operations, which XLA
    can compile. Nothing can be raised there: numbers that are not right are NaN.

    Second and further derivatives take tapes around tapes. They need an operator whose data are one
    batch; others raise a `SecondDerivativeError`.

    References
    ----------
    .. [Raj] A. Rajeswaran, C. Finn, S. Kakade, S. Levine, "Meta-learning with implicit gradients",
       NeurIPS 2019. https://arxiv.org/abs/1909.04630
    .. [Blo] M. Blondel et al., "Efficient and modular implicit differentiation", NeurIPS 2022.
       https://arxiv.org/abs/2105.15183

    Examples
    --------
    The minimum of `(w - t)**2 + w**2` is `t / 2`.

    >>> import tensorflow as tf
    >>> import hvp
    >>> w, t = tf.Variable(0.0), tf.Variable(3.0)
    >>> with tf.GradientTape() as tape:
    ...     best = hvp.argmin(lambda: (w - t) ** 2 + w**2, w, t)
    >>> round(float(best), 5), round(float(tape.gradient(best, t)), 5)
    (1.5, 0.5)
    """
    check_damping(damping)
    check_search(solver, rtol, maxiter)
    is_operator = isinstance(loss, HessianOperator)
    if not (is_operator or callable(loss)):
        raise HvpError(f"the loss is {type(loss).__name__}", "a function or a HessianOperator")
    unknowns = Unknowns(inner_variables, "the inner variables")
    sources = sources_of(outer_variables, unknowns)
    options: dict[str, Any] = {"rtol": rtol, "damping": float(damping), "maxiter": maxiter}
    by_operator = unknowns.are_variables and tf.executing_eagerly()
    if by_operator and all(isinstance(source, tf.Variable) for source in sources):
        return unknowns.nest_of(_by_operator(loss, unknowns, sources, solver, M, options))
    if is_operator or M is not None:
        raise HvpError(
            f"{'an operator' if is_operator else 'a preconditioner'} is given, and the search runs "
            "on tensors or in a graph",
            "variables outside of a tf.function",
            "pass the loss as a function, without M",
        )

    def value(parts: Sequence[Any]) -> tf.Tensor:
        result = check_scalar(unknowns.called(loss, parts))
        return result if result.dtype == unknowns.dtype else tf.cast(result, unknowns.dtype)

    def gradient(parts: Sequence[Any]) -> Tensors:
        return pulled_back(lambda: value(parts), parts)

    return TapedEquation(unknowns, sources, gradient, value, **options).solution(solver)


def sources_of(outer: Any, unknowns: Unknowns) -> list[Any]:
    """Return the variables and tensors that derivatives are taken in, each of them once."""
    sources: list[Any] = []
    for leaf in tf.nest.flatten(outer):
        is_tensor = tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable)
        sources += [leaf] if is_tensor else collect_variables(leaf).variables
    if not sources:
        raise HvpError("there are no outer variables", "what the derivatives are taken in")
    inner = unknowns.parts if unknowns.are_variables else []
    seen = {id(variable.handle) for variable in inner}
    for place, source in enumerate(sources):
        is_variable = isinstance(source, tf.Variable)
        key = id(source.handle if is_variable else source)
        if key in seen:
            name = repr(source.name) if is_variable else f"tensor {place}"
            raise HvpError(
                f"{name} is twice among the inner and outer variables",
                "each variable or tensor once",
                "drop one of the two",
            )
        seen.add(key)
    return sources


# For each operator that was passed, and what was minimized over: the method, which has traced its
# graphs, and the last solution of a linear system.
_KEPT: weakref.WeakKeyDictionary[HessianOperator, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _by_operator(
    loss: Any,
    unknowns: Unknowns,
    sources: Sequence[tf.Variable],
    solver: Callable[..., Any] | None,
    M: Any,
    options: dict[str, Any],
) -> list[tf.Tensor]:
    """Return the minimum, whose derivatives come from products with a Hessian of all variables."""
    is_own = not isinstance(loss, HessianOperator)
    H = loss
    if is_own:  # beside tapes, which would record its evaluation
        H = in_another_thread(HessianOperator, loss, [*unknowns.parts, *sources])
    matrix = evaluation_of(H)
    watch = Watch(matrix.snapshot.facts.reads)
    space, places = matrix.space, _places(matrix.variables, [*unknowns.parts, *sources])

    def refuse_unused() -> None:
        unused = {matrix.variable_names[place] for place in places} & set(matrix.unconnected())
        if unused:
            raise unconnected(sorted(unused))

    if is_own:
        refuse_unused()
    count = len(unknowns.parts)
    order = np.argsort(places[:count])  # of the unknowns in the operator
    block = H.block([unknowns.parts[place] for place in order])
    rtol, is_current = tolerance_of(options["rtol"], unknowns.dtype), False
    kept = {} if is_own else _KEPT.setdefault(H, {}).setdefault(tuple(places[:count]), {})

    def find() -> Tensors:
        search()
        watch.set()
        return [tf.convert_to_tensor(variable) for variable in unknowns.parts]

    def search() -> None:
        if solver is not None:
            solver()
        else:
            newton = kept.get("newton")
            if newton is None:
                ends, is_fixed = np.cumsum([0, *space.sizes]), np.ones(space.size, bool)
                for place in places[:count]:
                    is_fixed[ends[place] : ends[place + 1]] = False
                newton = kept["newton"] = NewtonCG(H, fixed=is_fixed if is_fixed.any() else None)
            newton.reset()
            found = newton.minimize(gtol=0.0, rtol=rtol, leave_saddles=False)
            newton.close()
            if found.status not in _SUCCESS:
                warn(f"hvp.argmin: no minimum was found: {found.message}", ConvergenceWarning)

    def product(*cotangent: tf.Tensor) -> Tensors:
        make_current()
        given = dict(zip(places, cotangent))
        parts = space.with_zeros([given.get(place) for place in range(len(space.sizes))])
        result = space.split(H.product(space.join(parts)))
        pulled = [tf.cast(result[place], space.dtypes[place]) for place in places]
        damped = [p + options["damping"] * v for p, v in zip(pulled, cotangent)]
        return [*damped, *pulled[count:]]

    def make_current() -> None:
        nonlocal is_current
        if not is_current:  # the operator was evaluated where the search began, or elsewhere
            refuse_changes(watch.changed())
            H.refresh()
            is_current = True
            refuse_unused()

    def solved(w: Tensors, right: Tensors, transposed: bool) -> Tensors:
        del w, transposed  # of a symmetric matrix
        if not tf.executing_eagerly():
            raise GraphModeError(
                "the derivative of a minimum in variables is computed while TensorFlow traces a "
                "graph, as tape.jacobian does",
                "eager execution",
                "pass experimental_use_pfor=False to tape.jacobian; or pass tensors, as in "
                "hvp.argmin(function, start, outer)",
            )
        make_current()
        b = evaluation_of(block).space.join([right[place] for place in order]).numpy()
        result = solve(
            block,
            b,
            damping=options["damping"],
            rtol=rtol,
            maxiter=options["maxiter"],
            M=M,
            x0=kept.get("solution"),
        )
        if result.negative_curvature is not None or "least squares" in result.outcomes:
            raise not_a_minimum(result.products)
        kept["solution"] = result.x
        parts = evaluation_of(block).space.split(tf.constant(result.x))
        by_place = dict(zip(order.tolist(), parts))
        return [tf.cast(by_place[place], unknowns.dtype) for place in range(count)]

    def pullback(w: Tensors, outer: Tensors, cotangent: Tensors) -> Tensors:
        return at_tensors(product, [*unknowns.parts, *sources], [*w, *outer], cotangent)

    return Equation(sources, pullback, solved).solution(find)


def _places(variables: Sequence[tf.Variable], chosen: Sequence[tf.Variable]) -> list[int]:
    """Return where the chosen variables are among those of the operator."""
    by_handle = {id(variable.handle): place for place, variable in enumerate(variables)}
    missing = [v.name for v in chosen if id(v.handle) not in by_handle]
    if missing:
        raise HvpError(
            f"the operator is no function of {', '.join(map(repr, missing))}",
            "an operator of the inner and the outer variables: hvp.HessianOperator(loss, [w, t])",
        )
    return [by_handle[id(v.handle)] for v in chosen]
