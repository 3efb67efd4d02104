"""Laplace approximations against closed forms of linear models."""

import gc
import warnings

import keras
import numpy as np
import pytest
import scipy.special
import tensorflow as tf

import hvp
from tests.cases import crossed
from tests.runtime.disk import files_of_at_most

CURVATURES = ["full", "kfac", "ekfac", "diagonal", "low-rank"]
PRIOR, NOISE = 0.7, 0.4


def design(outputs=1, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((40, 5)), rng.standard_normal((5, outputs)), rng


def linear(curvature="full", **options):
    """A linear regression at the maximum of its posterior, and its precision matrix."""
    x, truth, rng = design()
    y = x @ truth + NOISE * rng.standard_normal((40, 1))
    precision = x.T @ x / NOISE**2 + PRIOR * np.eye(5)
    w = tf.Variable(np.linalg.solve(precision, x.T @ y / NOISE**2))
    options = {"prior_precision": PRIOR, "noise": NOISE, **options}
    la = hvp.Laplace(lambda x: x @ w, "gaussian", (x, y), subset=w, curvature=curvature, **options)
    return la, x, y, w, precision


@pytest.mark.parametrize("batch_size", [None, 16])
@pytest.mark.parametrize("curvature", ["full", "kfac", "ekfac", "low-rank"])
@pytest.mark.few(1)
def test_linear_regression_is_exact(curvature, batch_size):
    la, x, y, w, precision = linear(curvature, batch_size=batch_size)
    new = np.random.default_rng(1).standard_normal((7, 5))
    mean, variance = la.function(new)
    np.testing.assert_allclose(mean, new @ w.numpy(), rtol=1e-12)
    expected = np.einsum("ij,jk,ik->i", new, np.linalg.inv(precision), new)
    np.testing.assert_allclose(variance[:, 0], expected, rtol=1e-10)
    np.testing.assert_allclose(la.function(new, covariance=True)[1][:, 0, 0], expected, rtol=1e-10)
    np.testing.assert_allclose(la.predict(new), mean)
    np.testing.assert_allclose(la.covariance().to_dense(), np.linalg.inv(precision), rtol=1e-10)
    # The evidence is the density of the data, which are jointly normal.
    joint = NOISE**2 * np.eye(40) + x @ x.T / PRIOR
    evidence = -0.5 * (y.T @ np.linalg.solve(joint, y)).item()
    evidence -= 0.5 * np.linalg.slogdet(2 * np.pi * joint)[1]
    assert la.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-10)


def test_the_diagonal_is_that_of_the_precision():
    la, *_, precision = linear("diagonal")
    np.testing.assert_allclose(la.covariance().to_dense(), np.diag(1 / precision.diagonal()))


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.few(1)
def test_the_evidence_is_maximized(curvature):
    la, *_ = linear(curvature)
    best = la.tune_prior_precision(noise=True)
    assert best == pytest.approx(la.log_marginal_likelihood(), rel=1e-12)
    for factor in (0.9, 1.1):
        assert la.log_marginal_likelihood(factor * la.prior_precision) < best
        assert la.log_marginal_likelihood(noise=factor * la.noise) < best


def test_samples_have_the_covariance_of_the_posterior():
    la, *_, w, precision = linear()
    drawn = la.sample(4000, seed=1)
    np.testing.assert_allclose(drawn.mean(1), w.numpy()[:, 0], atol=0.02)
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(np.cov(drawn), covariance, atol=0.1 * covariance.max())


CASES = {
    "bernoulli": (1, lambda f, rng: rng.random(f.shape) < scipy.special.expit(f)),
    "categorical": (3, lambda f, rng: np.argmax(f + rng.gumbel(size=f.shape), axis=1)),
    "poisson": (1, lambda f, rng: rng.poisson(np.exp(f))),
}


def curvature_of_outputs(name, f):
    """The Hessians of one example's negative log-likelihood in its outputs."""
    if name == "poisson":
        return np.exp(f)[:, :, np.newaxis]
    if name == "bernoulli":
        p = scipy.special.expit(f)
        return (p * (1 - p))[:, :, np.newaxis]
    p = scipy.special.softmax(f, axis=1)
    return np.einsum("ei,ij->eij", p, np.eye(p.shape[1])) - np.einsum("ei,ej->eij", p, p)


def log_likelihood(name, f, y):
    if name == "poisson":
        return np.sum(y * f - np.exp(f) - scipy.special.gammaln(y + 1))
    if name == "bernoulli":
        return -np.sum(np.logaddexp(0, np.where(y, -f, f)))
    return np.sum(scipy.special.log_softmax(f, axis=1)[np.arange(len(y)), y])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.few(1)
def test_generalized_linear_models(name):
    outputs, draw = CASES[name]
    x, truth, rng = design(outputs)
    y = draw(x @ truth, rng)
    w = tf.Variable(truth)
    la = hvp.Laplace(
        lambda x: x @ w, name, (x, y), subset=w, curvature="full", prior_precision=PRIOR
    )
    f = x @ truth
    rows = np.einsum("ei,op->eoip", x, np.eye(outputs)).reshape(40, outputs, -1)
    matrix = np.einsum("eon,eop,epm->nm", rows, curvature_of_outputs(name, f), rows)
    precision = matrix + PRIOR * np.eye(len(matrix))
    covariance = np.linalg.inv(precision)
    expected = np.einsum("eon,nm,epm->eop", rows, covariance, rows)
    mean, found = la.function(x, covariance=True)
    np.testing.assert_allclose(mean, f, rtol=1e-12)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    evidence = log_likelihood(name, f, y) - PRIOR * np.sum(truth**2) / 2
    evidence += (len(matrix) * np.log(PRIOR) - np.linalg.slogdet(precision)[1]) / 2
    assert la.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-10)
    # Predictions against integrals over normal outputs.
    many = rng.standard_normal((20_000, outputs))
    link = {"poisson": np.exp, "bernoulli": scipy.special.expit}.get(
        name, lambda f: scipy.special.softmax(f, axis=-1)
    )
    roots = np.linalg.cholesky(expected[:5])
    exact = np.stack([link(f[e] + many @ roots[e].T).mean(axis=0) for e in range(5)])
    # For classes, MacKay's approximation leaves out the covariances of their logits.
    close = 0.06 if name == "categorical" else 0.02
    np.testing.assert_allclose(la.predict(x[:5]), exact, rtol=0.1, atol=close)
    drawn = la.predict(x[:5], method="samples", samples=4000)
    np.testing.assert_allclose(drawn, exact, rtol=0.1, atol=0.02)
    # The model is linear: drawing weights is drawing outputs.
    network = la.predict(x[:5], method="network", samples=4000)
    np.testing.assert_allclose(network, exact, rtol=0.1, atol=0.02)
    np.testing.assert_array_equal(w, truth)


