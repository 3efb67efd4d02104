"""The Laplace approximation of a posterior: weights, predictions and evidence."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg
import scipy.optimize
import tensorflow as tf

from hvp._data.batches import Batches
from hvp._data.elements import Elements, convert_batch
from hvp._engines.options import Options, declared
from hvp._engines.predictions import Prediction
from hvp._errors import (
    HvpError,
    InvalidDataError,
    InvalidLossError,
    InvalidVariablesError,
    StaleOperatorError,
    quoted,
)
from hvp._keras.compiled_loss import CompiledModel
from hvp._keras.from_keras import FromKeras
from hvp._kronecker.block import Block, exact
from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.factors import Factors
from hvp._kronecker.kfac import EKFAC, KFAC, WithLayers
from hvp._laplace.targets import TARGETS, Targets
from hvp._operators.example_rows import ExampleRows
from hvp._operators.gauss_newton import GaussNewtonOperator
from hvp._operators.hessian import HessianOperator
from hvp._operators.jacobian import JacobianOperator
from hvp._runtime.arguments import check_count, check_number
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._vectors.resources import Resource
from hvp._vectors.selection import groups, select
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest, collect_variables
from hvp._vectors.watch import Watch

Curvature = Literal["kfac", "ekfac", "full", "diagonal"]
_OPTIONS = ("batch_size", "memory_limit", "progress")
# Rows of Jacobians of one call take at most so many bytes.
_ROW_BYTES = 2**26
# Two predictions of one input are the same up to this, relative to the largest.
_SAME = 1e-3
# Precisions that are tried for validation data: powers of ten, and their number.
_GRID = -3, 6, 91
# Eigenvalues are zero up to so many rounding errors of the largest.
_ROUNDING_ERRORS = 8.0
# Precisions are searched within this factor of one.
_FARTHEST = 1e12


@declared(_OPTIONS)
class Laplace(FromKeras, OneProcess):
    """The Laplace approximation of the posterior of a model's weights.

    Around weights that minimize the loss, the posterior is taken to be normal. Its precision is the
    Gauss-Newton matrix `G` of the negative log-likelihood, summed over the examples, plus that of a
    normal prior with mean zero: `N G + prior_precision I`. The model is linear in its weights then
    (Daxberger et al. 2021 [Dax]_, Immer et al. 2021 [Imm]_).

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
    curvature : {"kfac", "ekfac", "full", "diagonal"}, optional
        How the matrix `G` is approximated: by the Kronecker factors of `KFAC` or `EKFAC`, not at
        all (for up to 4096 weights), or by its exact diagonal.
    subset : optional
        The weights that are uncertain; the others are fixed. ``"all"`` are those of the model,
        ``"last-layer"`` those of the last Keras layer that has any; or variables, layers and names
        as for `HessianOperator.block`. A function needs variables.
    prior_precision : float, optional
        The precision of the prior, one over the variance of a weight. The default is one, or what
        `regularization` says.
    noise : float, optional
        The standard deviation of errors, if `likelihood` is ``"gaussian"``. The default is the root
        mean square of the residuals.
    regularization : callable, optional
        The penalty that was added to the mean loss, such as that of a Keras model's regularizers. A
        penalty is a prior: its second derivatives, times the number of examples and averaged over
        each block, are the prior precision. It is one for blocks that the penalty leaves out.
    **options
        As for `HessianOperator`: {option_names}.

    Attributes
    ----------
    noise : float
        The standard deviation of errors; one if there are none.

    Raises
    ------
    InvalidDataError
        If the data are not pairs.
    InvalidLossError
        If the model does not return one tensor for a batch.
    HvpError
        If another argument is invalid, or as `KFAC` and `GaussNewtonOperator`.

    References
    ----------
    .. [Dax] E. Daxberger et al., "Laplace Redux - Effortless Bayesian Deep Learning", NeurIPS 2021.
       https://arxiv.org/abs/2106.14806
    .. [Imm] A. Immer, M. Korzepa, M. Bauer, "Improving predictions of Bayesian neural nets via
       local linearization", AISTATS 2021. https://arxiv.org/abs/2008.08400
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
        prior_precision: float | None = None,
        noise: float | None = None,
        regularization: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        Options.of(type(self).__name__, options, _OPTIONS)
        if curvature not in get_args(Curvature):
            names = ", ".join(map(repr, get_args(Curvature)))
            raise HvpError(f"the argument curvature is {curvature!r}", f"one of {names}")
        if not callable(likelihood) and likelihood not in TARGETS:
            raise HvpError(
                f"the argument likelihood is {likelihood!r}",
                f"one of {', '.join(map(repr, TARGETS))}, or a loss of outputs and targets",
            )
        self._targets = Targets(None, likelihood) if callable(likelihood) else TARGETS[likelihood]
        if noise is not None:
            self._check_noise(noise)
        if prior_precision is not None:
            check_number(prior_precision, "prior_precision")
        self._outputs = _outputs(model, self._targets.likelihood in ("categorical", "bernoulli"))
        self._nest = collect_variables(_chosen(model, subset))
        self._space = Space.of_variables(self._nest)
        self._count, self._entries, constant = self._measured(data)
        self._make = self._maker(curvature, data, options)
        self._watch = Watch([Resource.of(variable) for variable in self._nest.variables])
        self._matrix, loss = self._make()
        self._watch.set()
        self._loss, self._constant = self._count * loss, constant
        self.noise = 1.0
        if self._targets.is_gaussian:
            self.noise = math.sqrt(2 * self._loss / self._entries) if noise is None else noise
            self._check_noise(self.noise)
        self._prior = np.ones(len(self._matrix.parts()))
        if prior_precision is not None:
            self.prior_precision = prior_precision
        elif regularization is not None:
            self._prior = self._of_penalty(regularization)
        is_last = isinstance(subset, str) and subset == "last-layer"
        self._features = _features(model) if is_last else None
        self._rows = ExampleRows(self._called, self._nest)

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        likelihoods = compiled.likelihoods
        if likelihoods is None or len(likelihoods) != 1:
            raise HvpError(
                "the compiled loss is no likelihood of one output",
                "a cross-entropy or the mean square error",
                "pass hvp.Laplace(model, likelihood, data)",
            )
        if compiled.options.get("prior_precision") is None:
            compiled.options["regularization"] = compiled.regularization
        if variables is not compiled.keras_model:
            compiled.options["subset"] = variables
        return WithLayers(compiled.model, compiled.keras_model), likelihoods[0]

    def __repr__(self) -> str:
        return (
            f"Laplace({self._space.size} weights, {self._count} examples, {self._matrix!r}, "
            f"prior precision {_shown(self._prior)}, noise {self.noise:.3g})"
        )

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """The names of the variables of each block."""
        return [names for names, _, _ in self._matrix.parts()]

    @property
    def prior_precision(self) -> Any:
        """The precision of the prior: one number, or one for each block if they differ."""
        same = (self._prior == self._prior[0]).all()
        return float(self._prior[0]) if same else self._prior.copy()

    @prior_precision.setter
    def prior_precision(self, value: Any) -> None:
        self._prior = self._checked_prior(value)

    @property
    def mean(self) -> np.ndarray:
        """The weights, of shape `(n,)`."""
        parts = [tf.convert_to_tensor(v) for v in self._nest.variables]
        return self._space.join(parts).numpy()

    def covariance(self) -> FactoredOperator:
        """Return the covariance matrix of the weights, as an operator."""
        return self._function(lambda precision: 1 / precision)

    @Uninterrupted()
    def sample(self, count: int, *, seed: int = 0) -> np.ndarray:
        """Draw weights, as columns of an array of shape `(n, count)`."""
        check_count(count, "count")
        root = self._function(lambda precision: 1 / np.sqrt(precision))
        normal = np.random.default_rng(seed).standard_normal((self._space.size, count))
        return self.mean[:, np.newaxis] + root @ normal.astype(root.dtype)

    @Uninterrupted()
    def function(self, x: Any, *, covariance: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the means and variances of the model's outputs, linear in the weights.

        Parameters
        ----------
        x : array or nest of arrays
            Inputs, as the first element of the data.
        covariance : bool, optional
            Whether to return the covariances of the outputs of each input instead of variances.

        Returns
        -------
        mean : ndarray
            The outputs at the mean of the weights, of shape `(examples, outputs)`.
        variance : ndarray
            Shaped like `mean`; with `covariance` of shape `(examples, outputs, outputs)`. The noise
            of the data is not part of it.

        Raises
        ------
        StaleOperatorError
            If a weight has changed; call `refresh`.
        """
        elements, mean = self._evaluated(x)
        if self._features is not None and not covariance:
            features = np.asarray(elements.call(self._features), np.float64)
            variance = self.covariance().output_variances(features)
            if variance is not None:
                return mean, variance
        inverse = 1 / self._precisions(self._prior)
        if not covariance:
            found = [rows**2 @ inverse for rows in self._rotated(elements, mean)]
            return mean, np.concatenate(found).reshape(mean.shape)
        outer = []
        for rows in self._rotated(elements, mean):
            each = rows.reshape(-1, mean[0].size, self._space.size)
            outer.append(np.einsum("ein,n,ejn->eij", each, inverse, each, optimize=True))
        return mean, np.concatenate(outer)

    def _rotated(self, elements: Elements, mean: np.ndarray) -> Iterator[np.ndarray]:
        """Iterate over rows of the Jacobian of the outputs, in terms of the eigenvectors."""
        width = mean[0].size
        step = max(1, _ROW_BYTES // (width * self._space.size * self._space.dtype.size))
        for start in range(0, elements.examples, step):
            deliver_interrupt()
            part = elements.part(start, min(start + step, elements.examples))
            rows = self._rows.of(part)
            if rows is None:
                with JacobianOperator(self._called, self._nest.source, part.as_data()) as J:
                    rows = J.to_dense(max_size=max(mean.size, self._space.size))
            yield self._matrix.rotate(tf.constant(rows)).numpy().astype(np.float64)

    def _precisions(self, prior: np.ndarray) -> np.ndarray:
        """Return the eigenvalues of the precision matrix, for the prior of each block."""
        self._refuse_singular(prior)
        pairs = zip(prior, self._matrix.parts())
        return np.concatenate([self._scale * values + own for own, (_, _, values) in pairs])

    @property
    def _scale(self) -> float:
        """What the mean curvature is multiplied by."""
        return self._count / self.noise**2

    def _refuse_singular(self, prior: np.ndarray) -> None:
        unit = _ROUNDING_ERRORS * np.finfo(self._space.dtype.as_numpy_dtype).eps
        for own, (names, _, values) in zip(prior, self._matrix.parts()):
            if own == 0 and values.min() <= unit * values.max():
                raise HvpError(
                    f"the posterior of {', '.join(names)} has no precision in some direction: the "
                    "data do not determine it, and the prior precision is zero",
                    "a prior precision above zero",
                    "set prior_precision, or call tune_prior_precision",
                )

    def _evaluated(self, x: Any) -> tuple[Elements, np.ndarray]:
        """Return inputs as tensors, and the outputs, each of which depends on its own input."""
        elements = convert_batch((x,), "x")
        mean = elements.call(self._called).numpy()
        alone = elements.first().call(self._called).numpy()
        if np.abs(alone - mean[:1]).max() > _SAME * np.abs(mean).max():
            raise HvpError(
                "the outputs for an input depend on the other inputs of the batch",
                "a model that treats examples independently",
                "pass a function that calls it with training=False",
            )
        return elements, mean

    @Uninterrupted()
    def predict(
        self,
        x: Any,
        *,
        method: Literal["analytic", "samples", "network"] = "analytic",
        samples: int = 100,
        seed: int = 0,
    ) -> np.ndarray:
        """Return the expected targets: probabilities of classes or of ones, means, mean counts.

        Parameters
        ----------
        x : array or nest of arrays
            Inputs, as the first element of the data.
        method : {"analytic", "samples", "network"}, optional
            - ``"analytic"`` takes the variances of the outputs of `function` into account in closed
              form: by MacKay's approximation for classes and ones [Mac]_, exactly for counts.
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
        choices = ("analytic", "samples", "network")
        if method not in choices:
            raise HvpError(f"the method is {method!r}", " or ".join(map(repr, choices)))
        check_count(samples, "samples")
        if method == "analytic":
            return self._targets.averaged(*self.function(x))
        if method == "samples":
            mean, covariance = self.function(x, covariance=True)
            values, vectors = np.linalg.eigh(covariance)
            root = vectors * np.sqrt(np.maximum(values, 0))[:, np.newaxis]
            flat, rng = mean.reshape(len(mean), -1), np.random.default_rng(seed)
            mixed = np.zeros(mean.shape)
            for _ in range(samples):
                moved = np.einsum("eij,ej->ei", root, rng.standard_normal(flat.shape))
                mixed += self._targets.mean((flat + moved).reshape(mean.shape))
            return mixed / samples
        elements, drawn = convert_batch((x,), "x"), self.sample(samples, seed=seed)
        kept = [variable.numpy() for variable in self._nest.variables]
        total = None
        try:
            for column in drawn.T:
                self._assign(self._space.split(tf.constant(column)))
                outputs = self._targets.mean(elements.call(self._called).numpy())
                total = outputs if total is None else total + outputs
        finally:
            self._assign(kept)
            self._watch.set()
        return np.asarray(total) / samples

    def log_marginal_likelihood(
        self, prior_precision: Any = None, noise: float | None = None
    ) -> float:
        """Return the logarithm of the evidence for the model, which judges priors and models.

        Parameters
        ----------
        prior_precision : float or array_like, optional
            Another precision of the prior, one number or one for each block.
        noise : float, optional
            Another standard deviation of errors, if the likelihood is ``"gaussian"``.

        Returns
        -------
        float
            `log p(data | weights) + log p(weights) + n log(2 pi) / 2 - log det(precision) / 2`.
        """
        if noise is not None:
            self._check_noise(noise)
        prior = self._prior if prior_precision is None else self._checked_prior(prior_precision)
        value, *_ = self._evidence(prior, self.noise if noise is None else noise)
        return value

    @Uninterrupted()
    def tune_prior_precision(
        self,
        data: tuple[Any, Any] | None = None,
        *,
        by: Literal["all", "block"] = "all",
        noise: bool = False,
    ) -> float:
        """Choose the prior precision that maximizes the evidence, or that validation data ask for.

        Parameters
        ----------
        data : tuple of arrays, optional
            Data ``(x, y)`` that were not trained on. If they are given, one precision for all
            weights is chosen by the mean negative log-likelihood of the predictions for them.
        by : {"all", "block"}, optional
            Whether all weights share one precision, or each block has its own.
        noise : bool, optional
            Whether to choose the standard deviation of errors, too, for ``"gaussian"`` targets.

        Returns
        -------
        float
            The logarithm of the evidence; with `data` the negative log-likelihood for them.

        Notes
        -----
        The evidence takes the model for linear and its weights for those at the maximum of the
        posterior. A network that was trained without a prior until it fits all examples is far from
        that: its predictions become too cautious, which validation data prevent.

        The weights stay where they are: after a large change, train again with the new prior, and
        `refresh`. The maximum is found by L-BFGS in the logarithms of the precisions.
        """
        if by not in ("all", "block"):
            raise HvpError(f"the argument by is {by!r}", "'all' or 'block'")
        if noise and not self._targets.is_gaussian:
            raise HvpError("noise is tuned without any", "the likelihood 'gaussian'")
        if data is not None:
            return self._validated(data)
        spread = np.ones((1, len(self._prior))) if by == "all" else np.eye(len(self._prior))

        def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
            own = at[: len(spread)] @ spread
            sigma = math.exp(at[-1]) if noise else self.noise
            value, of_prior, of_noise = self._evidence(np.exp(own), sigma)
            slope = spread @ of_prior
            return -value, -np.append(slope, of_noise) if noise else -slope

        start = np.log(np.maximum(self._prior, 1 / _FARTHEST))
        start = np.array([start.mean()]) if by == "all" else start
        start = np.append(start, math.log(self.noise)) if noise else start
        farthest = math.log(_FARTHEST)
        found = scipy.optimize.minimize(
            negative,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-farthest, farthest)] * len(start),
        )
        self._prior = np.exp(found.x[: len(spread)] @ spread)
        if noise:
            self.noise = math.exp(found.x[-1])
        return -float(found.fun)

    def _validated(self, data: tuple[Any, Any]) -> float:
        """Choose a precision for all weights by the likelihood of validation data."""
        elements, mean = self._evaluated(data[0])
        grid = np.logspace(*_GRID)
        inverses = 1 / np.stack([self._precisions(0 * self._prior + one) for one in grid], axis=1)
        squares = np.concatenate([rows**2 @ inverses for rows in self._rotated(elements, mean)])
        losses = [
            self._targets.predictive(mean, squares[:, i].reshape(mean.shape), data[1], self.noise)
            for i in range(len(grid))
        ]
        best = int(np.argmin(losses))
        self._prior[:] = grid[best]
        return float(losses[best])

    @Uninterrupted()
    def refresh(self) -> None:
        """Compute the curvature again, at the values the weights have now."""
        if isinstance(self._matrix, KFAC):
            self._matrix.refresh()
            loss = self._matrix.value
        else:
            self._matrix, loss = self._make()
        self._watch.set()
        self._loss = self._count * loss

    def _evidence(self, prior: np.ndarray, noise: float) -> tuple[float, np.ndarray, float]:
        """Return the evidence, and its derivatives in logarithms of precisions and of the noise."""
        weights, scale = self.mean.astype(np.float64), self._count / noise**2
        value, of_noise = -self._loss / noise**2 - self._constant, 0.0
        if self._targets.is_gaussian:
            value -= self._entries * (math.log(noise) + math.log(2 * math.pi) / 2)
            of_noise = 2 * self._loss / noise**2 - self._entries
        of_prior = np.zeros(len(prior))
        for i, (own, (_, entries, values)) in enumerate(zip(prior, self._matrix.parts())):
            squares = float(np.sum(weights[entries] ** 2))
            precision = scale * values + own
            with np.errstate(divide="ignore"):
                value += (len(entries) * np.log(own) - own * squares) / 2
                value -= np.sum(np.log(precision)) / 2
            share = np.sum(own / precision)
            of_prior[i] = (len(entries) - own * squares - share) / 2
            of_noise += float(len(entries) - share)
        return float(value), of_prior, of_noise

    def _function(self, of_precision: Callable[[np.ndarray], np.ndarray]) -> FactoredOperator:
        """Return a function of the precision matrix."""
        self._refuse_singular(self._prior)
        scale = self._scale

        def of_block(own: float) -> Callable[[np.ndarray], np.ndarray]:
            return lambda values: of_precision(scale * values + own)

        return self._matrix.rescaled([of_block(own) for own in self._prior])

    def _assign(self, parts: Sequence[Any]) -> None:
        for variable, part in zip(self._nest.variables, parts):
            variable.assign(tf.cast(part, variable.dtype))

    def _measured(self, data: Any) -> tuple[int, int, float]:
        """Return how many examples and entries of outputs there are, and the loss's constant."""
        if isinstance(data, tuple):
            parts: Any = [convert_batch(data, "data")]
        else:
            parts = (batch.elements for batch in Batches(data, None, None))
        count, constant, width = 0, 0.0, 0
        for part in parts:
            given = part.as_data()
            if not isinstance(given, tuple) or len(given) != 2:
                raise InvalidDataError("the data are not pairs", "inputs and targets, (x, y)")
            if not width:
                outputs = part.first().call(lambda x, y: self._called(x))
                width = int(np.prod(outputs.shape[1:]))
            count += part.examples
            constant += self._targets.constant(given[1].numpy())
        return count, count * width, constant

    def _called(self, x: Any) -> Any:
        return self._outputs(*x) if isinstance(x, tuple) else self._outputs(x)

    def _check_noise(self, noise: Any) -> None:
        if not self._targets.is_gaussian:
            raise HvpError("noise is given, and the targets have none", "the likelihood 'gaussian'")
        check_number(noise, "noise", positive=True)

    def _checked_prior(self, value: Any) -> np.ndarray:
        """Return precisions of the prior, one for each block."""
        prior, count = np.asarray(value, np.float64), len(self._prior)
        if prior.shape not in ((), (count,)) or not (np.isfinite(prior) & (prior >= 0)).all():
            raise HvpError(
                f"the prior precision is {value!r}",
                f"a finite number from zero on, or one for each of {count} blocks",
            )
        return np.broadcast_to(prior, count).copy()

    def _of_penalty(self, regularization: Callable[[], Any]) -> np.ndarray:
        """Return the precision of the prior that a penalty is, for each block."""
        prior = np.ones(len(self._matrix.parts()))
        try:
            penalty = HessianOperator(regularization, self._nest.source)
        except InvalidVariablesError:  # it depends on other weights only
            return prior
        with penalty:
            diagonal = self._count * penalty.diagonal(max_size=self._space.size)
        for place, (_, entries, _) in enumerate(self._matrix.parts()):
            prior[place] = diagonal[entries].mean() or 1.0
        return self._checked_prior(prior)

    def _maker(
        self, curvature: Curvature, data: Any, options: dict[str, Any]
    ) -> Callable[[], tuple[FactoredOperator, float]]:
        """Return a function that computes the mean curvature, and the mean loss."""
        arguments = self._outputs, self._targets.loss, self._nest.source, data
        if curvature in ("kfac", "ekfac"):

            def factored() -> tuple[FactoredOperator, float]:
                kind = KFAC if curvature == "kfac" else EKFAC
                likelihood = self._targets.likelihood
                K = kind(*arguments, likelihood=likelihood, **options)
                return K, K.value

            return factored

        def whole() -> tuple[FactoredOperator, float]:
            with GaussNewtonOperator(*arguments, **options) as G:
                if curvature == "full":
                    values, vectors = scipy.linalg.eigh(G.to_dense())
                    every = np.arange(len(values))
                    kept = [self._block("exact", every, values, vectors)]
                else:
                    diagonal = G.diagonal(max_size=self._space.size).astype(np.float64)
                    ends = np.cumsum([0, *self._space.sizes])
                    kept = []
                    for places in groups(self._space.paths).values():
                        own = np.concatenate([np.arange(ends[p], ends[p + 1]) for p in places])
                        kept.append(self._block("diagonal", own, diagonal[own], None))
                value = G.value
            factors = Factors(lambda: kept, watch=self._watch, check=self._make_sure)
            return FactoredOperator(self._space, self._nest, factors), value

        return whole

    def _block(
        self, kind: str, entries: np.ndarray, values: np.ndarray, vectors: np.ndarray | None
    ) -> Block:
        ends = np.cumsum(self._space.sizes)
        places = sorted(set(np.searchsorted(ends, entries, side="right").tolist()))
        names = tuple(self._nest.names[place] for place in places)
        basis = None if vectors is None else vectors[np.newaxis]
        scales = exact(np.maximum(values.astype(np.float64), 0))
        return Block.of(names, kind, exact(entries), (basis, None), scales, self._space.dtype)

    def _make_sure(self) -> None:
        changed = self._watch.changed()
        if changed:
            raise StaleOperatorError(
                f"weights have changed: {quoted(changed)}",
                "the weights at which the curvature was computed",
                "call refresh()",
            )


