"""Eigenvalues and densities against dense decompositions in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.stats import wasserstein_distance

import hvp
from tests import inside
from tests.cases import FUZZ, crossed, examples, relative_error
from tests.operators.test_gauss_newton import WAYS
from tests.spectra.matrices import SPECTRA, matrix_of, network
from tests.spectra.test_estimates import options_of

WHICH = {
    "LA": lambda e, k: np.sort(e)[::-1][:k],
    "SA": lambda e, k: np.sort(e)[:k],
    "LM": lambda e, k: e[np.argsort(-np.abs(e), kind="stable")][:k],
    "BE": lambda e, k: np.sort(np.r_[np.sort(e)[: k // 2], np.sort(e)[len(e) - k + k // 2 :]])[
        ::-1
    ],
    "near 0": lambda e, k: e[np.argsort(np.abs(e), kind="stable")][:k],
}


@pytest.fixture
def iterative(monkeypatch):
    """Never take the dense matrix instead."""
    inside.set_limit(monkeypatch, "size of dense eigenvalues", 0)
    inside.set_limit(monkeypatch, "largest size of dense eigenvalues", 0)


def check(A, result, eigenvalues, k, which, tol):
    scale = np.abs(eigenvalues).max() or 1.0
    want = WHICH[which](eigenvalues, k)
    values = result.eigenvalues
    if which in ("LM", "near 0"):  # of opposite eigenvalues either one may be returned
        values, want = np.abs(values), np.abs(want)
        assert (np.diff(values) * (1 if which == "LM" else -1) <= 2 * tol * scale).all()
        assert np.abs(values - want).max() <= 2 * tol * scale
    else:
        assert np.abs(np.sort(values) - np.sort(want)).max() <= 2 * tol * scale
        assert (np.diff(result.eigenvalues) * (1 if which == "SA" else -1) >= 0).all()
    X = result.eigenvectors
    residuals = np.linalg.norm(A @ X - X * result.eigenvalues, axis=0)
    assert np.abs(residuals - result.residual_norms).max() <= 1e-12 * scale
    assert np.abs(X.T @ X - np.eye(k)).max() < 1e-6


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.few(7)
def test_they_are_those_of_the_dense_matrix(name, which):
    A = matrix_of(SPECTRA[name])
    # Systems with a condition number of 1e8 would take too long.
    tol = 1e-5 if which == "near 0" else 1e-8
    for k in (1, 6) if FUZZ or which != "near 0" else (4,):
        result = hvp.eigsh(A, k, which, tol=tol)
        assert result.converged.all()
        check(A, result, SPECTRA[name], k, which, tol)


@pytest.mark.parametrize("which", ["LA", "LM", "near 0"])
@pytest.mark.parametrize("name", ["decaying", "indefinite", "multiple", "rank one", "zero"])
@pytest.mark.few(5)
def test_none_is_missed(name, which, iterative):
    """Also equal ones, of which a Krylov space holds fewer than a block has columns."""
    A = matrix_of(SPECTRA[name])
    if which == "near 0" and name in ("indefinite", "decaying") and not FUZZ:
        pytest.skip("long: make test-all")
    tol = 1e-5 if which == "near 0" else 1e-8
    for seed in range(20 if FUZZ else 1 if which == "near 0" else 4):
        result = hvp.eigsh(A, 10, which, tol=tol, seed=seed, max_products=20_000)
        assert result.converged.all()
        check(A, result, SPECTRA[name], 10, which, tol)


@given(
    values=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 1e-9, 0.5, 1.0, 2.0, 1e3]), min_size=30,
                    max_size=60),
    k=st.integers(1, 5),
    which=st.sampled_from(list(WHICH)),
    seed=st.integers(0, 1000),
)  # fmt: skip
@examples(30)
@pytest.mark.few(0)
def test_random_spectra(values, k, which, seed):
    with pytest.MonkeyPatch.context() as patch:
        inside.set_limit(patch, "size of dense eigenvalues", 0)
        A, eigenvalues = matrix_of(np.array(values), seed), np.array(values)
        result = hvp.eigsh(A, k, which, seed=seed)
        assert result.converged.all()
        check(A, result, eigenvalues, k, which, 1e-8)


@pytest.mark.parametrize(("way", "which"), crossed(WAYS, WHICH))
@pytest.mark.few(1)
def test_operators_of_this_package(way, which, iterative):
    model, loss, data, want = network()

    def build(**options):
        return hvp.HessianOperator(loss, model, data, **options)

    if which == "near 0" and not FUZZ and ("evaluated" in way or "tape" in way):
        pytest.skip("long: make test-all")
    with build(damping=0.25, **options_of(way, build)) as H:
        result = hvp.eigsh(H, 4, which, max_products=20_000)
        A = want + 0.25 * np.eye(len(want))
        right = WHICH[which](np.linalg.eigvalsh(A), 4)
        assert relative_error(np.sort(result.eigenvalues), np.sort(right)) < 1e-8
        nest = result.nests[0]
        assert [part.shape for part in nest] == [w.shape for w in model.trainable_variables]
        assert relative_error(H.flatten(nest), result.eigenvectors[:, 0]) < 1e-12
        warm = hvp.eigsh(H, 4, which, v0=result.eigenvectors, seed=3, max_products=20_000)
        assert relative_error(np.sort(warm.eigenvalues), np.sort(right)) < 1e-8
        density = hvp.spectral_density(H, probes=4, steps=94)
        # With as many steps as variables, the quadrature is exact: its moments are v' A^p v.
        assert density.moment(0) == pytest.approx(1)
        assert wasserstein_distance(
            density.nodes.ravel(), np.linalg.eigvalsh(A), density.weights.ravel()
        ) < 0.3 * np.std(np.linalg.eigvalsh(A))


def test_what_has_not_converged_is_said():
    A = matrix_of(SPECTRA["wide"])
    with pytest.warns(hvp.ConvergenceWarning, match=r"6 of 6 eigenvalues have not converged.*tol"):
        result = hvp.eigsh(A, 6, "SA", max_products=100)
    assert not result.converged.any()
    assert result.products <= 100
    assert "0 of 6 converged" in repr(result)
    # The remedy.
    assert hvp.eigsh(A, 6, "SA").converged.all()
    for call, said in (
        (lambda: hvp.eigsh(A, 301), "at most 300 eigenvalues"),
        (lambda: hvp.eigsh(A, 0), "k is 0"),
        (lambda: hvp.eigsh(A, 2, "XX"), "'LA' or 'SA'"),
        (lambda: hvp.eigsh(A, 2, tol=-1.0), "tol is -1"),
        (lambda: hvp.eigsh(A, 2, v0=np.ones(3)), "v0 has shape"),
        (lambda: hvp.eigsh(A, 2).nests, "no variables"),
        (lambda: hvp.spectral_density(A, probes=0), "probes is 0"),
        (lambda: hvp.spectral_density(A).density(0.0, bandwidth=0.0), "bandwidth is 0"),
        (lambda: hvp.spectral_density(A).density(0.0, bandwidth="wide"), "bandwidth is 'wide'"),
        (lambda: hvp.spectral_density(A).grid(-1), "points is -1"),
    ):
        with pytest.raises(hvp.HvpError, match=f"(?i){said}"):
            call()


@pytest.mark.parametrize("name", SPECTRA)
def test_densities(name):
    A, eigenvalues = matrix_of(SPECTRA[name]), SPECTRA[name]
    density = hvp.spectral_density(A, probes=12, steps=30)
    assert density.products == 360
    assert np.allclose(density.weights.sum(axis=1), 1)
    x = density.grid(20_001)
    assert trapezoid(density.density(x), x) == pytest.approx(1, abs=1e-3)
    distance = wasserstein_distance(density.nodes.ravel(), eigenvalues, density.weights.ravel())
    spread = np.std(eigenvalues)
    assert distance <= 0.1 * spread + 1e-9
    x = np.median(eigenvalues) + 0.05 * spread + 1e-9
    assert density.distribution(x) == pytest.approx(np.mean(eigenvalues <= x), abs=0.15)
    again = hvp.spectral_density(A, probes=12, steps=30)
    np.testing.assert_array_equal(again.nodes, density.nodes)


def test_the_bulk_and_what_is_outside():
    rng = np.random.default_rng(0)
    bulk = np.linalg.eigvalsh(
        (lambda g: (g + g.T) / np.sqrt(2 * 600))(rng.standard_normal((600,) * 2))
    )
    eigenvalues = np.r_[bulk, [4.0, 5.0, 7.0, -3.0]]
    density = hvp.spectral_density(matrix_of(eigenvalues), probes=6, steps=25)
    assert (density.below, density.above) == (1, 3)
    low, high = density.bulk
    assert bulk.min() - 0.1 < low < -1
    assert 1 < high < bulk.max() + 0.1
    # The band of two errors covers nearly all of the true density, smoothed alike.
    x = np.linspace(-1.5, 1.5, 200)
    z = (x[:, np.newaxis] - eigenvalues) / density.bandwidth
    right = np.exp(-(z**2) / 2).mean(axis=1) / density.bandwidth / np.sqrt(2 * np.pi)
    smooth = density.density(x)
    assert relative_error(smooth, right) < 0.3
    assert "1 below and 3 above" in repr(density)


def test_a_density_without_a_bulk_says_so():
    density = hvp.spectral_density(matrix_of(np.r_[1.0, 1.0, 2.0, 4.0, 9.0]), probes=3)
    assert np.isnan(density.bulk).all()
    assert "no bulk" in repr(density)
    assert "nan" not in repr(density)


def test_eigenvalues_that_do_not_exist_are_in_no_density():
    """The space of each vector is exhausted after two steps."""
    A = matrix_of(np.repeat([5.0, 7.0], 50))
    density = hvp.spectral_density(A, probes=4, steps=10)
    assert np.abs(np.abs(density.nodes - 6) - 1).max() < 1e-10
    assert np.allclose(density.weights.sum(axis=1), 1)
    assert density.grid().min() == pytest.approx(5 - 6 * density.bandwidth)
    assert "from 5 to 7" in repr(density)
    np.testing.assert_allclose(density.distribution([4, np.nan, 8]), [0, np.nan, 1])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_zeros_that_rounding_tells_apart_are_one_eigenvalue(dtype):
    """With 40 steps, float32 has two nodes for the 1,960 zeros, which must not be the bandwidth."""
    values = np.concatenate([np.zeros(1960), np.geomspace(1, 100, 40)])
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(2000, 40)))[0]
    A = (vectors * values[1960:]) @ vectors.T
    density = hvp.spectral_density(((A + A.T) / 2).astype(dtype), probes=4, steps=40)
    assert density.bandwidth == pytest.approx(1, rel=1e-3)


def test_the_grid_resolves_the_bandwidth():
    """One eigenvalue is 10,000 times the width of the others."""
    values = np.append(np.linspace(0, 1, 99), 1e4)
    density = hvp.spectral_density(matrix_of(values), probes=4, steps=30)
    x = density.grid()
    assert trapezoid(density.density(x), x) == pytest.approx(1, abs=1e-6)
    assert density.grid(10).shape == (10,)


def test_eigenvectors_of_an_earlier_point_save_products(iterative):
    A = matrix_of(SPECTRA["decaying"])
    change = matrix_of(1e-5 * SPECTRA["indefinite"], seed=5)
    before = hvp.eigsh(A, 8)
    cold, warm = hvp.eigsh(A + change, 8), hvp.eigsh(A + change, 8, v0=before.eigenvectors)
    assert relative_error(warm.eigenvalues, np.linalg.eigvalsh(A + change)[::-1][:8]) < 1e-8
    assert warm.products < cold.products


@pytest.mark.long
def test_low_precision_is_not_in_the_results(iterative):
    """Estimates and eigenvalues are of products in full precision."""
    model, _, data, want = network()
    twin = keras.Sequential(
        [keras.Input((5,))]
        + [keras.layers.Dense(w, a) for w, a in ((8, "tanh"), (4, "tanh"), (2, None))]
    )
    twin.set_weights(model.get_weights())
    x, y = (part.astype("float32") for part in data)

    def loss_32(x, y):
        return tf.reduce_mean(tf.reduce_sum((twin(x) - y) ** 2, axis=1))

    right = np.linalg.eigvalsh(want)[::-1][:3]
    with hvp.HessianOperator(loss_32, twin, (x, y), precision="bfloat16") as H:
        assert relative_error(hvp.eigsh(H, 3).eigenvalues, right) < 1e-5
        for function in (hvp.trace, hvp.norm, hvp.diagonal):
            with hvp.HessianOperator(loss_32, twin, (x, y)) as full:
                one, other = function(H).estimate, function(full).estimate
            assert relative_error(one, other) < 1e-5


@pytest.mark.long
def test_graphs_are_refused():
    A = matrix_of(SPECTRA["flat"])
    calls = {
        "trace": lambda: hvp.trace(A),
        "diagonal": lambda: hvp.diagonal(A),
        "norm": lambda: hvp.norm(A),
        "logdet": lambda: hvp.logdet(A),
        "quadratic_forms": lambda: hvp.quadratic_forms(A, np.ones(300), np.exp),
        "eigsh": lambda: hvp.eigsh(A),
        "spectral_density": lambda: hvp.spectral_density(A),
    }
    for name, call in calls.items():
        with pytest.raises(hvp.GraphModeError, match=f"{name} was called while TensorFlow traces"):
            tf.function(lambda call=call: call() and 0)()


def test_float32_and_constants():
    A = matrix_of(SPECTRA["decaying"], dtype="float32")
    result = hvp.eigsh(A, 5)
    assert result.eigenvectors.dtype == np.float32
    assert relative_error(result.eigenvalues, SPECTRA["decaying"][:5]) < 1e-5
    w = tf.Variable(3.0)
    with hvp.HessianOperator(lambda: w**3, w) as H:
        assert hvp.eigsh(H, 1).eigenvalues == pytest.approx([18.0])
        assert hvp.trace(H).estimate == pytest.approx(18.0)
        assert hvp.spectral_density(H).moment(1) == pytest.approx(18.0)


PICTURES = {
    "density": lambda A: hvp.spectral_density(A).plot(),
    "linear": lambda A: hvp.spectral_density(A).plot(scale="linear"),
    "symlog": lambda A: hvp.spectral_density(A).plot(scale="symlog"),
    "eigenvalues": lambda A: hvp.eigsh(A).plot(),
    "diagonal": lambda A: hvp.diagonal(A).plot(),
    "layers": lambda A: hvp.plot_layers({"first": 1.0, "second": -2.0}),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    ax = PICTURES[name](matrix_of(SPECTRA["indefinite"]))
    assert ax.has_data()
    ax.figure.canvas.draw()
    plt.close(ax.figure)


def test_a_name_in_place_of_axes():
    pytest.importorskip("matplotlib")
    with pytest.raises(hvp.HvpError, match="savefig"):
        hvp.eigsh(np.eye(4), 2).plot("figure.png")


def test_without_matplotlib(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(hvp.HvpError, match=r"matplotlib is not installed.*pip install matplotlib"):
        hvp.plot_layers({"a": 1.0})
    with pytest.raises(hvp.HvpError, match="a mapping from names"):
        hvp.plot_layers([1.0])
    with pytest.raises(hvp.HvpError, match="a mapping from names"):
        hvp.plot_layers({"a": "large"})