@pytest.mark.parametrize("name", [*CASES, "gaussian"])
@pytest.mark.few(1)
def test_validation_chooses_the_most_likely_precision(name):
    outputs, draw = CASES.get(name, (1, lambda f, rng: f + rng.standard_normal(f.shape)))
    x, truth, rng = design(outputs)
    w, (y, other) = tf.Variable(1.5 * truth), (draw(x @ truth, rng) for _ in range(2))
    la = hvp.Laplace(lambda x: x @ w, name, (x, y), subset=w, curvature="full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        best = la.tune_prior_precision((x, other))
    # No smaller variance is tried.
    assert bool(caught) == (la.prior_precision == pytest.approx(1e6))
    assert all(one.category is hvp.ConvergenceWarning for one in caught)

    def value():
        mean, variance = la.function(x)
        if name == "gaussian":
            total = variance + la.noise**2
            return np.mean((mean - other) ** 2 / total + np.log(2 * np.pi * total)) / 2
        expected = la.predict(x)
        if name == "categorical":
            return -np.mean(np.log(expected[np.arange(40), other]))
        if name == "bernoulli":
            return -np.mean(np.log(np.where(other, expected, 1 - expected)))
        return np.mean(expected - other * np.log(expected) + scipy.special.gammaln(other + 1))

    assert value() == pytest.approx(best, rel=1e-6)
    chosen = la.prior_precision
    for factor in (0.5, 2.0):
        la.prior_precision = np.clip(factor * chosen, 1e-3, 1e6)  # between those that are tried
        assert value() >= best - 1e-9


def classifier(regularizer=None, of_last=None):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh", name="hidden", kernel_regularizer=regularizer),
            layers.Dense(3, "softmax", name="last", kernel_regularizer=of_last),
        ]
    )
    model.compile(loss="sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 6)).astype("float32")
    return model, x, rng.integers(0, 3, 50)


@pytest.mark.parametrize(
    ("curvature", "subset"), crossed(CURVATURES, ["all", "last-layer", "hidden", "all", "all"])
)
@pytest.mark.few(1)
def test_keras_models(curvature, subset):
    model, x, y = classifier()
    la = hvp.Laplace.from_keras(model, (x, y), curvature=curvature, subset=subset)
    assert la.mean.shape == ({"all": 83, "last-layer": 27, "hidden": 56}[subset],)
    probabilities = la.predict(x)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    plain = model.predict(x, verbose=0)
    # Less sure than the network itself.
    assert (probabilities.max(axis=1) <= plain.max(axis=1) + 1e-6).all()
    assert probabilities.max(axis=1).mean() < plain.max(axis=1).mean() - 0.01
    assert (la.function(x)[1] > 0).all()
    la.prior_precision = 1e8
    np.testing.assert_allclose(la.predict(x), plain, rtol=1e-3)
    la.tune_prior_precision(by="block", check=False)
    assert len(la.blocks) == np.size(la.prior_precision)
    model.layers[0].kernel.assign(model.layers[0].kernel * 1.1)
    if subset != "last-layer":
        with pytest.raises(hvp.StaleOperatorError, match="refresh"):
            la.predict(x)
        la.refresh()
        assert np.isfinite(la.predict(x)).all()


def test_regularizers_are_the_prior():
    model, x, y = classifier(*[keras.regularizers.L2(0.01)] * 2)
    la = hvp.Laplace.from_keras(model, (x, y), curvature="full")
    kernels = 6 * 8 + 8 * 3
    # Of both kernels but no bias: 50 examples, and the second derivative 2 * 0.01.
    assert la.prior_precision == pytest.approx(50 * 0.02 * kernels / 83, rel=1e-5)
    chosen = hvp.Laplace.from_keras(model, (x, y), curvature="full", prior_precision=3.0)
    assert chosen.prior_precision == 3.0
    # A penalty of the first kernel alone says nothing of the other layer.
    model, x, y = classifier(keras.regularizers.L2(0.01))
    both = hvp.Laplace.from_keras(model, (x, y), curvature="kfac")
    np.testing.assert_allclose(both.prior_precision, [50 * 0.02 * 48 / 56, 1], rtol=1e-5)
    last = hvp.Laplace.from_keras(model, (x, y), subset="last-layer")
    assert last.prior_precision == 1


def test_a_weight_of_the_loss_divides_the_penalty():
    # 2 (loss + 0.005 w^2) is least where loss + 0.005 w^2 is.
    model, x, y = classifier(*[keras.regularizers.L2(0.01)] * 2)
    once = hvp.Laplace.from_keras(model, (x, y), curvature="full").prior_precision
    model.compile(loss="sparse_categorical_crossentropy", loss_weights=[2.0])
    try:
        model.evaluate(x, y, verbose=0)
    except ValueError as error:
        pytest.skip(f"Keras {keras.__version__} takes no weight of a single loss: {error}")
    la = hvp.Laplace.from_keras(model, (x, y), curvature="full")
    assert la.prior_precision == pytest.approx(once / 2, rel=1e-6)


@pytest.mark.parametrize(
    "regularizer", [keras.regularizers.L1(), keras.regularizers.L1L2(0.1, 0.1)]
)
@pytest.mark.few(1)
def test_a_penalty_that_is_no_normal_prior_is_refused(regularizer):
    model, x, y = classifier(regularizer)
    with pytest.raises(hvp.HvpError, match=r"mean zero.*prior_precision"):
        hvp.Laplace.from_keras(model, (x, y))
    assert hvp.Laplace.from_keras(model, (x, y), prior_precision=2.0).prior_precision == 2


def test_a_penalty_with_another_mean_is_refused():
    x = np.ones((3, 1))
    w = tf.Variable([[1.0]], dtype=tf.float64)

    def penalty():
        return tf.reduce_sum((w - 3.0) ** 2)

    with pytest.raises(hvp.HvpError, match="mean zero"):
        hvp.Laplace(lambda x: x @ w, "gaussian", (x, 2 * x), subset=w, regularization=penalty)


def test_penalties_of_frozen_variables_and_of_none_of_the_uncertain_ones():
    x = np.ones((3, 1))
    w = tf.Variable([[1.0]], dtype=tf.float64, trainable=False)
    other = tf.Variable([[2.0]], dtype=tf.float64)

    def prior(penalty):
        options = {"subset": w, "regularization": penalty, "noise": 1.0}
        return hvp.Laplace(lambda x: x @ w, "gaussian", (x, 2 * x), **options).prior_precision

    assert prior(lambda: tf.reduce_sum(w**2)) == pytest.approx(3 * 2)
    assert prior(lambda: tf.reduce_sum(other**2)) == 1


@pytest.mark.long
def test_label_smoothing_is_not_part_of_the_likelihood():
    model, x, y = classifier()
    y = np.eye(3, dtype="float32")[y]
    model.compile(loss="categorical_crossentropy")
    plain = hvp.Laplace.from_keras(model, (x, y)).log_marginal_likelihood()
    model.compile(loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.2))
    smoothed = hvp.Laplace.from_keras(model, (x, y)).log_marginal_likelihood()
    assert smoothed == pytest.approx(plain, rel=1e-6)


