"""Uses of the library: what a user can do with a model, each compared with a dense matrix."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvp
from tests.cases import dense_hessian, random, relative_error
from tests.uses.families import EXAMPLES, FAMILIES, LABELS, Family

# The families that TensorFlow differentiates in float32 only.
FLOAT32 = {"grouped convolution"}


class Subject:
    """A family, with its matrices by other means: differences of gradients in float64.

    Attributes
    ----------
    name : str
        The name of the family.
    dtype : str
        The dtype of `family`.
    family : Family
        The model, at the values for which the matrices are.
    tol : float
        The relative accuracy to expect of products.
    """

    def __init__(self, name: str, dtype: str = "float64") -> None:
        self.name, self.dtype = name, "float32" if name in FLOAT32 else dtype
        self.family = FAMILIES[name](self.dtype)
        self.tol = 1e-8 if self.dtype == "float64" else 2e-4

    def fresh(self) -> Family:
        """Return the same model at the same values, for uses that change them."""
        return FAMILIES[self.name](self.dtype)

    @functools.cached_property
    def variables(self) -> list[tf.Variable]:
        """The variables, in the order of the operator."""
        return self.family.problem.tensorflow_variables()

    @functools.cached_property
    def dense(self) -> np.ndarray:
        """The Hessian."""
        return dense_hessian(FAMILIES[self.name]("float64").problem)

    @functools.cached_property
    def jacobian(self) -> np.ndarray:
        """The Jacobian of the logits, `(3 * examples, n)`, by reverse mode in float64, by rows."""
        family = FAMILIES[self.name]("float64")
        variables = family.problem.tensorflow_variables()

        @tf.function(autograph=False)
        def rows() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(variables)
                logits = tf.reshape(family.model(family.x), [-1])
            zero = tf.UnconnectedGradients.ZERO
            return tape.jacobian(logits, variables, zero, experimental_use_pfor=False)

        return np.concatenate([part.numpy().reshape(3 * EXAMPLES, -1) for part in rows()], axis=1)

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """The logits in float64, of shape `(examples, 3)`."""
        family = FAMILIES[self.name]("float64")
        return np.asarray(family.model(family.x))

    @functools.cached_property
    def probabilities(self) -> np.ndarray:
        """The probabilities of the classes."""
        e = np.exp(self.logits - self.logits.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    @functools.cached_property
    def gauss_newton(self) -> np.ndarray:
        """The Gauss-Newton matrix of the mean cross-entropy."""
        J, p = self.jacobian.reshape(EXAMPLES, 3, -1), self.probabilities
        B = np.einsum("nk,kl->nkl", p, np.eye(3)) - np.einsum("nk,nl->nkl", p, p)
        return np.einsum("nki,nkl,nlj->ij", J, B, J) / EXAMPLES

    @functools.cached_property
    def example_gradients(self) -> np.ndarray:
        """The gradients of single examples, `(examples, n)`, where examples are independent."""
        J = self.jacobian.reshape(EXAMPLES, 3, -1)
        return np.einsum("nk,nki->ni", self.probabilities - np.eye(3)[LABELS], J)

    @functools.cached_property
    def damping(self) -> float:
        """A damping that makes the Hessian definite, with a moderate condition number."""
        eigenvalues = np.linalg.eigvalsh(self.dense)
        return float(max(0, -eigenvalues[0]) + 0.1 * np.abs(eigenvalues).max())

    @functools.cached_property
    def operator(self) -> Any:
        """The operator of the defaults, which is shared by uses that do not change it."""
        return self.hessian()

    def hessian(self, **options: Any) -> Any:
        """Make an operator."""
        return hvp.HessianOperator(
            self.family.loss, self.family.variables, self.family.data, **options
        )

    @property
    def v(self) -> np.ndarray:
        """A vector."""
        return random(5, len(self.dense), dtype=self.dtype)

    @property
    def V(self) -> np.ndarray:  # noqa: N802
        """A block of vectors."""
        return random(6, len(self.dense), 3, dtype=self.dtype)


def close(got: Any, want: Any, tol: float) -> None:
    """Require a small relative error."""
    assert relative_error(got, want) < tol


USES: dict[str, Callable[[Subject], None]] = {}


def use(check: Callable[..., None]) -> Callable[..., None]:
    """Add a use to the table, under the words of its name."""
    USES[check.__name__.replace("_", " ")] = check
    return check


def uses(*values: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a use for each value of its second argument."""

    def add(check: Callable[..., None]) -> Callable[..., None]:
        for value in values:
            name = f"{check.__name__.replace('_', ' ')}: {value}"
            USES[name] = functools.partial(lambda s, value: check(s, value), value=value)
        return check

    return add


