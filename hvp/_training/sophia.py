"""Sophia: momentum over a diagonal of curvature, clipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from hvp._data.elements import convert_batch
from hvp._derivatives.exact import exact_functions
from hvp._keras.compiled_loss import CompiledModel
from hvp._keras.losses import preserved_losses
from hvp._kronecker.roots import roots
from hvp._runtime.arguments import check_choice, check_count, check_number
from hvp._training.means import kept
from hvp._training.trainer import CurvatureOptimizer
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables

_ZERO = tf.UnconnectedGradients.ZERO


@keras.saving.register_keras_serializable(package="hvp")
class Sophia(CurvatureOptimizer):
    """Momentum divided by an estimate of the curvature of each weight, as a Keras optimizer.

    Every few steps the diagonal of the curvature is estimated from a batch. A step divides the
    running mean of gradients by the running mean of these, and no weight moves by more than the
    learning rate [Liu]_. The model has to be a `hvp.keras.Model`, or to inherit from
    `hvp.keras.Trainer`.

    Parameters
    ----------
    learning_rate : float or schedule, optional
        The largest change of a weight in a step.
    beta_1, beta_2 : float, optional
        How much of the running means of gradients and of curvatures is kept.
    gamma : float, optional
        Curvatures are multiplied by this: a smaller number clips more entries of steps. By default
        0.01 for ``"hutchinson"`` and 0.05 for ``"gauss-newton-bartlett"``, as in the paper.
    epsilon : float, optional
        The least curvature, times `gamma`, to divide by.
    estimator : {"gauss-newton-bartlett", "hutchinson"}, optional
        The first squares the gradient of a batch whose targets are drawn from the predictions,
        and needs a cross-entropy or the mean square error; weights of examples and classes are left
        out of it. The second multiplies the Hessian of any loss by random signs.
    interval : int, optional
        The curvature is estimated every so many steps.
    name : str, optional
        The name of the optimizer.
    **options
        As for every Keras optimizer: `weight_decay`, `clipnorm`, `global_clipnorm` and others.

    Raises
    ------
    HvpError
        If an argument is invalid, or the model does not show its data.

    References
    ----------
    .. [Liu] H. Liu, Z. Li, D. Hall, P. Liang, T. Ma, "Sophia: a scalable stochastic second-order
       optimizer for language model pre-training", ICLR 2024. https://arxiv.org/abs/2305.14342

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hvp
    >>> inputs = keras.Input((3,))
    >>> model = hvp.keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="zeros")(inputs))
    >>> model.compile(hvp.keras.optimizers.Sophia(0.1), "mse")
    >>> history = model.fit(np.eye(3), np.ones(3), epochs=20, verbose=0)
    >>> history.history["loss"][-1] < 0.7 * history.history["loss"][0]
    True
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.96,
        beta_2: float = 0.99,
        gamma: float | None = None,
        epsilon: float = 1e-12,
        estimator: Literal["gauss-newton-bartlett", "hutchinson"] = "gauss-newton-bartlett",
        interval: int = 10,
        name: str = "sophia",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **options)
        for argument, value in (("beta_1", beta_1), ("beta_2", beta_2)):
            check_number(value, argument, below=1.0)
        check_number(epsilon, "epsilon", positive=True)
        check_choice(estimator, "estimator", ("gauss-newton-bartlett", "hutchinson"))
        if gamma is None:
            gamma = 0.01 if estimator == "hutchinson" else 0.05
        check_number(gamma, "gamma", positive=True)
        self.beta_1, self.beta_2, self.gamma, self.epsilon = beta_1, beta_2, gamma, epsilon
        self.estimator, self.interval = estimator, check_count(interval, "interval")

    def build(self, variables: Any) -> None:
        """Make the state: two running means for each variable."""
        if self.built:
            return
        super().build(variables)
        self._nest = collect_variables(list(variables))
        self._means = [self.add_variable_from_reference(v, "mean") for v in variables]
        self._curvatures = [self.add_variable_from_reference(v, "curvature") for v in variables]

    def measure(self, data: tuple[Any, ...]) -> None:
        """Estimate the curvature from a batch, perhaps with weights."""
        if self._traced is None:
            estimate = self._signs if self.estimator == "hutchinson" else self._squares
            self._traced = tf.function(estimate(), autograph=False)
        done = self.steps()

        def update() -> None:
            self._seed.assign(done)
            for curvature, estimate in zip(self._curvatures, self._traced(*data)):
                kept(self, curvature, estimate, self.beta_2)

        tf.cond(done % self.interval == 0, update, lambda: None)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable; called by Keras."""
        # The way of Keras' own optimizers to find what they keep for a variable.
        place = self._get_variable_index(variable)
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        mean = kept(self, self._means[place], gradient, self.beta_1)
        # In half precision `epsilon` would be zero.
        wide = variable.dtype if tf.as_dtype(variable.dtype).size >= 4 else tf.float32
        curvature = tf.cast(tf.convert_to_tensor(self._curvatures[place]), wide)
        ratio = tf.cast(mean, wide) / tf.maximum(self.gamma * curvature, self.epsilon)
        step = tf.cast(tf.clip_by_value(ratio, -1.0, 1.0), variable.dtype)
        self.assign_sub(variable, tf.cast(learning_rate, variable.dtype) * step)

    def _signs(self) -> Any:
        """Return Hutchinson's estimate of the diagonal of the Hessian, for a batch."""
        model, variables = self._model(), self._nest.variables
        loss = CompiledModel(model, None, False, {}).loss

        def estimate(*data: Any) -> Sequence[tf.Tensor]:
            batch = convert_batch(data, "data")
            signs = [
                tf.cast(
                    2 * tf.random.stateless_uniform(v.shape, [self._seed, i], 0, 2, tf.int32) - 1,
                    v.dtype,
                )
                for i, v in enumerate(variables)
            ]
            with exact_functions(), preserved_losses([model]):
                with tf.GradientTape(watch_accessed_variables=False) as outer:
                    outer.watch(variables)
                    with tf.GradientTape(watch_accessed_variables=False) as tape:
                        tape.watch(variables)
                        value = batch.call(loss)
                    slopes = tape.gradient(value, variables, unconnected_gradients=_ZERO)
                    slopes = [tf.convert_to_tensor(slope) for slope in slopes]
                products = outer.gradient(slopes, variables, signs, unconnected_gradients=_ZERO)
            return [sign * product for sign, product in zip(signs, products)]

        return estimate

    def _squares(self) -> Any:
        """Return the estimate from a gradient whose targets are drawn, for a batch."""
        model, variables, rule = self._model(), self._nest.variables, self.rule()

        def estimate(*data: Any) -> Sequence[tf.Tensor]:
            batch = convert_batch(data[:2], "data")
            with exact_functions(), preserved_losses([model]):
                outputs, output = rule.taped(variables, batch)
                drawn = [part[0] for part in roots(rule, output, 1)]
                slopes = Space.of_variables(self._nest).with_zeros(outputs.vjp(drawn))
            count = tf.shape(output.predictions[0])[0]
            return [slope**2 / tf.cast(count, slope.dtype) for slope in slopes]

        return estimate

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` makes the same optimizer of."""
        names = ("beta_1", "beta_2", "gamma", "epsilon", "estimator", "interval")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