def test_several_inputs_and_batches():
    x, truth, rng = design()
    w = tf.Variable(truth)
    y = x @ truth + rng.standard_normal((40, 1))

    def model(a, b):
        return tf.concat([a, b], axis=1) @ w

    whole = hvp.Laplace(model, "gaussian", ((x[:, :2], x[:, 2:]), y), subset=w, curvature="full")
    parts = [((x[i : i + 8, :2], x[i : i + 8, 2:]), y[i : i + 8]) for i in range(0, 40, 8)]
    batches = hvp.Laplace(model, "gaussian", parts, subset=w, curvature="full")
    new = x[:3, :2], x[:3, 2:]
    for found, expected in zip(batches.function(new), whole.function(new)):
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert batches.noise == pytest.approx(whole.noise, rel=1e-12)
    assert batches.log_marginal_likelihood() == pytest.approx(
        whole.log_marginal_likelihood(), rel=1e-12
    )


class Linear(tf.Module):
    """A module without layers."""

    def __init__(self, w):
        super().__init__()
        self.w = w

    def __call__(self, x):
        return x @ self.w


def test_what_is_refused():
    la, x, y, w, _ = linear()

    def made(**changes):
        arguments = {"likelihood": "gaussian", "data": (x, y), "subset": w, **changes}
        return hvp.Laplace(lambda x: x @ w, **arguments)

    def own(f, y):
        return tf.reduce_mean(f**2)

    def mixing(x):
        return x @ w - tf.reduce_mean(x @ w)

    def of_mixing():
        return hvp.Laplace(mixing, "gaussian", (x, y), subset=w, curvature="full")

    same = np.tile(x[:, :1], (1, 5))
    undetermined = {"data": (same, y), "prior_precision": 0.0, "curvature": "full"}
    for call, said in (
        (lambda: made(curvature="dense"), "'dense'.*'kfac'"),
        (lambda: made(likelihood="normal"), "'normal'.*'gaussian'"),
        (lambda: made(likelihood=["gaussian"]), r"\['gaussian'\]"),
        (lambda: made(data=None), "not a pair"),
        (lambda: made(likelihood="bernoulli", data=(x, np.full(y.shape, 2))), "a target 2"),
        (lambda: made(likelihood="poisson", data=(x, -np.ones(y.shape))), "a target -1"),
        (lambda: la.sample(2, seed=-1), "seed is -1"),
        (lambda: made(likelihood="poisson", noise=1.0), "noise"),
        (lambda: made(subset="all"), r"subset=\[w, b\]"),
        (lambda: made(data=(x,)), r"\(x, y\)"),
        (lambda: made(**undetermined).function(x), "zero"),
        (lambda: made(prior_precision=-1.0), r"prior precision is -1\.0"),
        (lambda: made(prior_precision="much"), "'much'"),
        (lambda: made(likelihood="categorical", data=(x, 0 * y)), r"\(1,\).*'bernoulli'"),
        (lambda: la.tune_prior_precision((x, y[:30])), "30"),
        (lambda: la.calibration((x, y[:30])), "30"),
        (lambda: setattr(la, "prior_precision", [1.0, 2.0]), "1 blocks"),
        (lambda: la.log_marginal_likelihood([1.0, 2.0]), "1 blocks"),
        (lambda: la.log_marginal_likelihood(noise=0.0), "noise"),
        (lambda: la.sample(0), "count is 0"),
        (lambda: hvp.Laplace(Linear(w), "gaussian", (x, y), subset="last-layer"), "no layers"),
        (lambda: made(subset=[]), "empty"),
        (lambda: la.predict(x, method="probit"), "'network'"),
        (lambda: la.tune_prior_precision(by="layer"), "'block'"),
        (lambda: made(likelihood=own).tune_prior_precision((x, y)), "likelihoods"),
        (lambda: of_mixing().function(x), "other inputs"),
        (lambda: made(rank=0), "rank is 0"),
        (lambda: la.tune_prior_precision((x, y), by="block"), "by='all'"),
        (lambda: made(data=(0 * x, 0 * y)), "noise="),
        (lambda: la.function(x[:0]), "no examples"),
        (lambda: hvp.Laplace(classifier()[0], "categorical", (x, y), subset="conv"), "'conv'"),
        (lambda: setattr(la, "noise", 0.0), "noise is 0"),
        (lambda: la.predict(x, method="bridge"), "'categorical'"),
        (lambda: la.tune_prior_precision(by="weight"), "'diagonal'"),
        (lambda: la.tune_prior_precision((x,)), r"\(x, y\)"),
        (lambda: la.function(x, covariance="all"), "'joint'"),
        (lambda: la.saliency("magnitude"), "'surgeon'"),
        (lambda: la.calibration((x, y), bins=0), "bins is 0"),
        (lambda: made(likelihood=own).calibration((x, y)), "'gaussian'"),
        (lambda: hvp.Laplace.load("nothing", lambda x: x @ w, subset=w), "nothing.*FileNotFound"),
    ):
        with pytest.raises(hvp.HvpError, match=f"(?is){said}"):
            call()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("curvature", ["kfac", "ekfac", "diagonal", "full"])