@use
def product(s: Subject) -> None:
    close(s.operator @ s.v, s.dense @ s.v, s.tol)
    close(s.operator.product(s.v).numpy(), s.dense @ s.v, s.tol)


@use
def columns(s: Subject) -> None:
    close(s.operator @ s.V, s.dense @ s.V, s.tol)


@use
def gradient(s: Subject) -> None:
    J = s.jacobian.reshape(EXAMPLES, 3, -1)
    want = np.einsum("nk,nki->i", (s.probabilities - np.eye(3)[LABELS]) / EXAMPLES, J)
    if s.family.couples:  # the rows of one example's logits depend on all examples all the same
        want = ((s.probabilities - np.eye(3)[LABELS]) / EXAMPLES).reshape(-1) @ s.jacobian
    close(s.operator.gradient, want, s.tol)


@use
def product_in_a_function(s: Subject) -> None:
    H = s.hessian()
    multiply = tf.function(lambda v: H.product(v))
    close(multiply(tf.constant(s.v)).numpy(), s.dense @ s.v, s.tol)


@use
def products_in_a_loop(s: Subject) -> None:
    H = s.hessian()

    @tf.function
    def twice(v: Any) -> Any:
        for _ in tf.range(2):
            v = H.product(v)
        return v

    close(twice(tf.constant(s.v)).numpy(), s.dense @ s.dense @ s.v, s.tol)


@use
def columns_in_a_function(s: Subject) -> None:
    operator = s.hessian().as_tf_operator()
    multiply = tf.function(lambda V: operator.matmul(V))
    close(multiply(tf.constant(s.V)).numpy(), s.dense @ s.V, s.tol)


@use
def refresh(s: Subject) -> None:
    H = s.hessian()
    H @ s.v
    H.refresh()
    close(H @ s.v, s.dense @ s.v, s.tol)


@use
def block(s: Subject) -> None:
    variable = s.variables[-1]
    size = variable.shape.num_elements()
    B, v = s.operator.block([variable]), random(7, size, dtype=s.dtype)
    rows = s.operator.block([variable], [s.variables[0]])
    close(B @ v, s.dense[-size:, -size:] @ v, s.tol)
    first = s.variables[0].shape.num_elements()
    close(rows @ np.ones(first), s.dense[-size:, :first] @ np.ones(first), s.tol)


@use
def blocks(s: Subject) -> None:
    start, dense = 0, s.dense
    scale = np.linalg.norm(dense)
    for B in s.operator.blocks().values():
        stop = start + B.shape[0]
        error = np.linalg.norm(B.to_dense() - dense[start:stop, start:stop])
        assert error < s.tol * scale
        start = stop
    assert start == len(dense)


@uses("auto", "cg", "block_cg", "minres", "exact")
def solve(s: Subject, method: str) -> None:
    damped = s.dense + s.damping * np.eye(len(s.dense))
    rtol = 1e-9 if s.dtype == "float64" else 1e-4
    result = hvp.solve(s.operator, s.V, method=method, damping=s.damping, rtol=rtol)
    assert np.all(result.converged)
    close(damped @ result.x, s.V, 10 * rtol)


@uses("auto", "nystrom", "diagonal")
def preconditioner(s: Subject, M: str) -> None:
    damped = s.dense + s.damping * np.eye(len(s.dense))
    rtol = 1e-9 if s.dtype == "float64" else 1e-4
    H = s.operator if M != "nystrom" else s.operator.damped(s.damping)
    damping = s.damping if M != "nystrom" else 0.0
    result = hvp.solve(H, s.v, method="cg", damping=damping, rtol=rtol, M=M)
    assert np.all(result.converged)
    close(damped @ result.x, s.v, 10 * rtol)


@use
def block_diagonal_preconditioner(s: Subject) -> None:
    H = s.operator.damped(s.damping)
    M = hvp.BlockDiagonalPreconditioner(H)
    result = hvp.solve(H, s.v, method="cg", M=M, rtol=1e-4)
    assert result.converged


