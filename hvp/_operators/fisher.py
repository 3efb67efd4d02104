"""The Fisher matrices of a model and a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from hvp._engines.fisher import EmpiricalFisherRule, FisherRule
from hvp._engines.likelihoods import LIKELIHOODS
from hvp._engines.options import Options, declared
from hvp._engines.prediction_rule import PredictionRule
from hvp._errors import HvpError, InvalidDataError
from hvp._keras.compiled_loss import CompiledModel
from hvp._keras.from_keras import FromKeras
from hvp._operators.damping import check_damping
from hvp._operators.matrix import evaluated
from hvp._operators.predictions import checked_model, checked_output_loss, refuse_dict
from hvp._operators.symmetric import SymmetricOperator, evaluation_of
from hvp._runtime.arguments import check_count, check_seed
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.arrays import check_array

Kind = Literal["type-2", "monte-carlo", "empirical"]


@declared()
class FisherOperator(FromKeras, SymmetricOperator):
    """The Fisher information matrix of a model and a loss, as a scipy `LinearOperator`.

    If the loss of an example is the negative logarithm of a probability that the model assigns to
    its targets, the Fisher matrix is the mean, over the examples, of `E[g g^T]`. Here `g` is the
    gradient of the loss of one example with respect to the variables. The three kinds differ in the
    targets:

    ``"type-2"``
        The expectation over targets drawn from the model's own distribution. It equals the
        Gauss-Newton matrix (Martens 2020 [Mar]_).
    ``"monte-carlo"``
        An unbiased estimate of this expectation from `samples` such targets for each prediction.
    ``"empirical"``
        The targets of the data. This needs no `likelihood`, but it is a different matrix, which
        approaches the Fisher matrix only if the model fits the data (Kunstner et al. 2019 [Kun]_).

    All are positive semi-definite.

    Parameters
    ----------
    model : callable
        Returns the predictions, as for `GaussNewtonOperator`. Their first axis counts the examples.
    output_loss : callable
        Takes the predictions and the other elements of `data`; returns the mean of a loss for each
        example. It is also called with the first example alone, to check that it is a mean.
    variables : nest
        The variables that gradients are taken with respect to, as for `HessianOperator`.
    data : tuple of arrays, or iterable of such
        The examples, such as ``(x, y)``, as for `HessianOperator`.
    kind : {"type-2", "monte-carlo", "empirical"}, optional
        The targets for which gradients are computed.
    likelihood : {"categorical", "bernoulli", "gaussian", "poisson"}, or nest of these, optional
        The distribution of the targets, given the predictions; required unless `kind` is
        ``"empirical"``. The predictions are the logits of classes (along the last axis), the logits
        of ones, means, or logarithms of means. If there are several predictions, this may be a nest
        like them. The output loss must be the negative log-likelihood times a constant, such as the
        softmax cross-entropy or a mean square error; any other raises an error.
    samples : int, optional
        Number of targets to draw for each prediction, if `kind` is ``"monte-carlo"``. They take as
        much memory as `samples` times the predictions. The error is inversely proportional to the
        square root of `samples`; `standard_error` estimates it.
    seed : int, optional
        Seed of the draws, which also depend on the data. The draws are the same in all products,
        even after `refresh`.
    damping : float, optional
        Adds `damping * v` to every product.
    **options
        As for `HessianOperator`: {option_names}. A `regularization` adds its Hessian.

    Raises
    ------
    InvalidLossError
        If the output loss is not a mean over examples, or not the negative log-likelihood of
        `likelihood`; otherwise as `GaussNewtonOperator`.
    InvalidDataError
        If there are no data; otherwise as `GaussNewtonOperator`.
    HvpError
        If `kind`, `likelihood`, `samples` or `seed` is invalid; otherwise as `HessianOperator`.

    Notes
    -----
    With predictions `p` and their Jacobian `J_i` for example `i`, the gradient of an example is
    `g_i = J_i^T r_i`, where `r_i` is the gradient of its loss in `p`. A product with the empirical
    matrix is the mean of `J_i^T r_i (r_i . J_i v)`: it takes one product with the Jacobian of all
    predictions and one with its transpose. No gradient of a single example is computed or stored.

    If an example has several predictions, like a sequence of tokens, the empirical matrix uses the
    gradient of the whole loss of the example. For the other kinds, each prediction is drawn
    separately.

    If the model mixes the examples of a batch, as batch normalization in training does, `g_i` is
    the gradient of the loss that example `i` has within the batch.

    References
    ----------
    .. [Mar] J. Martens, "New insights and perspectives on the natural gradient method", Journal of
       Machine Learning Research 21(146), 2020. https://jmlr.org/papers/v21/17-678.html
    .. [Kun] F. Kunstner, P. Hennig, L. Balles, "Limitations of the empirical Fisher approximation
       for natural gradient descent", NeurIPS 2019. https://arxiv.org/abs/1905.12558

    Examples
    --------
    One coin, with the logit `w` of heads: the Fisher matrix is `p (1 - p)`, and the empirical one
    the mean of `(p - y)^2`.

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([0.0])
    >>> coin = lambda x: x * w
    >>> def loss(logits, y):
    ...     return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))
    >>> data = np.ones((4, 1), "float32"), np.array([[1], [1], [1], [0]], "float32")
    >>> hvp.FisherOperator(coin, loss, w, data, likelihood="bernoulli") @ np.ones(1)
    array([0.25], dtype=float32)
    >>> w.assign([np.log(3.0)])  # doctest: +ELLIPSIS
    <tf.Variable...
    >>> F = hvp.FisherOperator(coin, loss, w, data, kind="empirical")
    >>> (F @ np.ones(1)).round(4)
    array([0.1875], dtype=float32)
    """

    @outside_strategies
    def __init__(
        self,
        model: Callable[..., Any],
        output_loss: Callable[..., Any],
        variables: Any,
        data: Any,
        *,
        kind: Kind = "type-2",
        likelihood: Any = None,
        samples: int = 1,
        seed: int = 0,
        damping: float = 0.0,
        **options: Any,
    ) -> None:
        checked = Options.of(type(self).__name__, options)
        damping = check_damping(damping)
        refuse_dict(data)
        if data is None:
            raise InvalidDataError(
                "there are no data", "examples, over which the matrix is a mean", "pass data=(x, y)"
            )
        functions = checked_model(model), checked_output_loss(output_loss)
        rule = fisher_rule(functions, checked.weight, kind, likelihood, samples, seed)
        if kind != "monte-carlo" and samples != 1:
            raise HvpError(
                f"the argument samples is {samples!r}, and the kind is {kind!r}",
                "a number of targets to draw for kind='monte-carlo', since the others draw none",
                "pass kind='monte-carlo', or leave out samples",
            )
        self._rule = rule
        super().__init__(evaluated(rule, variables, data, checked).damped(damping))

    @Uninterrupted()
    def standard_error(self, X: Any, *, replicates: int = 8) -> np.ndarray:
        """Estimate the standard error of products if targets are drawn at random.

        Parameters
        ----------
        X : array_like
            A vector of shape `(n,)`, or a block of columns of shape `(n, k)`.
        replicates : int, optional
            Number of further matrices to draw, at least 2.

        Returns
        -------
        ndarray
            The standard error of each entry of ``F @ X``, shaped like `X`. The relative error of
            this estimate is about one over the square root of ``2 * (replicates - 1)``.

        Raises
        ------
        HvpError
            If `kind` is not ``"monte-carlo"``, or `replicates` is less than 2.
        InvalidVectorError
            If `X` has another shape or kind, or entries that are not finite.
        StaleOperatorError
            If a variable has changed since the operator was evaluated.
        ClosedOperatorError
            If the operator is closed.

        Notes
        -----
        The estimate is the standard deviation of `replicates` products of matrices whose targets
        are drawn independently, with as many samples each. It costs one trace, and an evaluation
        and a product for each replicate. Meanwhile memory holds the residuals twice.

        Examples
        --------
        One hundred coins, with the logit `w` of heads:

        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import hvp
        >>> w = tf.Variable([1.0])
        >>> def loss(logits, y):
        ...     return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))
        >>> data = np.ones((100, 1), "float32"), np.ones((100, 1), "float32")
        >>> options = {"kind": "monte-carlo", "likelihood": "bernoulli", "samples": 10}
        >>> F = hvp.FisherOperator(lambda x: x * w, loss, w, data, **options)
        >>> p = 1 / (1 + np.exp(-1.0))
        >>> abs(F @ np.ones(1) - p * (1 - p)) < 3 * F.standard_error(np.ones(1))
        array([ True])
        """
        drawn = self._rule
        if not isinstance(drawn, FisherRule) or not drawn.samples:
            raise HvpError(
                "no targets are drawn, so that products have no sampling error",
                "a Fisher matrix with kind='monte-carlo'",
            )
        if check_count(replicates, "replicates") < 2:
            raise HvpError("the argument replicates is 1", "at least 2")
        X = check_array(X, self.shape[0], self.dtype, ndims=(2,) if np.ndim(X) == 2 else (1,))
        # None of these is the seed of the operator itself.
        seeds = np.random.default_rng(drawn.seed).choice(2**31 - 2, replicates, replace=False)
        seeds += seeds >= drawn.seed
        seed = tf.Variable(seeds[0], trainable=False, dtype=tf.int32)
        rule = dataclasses.replace(drawn, seed=seed)
        products = []
        with evaluation_of(self).evaluated_with(rule) as evaluation:
            for number, value in enumerate(seeds):
                if number:
                    seed.assign(value)
                    evaluation.snapshot.refresh()
                products.append(SymmetricOperator(evaluation) @ X)
        return np.std(products, axis=0, ddof=1)

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        options = compiled.options
        options["regularization"] = compiled.regularization
        if options.get("kind") != "empirical" and options.get("likelihood") is None:
            options["likelihood"] = compiled.likelihoods
        return compiled.model, compiled.output_loss, variables


def fisher_rule(
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    weight: Callable[..., Any] | None,
    kind: Any,
    likelihood: Any,
    samples: Any,
    seed: Any,
    *,
    argument: str = "kind",
) -> PredictionRule:
    """Return the rule of a Fisher matrix of the model and the output loss in `functions`.

    The other arguments are checked here. `argument` is what the caller calls `kind`.
    """
    if _checked_kind(kind) == "empirical":
        if likelihood is not None:
            raise HvpError(
                "a likelihood is passed for the empirical Fisher matrix",
                "None: it takes the targets of the data",
                f"pass {argument}='type-2' or {argument}='monte-carlo'",
            )
        return EmpiricalFisherRule(*functions, weight)
    draws = check_count(samples, "samples") if kind == "monte-carlo" else 0
    names = _checked_likelihoods(likelihood, argument)
    return FisherRule(*functions, weight, names, draws, check_seed(seed, below=2**31))


def _checked_kind(kind: Any) -> Any:
    if kind not in get_args(Kind):
        names = ", ".join(map(repr, get_args(Kind)))
        raise HvpError(f"the argument kind is {kind!r}", f"one of {names}")
    return kind


def _checked_likelihoods(likelihood: Any, argument: str) -> tuple[str, ...]:
    known = ", ".join(map(repr, LIKELIHOODS))
    names = tuple(tf.nest.flatten(likelihood))
    if not names or not all(isinstance(name, str) and name in LIKELIHOODS for name in names):
        raise HvpError(
            f"the argument likelihood is {likelihood!r}",
            f"one of {known}, or a nest of these like the predictions",
            f"name the distribution of the targets; {argument}='empirical' needs none, and "
            "hvp.GaussNewtonOperator takes any output loss",
        )
    return names