@pytest.mark.few(1)
def test_the_last_layer_needs_no_jacobian(curvature, bias):
    """Against variances from the Jacobian, for weights that are named."""
    keras.utils.set_random_seed(0)
    last = keras.layers.Dense(3, use_bias=bias, name="last")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), last])
    _, x, y = classifier()
    options = {"curvature": curvature, "prior_precision": 0.5}
    fast = hvp.Laplace(model, "categorical", (x, y), subset="last-layer", **options)
    plain = hvp.Laplace(model, "categorical", (x, y), subset=last, **options)
    for found, expected in zip(fast.function(x), plain.function(x)):
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_low_rank_is_exact_in_its_eigenvectors():
    la, x, _, w, _ = linear("low-rank", rank=3)
    values, vectors = np.linalg.eigh(x.T @ x / NOISE**2)
    values[:2] = 0  # the smallest are left out
    precision = vectors @ np.diag(values + PRIOR) @ vectors.T
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(la.covariance().to_dense(), covariance, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(la.covariance().diagonal(), covariance.diagonal(), rtol=1e-8)
    expected = np.einsum("ij,jk,ik->i", x, covariance, x)
    np.testing.assert_allclose(la.function(x)[1][:, 0], expected, rtol=1e-8)
    squares = w.numpy().ravel() ** 2
    np.testing.assert_allclose(la.saliency(), squares * precision.diagonal() / 2, rtol=1e-8)
    surgeon = squares / covariance.diagonal() / 2
    np.testing.assert_allclose(la.saliency("surgeon"), surgeon, rtol=1e-8)


def test_one_precision_for_each_weight():
    la, x, y, w, _ = linear("diagonal")
    priors = np.array([0.1, 1.0, 10.0, 2.0, 0.5])
    la.prior_precision = priors
    np.testing.assert_array_equal(la.prior_precision, priors)
    diagonal = np.sum(x**2, axis=0) / NOISE**2 + priors
    np.testing.assert_allclose(la.covariance().diagonal(), 1 / diagonal, rtol=1e-12)
    residuals = y - x @ w.numpy()
    evidence = -np.sum(residuals**2) / NOISE**2 / 2 - 20 * np.log(2 * np.pi * NOISE**2)
    evidence += np.sum(np.log(priors / diagonal) - priors * w.numpy().ravel() ** 2) / 2
    assert la.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-12)
    by_all = la.tune_prior_precision(check=False)
    assert la.tune_prior_precision(by="weight", check=False) > by_all
    assert np.ptp(la.prior_precision) > 0


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.few(1)
def test_the_gradient_of_the_evidence(curvature):
    la, *_ = linear(curvature)
    value, of_prior, of_noise = la.log_marginal_likelihood(gradient=True)
    assert value == la.log_marginal_likelihood()
    step = 1e-4
    for place, slope in enumerate(of_prior):
        change = np.ones(len(of_prior))
        change[place] = np.exp(step)
        ends = [la.log_marginal_likelihood(PRIOR * change**sign) for sign in (1, -1)]
        assert slope == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)
    ends = [la.log_marginal_likelihood(noise=NOISE * np.exp(sign * step)) for sign in (1, -1)]
    assert of_noise == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


def test_joint_covariances_of_outputs():
    x, truth, _ = design(2)
    w = tf.Variable(truth)
    la = hvp.Laplace(lambda x: x @ w, "gaussian", (x, x @ truth), subset=w, noise=NOISE)
    precision = np.kron(x.T @ x / NOISE**2 + np.eye(5), np.eye(2))
    rows = np.kron(x, np.eye(2))
    mean, covariance = la.function(x, covariance="joint")
    np.testing.assert_allclose(mean, x @ truth)
    expected = rows @ np.linalg.inv(precision) @ rows.T
    np.testing.assert_allclose(covariance, expected, rtol=1e-8, atol=1e-12)
    each = la.function(x, covariance=True)[1]
    np.testing.assert_allclose(each[3], covariance[6:8, 6:8], rtol=1e-8, atol=1e-12)