@use
def solver(s: Subject) -> None:
    damped = s.dense + s.damping * np.eye(len(s.dense))
    rtol = 1e-9 if s.dtype == "float64" else 1e-4
    remembers = hvp.Solver(s.hessian())
    for b in (s.v, s.V[:, 0]):
        result = remembers.solve(b, damping=s.damping, rtol=rtol)
        assert np.all(result.converged)
        close(damped @ result.x, b, 10 * rtol)


@uses("LA", "SA", "LM", "near 0")
def eigenvalues(s: Subject, which: str) -> None:
    result = hvp.eigsh(s.operator, 2, which)
    every = np.linalg.eigvalsh(s.dense)
    order = {
        "LA": -every,
        "SA": every,
        "LM": -np.abs(every),
        "near 0": np.abs(every),
    }[which]
    want = every[np.argsort(order, kind="stable")][:2]
    scale = np.abs(every).max()
    assert (
        np.abs(np.sort(np.abs(result.eigenvalues)) - np.sort(np.abs(want))).max()
        < (1e-3 if s.dtype == "float32" else 1e-5) * scale
    )
    X = result.eigenvectors
    residuals = np.linalg.norm(s.dense @ X - X * result.eigenvalues, axis=0)
    assert (residuals <= np.maximum(2 * result.residual_norms, s.tol * scale)).all()


@use
def trace(s: Subject) -> None:
    estimate = hvp.trace(s.operator)
    error = abs(estimate.estimate - np.trace(s.dense))
    assert error <= 5 * estimate.standard_error + 10 * s.tol * np.linalg.norm(s.dense)


@use
def diagonal(s: Subject) -> None:
    exact = hvp.diagonal(s.operator)
    close(exact.estimate, np.diagonal(s.dense), s.tol)
    assert exact.method == "exact"
    estimate = hvp.diagonal(s.operator, rtol=0.3, method="bekas")
    error = np.abs(estimate.estimate - np.diag(s.dense))
    floor = 10 * s.tol * np.linalg.norm(s.dense)
    assert (error <= 6 * estimate.standard_error + floor).mean() > 0.9


@use
def frobenius_norm(s: Subject) -> None:
    estimate = hvp.norm(s.operator)
    error = abs(estimate.estimate - np.linalg.norm(s.dense))
    assert error <= 5 * estimate.standard_error + 10 * s.tol * np.linalg.norm(s.dense)


@use
def log_determinant(s: Subject) -> None:
    estimate = hvp.logdet(s.operator.damped(s.damping), rtol=0.05)
    want = np.linalg.slogdet(s.dense + s.damping * np.eye(len(s.dense)))[1]
    assert abs(estimate.estimate - want) <= 5 * estimate.standard_error + 1e-3 * abs(want) + 1e-3


@use
def density(s: Subject) -> None:
    result = hvp.spectral_density(s.operator, probes=2, steps=12)
    lowest, highest = np.linalg.eigvalsh(s.dense)[[0, -1]]
    slack = 1e-3 * (highest - lowest)
    assert lowest - slack <= result.nodes.min() <= result.nodes.max() <= highest + slack


@use
def quadratic_form(s: Subject) -> None:
    eigenvalues, vectors = np.linalg.eigh(s.dense)
    got = hvp.quadratic_forms(s.operator, s.v, np.cos, steps=60)
    want = np.sum(np.cos(eigenvalues) * (vectors.T @ s.v) ** 2)
    assert abs(got - want) < 1e3 * s.tol * np.sum(s.v**2)


@use
def slice_of_the_loss(s: Subject) -> None:
    result = hvp.loss_slice(s.operator, s.v, radius=0.01, points=3)
    assert np.isfinite(result.losses).all()


@uses("exact", "neumann")
def inverse(s: Subject, kind: str) -> None:
    damped = s.dense + s.damping * np.eye(len(s.dense))
    want = np.linalg.solve(damped, s.v)
    if kind == "exact":
        close(hvp.ExactInverse(s.operator, damping=s.damping) @ s.v, want, 1e3 * s.tol)
    else:
        inverse = hvp.NeumannInverse(s.operator, damping=s.damping, iterations=400)
        close(inverse @ s.v, want, 1e-3)