def _outputs(model: Any, takes_logits: bool) -> Callable[..., Any]:
    """Return the outputs of a model as a function of its inputs, one tensor."""
    if not callable(model):
        raise HvpError(f"the model is {type(model).__name__}", "a function of inputs")

    def outputs(*inputs: Any) -> Any:
        value = model(*inputs)
        if not tf.is_tensor(value) or not value.shape.rank:
            raise InvalidLossError(
                f"the model returns {type(value).__name__} for a batch",
                "one tensor, whose first axis counts the examples",
            )
        logits = Prediction.of(value).logits if takes_logits else None
        return value if logits is None else logits

    own = getattr(model, "keras_model", model)
    return WithLayers(outputs, own) if hasattr(own, "trainable_variables") else outputs


def _chosen(model: Any, subset: Any) -> Any:
    """Return the variables that are uncertain."""
    model = getattr(model, "keras_model", model)
    named = subset if isinstance(subset, (list, tuple)) else [subset]
    if not all(isinstance(one, str) for one in named) or not named:
        return subset
    if not hasattr(model, "trainable_variables"):
        raise HvpError(
            f"the subset is {subset!r}, and the model is a function",
            "the variables that are uncertain",
            "pass subset=[w, b]",
        )
    if subset == "all":
        return model
    if subset == "last-layer":
        return _last_layer(model)
    nest: VariableNest = collect_variables(model)
    space = Space.of_variables(nest)
    return [nest.variables[place] for place in select(subset, space.paths, nest.variables)]


def _last_layer(model: Any) -> Any:
    layers = [layer for layer in getattr(model, "layers", ()) if layer.trainable_variables]
    if not layers:
        raise HvpError(
            "the subset is 'last-layer', and the model has no layers with trainable weights",
            "a Keras model",
            "pass the weights of the last layer: subset=[w, b]",
        )
    return layers[-1]


def _features(model: Any) -> Callable[..., Any] | None:
    """Return the inputs of the last layer of a Keras model, if it is a dense one."""
    model = getattr(model, "keras_model", model)
    layer = _last_layer(model)
    is_dense = type(layer).__name__ == "Dense"
    # Models that are classes, and layers that are called twice, have none.
    ends: tuple[Any, Any] = getattr(model, "inputs", None), getattr(layer, "input", None)
    if not is_dense or any(end is None for end in ends) or len(ends[1].shape) != 2:
        return None
    keras = importlib.import_module(type(layer).__module__.partition(".")[0])  # or tf_keras
    inner = keras.Model(*ends)
    return lambda x: inner(x, training=False)


def _shown(prior: np.ndarray) -> str:
    low, high = prior.min(), prior.max()
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