def test_inputs_in_batches():
    la, x, *_ = linear()
    expected = la.function(x)
    for batches in (
        tf.data.Dataset.from_tensor_slices(x).batch(7),
        tf.data.Dataset.from_tensor_slices((x, x[:, 0])).batch(16),
    ):
        for found, whole in zip(la.function(batches), expected):
            np.testing.assert_allclose(found, whole, rtol=1e-12)
        np.testing.assert_allclose(la.predict(batches, method="network", samples=2).shape, (40, 1))


def test_weights_that_are_no_maximum_are_refused():
    la, x, y, w, _ = linear()
    least = np.linalg.lstsq(x, y, rcond=None)[0]  # near enough, as the data determine it
    w.assign(least)
    la.refresh()
    la.tune_prior_precision()
    w.assign(least + 1)
    la.refresh()
    with pytest.raises(hvp.HvpError, match=r"(?s)deviations.*not trained on.*prior_precision"):
        la.tune_prior_precision()
    before = la.prior_precision
    assert la.tune_prior_precision(check=False) == la.log_marginal_likelihood()
    assert la.prior_precision != before
    la.tune_prior_precision((x, y))  # which needs no maximum


@pytest.mark.long
def test_evidence_that_makes_predictions_too_cautious_is_warned_of():
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    layers = dense(64, "relu"), dense(32, "relu"), dense(10, "softmax")
    model = keras.Sequential([keras.Input((20,)), *layers])
    x = np.random.default_rng(0).standard_normal((200, 20)).astype("float32")
    y = np.argmax(x[:, :10], axis=1)
    model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy")
    model.fit(x, y, epochs=40, verbose=0)
    la = hvp.Laplace.from_keras(model, (x, y))
    with pytest.warns(hvp.ConvergenceWarning, match="too cautious") as caught:
        la.tune_prior_precision()
    found = la.calibration((x, y))  # of the data that were trained on
    assert f"is {found.log_loss:.3g}, and {found.point.log_loss:.3g} with" in str(caught[0].message)
    assert found.log_loss > found.point.log_loss + 0.2
    la.tune_prior_precision(check=False)


@pytest.mark.parametrize("curvature", ["full", "diagonal", "low-rank"])
def test_refresh_traces_nothing_again(curvature):
    rng = np.random.default_rng(0)
    w, x = tf.Variable(rng.standard_normal((4, 3))), rng.standard_normal((30, 4))
    traces = []

    def model(x):
        if not tf.executing_eagerly():
            traces.append(1)
        return tf.matmul(x, w)

    la = hvp.Laplace(model, "categorical", (x, np.arange(30) % 3), subset=w, curvature=curvature)
    before, variances = len(traces), la.function(x)[1]
    w.assign(2 * w)
    la.refresh()
    assert len(traces) == before + 1  # predictions, for variances
    assert not np.allclose(la.function(x)[1], variances)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.few(1)
def test_other_variables_of_a_function_are_watched(curvature):
    x, truth, _ = design()
    w, b = tf.Variable(truth), tf.Variable(np.ones(1))
    options = {"subset": w, "curvature": curvature}
    la = hvp.Laplace(lambda x: tf.exp(x @ w) + b, "gaussian", (x, x[:, :1]), **options)
    b.assign([2.0])
    with pytest.raises(hvp.StaleOperatorError):
        la.function(x)
    la.refresh()
    assert la.function(x)[1].all()


def test_refresh_estimates_the_noise_again_unless_it_is_known():
    x, truth, rng = design()
    y = x @ truth + NOISE * rng.standard_normal((40, 1))
    w = tf.Variable(truth)
    estimated, known = (
        hvp.Laplace(lambda x: x @ w, "gaussian", (x, y), subset=w, curvature="full", noise=noise)
        for noise in (None, NOISE)
    )
    w.assign(0 * truth)
    for la in (estimated, known):
        la.refresh()
    assert estimated.noise == pytest.approx(np.sqrt(np.mean(y**2)))
    assert known.noise == NOISE
    estimated.noise = 0.5
    estimated.refresh()
    assert estimated.noise == 0.5


def test_compiled_losses_that_are_no_likelihood_of_the_outputs_are_refused():
    """Masks, ignored classes, and probabilities whose logits are not found."""
    rng = np.random.default_rng(0)
    layers, losses = keras.layers, keras.losses
    x, y = rng.standard_normal((20, 4)).astype("float32"), rng.integers(0, 2, 20)

    def made(model, loss, y=y, x=x):
        model.compile(loss=loss)
        return hvp.Laplace.from_keras(model, (x, y), curvature="diagonal")

    def reshaped(activation):
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(1, activation), layers.Reshape((1, 1))]
        )

    with pytest.raises(hvp.InvalidLossError, match="'bernoulli'"):
        made(reshaped("sigmoid"), "binary_crossentropy", y[:, None, None])
    made(reshaped(None), losses.BinaryCrossentropy(from_logits=True), y[:, None, None])
    smooth = losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1)
    made(reshaped(None), smooth, y[:, None, None])
    classes = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])
    with pytest.raises(hvp.HvpError, match="ignores the class 0"):
        made(classes, losses.SparseCategoricalCrossentropy(ignore_class=0))
    tokens = rng.integers(0, 5, (20, 6))
    sequences = keras.Sequential(
        [keras.Input((6,)), layers.Embedding(5, 4, mask_zero=True), layers.Dense(3, "softmax")]
    )
    with pytest.raises(hvp.HvpError, match="mask"):
        made(sequences, "sparse_categorical_crossentropy", tokens % 3, tokens)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.few(1)