@uses("BFGS", "L-BFGS-B", "Newton-CG", "trust-ncg", "trust-krylov", "trust-exact", "trust-constr")
def minimize(s: Subject, method: str) -> None:
    family = s.fresh()
    before = float(family.loss(*family.data))
    options = {"maxiter": 3}
    result = hvp.minimize(family.loss, family.variables, family.data, method, options=options)
    after = float(family.loss(*family.data))
    assert after < before
    assert abs(result.fun - after) < 1e-5


@uses("plain", "diagonal", "nystrom", "recycled")
def newton(s: Subject, preconditioner: str) -> None:
    family = s.fresh()
    before = float(family.loss(*family.data))
    chosen = None if preconditioner == "plain" else preconditioner
    optimizer = hvp.NewtonCG(
        family.loss, family.variables, family.data, preconditioner=chosen, rank=4
    )
    for _ in range(3):
        optimizer.step()
    assert float(family.loss(*family.data)) < before


@uses("block_cg", "cg", "exact", "ekfac", "kfac")
def influence(s: Subject, solver: str) -> None:
    f = s.family
    both = solver in ("ekfac", "kfac")
    influences = hvp.InfluenceFunctions(
        (f.model, f.output_loss) if both else f.loss,
        f.variables,
        f.data,
        solver=solver,
        damping=s.damping,
        rtol=1e-8 if s.dtype == "float64" else 1e-5,
        **({"curvature": "gauss-newton"} if both else {}),
    )
    scores = influences.scores((f.x[:2], LABELS[:2]))
    assert scores.shape == (2, EXAMPLES)
    if solver in ("block_cg", "cg", "exact"):
        g = s.example_gradients
        damped = s.dense + s.damping * np.eye(len(s.dense))
        close(scores, g[:2] @ np.linalg.solve(damped, g.T) / EXAMPLES, 1e3 * s.tol)
    assert np.isfinite(scores).all()


@use
def gradients_by_token(s: Subject) -> None:
    f = s.family
    influences = hvp.InfluenceFunctions(
        f.loss, f.variables, f.data, solver="block_cg", damping=s.damping
    )
    by_layer = influences.scores_by_layer((f.x[:2], LABELS[:2]))
    total = sum(by_layer.values())
    close(total, influences.scores((f.x[:2], LABELS[:2])), 1e-4)


@use
def gauss_newton(s: Subject) -> None:
    f = s.family
    G = hvp.GaussNewtonOperator(f.model, f.output_loss, f.variables, f.data)
    close(G @ s.V, s.gauss_newton @ s.V, s.tol)
    solution = hvp.solve(G, s.v, damping=s.damping, method="cg", rtol=1e-4)
    assert solution.converged


@uses("type-2", "monte-carlo", "empirical")
def fisher(s: Subject, kind: str) -> None:
    f = s.family
    likelihood = None if kind == "empirical" else "categorical"
    F = hvp.FisherOperator(
        f.model, f.output_loss, f.variables, f.data, kind=kind, likelihood=likelihood
    )
    got = F @ s.V
    if kind == "type-2":
        close(got, s.gauss_newton @ s.V, s.tol)
    elif kind == "empirical":
        g = s.example_gradients
        close(got, g.T @ (g @ s.V) / EXAMPLES, s.tol)
    else:
        assert np.isfinite(got).all()


@use
def jacobian(s: Subject) -> None:
    f = s.family
    J = hvp.JacobianOperator(f.model, f.variables, (f.x,))
    close(J @ s.V, s.jacobian @ s.V, s.tol)
    close(J.T @ np.ones(len(s.jacobian)), s.jacobian.sum(0), s.tol)


@use
def linearization(s: Subject) -> None:
    f = s.family
    with hvp.linearize(lambda: f.model(f.x), f.variables) as derivative:
        close(np.ravel(derivative.jvp(s.v)), s.jacobian @ s.v, s.tol)
        parts = tf.nest.flatten(derivative.vjp(tf.ones([EXAMPLES, 3], s.dtype)))
    close(np.concatenate([np.ravel(p) for p in parts]), s.jacobian.sum(0), s.tol)


