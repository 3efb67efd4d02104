"""The Laplace approximation of a posterior: weights, predictions and evidence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import scipy.optimize
import tensorflow as tf

from hvp._data.batches import Batches
from hvp._data.elements import Elements, convert_batch, rows_of
from hvp._derivatives.gradient import value_and_gradient
from hvp._engines.options import Options, declared
from hvp._errors import (
    CheckpointError,
    ConvergenceWarning,
    HvpError,
    InvalidDataError,
    InvalidLossError,
    StaleOperatorError,
    quoted,
)
from hvp._graphs.compiled import Compiled
from hvp._keras.compiled_loss import CompiledModel
from hvp._keras.from_keras import FromKeras
from hvp._kronecker.block import Block
from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.factors import Factors
from hvp._kronecker.kfac import WithLayers
from hvp._kronecker.penalty import penalty_diagonal
from hvp._laplace.calibration import Calibration, calibration, of_intervals
from hvp._laplace.curvatures import Curvature, curvature_of
from hvp._laplace.models import chosen, features_of, outputs_of
from hvp._laplace.targets import TARGETS, Targets, bridged
from hvp._operators.example_rows import ExampleRows
from hvp._operators.jacobian import JacobianOperator
from hvp._runtime.arguments import check_count, check_number
from hvp._runtime.digest import digest
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._runtime.progress import progress_bar
from hvp._runtime.recent import Recent
from hvp._runtime.user_warning import warn
from hvp._vectors.resources import Resource
from hvp._vectors.space import Space
from hvp._vectors.variables import all_variables, collect_variables
from hvp._vectors.watch import Watch

_OPTIONS = ("batch_size", "memory_limit", "progress")
# What is saved besides the matrix and the prior.
_SAVED = ("count", "shape", "loss", "noise", "is_diagonal")
# Rows of Jacobians, or outputs, of one call take at most so many bytes.
_ROW_BYTES = 2**26
# Examples of one call, where the data are not divided.
_EXAMPLES = 1024
# Columns of the identity that joint covariances are multiplied by at once.
_COLUMNS = 64
# Two predictions of one input, or two derivatives, are the same up to this, relative to the
# largest.
_SAME = 1e-3
# Precisions that are tried for validation data: powers of ten, and their number.
_GRID = -3, 6, 91
# Eigenvalues are zero up to so many rounding errors of the largest.
_ROUNDING_ERRORS = 8.0
# How much the evidence may worsen the mean log-likelihood of training data without a warning.
_MOST_GROWTH = 0.5
# Precisions are searched within this factor of one.
_FARTHEST = 1e12


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
        self._progress = Options.of(type(self).__name__, options, _OPTIONS).progress
        if curvature not in get_args(Curvature):
            names = ", ".join(map(repr, get_args(Curvature)))
            raise HvpError(f"the argument curvature is {curvature!r}", f"one of {names}")
        check_count(rank, "rank")
        self._prepare(model, likelihood, subset)
        if noise is not None:
            self._check_noise(noise)
        if isinstance(data, tuple):
            _pair(data)
        self._data = data
        arguments = self._outputs, self._targets.loss, self._nest.source, data
        choices: dict[str, Any] = {"likelihood": self._targets.likelihood, "rank": rank}
        self._make = curvature_of(curvature, arguments, options, self._with_blocks, **choices)
        matrix, loss = self._make()
        self._count, self._shape = self._measured()
        self._watch.set()
        self._loss = self._count * loss
        self._noise = 1.0
        if self._targets.is_gaussian:
            if noise is None and not self._loss:
                raise HvpError("all residuals are zero", "a standard deviation of errors, noise=")
            self.noise = math.sqrt(2 * self._loss / self._entries) if noise is None else noise
        self._set_matrix(matrix, curvature == "diagonal")
        if prior_precision is not None:
            self.prior_precision = prior_precision
        elif regularization is not None:
            self._prior = self._of_penalty(regularization)

    def _prepare(self, model: Any, likelihood: Any, subset: Any) -> None:
        """Find what of the model is uncertain."""
        if not callable(likelihood) and likelihood not in TARGETS:
            raise HvpError(
                f"the argument likelihood is {likelihood!r}",
                f"one of {', '.join(map(repr, TARGETS))}, or a loss of outputs and targets",
            )
        self._targets = Targets(None, likelihood) if callable(likelihood) else TARGETS[likelihood]
        self._outputs = outputs_of(model, self._targets.likelihood in ("categorical", "bernoulli"))
        self._nest = collect_variables(chosen(model, subset))
        self._space = Space.of_variables(self._nest)
        own = getattr(model, "keras_model", model)
        source = own if hasattr(own, "trainable_variables") else self._nest.source
        # Seeds of layers are integers.
        self._held = [v for v in all_variables(source) if v.dtype.is_floating]
        self._watch = Watch([Resource.of(variable) for variable in self._held])
        self._factors: Factors | None = None
        is_last = isinstance(subset, str) and subset == "last-layer"
        self._features: Any = features_of(model) if is_last else None
        self._rows = ExampleRows(self._called, self._nest)
        self._functions = Recent(4)

    def _set_matrix(self, matrix: FactoredOperator, is_diagonal: bool) -> None:
        self._matrix, self._is_diagonal = matrix, is_diagonal
        parts = matrix.parts()
        self._sizes = [len(entries) for _, entries, _ in parts]
        self._order = np.concatenate([entries for _, entries, _ in parts])
        self._prior = np.ones(self._space.size)  # in this order
        self._last: tuple[Any, Any] = (None, None)

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        likelihoods = compiled.likelihoods
        if likelihoods is None or len(likelihoods) != 1:
            raise HvpError(
                "the compiled loss is no likelihood of one output",
                "a cross-entropy or the mean square error",
                "pass hvp.Laplace(model, likelihood, data)",
            )
        penalty = compiled.regularization
        if compiled.options.get("prior_precision") is None and penalty is not None:
            size = 1 if isinstance(compiled.data, tuple) else None
            first = next(iter(Batches(compiled.data, size, None))).elements.first()
            shape = first.call(lambda x, y: compiled.model(x)).shape[1:]
            multiple = TARGETS[likelihoods[0]].multiple(shape) / compiled.loss_weight
            compiled.options["regularization"] = lambda: multiple * penalty()
        if variables is not compiled.keras_model:
            compiled.options["subset"] = variables
        return WithLayers(compiled.model, compiled.keras_model), likelihoods[0]

    def __repr__(self) -> str:
        noise = f", noise {self.noise:.3g}" if self._targets.is_gaussian else ""
        return (
            f"Laplace({self._space.size} weights, {self._count} examples, {self._matrix!r}, "
            f"prior precision {_shown(self._prior)}{noise})"
        )

    @property
    def blocks(self) -> list[tuple[str, ...]]:
        """The names of the variables of each block."""
        return [names for names, _, _ in self._matrix.parts()]

    @property
    def prior_precision(self) -> Any:
        """The precision of the prior: one number, one for each block, or one for each weight."""
        blocks = np.split(self._prior, np.cumsum(self._sizes)[:-1])
        if all((block == block[0]).all() for block in blocks):
            firsts = np.array([block[0] for block in blocks])
            return float(firsts[0]) if (firsts == firsts[0]).all() else firsts
        return self._in_order_of_weights(self._prior)

    @prior_precision.setter
    def prior_precision(self, value: Any) -> None:
        self._prior = self._checked_prior(value)

    def _in_order_of_weights(self, values: np.ndarray) -> np.ndarray:
        ordered = np.empty_like(values)
        ordered[self._order] = values
        return ordered

    @property
    def likelihood(self) -> str | None:
        """The name of the distribution of the targets; None if it is a function."""
        return self._targets.likelihood

    @property
    def noise(self) -> float:
        """The standard deviation of errors, which can be set; one if there are none."""
        return self._noise

    @noise.setter
    def noise(self, value: float) -> None:
        self._check_noise(value)
        self._noise = float(value)

    @property
    def mean(self) -> np.ndarray:
        """The weights, of shape `(n,)`."""
        return self._space.join(self._values()).numpy()

    def _values(self) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(variable) for variable in self._nest.variables]

    def precision(self) -> FactoredOperator:
        """Return the inverse of `covariance`, as an operator."""
        return self._function(lambda precision: precision)

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

    def weight_decay(self) -> dict[str, float]:
        """Return the prior as penalties of a Keras model, by the names of its variables.

        Returns
        -------
        dict of str to float
            The factor of the sum of the squares of each variable, to train again with this prior:
            ``keras.regularizers.L2(factor)`` beside a compiled cross-entropy or mean square error.
        """
        prior, names = self._in_order_of_weights(self._prior), self._nest.names
        if len(set(names)) < len(names):
            raise HvpError("several variables have the same name", "the weights of a Keras model")
        unit = 2 * self._scale * self._targets.multiple(self._shape)
        parts = np.split(prior, np.cumsum(self._space.sizes)[:-1])
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
        if method not in ("damage", "surgeon"):
            raise HvpError(f"the method is {method!r}", "'damage' or 'surgeon'")
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
        matrix, mean = self._matrix.frozen(), self.mean
        precision = tf.constant(self._precisions(self._prior), self._space.dtype)

        @tf.autograph.experimental.do_not_convert
        def penalty() -> Any:
            change = self._space.join(self._values()) - mean
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
        inverse = 1 / self._precisions(self._prior)
        fast = None if covariance else self._of_last_layer()
        pieces = self._pieces(x, has_rows=fast is None)
        found = [self._moments(*piece, inverse, covariance, fast) for piece in pieces]
        means, variances = zip(*found)
        return np.concatenate(means), np.concatenate(variances)

    def _moments(
        self,
        part: Elements,
        mean: np.ndarray,
        inverse: np.ndarray,
        covariance: Any,
        fast: Callable[[np.ndarray], np.ndarray] | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the outputs of some inputs and their variances, or covariances."""
        if fast is not None:
            return mean, fast(part.call(self._features).numpy().astype(np.float64))
        rows = self._rotated(part, mean)
        if not covariance:
            return mean, (rows**2 @ inverse).reshape(mean.shape)
        each = rows.reshape(-1, mean[0].size, self._space.size)
        return mean, np.einsum("ein,n,ejn->eij", each, inverse, each, optimize=True)

    def _of_last_layer(self, prior: float | None = None) -> Any:
        """Return the variances of outputs as a function of the last layer's inputs, or None."""
        if self._features is None:
            return None
        if prior is not None:
            return self._function(lambda p: 1 / p, self._prior * 0 + prior).output_variances()
        state = self._noise, self._prior.tobytes()
        if state != self._last[0]:
            self._last = state, self.covariance().output_variances()
        return self._last[1]

    def _joint(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        elements = convert_batch((x,), "x")
        mean = np.concatenate([mean for _, mean in self._pieces(x)])
        columns, size = [], mean.size
        with JacobianOperator(self._called, self._nest.source, elements.as_data()) as J:
            both = J @ self.covariance() @ J.T
            for start in range(0, size, _COLUMNS):
                deliver_interrupt()
                unit = np.eye(size, min(_COLUMNS, size - start), -start, dtype=J.dtype)
                columns.append(both @ unit)
        return mean, np.concatenate(columns, axis=1)

    def _pieces(self, x: Any, *, has_rows: bool = True) -> Iterator[tuple[Elements, np.ndarray]]:
        """Iterate over parts of inputs with their outputs, for rows of the Jacobian of each."""
        row = self._space.size if has_rows else 1
        step = max(1, _ROW_BYTES // (math.prod(self._shape) * row * self._space.dtype.size))
        is_set, is_first = isinstance(x, tf.data.Dataset), True
        with progress_bar(self._progress, unit=" examples") as bar:
            for given in x if is_set else [x]:
                inputs = given[0] if is_set and isinstance(given, tuple) else given
                elements = convert_batch((inputs,), "x")
                for start in range(0, elements.examples, step):
                    deliver_interrupt()
                    part = elements.part(start, min(start + step, elements.examples))
                    mean = self._outputs_for(part).numpy()
                    if is_first:
                        self._refuse_mixing(part, mean)
                    is_first = False
                    yield part, mean
                    bar.update(len(mean))
        if is_first:
            raise InvalidDataError("there are no inputs", "at least one")

    def _rotated(self, part: Elements, mean: np.ndarray) -> np.ndarray:
        """Return the Jacobian of the outputs, in terms of the eigenvectors."""
        rows = self._rows.of(part)
        if rows is None:
            with JacobianOperator(self._called, self._nest.source, part.as_data()) as J:
                rows = J.to_dense(max_size=max(mean.size, self._space.size))
        return self._matrix.rotate(tf.constant(rows)).numpy().astype(np.float64)

    def _refuse_mixing(self, part: Elements, mean: np.ndarray) -> None:
        alone = self._outputs_for(part.first()).numpy()
        if np.abs(alone - mean[:1]).max() > _SAME * np.abs(mean).max():
            raise HvpError(
                "the outputs for an input depend on the other inputs of the batch",
                "a model that treats examples independently",
                "pass a function that calls it with training=False",
            )

    def _precisions(self, prior: np.ndarray) -> np.ndarray:
        """Return the eigenvalues of the precision matrix."""
        self._refuse_singular(prior)
        return self._scale * self._matrix.scales() + prior

    @property
    def _scale(self) -> float:
        """What the mean curvature is multiplied by."""
        return self._count / self.noise**2

    def _refuse_singular(self, prior: np.ndarray) -> None:
        unit = _ROUNDING_ERRORS * np.finfo(self._space.dtype.as_numpy_dtype).eps
        ends = np.cumsum(self._sizes)
        for own, (names, _, values) in zip(np.split(prior, ends[:-1]), self._matrix.parts()):
            if (values[own == 0] <= unit * values.max()).any():
                raise HvpError(
                    f"the posterior of {', '.join(names)} has no precision in some direction: the "
                    "data do not determine it, and the prior precision is zero",
                    "a prior precision above zero",
                    "set prior_precision",
                )

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
        choices = ("analytic", "bridge", "samples", "network")
        if method not in choices:
            raise HvpError(f"the method is {method!r}", " or ".join(map(repr, choices)))
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
        flat, rng = mean.reshape(len(mean), -1), np.random.default_rng(seed)
        mixed = np.zeros(mean.shape)
        for _ in range(samples):
            moved = np.einsum("eij,ej->ei", root, rng.standard_normal(flat.shape))
            mixed += self._targets.mean((flat + moved).reshape(mean.shape))
        return mixed / samples

    def _of_networks(self, x: Any, samples: int, seed: int) -> np.ndarray:
        """Return the mean predictions over weights that are drawn."""
        parts = [part for part, _ in self._pieces(x, has_rows=False)]
        drawn = self.sample(samples, seed=seed)
        kept = [variable.numpy() for variable in self._nest.variables]
        total = None
        try:
            for column in drawn.T:
                self._assign(self._space.split(tf.constant(column)))
                outputs = np.concatenate([self._outputs_for(part).numpy() for part in parts])
                outputs = self._targets.mean(outputs)
                total = outputs if total is None else total + outputs
        finally:
            self._assign(kept)
            self._watch.set()
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
        prior = self._prior if prior_precision is None else self._checked_prior(prior_precision)
        value, each, of_noise = self._evidence(prior, self.noise if noise is None else noise)
        if not gradient:
            return value
        of_blocks = np.add.reduceat(each, np.cumsum([0, *self._sizes[:-1]]))
        of_prior = self._in_order_of_weights(each) if self._is_diagonal else of_blocks
        return value, of_prior, of_noise

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
        if by == "weight" and not self._is_diagonal:
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
            return self._validated(*_pair(data))
        if check:
            self._refuse_distance()
        size = len(self._prior)
        blocks = np.repeat(np.arange(len(self._sizes)), self._sizes)
        places = {"all": np.zeros(size, int), "block": blocks, "weight": np.arange(size)}[by]
        counts = np.bincount(places)

        def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
            sigma = math.exp(at[-1]) if noise else self.noise
            value, each, of_noise = self._evidence(np.exp(at[places]), sigma)
            slope = np.bincount(places, each)
            return -value, -np.append(slope, of_noise) if noise else -slope

        start = np.log(np.maximum(self._prior, 1 / _FARTHEST))
        start = np.bincount(places, start) / counts
        start = np.append(start, math.log(self.noise)) if noise else start
        farthest = math.log(_FARTHEST)
        found = scipy.optimize.minimize(
            negative,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=[(-farthest, farthest)] * len(start),
        )
        self._prior = np.exp(found.x[places])
        if noise:
            self.noise = math.exp(found.x[-1])
        if check:
            self._warn_of_caution()
        return -float(found.fun)

    def _effective(self) -> float:
        """Return the number of parameters that the data determine, rather than the prior."""
        curvature = self._scale * self._matrix.scales()
        return float(np.sum(curvature / self._precisions(self._prior)))

    def _warn_of_caution(self) -> None:
        """Warn if training data are less likely than they can be where the loss is quadratic."""
        targets = self._targets
        if targets.flattened is None and not targets.is_gaussian:
            return  # predictions are not known
        x, y = _pair(next(self._parts()).as_data())
        mean, variance = self.function(x)
        alone, averaged = (targets.predictive(mean, v, y, self.noise) for v in (0 * mean, variance))
        most = self._effective() / (2 * self._count)
        if averaged - alone > min(most, _MOST_GROWTH):
            warn(
                "hvp.Laplace: the evidence chose a prior with which predictions are too cautious. "
                f"The mean negative log-likelihood of training data is {averaged:.3g}, and "
                f"{alone:.3g} with the weights alone; a quadratic loss would allow a growth of "
                f"{most:.3g}, and {_MOST_GROWTH} is much. Pass data that were not trained on: "
                "tune_prior_precision((x, y))",
                ConvergenceWarning,
            )

    def _refuse_distance(self) -> None:
        """Refuse weights that are not near the maximum of the posterior."""
        if self._data is None:
            raise HvpError(
                "the posterior was loaded without its data, and it takes a gradient to see whether "
                "the evidence holds",
                "validation data",
                "pass tune_prior_precision((x, y)), or check=False",
            )
        slope: Any = 0
        for part in self._parts():
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(self._nest.variables)
                x, y = part.as_data()
                loss = self._targets.loss(self._outputs_for(convert_batch((x,), "x")), y)
            slopes = tape.gradient(loss, self._nest.variables, unconnected_gradients="zero")
            own = self._space.join([tf.convert_to_tensor(s) for s in slopes])
            slope += part.examples * own
        both = self._matrix.rotate(tf.stack([slope, self._space.join(self._values())])).numpy()
        slope, weights = both.astype(np.float64)
        precision, effective = self._precisions(self._prior), self._effective()
        squared = np.sum((slope / self.noise**2 + self._prior * weights) ** 2 / precision)
        if squared > effective:
            raise HvpError(
                "the weights are not at the maximum of the posterior for the prior precision "
                f"{_shown(self._prior)}: that is {math.sqrt(squared):.3g} standard deviations of "
                f"the posterior away, and may be {math.sqrt(effective):.3g}",
                "weights that were trained with this prior until they converged",
                "pass data that were not trained on, tune_prior_precision((x, y)); or train with "
                "the penalties that weight_decay() returns, to the end: "
                "hvp.minimize(hvp.HessianOperator.from_keras(model, data))",
            )

    def _validated(self, x: Any, y: Any) -> float:
        """Choose a precision for all weights by the likelihood of validation data."""
        grid, scaled = np.logspace(*_GRID), self._scale * self._matrix.scales()
        fast, start, losses = self._of_last_layer(), 0, np.zeros(len(grid))
        for part, mean in self._pieces(x, has_rows=fast is None):
            if fast is None:
                squares = self._rotated(part, mean) ** 2
                variances = (squares @ (1 / (scaled + value)) for value in grid)
            else:
                features = part.call(self._features).numpy().astype(np.float64)
                variances = (self._of_last_layer(value)(features) for value in grid)
            own = rows_of(y, start, start + len(mean))
            for place, variance in enumerate(variances):
                shaped = variance.reshape(mean.shape)
                loss = self._targets.predictive(mean, shaped, own, self.noise)
                losses[place] += len(mean) * loss
            start += len(mean)
        if not np.isfinite(losses).any():
            raise HvpError("no prediction has a finite likelihood", "targets as in the training")
        best = int(np.nanargmin(losses))
        self._prior = np.full_like(self._prior, grid[best])
        if best == len(grid) - 1:
            warn(
                f"hvp.Laplace: predictions are best with the prior precision {grid[best]:.0e}, the "
                "largest that is tried, and so with no uncertainty. Either the model is as sure as "
                "it should be, or these are data that it was trained on, or too much like them",
                ConvergenceWarning,
            )
        return float(losses[best] / start)

    @Uninterrupted()
    def refresh(self) -> None:
        """Compute the curvature again, at the values the weights have now."""
        if self._data is None:
            raise HvpError("the posterior was loaded without its data", "hvp.Laplace(...) anew")
        self._matrix, loss = self._make()
        self._watch.set()
        self._loss, self._last = self._count * loss, (None, None)

    def save(self, path: Any) -> None:
        """Write the posterior to a file, for `load`; the weights are saved with the model.

        Parameters
        ----------
        path : str or path
            A file in a folder that exists.
        """
        settings = {name: getattr(self, f"_{name}") for name in _SAVED}
        settings |= {"likelihood": self.likelihood, "weights": self._digests()}
        settings["is_last"] = self._features is not None
        arrays: dict[str, Any] = dict(self._matrix.arrays())
        arrays |= {"settings": np.array(json.dumps(settings)), "prior": self._prior}
        with open(path, "wb") as file:
            np.savez(file, **arrays)

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
        likelihood : callable, optional
            The loss, if `likelihood` was a function.
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
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the posterior cannot be read from {path} ({type(error).__name__})",
                "a file that Laplace.save wrote",
            ) from error
        name = settings["likelihood"]
        if (name is None) != callable(likelihood):
            raise HvpError(f"the likelihood was {name}", "a function if, and only if, it was one")
        other = cls.__new__(cls)
        other._prepare(model, likelihood or name, subset)
        if settings["weights"] != other._digests():
            raise CheckpointError(
                f"the posterior in {path} is of other weights",
                "the model with the weights that it had, and the subset that was uncertain",
                "save the model with its posterior, and load both",
            )
        for key in _SAVED:
            setattr(other, f"_{key}", settings[key])
        other._data, other._progress = None, False
        other._watch.set()
        prior = arrays.pop("prior")
        blocks = FactoredOperator.blocks_from(arrays, other._space.dtype)
        other._set_matrix(other._with_blocks(blocks), other._is_diagonal)
        other._prior = prior
        if not settings["is_last"]:
            other._features = None
        return other

    def _digests(self) -> list[str]:
        """Return digests of all weights, and of those that are uncertain."""
        return [digest(v.numpy()) for v in (*self._held, *self._nest.variables)]

    def _evidence(self, prior: np.ndarray, noise: float) -> tuple[float, np.ndarray, float]:
        """Return the evidence, and its derivatives in logarithms of precisions and of the noise."""
        weights = self.mean.astype(np.float64)[self._order]
        squares = prior * weights**2
        precision = self._count / noise**2 * self._matrix.scales() + prior
        value, of_noise = -self._loss / noise**2, 0.0
        share = prior / precision
        if self._targets.is_gaussian:
            value -= self._entries * (math.log(noise) + math.log(2 * math.pi) / 2)
            of_noise = 2 * self._loss / noise**2 - self._entries + float(np.sum(1 - share))
        with np.errstate(divide="ignore"):
            value += np.sum(np.log(prior) - squares - np.log(precision)) / 2
        return float(value), (1 - squares - share) / 2, of_noise

    def _function(
        self, of_precision: Callable[[np.ndarray], np.ndarray], prior: np.ndarray | None = None
    ) -> FactoredOperator:
        """Return a function of the precision matrix."""
        prior = self._prior if prior is None else prior
        self._refuse_singular(prior)
        scale = self._scale

        def of_block(own: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
            return lambda values: of_precision(scale * values + own.reshape(values.shape))

        blocks = np.split(prior, np.cumsum(self._sizes)[:-1])
        return self._matrix.rescaled([*map(of_block, blocks)])

    def _with_blocks(self, blocks: list[Block]) -> FactoredOperator:
        """Return the matrix with these blocks, which refuses other weights, and keeps this."""
        if self._factors is None:
            self._factors = Factors(lambda: blocks, watch=self._watch, check=self._make_sure)
            return FactoredOperator(self._space, self._nest, self._factors, origin=self)
        self._factors.replace(lambda: blocks)
        return self._matrix

    def _assign(self, parts: Sequence[Any]) -> None:
        for variable, part in zip(self._nest.variables, parts):
            variable.assign(tf.cast(part, variable.dtype))

    def _parts(self) -> Iterator[Elements]:
        """Iterate over the data in small parts."""
        is_whole = isinstance(self._data, tuple)
        batches = Batches(self._data, _EXAMPLES if is_whole else None, None)
        return (batch.elements for batch in batches)

    def _measured(self) -> tuple[int, tuple[int, ...]]:
        """Return how many examples there are, and the shape of the outputs of one."""
        count, shape = 0, ()
        for part in self._parts():
            x, _ = _pair(part.as_data())
            if not count:
                first = convert_batch((x,), "x").first()
                outputs = self._outputs_for(first).numpy()
                shape = outputs.shape[1:]
                self._check_outputs(first, outputs)
            count += part.examples
        return count, shape

    def _check_outputs(self, first: Elements, outputs: np.ndarray) -> None:
        """Refuse probabilities; see whether the last layer's outputs are those of the model."""
        if self._targets.likelihood == "categorical":
            sums = outputs.astype(np.float64).sum(axis=-1)
            if (outputs >= 0).all() and np.abs(sums - 1).max() < _SAME:
                raise InvalidLossError(
                    "the outputs of the model are probabilities",
                    "logits, or a Keras model that ends with a softmax",
                    "leave out the softmax",
                )
        if self._features is not None:
            own, (kernel, *bias) = first.call(self._features), self._values()
            own = tf.matmul(own, kernel) + (bias[0] if bias else 0)
            if np.abs(own - outputs).max() > _SAME * np.abs(outputs).max():
                self._features = None  # something follows the layer

    @property
    def _entries(self) -> int:
        return self._count * math.prod(self._shape)

    def _outputs_for(self, inputs: Elements) -> tf.Tensor:
        """Return the outputs of the model, from a graph: logits are found there."""
        specs = inputs.specs_of_any_number
        function = self._functions.get_or_make(
            tuple(specs),
            lambda: Compiled(lambda *x: inputs.with_tensors(x).call(self._called), specs, False),
        )
        return function(*inputs.tensors)

    def _called(self, x: Any) -> Any:
        return self._outputs(*x) if isinstance(x, tuple) else self._outputs(x)

    def _check_noise(self, noise: Any) -> None:
        if not self._targets.is_gaussian:
            raise HvpError("noise is given, and the targets have none", "the likelihood 'gaussian'")
        check_number(noise, "noise", positive=True)

    def _checked_prior(self, value: Any) -> np.ndarray:
        """Return precisions of the prior, one for each eigenvector."""
        prior, count = np.asarray(value, np.float64), len(self._sizes)
        shapes = [(), (count,), *([self._prior.shape] if self._is_diagonal else [])]
        if prior.shape not in shapes or not (np.isfinite(prior) & (prior >= 0)).all():
            raise HvpError(
                f"the prior precision is {value!r}",
                f"a finite number from zero on, or one for each of {count} blocks; of each weight "
                "only if the curvature is 'diagonal'",
            )
        if prior.shape in shapes[:2]:
            return np.repeat(np.broadcast_to(prior, count), self._sizes)
        return prior[self._order]

    def _of_penalty(self, regularization: Callable[[], Any]) -> np.ndarray:
        """Return the precision of the prior that a penalty is."""
        prior = np.ones(self._space.size)
        diagonal = self._scale * penalty_diagonal(regularization, self._nest)[self._order]
        for place in np.split(np.arange(len(prior)), np.cumsum(self._sizes)[:-1]):
            own = diagonal[place]
            if own.any():
                prior[place] = own if self._is_diagonal else own.mean()
        if not (np.isfinite(prior) & (prior >= 0)).all():
            raise HvpError(
                f"second derivatives of the penalty go down to {diagonal.min():.3g}",
                "a penalty that is the negative logarithm of a normal density",
                "pass prior_precision",
            )
        _, slopes = value_and_gradient(regularization, self._nest.variables)
        slope = self._space.join(self._space.with_zeros(slopes)).numpy()[self._order]
        slope = self._scale * slope
        apart = np.abs(slope - diagonal * self.mean[self._order])
        if apart.max() > _SAME * np.abs(slope).max():
            raise HvpError(
                f"the penalty has a first derivative that is {apart.max():.3g} from its second "
                "derivative times the weight, so that it is not a normal prior with mean zero",
                "a sum of squares of weights, such as the regularizer 'l2'",
                "pass prior_precision",
            )
        return prior

    def _make_sure(self) -> None:
        changed = self._watch.changed()
        if changed:
            raise StaleOperatorError(
                f"weights have changed: {quoted(changed)}",
                "the weights at which the curvature was computed",
                "call refresh()",
            )


def _pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, tuple) or len(data) != 2:
        raise InvalidDataError("the data are not a pair", "inputs and targets, (x, y)")
    return data


def _shown(prior: np.ndarray) -> str:
    low, high = prior.min(), prior.max()
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