def test_saved_and_loaded(curvature, tmp_path):
    model, x, y = classifier()
    la = hvp.Laplace.from_keras(model, (x, y), curvature=curvature)
    la.prior_precision = np.arange(1, len(la.blocks) + 1)
    la.save(tmp_path / "posterior.npz")
    loaded = hvp.Laplace.load(tmp_path / "posterior.npz", model)
    np.testing.assert_array_equal(loaded.predict(x), la.predict(x))
    np.testing.assert_array_equal(loaded.prior_precision, la.prior_precision)
    assert loaded.log_marginal_likelihood() == la.log_marginal_likelihood()
    assert loaded.tune_prior_precision((x, y)) == la.tune_prior_precision((x, y))
    for call in (loaded.refresh, loaded.tune_prior_precision):
        with pytest.raises(hvp.HvpError, match="without its data"):
            call()
    with pytest.raises(hvp.CheckpointError, match="subset"):
        hvp.Laplace.load(tmp_path / "posterior.npz", model, subset="last-layer")
    with pytest.raises(hvp.HvpError, match="'categorical'"):
        hvp.Laplace.load(tmp_path / "posterior.npz", model, likelihood="bernoulli")
    hvp.Laplace.load(tmp_path / "posterior.npz", model, likelihood="categorical")
    whole = (tmp_path / "posterior.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(hvp.CheckpointError, match="BadZipFile"):
        hvp.Laplace.load(tmp_path / "half.npz", model)
    with files_of_at_most(len(whole) // 2), pytest.raises(OSError, match="large"):
        la.save(tmp_path / "posterior.npz")
    assert (tmp_path / "posterior.npz").read_bytes() == whole
    model.layers[0].bias.assign_add(np.ones(8))
    with pytest.raises(hvp.CheckpointError, match="weights"):
        hvp.Laplace.load(tmp_path / "posterior.npz", model)


def test_a_loss_of_the_caller_is_loaded(tmp_path):
    x, truth, _ = design()
    w = tf.Variable(truth)

    def own(f, y):
        return tf.reduce_mean(tf.cosh(f[:, 0] - y))

    la = hvp.Laplace(lambda x: x @ w, own, (x, x[:, 0]), subset=w, curvature="full")
    la.save(tmp_path / "posterior.npz")
    with pytest.raises(hvp.HvpError, match="function"):
        hvp.Laplace.load(tmp_path / "posterior.npz", lambda x: x @ w, subset=w)
    loaded = hvp.Laplace.load(tmp_path / "posterior.npz", lambda x: x @ w, likelihood=own, subset=w)
    np.testing.assert_array_equal(loaded.function(x), la.function(x))


def test_the_posterior_is_the_next_prior():
    """Two halves of the data one after the other are as good as all of them."""
    _, x, y, w, precision = linear("full")
    first, second = (x[:20], y[:20]), (x[20:], y[20:])
    model = lambda x: x @ w  # noqa: E731
    old = {"subset": w, "curvature": "full", "noise": NOISE}
    w.assign(
        np.linalg.solve(
            first[0].T @ first[0] / NOISE**2 + PRIOR * np.eye(5), first[0].T @ first[1] / NOISE**2
        )
    )
    half = hvp.Laplace(model, "gaussian", first, prior_precision=PRIOR, **old)
    penalty = half.penalty()
    assert penalty() == 0

    def loss(x, y):
        return tf.reduce_sum((x @ w - y) ** 2) / (2 * NOISE**2) + penalty()

    with hvp.HessianOperator(loss, w, second) as H:
        np.testing.assert_allclose(H.to_dense(), precision, rtol=1e-10, atol=1e-10)
    hvp.minimize(loss, w, second, options={"gtol": 1e-10})
    both = np.linalg.solve(precision, x.T @ y / NOISE**2)
    np.testing.assert_allclose(w, both, rtol=1e-8)
    assert penalty() > 0


@pytest.mark.parametrize("loss", ["mse", "binary_crossentropy"])
@pytest.mark.few(1)
def test_weight_decay_is_the_prior_in_units_of_keras(loss):
    def made(decay):
        keras.utils.set_random_seed(0)
        regularizer = None if decay is None else keras.regularizers.L2(decay)
        link = "sigmoid" if loss == "binary_crossentropy" else None
        layers = keras.layers
        output = layers.Dense(2, link, kernel_regularizer=regularizer, use_bias=False, name="d")
        model = keras.Sequential([keras.Input((6,)), output])
        model.compile(loss=loss)
        return model

    x = np.random.default_rng(0).standard_normal((50, 6)).astype("float32")
    y = (x[:, :2] > 0).astype("float32")
    la = hvp.Laplace.from_keras(made(0.01), (x, y), curvature="full")
    assert la.weight_decay() == pytest.approx({"sequential/d/kernel": 0.01}, rel=1e-5) or (
        [*la.weight_decay().values()] == pytest.approx([0.01], rel=1e-5)
    )
    # The posterior's precision is the Hessian of the sum of negative log-likelihoods.
    of_keras = hvp.HessianOperator.from_keras(made(0.01), (x, y)).to_dense()
    unit = 100 / (2 * la.noise**2) if loss == "mse" else 100
    precision = np.linalg.inv(la.covariance().to_dense())
    np.testing.assert_allclose(precision, unit * of_keras, rtol=1e-3, atol=1e-3 * precision.max())


def test_the_bridge_of_certain_logits():
    """Without features and without a bias, the logits are zero whatever the weights are."""
    x, truth, _ = design(3)
    w = tf.Variable(truth)
    la = hvp.Laplace(lambda x: x @ w, "categorical", (x, np.arange(40) % 3), subset=w)
    found = la.predict(np.concatenate([0 * x[:1], x[:1]]), method="bridge")
    np.testing.assert_allclose(found[0], 1 / 3)
    np.testing.assert_allclose(found[1], la.predict(x[:1], method="bridge")[0])


def test_the_bridge_is_the_mean_of_a_dirichlet():
    """Of the one whose softmax basis has these means and variances, given that logits sum to 0."""
    model, x, y = classifier()
    la = hvp.Laplace.from_keras(model, (x, y), curvature="full")
    mean, covariance = (a.astype(np.float64) for a in la.function(x, covariance=True))
    gain = covariance.sum(axis=2) / covariance.sum(axis=(1, 2))[:, np.newaxis]
    logits = mean - gain * mean.sum(axis=1, keepdims=True)
    given = covariance - np.einsum("ei,ej->eij", gain, covariance.sum(axis=1))
    counts = [
        [(1 - 2 / 3 + np.exp(z[k]) / 9 * np.exp(-z).sum()) / v[k, k] for k in range(3)]
        for z, v in zip(logits, given)
    ]
    expected = counts / np.sum(counts, axis=1, keepdims=True)
    np.testing.assert_allclose(la.predict(x, method="bridge"), expected, rtol=1e-6)


def test_calibration_of_intervals():
    """Of a linear regression with the right noise, the intervals have their probabilities."""
    rng = np.random.default_rng(0)
    x, truth = rng.standard_normal((2000, 5)), rng.standard_normal((5, 1))
    y = x @ truth + NOISE * rng.standard_normal((2000, 1))
    w = tf.Variable(np.linalg.lstsq(x[:10], y[:10], rcond=None)[0])
    la = hvp.Laplace(
        lambda x: x @ w, "gaussian", (x[:10], y[:10]), subset=w, noise=NOISE, prior_precision=0.01
    )
    found = la.calibration((x[10:], y[10:]))
    assert found.error < 0.1 < found.point.error
    assert found.log_loss < found.point.log_loss
    np.testing.assert_allclose(found.confidence, (np.arange(15) + 0.5) / 15)
    total = la.function(x[10:])[1] + NOISE**2
    scores = np.abs(y[10:] - x[10:] @ w.numpy()) / np.sqrt(total)
    assert found.frequency[7] == pytest.approx(np.mean(scores < 0.6744897501960817))
    assert found.log_loss == pytest.approx(
        np.mean(scores**2 + np.log(2 * np.pi * total)) / 2, rel=1e-10
    )


def test_logistic_regression_against_its_true_posterior():
    """Two weights, whose posterior is integrated on a grid."""
    rng = np.random.default_rng(0)
    x, truth = rng.standard_normal((200, 2)), np.array([[1.0], [-0.5]])
    y = rng.random((200, 1)) < scipy.special.expit(x @ truth)
    w = tf.Variable(truth)

    def loss(x, y):
        cross = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(y, tf.float64), x @ w)
        return tf.reduce_sum(cross) + tf.reduce_sum(w**2) / 2

    hvp.minimize(loss, w, (x, y), options={"gtol": 1e-10})
    la = hvp.Laplace(lambda x: x @ w, "bernoulli", (x, y), subset=w, curvature="full")
    deviations = np.sqrt(la.covariance().diagonal())
    steps = np.linspace(-6, 6, 121)
    places = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    grid = la.mean + places * deviations
    logits = grid @ x.T
    log_density = -np.logaddexp(0, np.where(y.ravel(), -logits, logits)).sum(axis=1)
    log_density -= np.sum(grid**2, axis=1) / 2
    density = np.exp(log_density - log_density.max())
    cell = np.prod(deviations) * 0.1**2
    # The prior's density has a factor of 1 / (2 pi).
    evidence = np.log(density.sum() * cell) + log_density.max() - np.log(2 * np.pi)
    density /= density.sum()
    mean = density @ grid
    covariance = (density[:, np.newaxis] * (grid - mean)).T @ (grid - mean)
    np.testing.assert_allclose(la.covariance().to_dense(), covariance, rtol=0.06, atol=1e-3)
    assert la.log_marginal_likelihood() == pytest.approx(evidence, abs=0.03)
    new = rng.standard_normal((20, 2))
    expected = density @ scipy.special.expit(grid @ new.T)
    np.testing.assert_allclose(la.predict(new)[:, 0], expected, atol=0.01)


@pytest.mark.parametrize("curvature", ["full", "kfac"])
@pytest.mark.few(1)
def test_the_last_layer_may_have_other_units(curvature):
    """Features of another scale, and weights that make up for it, are the same function."""
    x, truth, rng = design(2)
    y = x @ truth + NOISE * rng.standard_normal((40, 2))
    mixed = rng.standard_normal((5, 5)) + 3 * np.eye(5)
    options = {"curvature": curvature, "noise": NOISE, "prior_precision": 1e-12}
    found = []
    for change in (np.eye(5), mixed):
        w = tf.Variable(np.linalg.solve(change, truth))
        la = hvp.Laplace(lambda x, w=w: x @ w, "gaussian", (x @ change, y), subset=w, **options)
        found.append((*la.function(x @ change), la.predict(x @ change)))
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-8)