@uses("KFAC", "EKFAC")
def kronecker(s: Subject, kind: str) -> None:
    f = s.family
    K = getattr(hvp, kind)(f.model, f.output_loss, f.variables, f.data, largest_exact=64)
    dense = K.to_dense(max_size=200)
    assert np.isfinite(dense).all()
    close(K.inverse(0.5) @ (dense @ s.v + 0.5 * s.v), s.v, 100 * s.tol)
    if kind == "EKFAC" and not s.family.couples:  # its trace is that of the matrix
        assert abs(np.trace(dense) - np.trace(s.gauss_newton)) < 1e-3 * np.trace(s.gauss_newton)


@uses("full", "diagonal", "kfac")
def laplace(s: Subject, curvature: str) -> None:
    f = s.family
    options: dict[str, Any] = {"subset": f.variables, "curvature": curvature}
    la = hvp.Laplace(f.model, "categorical", f.data, prior_precision=2.0, **options)
    mean, covariance = la.function(f.x, covariance=True)
    close(mean, s.logits, s.tol)
    rows = s.jacobian.reshape(EXAMPLES, 3, -1)
    precision = EXAMPLES * s.gauss_newton + 2 * np.eye(len(s.dense))
    if curvature == "diagonal":
        precision = np.diag(precision.diagonal())
    if curvature == "kfac":
        K = hvp.KFAC(f.model, f.output_loss, f.variables, f.data, likelihood="categorical")
        precision = EXAMPLES * K.to_dense(max_size=200) + 2 * np.eye(len(s.dense))
    expected = np.einsum("eip,pq,ejq->eij", rows, np.linalg.inv(precision), rows)
    close(covariance, expected, 100 * s.tol)
    assert (np.linalg.eigvalsh(covariance) > -s.tol).all()
    close(la.function(f.x)[1], np.einsum("eii->ei", covariance), 10 * s.tol)
    close(la.predict(f.x).sum(axis=1), np.ones(EXAMPLES), s.tol)
    assert np.isfinite(la.tune_prior_precision(check=False))


@use
def exact_diagonal(s: Subject) -> None:
    close(s.operator.diagonal(), np.diagonal(s.dense), s.tol)
    damped = s.operator.damped(0.5)
    close(damped.diagonal(), np.diagonal(s.dense) + 0.5, s.tol)


@use
def jacobian_in_tensorflow(s: Subject) -> None:
    f = s.family
    J = hvp.JacobianOperator(f.model, f.variables, (f.x,))
    u, whole = random(7, len(s.jacobian), dtype=s.dtype), s.jacobian
    close(J.product(tf.constant(s.v)), whole @ s.v, s.tol)
    close(tf.function(J.product)(tf.constant(s.v)), whole @ s.v, s.tol)
    linear = J.as_tf_operator()
    close(linear.matmul(s.V), whole @ s.V, s.tol)
    close(linear.matvec(u, adjoint=True), whole.T @ u, s.tol)
    first = s.variables[0].shape.num_elements()
    close(J.block(s.variables[0]).to_dense(), whole[:, :first], s.tol)


@use
def an_inverse_in_tensorflow(s: Subject) -> None:
    inverse = hvp.ExactInverse(s.operator, damping=s.damping)
    damped = s.dense + s.damping * np.eye(len(s.dense))
    for product in (inverse.product, tf.function(inverse.product)):
        close(damped @ product(tf.constant(s.v)).numpy(), s.v, 1000 * s.tol)
    close(damped @ inverse.as_tf_operator().matmul(s.V).numpy(), s.V, 1000 * s.tol)


@uses("KFAC", "EKFAC")
def factors_in_solvers(s: Subject, kind: str) -> None:
    f = s.family
    K = getattr(hvp, kind)(f.model, f.output_loss, f.variables, f.data, largest_exact=64)
    K = K.damped(0.5)
    dense = K.to_dense(max_size=200)
    close(K.diagonal(), np.diagonal(dense), s.tol)
    solution = hvp.solve(K, s.v, method="cg", rtol=1e-6)
    close(dense @ solution.x, s.v, 1e-4)
    G = hvp.GaussNewtonOperator(f.model, f.output_loss, f.variables, f.data)
    solution = hvp.solve(G, s.v, damping=0.5, M=K.inverse(), method="cg", rtol=1e-6)
    close(s.gauss_newton @ solution.x + 0.5 * solution.x, s.v, 1e-4)


