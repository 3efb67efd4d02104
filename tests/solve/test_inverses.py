"""Inverses as operators, against dense float64 algebra."""

import warnings

import numpy as np
import pytest
import scipy.sparse.linalg
import tensorflow as tf
from scipy.sparse.linalg import aslinearoperator, eigsh

import hvp
from tests.solve.systems import SPECTRA, columns, matrix, operator, shared

N = 60


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_exact_is_the_pseudo_inverse(spectrum):
    values = np.sort(SPECTRA[spectrum](N))
    A = matrix(values)
    inverse = hvp.ExactInverse(shared(A))
    np.testing.assert_allclose(inverse.eigenvalues, values, atol=1e-12 * np.abs(values).max())
    assert inverse.rank == np.sum(np.abs(values) > 1e-10)
    b = columns(N, 3)
    expected = np.linalg.pinv(A, rcond=1e-10, hermitian=True) @ b
    assert np.linalg.norm(inverse @ b - expected) < 1e-8 * np.linalg.norm(expected)
    np.testing.assert_allclose(inverse @ b[:, 0], (inverse @ b)[:, 0], rtol=1e-10, atol=1e-12)


def test_exact_adds_damping_to_the_operators_own():
    A = matrix(SPECTRA["indefinite"](N))
    inverse = hvp.ExactInverse(operator(A, damping=2.0), damping=1.0)
    np.testing.assert_allclose(
        inverse @ np.eye(N), np.linalg.inv(A + 3 * np.eye(N)), rtol=1e-9, atol=1e-12
    )
    assert inverse.damping == 3.0
    with pytest.raises(hvp.TooLargeError, match="60 x 60"):
        hvp.ExactInverse(shared(A), max_size=50)
    with pytest.raises(hvp.HvpError, match="damping"):
        hvp.ExactInverse(shared(A), damping=np.nan)


def test_neumann_is_the_truncated_series():
    """The factor along an eigenvector is exactly (1 - (1 - e / s)^m) / e."""
    values = np.linspace(0.1, 2, N)
    A = matrix(values)
    vectors = np.linalg.eigh(A)[1]
    inverse = hvp.NeumannInverse(shared(A), damping=0.5, iterations=37, scale=3.0)
    e = values + 0.5
    expected = vectors * ((1 - (1 - e / 3.0) ** 37) / e)
    np.testing.assert_allclose(inverse @ vectors, expected, atol=1e-12)


def test_neumann_estimates_its_scale_and_converges():
    A = matrix(np.linspace(1, 10, N))
    inverse = hvp.NeumannInverse(shared(A), iterations=400)
    assert 10 <= inverse.scale < 12
    np.testing.assert_allclose(inverse @ np.eye(N), np.linalg.inv(A), atol=1e-8)


@pytest.mark.parametrize("values", [np.linspace(-0.5, 2, N), -np.ones(N)])
def test_neumann_refuses_an_indefinite_operator(values):
    inverse = hvp.NeumannInverse(shared(matrix(values)))
    with pytest.raises(hvp.HvpError, match="The Neumann series grows"):
        inverse @ columns(N, 2)


def test_neumann_refuses_a_scale_that_is_too_small():
    inverse = hvp.NeumannInverse(shared(matrix(np.linspace(1, 10, N))), scale=4.0)
    with pytest.raises(hvp.HvpError, match="grows"):
        inverse @ columns(N, 1)
    for wrong in (-1.0, "large"):
        with pytest.raises(hvp.HvpError, match=f"scale is {wrong!r}"):
            hvp.NeumannInverse(shared(np.eye(N)), scale=wrong)


def test_nystrom_adapts_its_rank_to_the_damping():
    values = np.concatenate([np.geomspace(1e5, 1e2, 20), np.full(180, 1e-3)])
    H = shared(matrix(values))
    M = hvp.NystromPreconditioner(H, damping=1e-2)
    assert len(M.eigenvalues) == M.products == 32
    np.testing.assert_allclose(M.eigenvalues[:20], values[:20], atol=180 * 1e-3)  # sum of the rest
    assert H.stats.products == 32
    largest = hvp.NystromPreconditioner(H, damping=1e-9)
    assert len(largest.eigenvalues) == 100
    assert len(hvp.NystromPreconditioner(H, rank=7).eigenvalues) == 7
    for rank in (0, 201, 2.5):
        with pytest.raises(hvp.HvpError, match="rank"):
            hvp.NystromPreconditioner(H, rank=rank)


