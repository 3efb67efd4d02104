"""The Laplace approximation of a posterior: weights, predictions and evidence."""

from __future__ import annotations

import functools
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from hvp._data.batches import Batches
from hvp._data.elements import convert_batch
from hvp._engines.options import Options, declared
from hvp._errors import CheckpointError, HvpError, InvalidDataError, InvalidLossError
from hvp._keras.compiled_loss import CompiledModel
from hvp._keras.from_keras import FromKeras
from hvp._keras.private import mask_of
from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.kfac import with_layers
from hvp._laplace.calibration import Calibration, calibration, of_intervals
from hvp._laplace.curvatures import Curvature, curvature_of
from hvp._laplace.models import outputs_of
from hvp._laplace.outputs import Outputs
from hvp._laplace.posterior import Posterior, checked_precisions
from hvp._laplace.targets import TARGETS, Targets, bridged
from hvp._laplace.tuning import maximize_evidence, refuse_distance, validate, warn_of_caution
from hvp._laplace.weights import Weights
from hvp._runtime.arguments import check_choice, check_count, check_number, check_seed
from hvp._runtime.checkpoint import write_npz
from hvp._runtime.files import replacing
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt

_OPTIONS = ("batch_size", "memory_limit", "progress")
# What of the posterior is saved besides the matrix and the prior.
_SAVED = ("count", "normal", "loss", "noise", "is_diagonal")
# Examples at which the compiled loss is compared with that of the likelihood, and how much they may
# differ: Keras bounds probabilities.
_SEEN, _OTHER = 8, 0.05
# Examples of one call, where the data are not divided.
_EXAMPLES = 1024
# Columns of the identity that joint covariances are multiplied by at once.
_COLUMNS = 64