@use
def single_product(s: Subject) -> None:
    f = s.family
    parts, v = [], s.v
    for variable in s.variables:
        size = variable.shape.num_elements()
        parts.append(tf.reshape(v[:size], variable.shape))
        v = v[size:]
    got = hvp.hessian_vector_product(f.loss, s.variables, parts, f.data)
    close(np.concatenate([np.ravel(p) for p in tf.nest.flatten(got)]), s.dense @ s.v, s.tol)


@use
def report(s: Subject) -> None:
    result = hvp.check(s.hessian())
    assert result.ok, str(result)
    lowest, highest = np.linalg.eigvalsh(s.dense)[[0, -1]]
    text = result["curvature"].message
    if lowest < -1e-3 * highest:
        assert "positive" not in text


def option(name: str, **options: Any) -> None:
    """Add an option of operators: products, columns, and a solve in a graph."""

    def check(s: Subject, **more: Any) -> None:
        tol = more.pop("tol", s.tol)
        with s.hessian(**more) as H:
            close(H @ s.v, s.dense @ s.v, tol)
            close(H @ s.V, s.dense @ s.V, tol)
            damped = s.dense + s.damping * np.eye(len(s.dense))
            result = hvp.solve(H, s.v, method="cg", damping=s.damping, rtol=1e-4)
            close(damped @ result.x, s.v, max(1e-3, 10 * tol))

    USES[f"option: {name}"] = functools.partial(check, **options)


option("batches", batch_size=4)
option("memory limit", batch_size=2, memory_limit="1 MB")
option("streamed", batch_size=2, memory_limit="30 KiB")
option("recompute", recompute=True)
option("xla", jit_compile=True)
option("auto", jit_compile="auto")
option("tape", engine="tape")
option("devices", devices=["CPU:0", "CPU:1"], batch_size=2)


@use
def low_precision(s: Subject) -> None:
    low = Subject(s.name, "float32")
    with low.hessian(precision="bfloat16") as H:
        close(H @ low.v, low.dense @ low.v, 0.1)
        close(H @ low.V, low.dense @ low.V, 0.1)


@use
def float32(s: Subject) -> None:
    single = Subject(s.name, "float32")
    close(single.operator @ single.V, single.dense @ single.V, 2e-4)
    result = hvp.solve(single.operator, single.V, method="block_cg", damping=single.damping)
    damped = single.dense + single.damping * np.eye(len(single.dense))
    close(damped @ result.x, single.V, 1e-3)


assert all(inspect.isfunction(f) or isinstance(f, functools.partial) for f in USES.values())


# Why third derivatives and derivatives in the inputs are refused, always with the name of an
# operation.
_REFUSED = r"(While|If|Case|PartitionedCall|TensorList\w*|\w+Pool\w*|custom_gradient|recompute)\b"


def must_say(error: Exception, words: str) -> None:
    """Require words of an error, as a regular expression."""
    assert re.search(words, str(error)), error


@use
def laplacian_in_the_inputs(s: Subject) -> None:
    """Sum the second derivatives of the logits in the inputs, or refuse by name."""
    x = tf.constant(s.family.x)
    if not x.dtype.is_floating:
        return
    try:
        found = hvp.laplacian(s.family.model, x)
    except hvp.SecondDerivativeError as error:
        must_say(error, _REFUSED)
        return
    except hvp.InvalidLossError as error:
        must_say(error, "mixes examples")
        return
    exact = FAMILIES[s.name]("float64")
    points, h = np.asarray(exact.x, np.float64), 1e-4
    size = int(np.prod(points.shape[1:]))
    total: Any = 0
    for unit in np.eye(size).reshape(size, 1, *points.shape[1:]):
        ends = [np.asarray(exact.model(tf.constant(points + t * unit))) for t in (h, -h)]
        total += (sum(ends) - 2 * np.asarray(exact.model(tf.constant(points)))) / h**2
    assert np.abs(found.laplacian - total).max() <= 1e-4 * (1 + np.abs(total).max())