def test_nystrom_eigenvalues_of_an_indefinite_operator_are_not_too_large():
    """Without the shift some would be several times the largest eigenvalue."""
    values = np.concatenate([-np.linspace(0.1, 1.5, 80), np.linspace(0.1, 5, 81)])
    H = shared(matrix(values))
    for rank in (20, 100):
        eigenvalues = hvp.NystromPreconditioner(H, rank=rank, damping=2.0).eigenvalues
        largest = np.sort(values)[::-1][:rank]
        assert (eigenvalues <= np.maximum(largest, 0) * 1.01 + 1e-9).all()
        assert eigenvalues[0] > 1.0
    for damping in (np.nan, "large"):
        for preconditioner in (hvp.NystromPreconditioner, hvp.DiagonalPreconditioner):
            with pytest.raises(hvp.HvpError, match="damping"):
                preconditioner(H, damping=damping)


@pytest.mark.parametrize(
    "make", [hvp.NystromPreconditioner, hvp.DiagonalPreconditioner], ids=["nystrom", "diagonal"]
)
def test_preconditioners_work_in_scipy(make):
    scales = np.concatenate([np.geomspace(1e2, 1e5, 10), np.ones(N - 10)])
    H = shared(np.diag(scales))
    M = make(H)
    dense = M @ np.eye(N)
    np.testing.assert_allclose(dense, dense.T, atol=1e-10)
    assert np.linalg.eigvalsh(dense).min() > 0
    np.testing.assert_allclose(M.T @ np.ones(N), dense @ np.ones(N), rtol=1e-10)
    counts = []
    for preconditioner in (None, M):
        steps = []
        x, info = scipy.sparse.linalg.cg(
            H, np.ones(N), M=preconditioner, rtol=1e-8, callback=steps.append
        )
        assert info == 0
        np.testing.assert_allclose(x, 1 / scales, rtol=1e-5, atol=1e-9)
        counts.append(len(steps))
    assert counts[1] <= counts[0] * 0.6


def test_diagonal_estimate_has_the_stated_error():
    A = matrix(np.linspace(1, 10, N))
    M = hvp.DiagonalPreconditioner(shared(A), samples=400, damping=1.0)
    deviation = np.sqrt(np.sum(A**2, axis=1) - np.diag(A) ** 2)
    error = (M.diagonal - np.diag(A) - 1) / (deviation / np.sqrt(400))
    assert 0.7 < np.sqrt(np.mean(error**2)) < 1.3


def test_the_exact_inverse_as_a_matrix_and_its_diagonal():
    A = np.diag([1.0, 4.0, 9.0]) + 0.3
    w = tf.Variable(np.ones(3))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w * tf.linalg.matvec(A, w)) / 2, w)
    inverse = hvp.ExactInverse(H, damping=0.5)
    expected = np.linalg.inv(A + 0.5 * np.eye(3))
    np.testing.assert_allclose(inverse.to_dense(), expected, rtol=1e-12)
    np.testing.assert_array_equal(inverse.to_dense(), inverse.to_dense().T)
    np.testing.assert_allclose(inverse.diagonal, np.diag(expected), rtol=1e-12)
    singular = hvp.ExactInverse(aslinearoperator(np.diag([1.0, 0.0, 2.0])))
    np.testing.assert_allclose(singular.diagonal, [1, 0, 0.5])


def test_standard_errors_of_a_least_squares_fit():
    rng = np.random.default_rng(0)
    x = np.c_[np.ones(40), rng.standard_normal((40, 2))]
    y = x @ [1.0, -2.0, 0.5] + rng.standard_normal(40)
    w = tf.Variable(np.linalg.lstsq(x, y, rcond=None)[0])
    variance = np.sum((x @ w.numpy() - y) ** 2) / (40 - 3)

    def negative_log_likelihood(x, y):
        return tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2) / (2 * variance)

    H = hvp.HessianOperator(negative_log_likelihood, w, (x, y), reduction="sum")
    expected = np.sqrt(variance * np.diag(np.linalg.inv(x.T @ x)))
    np.testing.assert_allclose(np.sqrt(hvp.ExactInverse(H).diagonal), expected, rtol=1e-10)
    np.testing.assert_allclose(hvp.ExactInverse(H).standard_errors(), expected, rtol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 30])