@pytest.mark.parametrize(
    "after", ["softplus", "rescaling", "nothing", "rescaled zeros", "relu", "squeezed"]
)
@pytest.mark.few(1)
def test_what_follows_the_last_layer_counts(after):
    """The variances are those of the model's outputs, not of the last layer's product."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    last = layers.Dense(1, after if after in ("softplus", "relu") else None, name="last")
    more = {"resca": [layers.Rescaling(3.0)], "squee": [layers.Reshape(())]}.get(after[:5], [])
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), last, *more])
    _, x, _ = classifier()
    y = x[:, :1]
    if after == "rescaled zeros":  # which are what the layer returns, too
        last.kernel.assign(tf.zeros((8, 1)))
    if after == "relu":  # linear at the first examples alone
        x = x[np.argsort(-model(x)[:, 0])]
    for curvature in ("kfac", "low-rank"):
        options = {"curvature": curvature, "noise": 0.3}
        named = hvp.Laplace(model, "gaussian", (x, y), subset="last-layer", **options)
        plain = hvp.Laplace(model, "gaussian", (x, y), subset=last, **options)
        for found, expected in zip(named.function(x), plain.function(x)):
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-3)
        assert named.tune_prior_precision((x, y)) == pytest.approx(
            plain.tune_prior_precision((x, y)), rel=1e-4
        )


def test_logits_of_a_plain_softmax():
    x, truth, rng = design(3)
    y = np.argmax(x @ truth + rng.gumbel(size=(40, 3)), axis=1)
    w = tf.Variable(truth)
    options = {"subset": w, "curvature": "full"}
    of_logits = hvp.Laplace(lambda x: x @ w, "categorical", (x, y), **options)
    la = hvp.Laplace(lambda x: tf.nn.softmax(x @ w), "categorical", (x, y), **options)
    np.testing.assert_allclose(la.predict(x), of_logits.predict(x), rtol=1e-10)
    assert la.log_marginal_likelihood() == pytest.approx(of_logits.log_marginal_likelihood())
    # Where they cannot be found, probabilities would be taken for logits.
    with pytest.raises(hvp.InvalidLossError, match="probabilities"):
        hvp.Laplace(lambda x: tf.nn.softmax(x @ w) + 0, "categorical", (x, y), **options)


def test_penalties_of_sequences_are_in_units_of_keras():
    """Keras averages over positions, of which the likelihood has the sum."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(3, "softmax", kernel_regularizer=keras.regularizers.L2(0.01))
    model = keras.Sequential([keras.Input((4, 6)), dense])
    model.compile(loss="sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 4, 6)).astype("float32"), rng.integers(0, 3, (20, 4))
    la = hvp.Laplace.from_keras(model, (x, y), curvature="diagonal")
    kernel = next(value for name, value in la.weight_decay().items() if "kernel" in name)
    assert kernel == pytest.approx(0.01, rel=1e-5)
    assert np.max(la.prior_precision) == pytest.approx(0.02 * 20 * 4, rel=1e-5)


def test_low_rank_of_unit_vectors():
    """Eigenvectors that need no reflection: features that are one at a time."""
    x = np.repeat(np.eye(5), [9, 7, 5, 3, 1], axis=0)
    w = tf.Variable(np.arange(1.0, 6)[:, np.newaxis])
    options = {"subset": w, "curvature": "low-rank", "rank": 3, "noise": 1.0}
    la = hvp.Laplace(lambda x: x @ w, "gaussian", (x, x[:, 0]), **options)
    expected = np.array([10, 8, 6, 1, 1])
    np.testing.assert_allclose(1 / la.covariance().diagonal(), expected, rtol=1e-10)
    np.testing.assert_allclose(la.precision().to_dense(), np.diag(expected), atol=1e-10)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.few(1)
@pytest.mark.long
def test_a_covariance_outlives_and_follows(curvature):
    x, truth, _ = design()
    w = tf.Variable(truth)
    options = {"subset": w, "curvature": curvature}
    counts = np.ones((40, 1))
    covariance = hvp.Laplace(lambda x: x @ w, "poisson", (x, counts), **options).covariance()
    gc.collect()
    assert np.isfinite(covariance.to_dense()).all()
    la = hvp.Laplace(lambda x: x @ w, "poisson", (x, counts), **options)
    before, covariance = la.covariance().to_dense(), la.covariance()
    w.assign(0 * truth)
    la.refresh()
    again = hvp.Laplace(lambda x: x @ w, "poisson", (x, counts), **options)
    np.testing.assert_allclose(covariance.to_dense(), again.covariance().to_dense(), rtol=1e-8)
    assert np.abs(covariance.to_dense() - before).max() > 1e-4


@pytest.mark.long
def test_models_with_the_same_weights_share_a_posterior(tmp_path):
    """Keras numbers the layers of another model of the same process differently."""
    first, x, y = classifier()
    hvp.Laplace.from_keras(first, (x, y)).save(tmp_path / "posterior.npz")
    layers = keras.layers
    second = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(3, "softmax")]
    )
    second.set_weights(first.get_weights())
    loaded = hvp.Laplace.load(tmp_path / "posterior.npz", second)
    original = hvp.Laplace.load(tmp_path / "posterior.npz", first)
    np.testing.assert_array_equal(loaded.predict(x), original.predict(x))


def test_several_questions_are_calibrated_together():
    x, truth, rng = design(3)
    y = (rng.random((40, 3)) < scipy.special.expit(x @ truth)).astype(float)
    w = tf.Variable(truth)
    la = hvp.Laplace(lambda x: x @ w, "bernoulli", (x, y), subset=w, curvature="full")
    found = la.calibration((x, y))
    p = la.predict(x)
    assert found.log_loss == pytest.approx(-np.log(np.where(y == 1, p, 1 - p)).mean())
    assert found.count.sum() == 120


def test_inputs_without_end_and_files_that_cannot_be_written_are_refused(tmp_path):
    model, x, y = classifier()
    la = hvp.Laplace.from_keras(model, (x, y))
    for path in (tmp_path, tmp_path / "none" / "posterior.npz"):
        with pytest.raises(hvp.CheckpointError, match="folder"):
            la.save(path)
    assert not [*tmp_path.iterdir()]
    batches = tf.data.Dataset.from_tensor_slices(x).batch(16)
    np.testing.assert_allclose(la.predict(batches), la.predict(x), rtol=1e-5)
    with pytest.raises(hvp.InvalidDataError, match=r"infinite.*take\(n\)"):
        la.predict(batches.repeat())