@uses("product", "jvp", "vjp")
def gradient_of_a(s: Subject, kind: str) -> None:
    """Differentiate a product of the Hessian or the Jacobian, or refuse by name."""
    family, h = s.fresh(), 1e-4 if s.dtype == "float64" else 1e-2
    variables = family.problem.tensorflow_variables()
    A: Any
    if kind == "product":
        A = hvp.HessianOperator(family.loss, family.variables, family.data)
    else:
        A = hvp.JacobianOperator(family.model, family.variables, (family.x,))
    shape = A.shape[::-1] if kind == "vjp" else A.shape
    u, v = (tf.constant(random(seed, n, dtype=s.dtype)) for seed, n in enumerate(shape, 1))
    sizes = [variable.shape.num_elements() for variable in variables]
    direction = tf.constant(random(3, sum(sizes), dtype=s.dtype))

    def value() -> Any:
        parts = tf.nest.flatten(getattr(A, kind)(v))
        return tf.tensordot(u, tf.concat([tf.reshape(part, [-1]) for part in parts], 0), 1)

    with tf.GradientTape() as tape:
        tape.watch(variables)
        scalar = value()
    zero = tf.UnconnectedGradients.ZERO
    try:
        parts = tape.gradient(scalar, variables, unconnected_gradients=zero)
        parts = [tf.convert_to_tensor(part) for part in parts]
    except hvp.SecondDerivativeError as error:
        must_say(error, _REFUSED)
        return
    gradient = np.concatenate([np.ravel(part) for part in parts])
    ends = []
    for step in (h, -2 * h):
        for variable, part in zip(variables, tf.split(direction, sizes)):
            variable.assign_add(tf.reshape(step * part, variable.shape))
        A.refresh()
        ends.append(float(value()))
    expected = (ends[0] - ends[1]) / (2 * h)
    difference = abs(gradient @ direction.numpy() - expected)
    assert difference <= (1e-5 if s.dtype == "float64" else 2e-2) * (1 + abs(expected))


def shifted(s: Subject, direction: np.ndarray) -> np.ndarray:
    """Return the Hessian in float64 at weights that are moved by `direction`."""
    problem = FAMILIES[s.name]("float64").problem
    variables = problem.tensorflow_variables()
    sizes = [variable.shape.num_elements() for variable in variables]
    for variable, part in zip(variables, np.split(direction, np.cumsum(sizes)[:-1])):
        variable.assign_add(np.reshape(part, variable.shape))
    return dense_hessian(problem)


@use
def derivatives_of_a_solution(s: Subject) -> None:
    """Differentiate the solution of a system in both of its sides, or refuse by name."""
    family, size, h = s.fresh(), len(s.dense), 1e-4
    H = hvp.HessianOperator(family.loss, family.variables, family.data)
    b, c, direction = (random(seed, size, dtype=s.dtype) for seed in (1, 2, 3))
    rhs, variables = tf.constant(b), family.problem.tensorflow_variables()
    exact = np.linalg.inv(s.dense + s.damping * np.eye(size))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([rhs, *variables])
        solution = hvp.solve(H, rhs, damping=s.damping, rtol=1e-10 if s.tol < 1e-6 else 1e-5).x
        scalar = tf.tensordot(tf.constant(c), solution, 1)
    close(tape.gradient(scalar, rhs), exact @ c, 1e3 * s.tol)
    try:
        parts = [tf.convert_to_tensor(part) for part in tape.gradient(scalar, variables)]
    except hvp.SecondDerivativeError as error:
        must_say(error, _REFUSED)
        return
    gradient = np.concatenate([np.ravel(part) for part in parts]).astype(np.float64)
    ends = [shifted(s, sign * h * direction.astype(np.float64)) for sign in (1, -1)]
    expected = -(exact @ c) @ ((ends[0] - ends[1]) / (2 * h)) @ (exact @ b)
    assert abs(gradient @ direction - expected) <= 1e3 * s.tol * (1 + abs(expected))


