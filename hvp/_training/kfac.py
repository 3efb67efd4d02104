"""K-FAC as a Keras optimizer: natural gradients from Kronecker factors of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from hvp._data.elements import convert_batch
from hvp._derivatives.exact import exact_functions
from hvp._errors import HvpError, quoted
from hvp._graphs.compiled import Compiled
from hvp._keras.losses import preserved_losses
from hvp._keras.unrolled import unrolled
from hvp._kronecker.layered_graph import LayeredGraph
from hvp._kronecker.layers import Layer
from hvp._kronecker.rule import Arrangement, StatisticsRule
from hvp._runtime.arguments import check_choice, check_count, check_number
from hvp._training.means import kept
from hvp._training.trainer import CurvatureOptimizer
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables


@keras.saving.register_keras_serializable(package="hvp")
class KFACOptimizer(CurvatureOptimizer):
    """Natural gradients by Kronecker factors, as a Keras optimizer: ``hvp.keras.optimizers.KFAC``.

    The gradient of each layer is multiplied by the inverse of the layer's block of the Fisher
    matrix, which `hvp.KFAC` approximates by a Kronecker product [MG2]_. The factors are running
    means over batches, with targets that are drawn from the predictions. They need the model and
    the data, not only gradients: the model has to be a `hvp.keras.Model`, or to inherit from
    `hvp.keras.Trainer`.

    Parameters
    ----------
    learning_rate : float or schedule, optional
        As for gradient descent with momentum; steps are natural gradients.
    momentum : float, optional
        The part of the last step that is added to the next.
    damping : float, optional
        Is added to the curvature, shared between both factors of a block in proportion to their
        mean eigenvalues. What is too small makes steps diverge; tune it in factors of two.
    decay : float, optional
        How much of the factors is kept when those of another batch are added.
    statistics_interval, interval : int, optional
        Factors are updated every `statistics_interval` steps, and their inverses every `interval`.
    norm_constraint : float, optional
        Steps are shortened to this squared length in the metric of the Fisher matrix; None for no
        limit.
    sharing : {"expand", "reduce"}, optional
        As for `hvp.KFAC`.
    largest, largest_exact : int, optional
        As for `hvp.KFAC`.
    name : str, optional
        The name of the optimizer.
    **options
        As for every Keras optimizer: `weight_decay`, `clipnorm`, `global_clipnorm`, `use_ema` and
        others. Clipping is of natural gradients.

    Raises
    ------
    HvpError
        If an argument is invalid. When it is built: if the model cannot show its layers, if its
        loss is no likelihood that is known, or if weights belong to no layer.

    Notes
    -----
    For a layer with the factors `A` of its inputs and `G` of the gradients with respect to its
    outputs, the gradient `V` becomes
    ``(A + pi sqrt(damping) I)^-1 V (G + sqrt(damping) / pi I)^-1``, where `pi**2` is the ratio of
    their mean eigenvalues. A step that updates factors takes another pass forward and backward.
    Weights of examples and classes count for gradients, and are left out of the factors.

    References
    ----------
    .. [MG2] J. Martens and R. Grosse, "Optimizing neural networks with Kronecker-factored
       approximate curvature", ICML 2015. https://proceedings.mlr.press/v37/martens15.html

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hvp
    >>> inputs = keras.Input((3,))
    >>> model = hvp.keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="zeros")(inputs))
    >>> model.compile(hvp.keras.optimizers.KFAC(0.5), "mse")
    >>> history = model.fit(np.eye(3), np.ones(3), epochs=10, verbose=0)
    >>> history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    True
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        damping: float = 1e-3,
        decay: float = 0.95,
        statistics_interval: int = 1,
        interval: int = 10,
        norm_constraint: float | None = 1e-3,
        sharing: Literal["expand", "reduce"] = "expand",
        largest: int = 4096,
        largest_exact: int = 256,
        name: str = "kfac",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **options)
        for argument, value in (("momentum", momentum), ("decay", decay)):
            check_number(value, argument, below=1.0)
        check_number(damping, "damping", positive=True)
        if norm_constraint is not None:
            check_number(norm_constraint, "norm_constraint", positive=True)
        check_choice(sharing, "sharing", ("expand", "reduce"))
        self.momentum, self.damping, self.decay = momentum, damping, decay
        self.statistics_interval = check_count(statistics_interval, "statistics_interval")
        self.interval = check_count(interval, "interval")
        self.norm_constraint, self.sharing = norm_constraint, sharing
        self.largest = check_count(largest, "largest", 0)
        self.largest_exact = check_count(largest_exact, "largest_exact", 0)

    def build(self, variables: Any) -> None:
        """Find the layers of the model, and make the state: factors and inverses of each."""
        if self.built:
            return
        model = self.shown_model()
        self._nest = collect_variables(list(variables))
        self._space = Space.of_variables(self._nest)
        self._arrangement = Arrangement(
            self.sharing == "reduce", self.largest, self.largest_exact, self._space.dtype
        )
        self._layers, uncovered = _layers_of(model, self._nest)
        if uncovered:
            raise HvpError(
                f"the weights {quoted(uncovered)} enter no operation that has Kronecker factors",
                "products of matrices, convolutions, einsums, embeddings, and entrywise operations",
                "use hvp.keras.optimizers.SOAP, or set trainable=False",
            )
        super().build(variables)
        self._velocities = [self.add_variable_from_reference(v, "velocity") for v in variables]
        self._factors: list[list[Any]] = []
        self._inverses: list[list[Any]] = []
        for layer in self._layers:
            shapes = self._arrangement.shapes(layer)
            name = layer.names[0].replace("/", "_").split(":")[0]
            for state, initial in ((self._factors, "factor"), (self._inverses, "inverse")):
                state.append(
                    [
                        self.add_variable(
                            shape, "zeros", self._space.dtype.name, name=f"{name}_{initial}_{i}"
                        )
                        for i, shape in enumerate(shapes)
                    ]
                )

    def measure(self, data: tuple[Any, ...]) -> None:
        """Update the factors from a batch, whose weights are left out."""
        if self._traced is None:
            self._traced = self._statistics()
        done = self.steps()

        def update() -> None:
            self._seed.assign(done)
            count = tf.cast(done // self.statistics_interval, self._space.dtype)
            keep = tf.minimum(1 - 1 / (count + 1), tf.cast(self.decay, self._space.dtype))
            factors = [factor for several in self._factors for factor in several]
            for factor, mean in zip(factors, self._traced(*data[:2])):
                kept(self, factor, mean, keep)

        tf.cond(done % self.statistics_interval == 0, update, lambda: None)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Take a step; called by Keras."""
        if not self.built:
            self.build(trainable_variables)
        return super().apply(self._natural(list(grads)), trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Move one variable along its natural gradient, with momentum; called by Keras."""
        # The way of Keras' own optimizers to find what they keep for a variable.
        velocity = self._velocities[self._get_variable_index(variable)]
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        moved = self.momentum * tf.convert_to_tensor(velocity) + gradient
        self.assign(velocity, moved)
        self.assign_sub(variable, tf.cast(learning_rate, variable.dtype) * moved)

    def _natural(self, gradients: list[Any]) -> list[tf.Tensor]:
        """Return natural gradients, of the allowed length."""
        tf.cond(self.steps() % self.interval == 0, self._invert, lambda: None)
        flat = self._space.join(
            [
                tf.zeros(shape, dtype) if g is None else tf.cast(tf.convert_to_tensor(g), dtype)
                for g, shape, dtype in zip(gradients, self._space.shapes, self._space.dtypes)
            ]
        )
        values, entries = [], []
        for layer, inverses in zip(self._layers, self._inverses):
            own = tf.gather(flat, layer.entries)
            inverse = [tf.convert_to_tensor(variable) for variable in inverses]
            values.append(tf.reshape(_multiplied(inverse, own), [-1]))
            entries.append(layer.entries.reshape(-1))
        order = np.argsort(np.concatenate(entries))
        natural = tf.gather(tf.concat(values, axis=0), order)
        if self.norm_constraint is not None:
            rate = tf.cast(tf.convert_to_tensor(self.learning_rate), natural.dtype)
            scale = self.loss_scale_factor or 1.0  # which Keras divides gradients by later
            squared = (rate / scale) ** 2 * tf.reduce_sum(natural * flat)
            tiny = float(np.finfo(natural.dtype.as_numpy_dtype).tiny)
            length = tf.sqrt(self.norm_constraint / tf.maximum(squared, tiny))
            natural *= tf.minimum(tf.ones_like(length), length)
        return self._space.split(natural)

    def _invert(self) -> None:
        """Invert the damped factors."""
        for factors, inverses in zip(self._factors, self._inverses):
            means = [tf.convert_to_tensor(factor) for factor in factors]
            for inverse, value in zip(inverses, _inverted(means, self.damping)):
                self.assign(inverse, value)

    def _statistics(self) -> Any:
        """Return a function of a batch that returns the factors for it."""
        model = self._model()
        rule = StatisticsRule(self.rule(), self._nest, self._arrangement, [model], 1)
        stand_ins = [f.value for several in self._factors for f in several]

        def statistics(*data: Any) -> Sequence[tf.Tensor]:
            with exact_functions(), preserved_losses([model]):
                found = rule.evaluate(stand_ins, convert_batch(data, "data"))
            return list(found.gradient or ())

        return tf.function(statistics, autograph=False)

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` makes the same optimizer of."""
        names = (
            "momentum damping decay statistics_interval interval norm_constraint sharing largest "
            "largest_exact"
        )
        return {**super().get_config(), **{name: getattr(self, name) for name in names.split()}}


def _layers_of(model: Any, nest: Any) -> tuple[list[Layer], list[str]]:
    """Return the layers of a Keras model, and the names of weights that are in none."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise HvpError(
            "the model is a class of its own, whose layers are not known before it is called",
            "a functional or sequential model",
            "use hvp.keras.optimizers.SOAP",
        )
    found: list[LayeredGraph] = []

    def outputs(*data: tf.Tensor) -> Any:
        own = tf.nest.pack_sequence_as(model.input, [tf.identity(x) for x in data])
        results = tf.nest.flatten(model(own, training=False))
        found.append(LayeredGraph.of(nest, list(data), results))
        return results

    shapes = [[2 if size is None else size for size in x.shape] for x in inputs]
    specs = [tf.TensorSpec(s, tf.as_dtype(x.dtype)) for s, x in zip(shapes, inputs)]
    with exact_functions(), preserved_losses([model]), unrolled([model]):
        Compiled(outputs, specs, False)
    return found[0].layers, found[0].uncovered


def _inverted(means: list[tf.Tensor], damping: float) -> list[tf.Tensor]:
    """Return the inverses of a block's factors, or that of an exact block."""
    if len(means) == 1:
        return [_inverse(means[0], tf.cast(damping, means[0].dtype))]
    traces = [_mean_eigenvalue(mean) for mean in means]
    ratio = tf.sqrt(tf.math.divide_no_nan(traces[0], traces[1]))
    ratio = tf.where(ratio > 0, ratio, tf.ones_like(ratio))
    root = tf.cast(damping**0.5, means[0].dtype)
    return [_inverse(means[0], root * ratio), _inverse(means[1], root / ratio)]


def _mean_eigenvalue(mean: tf.Tensor) -> tf.Tensor:
    diagonal = tf.linalg.diag_part(mean) if len(mean.shape) == 3 else mean
    return tf.reduce_mean(diagonal, axis=-1)


def _inverse(mean: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
    """Invert matrices `(K, d, d)`, or diagonals `(K, d)`, plus a multiple of the identity."""
    if len(mean.shape) == 2:
        return 1 / (mean + tf.reshape(shift, [-1, 1]))
    identity = tf.eye(mean.shape[-1], batch_shape=[mean.shape[0]], dtype=mean.dtype)
    shifted = mean + tf.reshape(shift, [-1, 1, 1]) * identity
    return tf.linalg.cholesky_solve(tf.linalg.cholesky(shifted), identity)


def _multiplied(inverse: list[tf.Tensor], values: tf.Tensor) -> tf.Tensor:
    """Multiply the entries of a layer by the inverse of its block."""
    if len(inverse) == 1:
        flat = tf.reshape(values, [1, -1])
        own = inverse[0]
        return own * flat if len(own.shape) == 2 else tf.linalg.matvec(own, flat)
    left, right = inverse
    full = len(left.shape) == 3
    values = tf.matmul(left, values) if full else left[:, :, tf.newaxis] * values
    full = len(right.shape) == 3
    return tf.matmul(values, right) if full else values * right[:, tf.newaxis]