def test_units_do_not_make_a_matrix_singular(size):
    """Against the matrix with ones on its diagonal, whose inverse NumPy computes."""
    rng = np.random.default_rng(size)
    factor = rng.standard_normal((size, 2 * size))
    plain = factor @ factor.T
    plain /= np.sqrt(np.outer(plain.diagonal(), plain.diagonal()))
    units = 10.0 ** rng.uniform(-12, 12, size)
    inverse = hvp.ExactInverse(aslinearoperator(plain * np.outer(units, units)))
    expected = np.linalg.inv(plain)
    assert inverse.rank == size
    dense = inverse.to_dense() * np.outer(units, units)
    np.testing.assert_allclose(dense, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    np.testing.assert_allclose(inverse.diagonal, np.diag(expected) / units**2, rtol=1e-9)
    errors = np.sqrt(np.diag(expected)) / units
    np.testing.assert_allclose(inverse.standard_errors(), errors, rtol=1e-9)
    Q = inverse.eigenvectors
    np.testing.assert_allclose(Q.T @ Q, np.eye(size), atol=1e-12)
    assert (np.diff(inverse.eigenvalues) >= 0).all()


def test_what_the_data_do_not_determine_has_no_standard_error():
    x, y = tf.Variable([0.0, 0.0]), tf.Variable(np.float32(0))
    unused = tf.Variable(np.float32(4))
    H = hvp.HessianOperator(lambda: 2 * (x[0] + 1e3 * x[1]) ** 2 + 2 * y**2, [x, y, unused])
    inverse = hvp.ExactInverse(H)
    np.testing.assert_allclose(inverse.standard_errors(), [np.inf, np.inf, 0.5, np.inf])
    zero = hvp.ExactInverse(aslinearoperator(np.zeros((2, 2))))
    assert (zero.standard_errors() == np.inf).all()


@pytest.mark.parametrize(
    "A", [np.diag([1.0, -1.0]), np.diag([1e16, -1e-3]), np.ones((2, 2)) - np.eye(2)]
)
def test_a_saddle_point_has_no_standard_errors(A):
    with pytest.raises(hvp.HvpError, match="has the eigenvalue -1"):
        hvp.ExactInverse(aslinearoperator(A)).standard_errors()


def test_smallest_eigenvalues_by_the_inverse():
    w = tf.Variable(np.ones(30))
    spectrum = np.linspace(0.1, 40, 30)
    H = hvp.HessianOperator(lambda: tf.reduce_sum(spectrum * w**2) / 2, w)
    values = eigsh(H, 3, sigma=0, OPinv=hvp.ExactInverse(H), return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(values), spectrum[:3], rtol=1e-8)


def decay(parameters):
    """Return the negative log-likelihood of a decay, and its model, at measured times."""
    rng = np.random.default_rng(0)
    t = np.linspace(0.1, 5, 40)
    y = 2 * np.exp(-1.1 * t) + 0.05 * rng.standard_normal(40)

    def model():
        exponent = -parameters[1] * t
        if parameters.shape[0] == 3:
            exponent += parameters[1] * parameters[2]  # a shift in time is a factor
        return parameters[0] * tf.exp(exponent)

    def half_of_squares(predicted):
        return tf.reduce_sum((predicted - y) ** 2) / (2 * 0.05**2)

    return model, half_of_squares


def test_standard_errors_away_from_a_minimum_come_with_a_warning():
    w = tf.Variable(np.array([1.0, 0.5]))
    model, output_loss = decay(w)
    for value in ([2.5, 1.0], [1.9, 1.0]):
        w.assign(value)
        for H in (
            hvp.HessianOperator(lambda: output_loss(model()), w),
            hvp.GaussNewtonOperator(model, output_loss, w),
        ):
            with pytest.warns(hvp.ConvergenceWarning, match="not at a minimum") as caught:
                hvp.ExactInverse(H).standard_errors()
            assert caught[0].filename == __file__
    hvp.NewtonCG(lambda: output_loss(model()), w).minimize()
    H = hvp.HessianOperator(lambda: output_loss(model()), w)
    expected = np.sqrt(np.diag(np.linalg.inv(H.to_dense())))
    np.testing.assert_allclose(hvp.ExactInverse(H).standard_errors(), expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.few(1)
def test_what_only_rounding_determines_has_no_plain_standard_error(seed):
    """A shift in time and a factor: near the minimum their combination has a tiny curvature."""
    w = tf.Variable(np.array([1.0, 1.0, 0.2]))
    w.assign_add(0.1 * np.random.default_rng(seed).standard_normal(3))
    model, output_loss = decay(w)
    hvp.NewtonCG(lambda: output_loss(model()), w).minimize(gtol=1e-5)
    inverse = hvp.ExactInverse(hvp.HessianOperator(lambda: output_loss(model()), w))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            errors, said = inverse.standard_errors(), ""
        except hvp.HvpError as error:
            errors, said = np.zeros(3), str(error)
    said += "".join(str(warning.message) for warning in caught)
    assert "combination of the parameters 0, 2" in said or np.isinf(errors[[0, 2]]).all()
    G = hvp.GaussNewtonOperator(model, output_loss, w)
    errors = hvp.ExactInverse(G).standard_errors()
    assert np.isinf(errors).tolist() == [True, False, True]


def test_an_inverse_belongs_to_the_point_of_its_operator():
    w = tf.Variable(np.arange(1.0, 6.0))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w)

    inverse, v = hvp.ExactInverse(H), np.ones(5)
    before = inverse @ v
    w.assign(2 * w)
    with pytest.raises(hvp.StaleOperatorError, match="have changed"):
        inverse @ v
    H.refresh()
    with pytest.raises(hvp.StaleOperatorError, match="compute it again"):
        inverse @ v
    inverse = hvp.ExactInverse(H)
    np.testing.assert_allclose(inverse @ v, before / 4)
    H.close()
    np.testing.assert_allclose(inverse @ v, before / 4)


def test_a_short_series_that_grows_is_refused():
    with pytest.raises(hvp.HvpError, match=r"20 iterations.*scale \(now 4\)"):
        hvp.NeumannInverse(np.diag([1.0, 10.0]), iterations=20, scale=4.0) @ [0.0, 1.0]


def test_neumann_of_zero_and_of_an_operator_that_was_closed():
    assert hvp.NeumannInverse(np.zeros((4, 4))).scale == 1
    w = tf.Variable(np.arange(1.0, 6.0))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w)
    inverse = hvp.NeumannInverse(H, iterations=5)
    w.assign(2 * w)
    with pytest.raises(hvp.StaleOperatorError, match="have changed"):
        inverse @ np.ones(5)
    H.close()
    with pytest.raises(hvp.ClosedOperatorError):
        inverse @ np.ones(5)