@use
def derivative_of_a_minimum(s: Subject) -> None:
    """Differentiate the minimum of a loss with a penalty in the penalty's strength."""
    family = s.fresh()
    strength = tf.Variable(s.damping, dtype=s.dtype)
    inner = family.problem.tensorflow_variables()
    before = np.concatenate([np.ravel(variable) for variable in inner])

    def loss() -> Any:
        # Around where the weights begin, so that the minimum is near.
        whole = tf.concat([tf.reshape(variable, [-1]) for variable in inner], 0)
        return family.loss(*family.data) + strength * tf.reduce_sum((whole - before) ** 2)

    with tf.GradientTape() as tape:
        found = hvp.argmin(loss, inner, strength)
        moved = tf.concat([tf.reshape(part, [-1]) for part in found], 0) - before
        scalar = tf.reduce_sum(moved**2)
    moved = moved.numpy()
    H = shifted(s, moved.astype(np.float64)) + 2 * s.damping * np.eye(len(moved))
    expected = 2 * moved @ np.linalg.solve(H, -2 * moved)
    assert abs(tape.gradient(scalar, strength) - expected) <= 1e4 * s.tol * abs(expected)


@uses("KFAC", "SOAP", "Sophia")
def optimizer(s: Subject, kind: str) -> None:
    """Train a Keras model by `model.fit`."""
    family = s.fresh()
    if not isinstance(family.variables, keras.Model):
        return
    model = hvp.keras.Model(family.variables.inputs, family.variables.outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(getattr(hvp.keras.optimizers, kind)(0.01), loss)
    before = model.evaluate(*family.data, verbose=0)
    try:
        model.fit(*family.data, epochs=10, shuffle=False, verbose=0)
    except hvp.HvpError as error:
        must_say(error, "gru_cell/bias.* enter no operation that has Kronecker factors")
        return
    assert model.evaluate(*family.data, verbose=0) < before


@use
def newton_in_the_space_of_residuals(s: Subject) -> None:
    """Take a Gauss-Newton step for squares of the logits."""
    family, damping = s.fresh(), 0.5
    wanted = np.eye(3, dtype=s.dtype)[LABELS]
    pair = family.model, lambda logits, y: tf.reduce_mean((logits - y) ** 2)
    newton = hvp.NewtonCG(
        pair,
        family.variables,
        (family.x, wanted),
        curvature="gauss-newton",
        space="residuals",
        radius=1e6,
        damping=damping,
    )
    variables = family.problem.tensorflow_variables()
    before = np.concatenate([np.ravel(variable) for variable in variables]).astype(np.float64)
    try:
        assert newton.step().ratio > 0
    except hvp.InvalidLossError as error:
        must_say(error, "examples independently")
        return
    after = np.concatenate([np.ravel(variable) for variable in variables]).astype(np.float64)
    J, c = s.jacobian, (2 / wanted.size) * (s.logits - wanted).ravel()
    matrix = (2 / wanted.size) * J.T @ J + damping * np.eye(J.shape[1])
    if (after != before).any():
        close(after - before, -np.linalg.solve(matrix, J.T @ c), 10 * s.tol)


@use
def data_sets(s: Subject) -> None:
    """Add up a loss over two data sets."""
    f = s.family
    H = hvp.HessianOperator(
        {"some": f.loss, "others": f.loss},
        f.variables,
        {"some": f.data, "others": f.data},
        weight={"some": 0.25, "others": 0.75},
    )
    close(H @ s.v, s.dense @ s.v, s.tol)


@use
def sparse_form(s: Subject) -> None:
    """Recover the matrix from its pattern, and solve with its factors."""
    H = s.operator
    close(H.to_sparse().toarray(), s.dense, 10 * s.tol)
    damped = s.dense + s.damping * np.eye(len(s.dense))
    result = hvp.solve(H, s.v, method="sparse", damping=s.damping, rtol=1e-3)
    assert result.converged
    close(result.x, np.linalg.solve(damped, s.v), 100 * s.tol)


@use
def newton_with_fixed_entries_and_bounds(s: Subject) -> None:
    """Take steps that leave half of the entries where they are, and the others between bounds."""
    family = s.fresh()
    variables = family.problem.tensorflow_variables()

    def flat() -> np.ndarray:
        return np.concatenate([np.ravel(variable) for variable in variables])

    start, value = flat(), float(family.loss(*family.data))
    fixed = np.arange(len(start)) % 2 == 0
    bounds = start - np.float32(0.01), start + np.float32(0.01)
    newton = hvp.NewtonCG(family.loss, family.variables, family.data, fixed=fixed, bounds=bounds)
    for _ in range(3):
        newton.step()
    np.testing.assert_array_equal(flat()[fixed], start[fixed])
    assert (np.abs(flat() - start) <= 0.01 + 1e-6).all()
    assert float(family.loss(*family.data)) < value
