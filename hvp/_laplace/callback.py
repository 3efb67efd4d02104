"""A Keras callback that tunes the prior of the weights during training."""

from __future__ import annotations

from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvp._errors import HvpError
from hvp._keras.compiled_loss import CompiledModel
from hvp._laplace.laplace import Laplace
from hvp._runtime.arguments import check_choice, check_count


class LaplaceCallback(keras.callbacks.Callback):
    """A Keras callback that chooses the strength of weight decay during training, by the evidence.

    It adds the penalties that `Laplace.weight_decay` returns to the training loss, as regularizers
    of the uncertain weights, and every few epochs replaces the precision of the prior by that which
    maximizes the evidence at the present weights [Imm2]_. Of a regression, so it does with the
    standard deviation of errors, unless `noise` is given. No validation data are needed.

    Parameters
    ----------
    data : tuple of arrays, or iterable of such
        The training examples ``(x, y)``, or batches of them.
    every : int, optional
        The number of epochs from one tuning to the next.
    by : {"all", "block"}, optional
        As for `Laplace.tune_prior_precision`.
    **options
        Other arguments of `Laplace`, such as `curvature`. The `prior_precision` is the first one.

    Attributes
    ----------
    laplace : Laplace
        The posterior; after the training, that at the last weights.

    Raises
    ------
    HvpError
        When the training begins: if weights have regularizers already, or as `Laplace`.

    Notes
    -----
    The logs contain ``log_marginal_likelihood``, of the last tuning, and ``prior_precision``, its
    mean over the blocks: `EarlyStopping` and `ModelCheckpoint` can monitor the first, with
    ``mode="max"``. The regularizers are removed at the end.

    References
    ----------
    .. [Imm2] A. Immer et al., "Scalable marginal likelihood estimation for model selection in deep
       learning", ICML 2021. https://arxiv.org/abs/2104.04975

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hvp.keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])
    >>> model.compile("sgd", "sparse_categorical_crossentropy")
    >>> x, y = np.eye(3, dtype="float32"), np.array([0, 1, 1])
    >>> tuning = hvp.keras.LaplaceCallback((x, y))
    >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=[tuning]).history
    >>> sorted(history)
    ['log_marginal_likelihood', 'loss', 'prior_precision']
    >>> tuning.laplace.predict(x).shape
    (3, 2)
    """

    def __init__(
        self, data: Any, *, every: int = 1, by: Literal["all", "block"] = "all", **options: Any
    ) -> None:
        super().__init__()
        self._data, self._every = data, check_count(every, "every")
        self._by: Literal["all", "block"] = check_choice(by, "by", ("all", "block"))
        self._options = options
        self._last: float = float("nan")
        self._strengths: dict[str, tf.Variable] = {}
        self.laplace: Laplace

    def on_train_begin(self, logs: Any = None) -> None:
        """Build the posterior, and add the regularizers."""
        self._remove_penalties()  # of a training that was interrupted
        weights = self.model.trainable_variables
        if not all(hasattr(v, "path") for v in weights):
            raise HvpError(f"the model is {type(self.model).__name__}", "a model of Keras 3")
        regularized = [v.path for v in weights if getattr(v, "regularizer", None) is not None]
        if regularized:
            raise HvpError(
                f"{regularized[0]} has a regularizer",
                "weights without regularizers, whose strength is chosen here",
                "build the layers without kernel_regularizer",
            )
        self.laplace = Laplace.from_keras(self.model, self._data, **self._options)
        self._strengths = {
            name: tf.Variable(value, dtype=tf.float32) for name, value in self._penalties().items()
        }
        for variable in weights:
            if variable.path in self._strengths:
                variable.regularizer = _Penalty(self._strengths[variable.path])
        self.model.make_train_function(force=True)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tune the prior, and add it to the logs."""
        if (epoch + 1) % self._every == 0:
            self.laplace.refresh()
            self._last = self.laplace.tune_prior_precision(
                by=self._by, noise=self._tunes_noise, check=False
            )
            for name, value in self._penalties().items():
                self._strengths[name].assign(value)
        if logs is not None:
            logs["log_marginal_likelihood"] = self._last
            logs["prior_precision"] = float(np.mean(self.laplace.prior_precision))

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the regularizers, and compute the posterior at the last weights."""
        self._remove_penalties()
        self.laplace.refresh()

    @property
    def _tunes_noise(self) -> bool:
        return self.laplace.likelihood == "gaussian" and self._options.get("noise") is None

    def _penalties(self) -> dict[str, float]:
        """Return the prior in units of the compiled loss, which may have a weight."""
        weight = CompiledModel(self.model, self._data, None, {}).loss_weight
        return {name: weight * own for name, own in self.laplace.weight_decay().items()}

    def _remove_penalties(self) -> None:
        for variable in self.model.trainable_variables:
            if isinstance(getattr(variable, "regularizer", None), _Penalty):
                variable.regularizer = None
        self.model.make_train_function(force=True)


class _Penalty(keras.regularizers.Regularizer):  # which Keras 3.10 asks for
    """A multiple of the sum of squares, which this callback recognizes as its own."""

    def __init__(self, strength: tf.Variable) -> None:
        self._strength = strength

    def __call__(self, weights: Any) -> tf.Tensor:
        squares = tf.square(tf.convert_to_tensor(weights))
        return tf.cast(self._strength, squares.dtype) * tf.reduce_sum(squares)