def test_what_is_refused():
    A, far = np.eye(3), aslinearoperator(np.eye(3))
    for call, said in (
        (lambda: hvp.SparseInverse(far), "pattern is not known"),
        (lambda: hvp.solve(far, np.ones(3), method="sparse"), "pattern is not known"),
        (lambda: hvp.ExactInverse(A, max_size=None), "max_size is None"),
        (lambda: hvp.DiagonalPreconditioner(A, seed="x"), "seed is 'x'"),
        (lambda: hvp.NystromPreconditioner(A, seed=None), "seed is None"),
        (lambda: hvp.standard_errors(A, rtol="x"), "rtol is 'x'"),
        (lambda: hvp.standard_errors(A, maxiter=-1), "maxiter is -1"),
    ):
        with pytest.raises(hvp.HvpError, match=said):
            call()
    assert hvp.SparseInverse(A.astype("float16")) @ np.ones(3) == pytest.approx(np.ones(3))


def test_graphs_are_refused():
    w = tf.Variable(np.arange(1.0, 6.0))
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w)
    solver = hvp.Solver(H)
    for call in (
        lambda: hvp.ExactInverse(H),
        lambda: hvp.NeumannInverse(H),
        lambda: hvp.SparseInverse(H),
        lambda: hvp.DiagonalPreconditioner(H),
        lambda: hvp.NystromPreconditioner(H),
        lambda: hvp.standard_errors(H),
        lambda: solver.solve(tf.ones(5)),
    ):
        with pytest.raises(hvp.GraphModeError):
            tf.function(lambda call=call: call() and 0)()


@pytest.mark.parametrize("graph", [False, True])
def test_a_solution_is_a_function_of_the_right_hand_side_and_not_of_the_point(graph):
    w = tf.Variable([1.0, 2.0, 3.0])
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    ways = [
        hvp.ExactInverse(H).product,
        hvp.NeumannInverse(H, iterations=200).product,
        hvp.SparseInverse(H).product,
        hvp.ExactInverse(H).as_tf_operator().matvec,
        *([] if graph else [lambda v: hvp.Solver(H).solve(v).x]),
    ]

    def gradient_of(way):
        def gradient():
            v = tf.ones(3)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(v)
                loss = tf.reduce_sum(way(v) ** 2)
            return tape.gradient(loss, v)

        return tf.function(gradient)() if graph else gradient()

    for way in ways:
        np.testing.assert_allclose(gradient_of(way), 2 / w.numpy() ** 4, rtol=1e-4)

    def in_variables(way):
        with tf.GradientTape() as tape:
            product = tf.function(way)(tf.ones(3)) if graph else way(tf.ones(3))
        return tf.reduce_sum(tape.gradient(product, w))

    for way in ways[:3]:
        with pytest.raises(hvp.SecondDerivativeError):
            in_variables(way)