@declared(_OPTIONS)
class Laplace(FromKeras, OneProcess):
    """The Laplace approximation of the posterior of a model's weights.

    Around weights that minimize the loss, the posterior is taken to be normal. Its precision is the
    Gauss-Newton matrix `G` of the mean negative log-likelihood, times the number of examples, plus
    that of a normal prior with mean zero: `N G + prior_precision I`, and `N G / noise**2` where
    targets have normal errors. The model is linear in its weights then (Daxberger et al. 2021
    [Dax]_, Immer et al. 2021 [Imm]_).

    Parameters
    ----------
    model : callable
        Returns the outputs, of shape `(batch, outputs)`: logits of classes, logits of ones, means,
        or logarithms of means. Of a Keras model that ends with a softmax or sigmoid, the logits
        are taken.
    likelihood : {"categorical", "bernoulli", "gaussian", "poisson"} or callable
        The distribution of the targets; or a function of the outputs and the targets, that returns
        the mean over examples of a negative log-likelihood, all of it.
    data : tuple of arrays, or iterable of such
        The training examples ``(x, y)``, or batches of them.
    curvature : {"kfac", "ekfac", "full", "diagonal", "low-rank"}, optional
        How the matrix `G` is approximated: by the Kronecker factors of `KFAC` or `EKFAC`, not at
        all (for up to 4096 weights), by its exact diagonal, or by its largest eigenvalues.
    subset : optional
        The weights that are uncertain; the others are fixed. ``"all"`` are those of the model,
        ``"last-layer"`` those of the last Keras layer that has any; or variables, layers and names
        as for `HessianOperator.block`. A function needs variables.
    rank : int, optional
        The number of eigenvalues, if `curvature` is ``"low-rank"``.
    prior_precision : float or array_like, optional
        The precision of the prior, one over the variance of a weight: one number, one for each of
        the `blocks`, or, if the curvature is ``"diagonal"``, one for each weight. The default is
        one, or what `regularization` says.
    noise : float, optional
        The standard deviation of errors, if `likelihood` is ``"gaussian"``. The default is the root
        mean square of the residuals.
    regularization : callable, optional
        The penalty that was added to the mean over examples of the negative log-likelihood, or of
        half the squared errors if `likelihood` is ``"gaussian"``; `from_keras` takes a model's
        regularizers. A penalty that is a sum of squares is a prior: its second derivatives, times
        the number of examples and over the squared noise, are the prior precision, averaged over
        each block. It is one for blocks that the penalty leaves out. Label smoothing is not part
        of the likelihood.
    **options
        As for `HessianOperator`: {option_names}.

    Raises
    ------
    InvalidDataError
        If the data are not pairs.
    InvalidLossError
        If the model does not return one tensor for a batch.
    HvpError
        If another argument is invalid, a penalty is no sum of squares, or as `KFAC` and
        `GaussNewtonOperator`.

    References
    ----------
    .. [Dax] E. Daxberger et al., "Laplace Redux - Effortless Bayesian Deep Learning", NeurIPS 2021.
       https://arxiv.org/abs/2106.14806
    .. [Imm] A. Immer, M. Korzepa, M. Bauer, "Improving predictions of Bayesian neural nets via
       local linearization", AISTATS 2021. https://arxiv.org/abs/2008.08400
    .. [Has] B. Hassibi, D. G. Stork, G. J. Wolff, "Optimal brain surgeon and general network
       pruning", ICNN 1993. https://doi.org/10.1109/ICNN.1993.298572
    .. [Hob] M. Hobbhahn, A. Kristiadi, P. Hennig, "Fast predictive uncertainty for classification
       with Bayesian deep networks", UAI 2022. https://arxiv.org/abs/2003.01227
    .. [LeC] Y. LeCun, J. S. Denker, S. A. Solla, "Optimal brain damage", NeurIPS 1989.
       https://proceedings.neurips.cc/paper/1989/hash/6c9882bbac1c7093bd25041881277658-Abstract.html
    .. [Mac] D. J. C. MacKay, "The evidence framework applied to classification networks", Neural
       Computation 4(5), 1992. https://doi.org/10.1162/neco.1992.4.5.720

    Examples
    --------
    A mean with four measurements, whose errors have the variance one: the posterior has the
    precision `4 + prior_precision`.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([[2.0]], dtype=tf.float64)
    >>> x, y = np.ones((4, 1)), np.array([1.0, 2.0, 2.0, 3.0])
    >>> la = hvp.Laplace(lambda x: x @ w, "gaussian", (x, y), subset=w, curvature="full", noise=1.0)
    >>> mean, variance = la.function(x[:1])
    >>> mean, variance.round(6)
    (array([[2.]]), array([[0.2]]))
    """

    @Uninterrupted()
    def __init__(
        self,
        model: Callable[..., Any],
        likelihood: Any,
        data: Any,
        *,
        curvature: Curvature = "kfac",
        subset: Any = "all",
        rank: int = 100,
        prior_precision: Any = None,
        noise: float | None = None,
        regularization: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        progress = Options.of(type(self).__name__, options, _OPTIONS).progress
        if curvature not in get_args(Curvature):
            names = ", ".join(map(repr, get_args(Curvature)))
            raise HvpError(f"the argument curvature is {curvature!r}", f"one of {names}")
        check_count(rank, "rank")
        self._prepare(model, likelihood, subset, progress)
        if noise is not None:
            self._check_noise(noise)
        if prior_precision is not None:
            checked_precisions(prior_precision)
        if data is None or isinstance(data, tuple):
            _pair(data)
        self._data = data
        weights, targets = self._weights, self._targets
        count = self._outputs.measure(x for x, _ in self._pairs())
        arguments = self._outputs.function, targets.loss, weights.nest.source, data
        choices: dict[str, Any] = {"likelihood": targets.likelihood, "rank": rank}
        self._make = curvature_of(curvature, arguments, options, weights.matrix_of, **choices)
        matrix, loss = self._make()
        weights.remember()
        loss, normal = count * loss, 0
        if targets.is_gaussian:
            normal = count * math.prod(self._outputs.shape)
        self._estimates_noise = targets.is_gaussian and noise is None
        if self._estimates_noise:
            noise = _noise_of(loss, normal)
        is_diagonal, noise = curvature == "diagonal", float(noise or 1.0)
        self._posterior = Posterior(weights, matrix, loss, count, normal, is_diagonal, noise)
        if prior_precision is not None:
            self.prior_precision = prior_precision
        elif regularization is not None:
            self._posterior.prior = self._posterior.prior_of(regularization)

    def _prepare(self, model: Any, likelihood: Any, subset: Any, progress: Any) -> None:
        """Find what of the model is uncertain."""
        if not callable(likelihood) and likelihood not in list(TARGETS):
            raise HvpError(
                f"the argument likelihood is {likelihood!r}",
                f"one of {', '.join(map(repr, TARGETS))}, or a loss of outputs and targets",
            )
        self._targets = Targets(None, likelihood) if callable(likelihood) else TARGETS[likelihood]
        self._weights = Weights(model, subset)
        self._outputs = Outputs(model, self._weights, subset, self.likelihood, progress)

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over the data in small parts."""
        is_whole = isinstance(self._data, tuple)
        for batch in Batches(self._data, _EXAMPLES if is_whole else None, None):
            x, y = _pair(batch.elements.as_data())
            self._targets.check(y)
            yield x, y

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        likelihoods = compiled.likelihoods
        if likelihoods is not None and len(likelihoods) > 1:
            raise HvpError(
                f"the model has {len(likelihoods)} outputs",
                "a model with one output",
                "make one of them: keras.Model(model.inputs, model.outputs[0])",
            )
        if likelihoods is None or len(likelihoods) != 1:
            raise HvpError(
                "the compiled loss is no likelihood of one output",
                "a cross-entropy or the mean square error",
                "pass hvp.Laplace(model, likelihood, data)",
            )
        penalty, multiple = compiled.regularization, _multiple_of(compiled, likelihoods[0])
        if compiled.options.get("prior_precision") is None and penalty is not None:
            compiled.options["regularization"] = lambda: multiple * penalty()
        if variables is not compiled.keras_model:
            compiled.options["subset"] = variables
        return with_layers(compiled.model, compiled.keras_model), likelihoods[0]

    def __repr__(self) -> str:
        posterior = self._posterior
        noise = f", noise {self.noise:.3g}" if self._targets.is_gaussian else ""
        return (
            f"Laplace({self._weights.space.size} weights, {posterior.count} examples, "
            f"{posterior.matrix!r}, prior precision {posterior.shown_prior()}{noise})"
        )

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """The names of the variables of each block."""
        return [names for names, _, _ in self._posterior.matrix.parts()]

    @property
    def prior_precision(self) -> Any:
        """The precision of the prior: one number, one for each block, or one for each weight."""
        blocks = self._posterior.split(self._posterior.prior)
        if all((block == block[0]).all() for block in blocks):
            firsts = np.array([block[0] for block in blocks])
            return float(firsts[0]) if (firsts == firsts[0]).all() else firsts
        return self._posterior.in_order_of_weights(self._posterior.prior)

    @prior_precision.setter
    def prior_precision(self, value: Any) -> None:
        self._posterior.prior = self._posterior.checked_prior(value)

    @property
    def likelihood(self) -> str | None:
        """The name of the distribution of the targets; None if it is a function."""
        return self._targets.likelihood

    @property
    def noise(self) -> float:
        """The standard deviation of errors, which can be set; one if there are none."""
        return self._posterior.noise

    @noise.setter
    def noise(self, value: float) -> None:
        self._check_noise(value)
        self._posterior.noise, self._estimates_noise = float(value), False

    @property
    def mean(self) -> np.ndarray:
        """The weights, of shape `(n,)`."""
        return self._weights.flat()

    def precision(self) -> FactoredOperator:
        """Return the inverse of `covariance`, as an operator."""
        return self._posterior.function(lambda precision: precision)

    def covariance(self) -> FactoredOperator:
        """Return the covariance matrix of the weights, as an operator."""
        return self._posterior.covariance()

    @Uninterrupted()
    def sample(self, count: int, *, seed: int = 0) -> np.ndarray:
        """Draw weights, as columns of an array of shape `(n, count)`."""
        check_count(count, "count")
        root = self._posterior.function(lambda precision: 1 / np.sqrt(precision))
        normal = np.random.default_rng(check_seed(seed)).standard_normal((root.shape[1], count))
        return self.mean[:, np.newaxis] + root @ normal.astype(root.dtype)

    def weight_decay(self) -> dict[str, float]:
        """Return the prior as penalties of a Keras model, by the names of its variables.

        Returns
        -------
        dict of str to float
            The factor of the sum of the squares of each variable, to train again with this prior:
            ``keras.regularizers.L2(factor)`` beside a compiled cross-entropy or mean square error,
            without a weight in `loss_weights`, by which to multiply the factors.
        """
        posterior, names = self._posterior, self._weights.nest.names
        unit = 2 * posterior.scale * self._targets.multiple(self._outputs.shape)
        prior = posterior.in_order_of_weights(posterior.prior)
        parts = np.split(prior, np.cumsum(self._weights.space.sizes)[:-1])
        return {name: float(part.mean() / unit) for name, part in zip(names, parts)}

    def saliency(self, method: Literal["damage", "surgeon"] = "damage") -> np.ndarray:
        """Return how much the loss grows if one weight becomes zero, for each weight.

        Parameters
        ----------
        method : {"damage", "surgeon"}, optional
            Whether all other weights stay where they are, as in "Optimal brain damage" [LeC]_, or
            follow to where the loss is least, as in "Optimal brain surgeon" [Has]_.

        Returns
        -------
        ndarray
            Increases of the negative logarithm of the posterior's density, to second order; shape
            `(n,)`. Remove the weights with the smallest.
        """
        check_choice(method, "method", ("damage", "surgeon"))
        squares = self.mean.astype(np.float64) ** 2 / 2
        if method == "damage":
            return squares * self.precision().diagonal()
        return squares / self.covariance().diagonal()

    def penalty(self) -> Callable[[], tf.Tensor]:
        """Return the posterior as a penalty for further training, on other data.

        Returns
        -------
        callable
            A function that takes nothing and returns half the squared distance of the weights from
            their present values, in standard deviations of the posterior. Added to the *sum* of a
            new negative log-likelihood it makes this posterior the new prior; divide it by the
            number of new examples to add it to a mean.
        """
        weights, mean = self._weights, self.mean
        matrix = self._posterior.matrix.frozen()
        precision = tf.constant(self._posterior.precisions(), weights.space.dtype)

        @tf.autograph.experimental.do_not_convert
        def penalty() -> Any:
            change = weights.space.join(weights.values()) - mean
            return tf.reduce_sum(precision * matrix.rotate(change[tf.newaxis])[0] ** 2) / 2

        return penalty

    @Uninterrupted()
    def function(
        self, x: Any, *, covariance: bool | Literal["joint"] = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the means and variances of the model's outputs, linear in the weights.

        Parameters
        ----------
        x : array or nest of arrays, or tf.data.Dataset
            Inputs, as the first element of the data; or batches of these or of the data.
        covariance : bool or "joint", optional
            Whether to return the covariances of the outputs of each input instead of variances, or
            those of all outputs of all inputs.

        Returns
        -------
        mean : ndarray
            The outputs at the mean of the weights, of shape `(examples, outputs)`.
        variance : ndarray
            Shaped like `mean`; with `covariance` of shape `(examples, outputs, outputs)`, and
            `(examples * outputs, examples * outputs)` if it is ``"joint"``. The noise of the data
            is not part of it.

        Raises
        ------
        StaleOperatorError
            If a weight has changed; call `refresh`.
        """
        if covariance not in (True, False, "joint"):
            raise HvpError(f"the argument covariance is {covariance!r}", "True, False or 'joint'")
        if covariance == "joint":
            return self._joint(x)
        means, variances = zip(*self._moments(x, bool(covariance)))
        return np.concatenate(means), np.concatenate(variances)

    def _moments(self, x: Any, covariance: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the outputs of some inputs and their variances, or covariances."""
        outputs, inverse = self._outputs, 1 / self._posterior.precisions()
        of_features = None
        if outputs.features is not None and not covariance:
            of_features = self._posterior.output_variances()
        for part, mean in outputs.pieces(x, has_rows=of_features is None):
            if of_features is not None:
                yield mean, of_features(outputs.features_for(part))
                continue
            rows = self._posterior.rotate(outputs.rows(part))
            if covariance:
                each = rows.reshape(-1, mean[0].size, len(inverse))
                yield mean, np.einsum("ein,n,ejn->eij", each, inverse, each, optimize=True)
            else:
                yield mean, (rows**2 @ inverse).reshape(mean.shape)

    def _joint(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        mean = np.concatenate([mean for _, mean in self._outputs.pieces(x)])
        columns, size = [], mean.size
        with self._outputs.jacobian(convert_batch((x,), "x")) as J:
            both = J @ self.covariance() @ J.T
            for start in range(0, size, _COLUMNS):
                deliver_interrupt()
                unit = np.eye(size, min(_COLUMNS, size - start), -start, dtype=J.dtype)
                columns.append(both @ unit)
        return mean, np.concatenate(columns, axis=1)

    @Uninterrupted()
    def predict(
        self,
        x: Any,
        *,
        method: Literal["analytic", "bridge", "samples", "network"] = "analytic",
        samples: int = 100,
        seed: int = 0,
    ) -> np.ndarray:
        """Return the expected targets: probabilities of classes or of ones, means, mean counts.

        Parameters
        ----------
        x : array or nest of arrays, or tf.data.Dataset
            Inputs, as for `function`.
        method : {"analytic", "bridge", "samples", "network"}, optional
            - ``"analytic"`` takes the variances of the outputs of `function` into account in closed
              form: by MacKay's approximation for classes and ones [Mac]_, exactly for counts.
            - ``"bridge"`` takes the mean of the Dirichlet distribution of probabilities that their
              covariances are closest to [Hob]_, for classes.
            - ``"samples"`` averages over draws of the outputs from their covariance.
            - ``"network"`` averages over the model with weights that are drawn, without taking it
              for linear. This is often worse.
        samples, seed : int, optional
            The number of draws, and their seed.

        Returns
        -------
        ndarray
            Shaped like the outputs of the model.
        """
        check_choice(method, "method", ("analytic", "bridge", "samples", "network"))
        check_count(samples, "samples")
        if method == "analytic":
            return self._targets.averaged(*self.function(x))
        if method == "network":
            return self._of_networks(x, samples, seed)
        if method == "bridge" and self._targets.likelihood != "categorical":
            raise HvpError("the method is 'bridge'", "the likelihood 'categorical'")
        mean, covariance = self.function(x, covariance=True)
        if method == "bridge":
            return bridged(mean, covariance)
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0))[:, np.newaxis]
        flat, rng = mean.reshape(len(mean), -1), np.random.default_rng(check_seed(seed))
        mixed = np.zeros(mean.shape)
        for _ in range(samples):
            moved = np.einsum("eij,ej->ei", root, rng.standard_normal(flat.shape))
            mixed += self._targets.mean((flat + moved).reshape(mean.shape))
        return mixed / samples

    def _of_networks(self, x: Any, samples: int, seed: int) -> np.ndarray:
        """Return the mean predictions over weights that are drawn."""
        weights, outputs = self._weights, self._outputs
        parts = [part for part, _ in outputs.pieces(x, has_rows=False)]
        drawn = self.sample(samples, seed=seed)
        kept = [variable.numpy() for variable in weights.nest.variables]
        total = None
        try:
            for column in drawn.T:
                weights.assign(weights.space.split(tf.constant(column)))
                own = np.concatenate([outputs.of(part).numpy() for part in parts])
                own = self._targets.mean(own)
                total = own if total is None else total + own
        finally:
            weights.assign(kept)
            weights.remember()
        return np.asarray(total) / samples

    @Uninterrupted()
    def calibration(self, data: tuple[Any, Any], *, bins: int = 15) -> Calibration:
        """Return how well predictions agree with what happened, for data not trained on.

        Parameters
        ----------
        data : tuple of arrays
            Inputs and targets ``(x, y)``: classes, ones, or numbers.
        bins : int, optional
            The number of bins of predicted probabilities, or of levels of intervals.

        Returns
        -------
        Calibration
            Of `predict`, or of normal intervals if the likelihood is ``"gaussian"``. Its `point` is
            that of the model without uncertain weights.
        """
        check_count(bins, "bins")
        x, y = _pair(data)
        convert_batch((x, y), "the data")  # as many targets as inputs
        mean, variance = self.function(x)
        if self._targets.is_gaussian:
            point = of_intervals(mean, np.full(mean.shape, self.noise**2), y, bins)
            return of_intervals(mean, variance + self.noise**2, y, bins, point)
        if self._targets.likelihood not in ("categorical", "bernoulli"):
            raise HvpError(
                f"the likelihood is {self._targets.likelihood or 'a loss of the caller'}",
                "'categorical', 'bernoulli' or 'gaussian'",
            )
        both = self._targets.mean(mean), self._targets.averaged(mean, variance)
        if self._targets.likelihood == "bernoulli":  # each output is a question of its own
            both, y = (both[0].ravel(), both[1].ravel()), np.ravel(y)
        point = calibration(both[0], y, bins=bins)
        return calibration(both[1], y, bins=bins, point=point)

    def log_marginal_likelihood(
        self, prior_precision: Any = None, noise: float | None = None, *, gradient: bool = False
    ) -> Any:
        """Return the logarithm of the evidence for the model, which judges priors and models.

        Parameters
        ----------
        prior_precision : float or array_like, optional
            Another precision of the prior, one number, or one for each block or weight.
        noise : float, optional
            Another standard deviation of errors, if the likelihood is ``"gaussian"``.
        gradient : bool, optional
            Whether to return its derivatives, too.

        Returns
        -------
        value : float
            `log p(data | weights) + log p(weights) + n log(2 pi) / 2 - log det(precision) / 2`.
        of_prior, of_noise : ndarray, float
            With `gradient`, the derivatives in the logarithms of the precision of each block (of
            each weight, if the curvature is ``"diagonal"``), and of the noise.
        """
        if noise is not None:
            self._check_noise(noise)
        posterior = self._posterior
        given = prior_precision is not None
        prior = posterior.checked_prior(prior_precision) if given else posterior.prior
        value, each, of_noise = posterior.evidence(prior, self.noise if noise is None else noise)
        if not gradient:
            return value
        if posterior.is_diagonal:
            return value, posterior.in_order_of_weights(each), of_noise
        return value, np.array([own.sum() for own in posterior.split(each)]), of_noise

    @Uninterrupted()
    def tune_prior_precision(
        self,
        data: tuple[Any, Any] | None = None,
        *,
        by: Literal["all", "block", "weight"] = "all",
        noise: bool = False,
        check: bool = True,
    ) -> float:
        """Choose the prior precision that validation data ask for, or that maximizes the evidence.

        Parameters
        ----------
        data : tuple of arrays, optional
            Data ``(x, y)`` that were not trained on. If they are given, one precision for all
            weights is chosen by the mean negative log-likelihood of the predictions for them.
        by : {"all", "block", "weight"}, optional
            Whether all weights share one precision, or each block has its own, or each weight, if
            the curvature is ``"diagonal"``.
        noise : bool, optional
            Whether to choose the standard deviation of errors, too, for ``"gaussian"`` targets.
        check : bool, optional
            Whether to refuse the evidence at weights that are far from the maximum of the
            posterior. This takes one gradient.

        Returns
        -------
        float
            The logarithm of the evidence; with `data` the negative log-likelihood for them.

        Warns
        -----
        ConvergenceWarning
            If the predictions for the `data` are best with the largest precision that is tried. Or,
            without `data`, if training data become less likely under the posterior than they would
            if the loss were quadratic, or by more than half a unit each.

        Raises
        ------
        HvpError
            If there are no `data`, and the weights are further from the maximum of the posterior,
            for the present prior precision, than the posterior is wide: a network that was trained
            without a prior until it fits all examples is. The evidence would make its predictions
            far too cautious.

        Notes
        -----
        The weights stay where they are: after a large change, train again with the new prior, and
        `refresh`. The maximum is found by L-BFGS in the logarithms of the precisions.
        """
        if by not in ("all", "block", "weight"):
            raise HvpError(f"the argument by is {by!r}", "'all', 'block' or 'weight'")
        if by == "weight" and not self._posterior.is_diagonal:
            raise HvpError("by is 'weight'", "the curvature 'diagonal'", "pass by='block'")
        if noise and not self._targets.is_gaussian:
            raise HvpError("noise is tuned without any", "the likelihood 'gaussian'")
        if data is not None:
            if by != "all" or noise:
                given = "noise=True" if noise else f"by={by!r}"
                raise HvpError(
                    f"validation data are given together with {given}",
                    "one precision to choose by them, with by='all' and noise=False",
                    f"leave out {given}, or the data for the evidence to choose",
                )
            return validate(self._posterior, self._outputs, self._targets, *_pair(data))
        if check:
            if self._data is None:
                raise HvpError(
                    "the posterior was loaded without its data, and it takes a gradient to see "
                    "whether the evidence holds",
                    "validation data",
                    "pass tune_prior_precision((x, y)), or check=False",
                )
            refuse_distance(self._posterior, self._outputs, self._targets, self._pairs())
        value = maximize_evidence(self._posterior, by, noise)
        self._estimates_noise = self._estimates_noise and not noise
        if check and (self._targets.flattened is not None or self._targets.is_gaussian):
            x, y = next(self._pairs())
            warn_of_caution(self._posterior, self._targets, *self.function(x), y)
        return value

    @Uninterrupted()
    def refresh(self) -> None:
        """Compute the curvature again, at the values the weights have now.

        The noise is estimated again, unless it was passed, set or tuned.
        """
        if self._data is None:
            raise HvpError("the posterior was loaded without its data", "hvp.Laplace(...) anew")
        _, loss = self._make()
        self._weights.remember()
        posterior, loss = self._posterior, self._posterior.count * loss
        posterior.refresh(loss)
        if self._estimates_noise:
            posterior.noise = _noise_of(loss, posterior.normal)

    def save(self, path: Any) -> None:
        """Write the posterior to a file, for `load`; the weights are saved with the model.

        Parameters
        ----------
        path : str or path
            A file in a folder that exists.

        Raises
        ------
        CheckpointError
            If there is no such folder, or a folder of that name.
        """
        settings: dict[str, Any] = {name: getattr(self._posterior, name) for name in _SAVED}
        settings |= {"likelihood": self.likelihood, "weights": self._weights.digests()}
        settings |= {"shape": self._outputs.shape, "is_last": self._outputs.features is not None}
        arrays: dict[str, Any] = dict(self._posterior.matrix.arrays())
        arrays |= {"settings": np.array(json.dumps(settings)), "prior": self._posterior.prior}
        with replacing(Path(path)) as temporary, temporary.open("wb") as file:
            write_npz(file, arrays)

    @classmethod
    def load(
        cls, path: Any, model: Callable[..., Any], *, likelihood: Any = None, subset: Any = "all"
    ) -> Laplace:
        """Return a posterior that was saved, without the data.

        Parameters
        ----------
        path : str or path
            The file.
        model : callable
            The model, with the weights that it had.
        likelihood : callable or str, optional
            The loss, if `likelihood` was a function; otherwise it may be left out.
        subset : optional
            The weights that are uncertain, as they were then.

        Returns
        -------
        Laplace
            It predicts as the one that was saved, but has no data to `refresh` from.

        Raises
        ------
        CheckpointError
            If there is no such file, or the weights are others.
        """
        try:
            with open(path, "rb") as file, np.load(file) as archive:
                arrays = dict(archive)
            settings = json.loads(str(arrays.pop("settings")))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"the posterior cannot be read from {path} ({type(error).__name__})",
                "a file that Laplace.save wrote",
            ) from error
        name = settings["likelihood"]
        if name is None and not callable(likelihood):
            raise HvpError("the likelihood was a function", "the same function, as likelihood")
        if name is not None and likelihood not in (None, name):
            raise HvpError(f"the likelihood was {name!r}", "no other one", "leave it out")
        other = cls.__new__(cls)
        other._prepare(model, likelihood or name, subset, False)
        if settings["weights"] != other._weights.digests():
            raise CheckpointError(
                f"the posterior in {path} is of other weights",
                "the model with the weights that it had, and the subset that was uncertain",
                "save the model with its posterior, and load both",
            )
        other._data, other._estimates_noise = None, False
        other._weights.remember()
        other._outputs.shape = tuple(settings["shape"])
        if not settings["is_last"]:
            other._outputs.features = None
        prior = arrays.pop("prior")
        blocks = FactoredOperator.blocks_from(arrays, other._weights.space.dtype)
        saved = {key: settings[key] for key in _SAVED}
        other._posterior = Posterior(other._weights, other._weights.matrix_of(blocks), **saved)
        other._posterior.prior = prior
        return other

    def _check_noise(self, noise: Any) -> None:
        if not self._targets.is_gaussian:
            raise HvpError("noise is given, and the targets have none", "the likelihood 'gaussian'")
        check_number(noise, "noise", positive=True)


def _multiple_of(compiled: CompiledModel, likelihood: str) -> float:
    """Return how much larger the loss of a likelihood is than the compiled one.

    Refuse what the likelihood would leave out, and outputs that it would take for others.
    """
    [loss] = tf.nest.flatten(compiled.keras_model.loss)
    ignored, remedy = getattr(loss, "ignore_class", None), "pass hvp.Laplace(model, loss, data)"
    if ignored is not None:
        raise HvpError(f"the compiled loss ignores the class {ignored}", "all targets", remedy)
    size = _SEEN if isinstance(compiled.data, tuple) else None
    elements = next(iter(Batches(compiled.data, size, None))).elements
    x, y = _pair(elements.part(0, min(_SEEN, elements.examples)).as_data())
    outputs, targets = compiled.model(x), TARGETS[likelihood]
    if mask_of(outputs) is not None:
        raise HvpError("the outputs of the model have a mask", "outputs that all count", remedy)
    multiple = targets.multiple(outputs.shape[1:]) / compiled.loss_weight
    if not getattr(loss, "label_smoothing", 0):
        expected = multiple * float(compiled.output_loss(outputs, y))
        # A partial function, because TensorFlow counts traces of one definition together.
        logits = functools.partial(outputs_of(compiled.model, not targets.is_gaussian))
        own = float(targets.loss(tf.function(logits, autograph=False)(x), tf.convert_to_tensor(y)))
        if abs(own - expected) > _OTHER * abs(expected):
            raise InvalidLossError(
                f"the loss of the first examples is {own:.6g} with the outputs of the model for "
                f"the {'means' if targets.is_gaussian else 'logits'} of the likelihood "
                f"{likelihood!r}, and {expected:.6g} as compiled",
                "a compiled loss that is this likelihood, and a softmax or sigmoid at the end of "
                "the model if the loss takes probabilities",
                remedy,
            )
    return multiple


def _noise_of(loss: float, normal: int) -> float:
    """Return the root mean square of residuals."""
    if not loss:
        raise HvpError("all residuals are zero", "a standard deviation of errors, noise=")
    return math.sqrt(2 * loss / normal)


def _pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, tuple) or len(data) != 2:
        raise InvalidDataError("the data are not a pair", "inputs and targets, (x, y)")
    return data
