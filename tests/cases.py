"""The losses every operator is tested on, and independent ways to their dense Hessians.

A case builds the same problem in any dtype: weights and data are drawn in float32 and then cast,
so that a float64 Hessian is the truth for the float32 operator at the very same point.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, settings

FUZZ = int(os.environ.get("HVP_FUZZ", "0"))


def examples(count: int) -> Any:
    """So many examples, the same each time; with `make fuzz` many more, and new ones."""
    return settings(
        max_examples=count * max(1, FUZZ),
        deadline=None,
        derandomize=not FUZZ,
        suppress_health_check=[HealthCheck.too_slow],
    )


def long(*values: Any) -> Any:
    """Mark what is much like another test and takes long: it runs by `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.long)


def crossed(*axes: Any) -> list[Any]:
    """All combinations of values; those run always in which each value occurs at least once.

    Of the first, the second ... of each axis is made a combination; an axis may say a value twice.
    The others are much like these: they run by `make test-all`.
    """
    values = [list(axis) for axis in axes]
    always = {tuple(v[i % len(v)] for v in values) for i in range(max(map(len, values)))}
    every = itertools.product(*map(dict.fromkeys, values))
    return [combination if combination in always else long(*combination) for combination in every]


def pairwise(*axes: Any) -> list[Any]:
    """All combinations of values; a part in which each pair of values occurs runs always.

    The others are much like these: they run by `make test-all`.
    """
    every = list(itertools.product(*axes))
    pairs = {c: set(itertools.combinations(enumerate(c), 2)) for c in every}
    missing, always = set().union(*pairs.values()), set()
    while missing:
        best = max(every, key=lambda c: len(pairs[c] & missing))
        always.add(best)
        missing -= pairs[best]
    return [combination if combination in always else long(*combination) for combination in every]


@dataclass
class Problem:
    """What `HessianOperator` takes."""

    loss: Callable[..., Any]
    variables: Any
    data: Any = None

    def bound(self) -> Any:
        """The loss's value at the data."""
        return self.loss() if self.data is None else self.loss(*self.data)

    def tensorflow_variables(self) -> list[tf.Variable]:
        source = self.variables
        if hasattr(source, "trainable_variables"):
            source = source.trainable_variables
        leaves = tf.nest.flatten(source)
        return [leaf if isinstance(leaf, tf.Variable) else leaf.value for leaf in leaves]


# Central differences of the first derivative, error of order step**8.
STENCIL = {1: 4 / 5, 2: -1 / 5, 3: 4 / 105, 4: -1 / 280}


def dense_hessian(problem: Problem, step: float = 4e-3) -> np.ndarray:
    """Differences of gradients, column by column: no second derivative of TensorFlow's enters.

    The problem's variables must be float64; with this step the error is near 1e-12.
    """
    return hessian_oracle(problem, step)()


def hessian_oracle(problem: Problem, step: float = 4e-3) -> Callable[[], np.ndarray]:
    """Return a function that computes `dense_hessian` at the values of the moment."""
    variables = problem.tensorflow_variables()
    sizes = [variable.shape.num_elements() for variable in variables]

    def gradient_at(w: tf.Tensor) -> tf.Tensor:
        for variable, part in zip(variables, tf.split(w, sizes)):
            variable.assign(tf.reshape(part, variable.shape))
        return flat_gradient(problem, variables)

    @tf.function(autograph=False)
    def gradients_at(points: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(gradient_at, points, parallel_iterations=1)

    steps = step * np.array([sign * k for k in STENCIL for sign in (1, -1)])
    factors = np.array([sign * c for c in STENCIL.values() for sign in (1, -1)])
    changes = steps[:, np.newaxis, np.newaxis] * np.eye(sum(sizes))

    def hessian() -> np.ndarray:
        values = [variable.numpy() for variable in variables]
        at = np.concatenate([value.reshape(-1) for value in values])
        try:
            gradients = gradients_at((at + changes).reshape(-1, len(at))).numpy()
        finally:
            for variable, value in zip(variables, values):
                variable.assign(value)
        rows = np.tensordot(factors, gradients.reshape(changes.shape), 1) / step
        return rows.T

    return hessian


def derivatives_by_values(problem: Problem, step: float = 2e-2) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian by differences of values: no derivative of TensorFlow's enters.

    Of one float64 variable, a vector.
    """
    (variable,) = problem.tensorflow_variables()
    at = variable.numpy()

    def value(change: np.ndarray) -> float:
        variable.assign(at + change)
        return float(problem.bound())

    def first_and_second(d: np.ndarray) -> tuple[float, float]:
        after, before = (
            np.array([value(sign * k * step * d) for k in STENCIL]) for sign in (1, -1)
        )
        first = np.array(list(STENCIL.values()))
        second = 2 * first / np.array(list(STENCIL))
        middle = -2 * second.sum() * value(0 * d)
        return first @ (after - before) / step, (second @ (after + before) + middle) / step**2

    unit = np.eye(len(at))
    try:
        single = np.array([first_and_second(a) for a in unit])
        both = np.array([[first_and_second(a + b)[1] for a in unit] for b in unit])
    finally:
        variable.assign(at)
    return single[:, 0], (both - single[:, 1] - single[:, 1:]) / 2


def jacobian_of_gradient(problem: Problem) -> np.ndarray:
    """TensorFlow's own dense Hessian, in one graph, from scratch."""
    variables = problem.tensorflow_variables()

    @tf.function
    def jacobian() -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            outer.watch(variables)
            gradient = flat_gradient(problem, variables)
        return outer.jacobian(
            gradient, variables, tf.UnconnectedGradients.ZERO, experimental_use_pfor=False
        )

    blocks = jacobian()
    rows = blocks[0].shape[0]
    return np.concatenate([block.numpy().reshape(rows, -1) for block in blocks], axis=1)


def flat_gradient(problem: Problem, variables: list[tf.Variable]) -> tf.Tensor:
    """The gradient of a problem's loss, as one vector."""
    with tf.GradientTape() as tape:
        tape.watch(variables)
        value = problem.bound()
    gradient = tape.gradient(value, variables, unconnected_gradients="zero")
    return tf.concat([tf.reshape(tf.convert_to_tensor(g), [-1]) for g in gradient], 0)


def relative_error(got: Any, want: Any) -> float:
    """The norm of the difference over the norm of `want`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def random(seed: int, *shape: int, dtype: str = "float32", scale: float = 1.0) -> np.ndarray:
    """Normal numbers, drawn in float32 whatever the dtype."""
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(shape)).astype("float32").astype(dtype)


def set_random_weights(model: Any, seed: int = 0) -> None:
    """Give a model weights that depend on the seed alone, small ones, variances positive."""
    for index, variable in enumerate(model.variables):
        if "int" in str(variable.dtype):
            continue
        value = random(seed + index, *variable.shape, scale=0.5)
        variable.assign(np.abs(value) + 0.5 if "variance" in variable.name else value)


def cross_entropy(model: Any, **call: Any) -> Callable[[Any, Any], tf.Tensor]:
    """The mean softmax cross-entropy of a model's logits."""

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x, **call))
        return tf.reduce_mean(each)

    return loss


def rosenbrock(dtype: str, n: int = 10) -> Problem:
    w = tf.Variable(random(n, n, dtype=dtype))
    return Problem(lambda: tf.reduce_sum(100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2), w)


def mlp(dtype: str) -> Problem:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6,), dtype=dtype),
            layers.Dense(5, "tanh", dtype=dtype),
            layers.Dense(4, "softplus", dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )
    set_random_weights(model)
    y = np.array([0, 1, 2, 1, 0, 2, 2])
    return Problem(cross_entropy(model), model, (random(1, 7, 6, dtype=dtype), y))


def cnn(dtype: str) -> Problem:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((6, 6, 2), dtype=dtype),
            layers.Conv2D(3, 3, activation="gelu", dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.AveragePooling2D(2, dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )
    set_random_weights(model)
    x = random(2, 5, 6, 6, 2, dtype=dtype)
    y = np.array([0, 1, 2, 1, 0])
    return Problem(cross_entropy(model, training=False), model, (x, y))


def attention(dtype: str) -> Problem:
    layers = keras.layers
    tokens = layers.Input((5,), dtype="int32")
    h = layers.Embedding(7, 4, dtype=dtype)(tokens)
    normal = layers.LayerNormalization(dtype=dtype)(h)
    h = h + layers.MultiHeadAttention(2, 2, dtype=dtype)(normal, normal)
    h = layers.GroupNormalization(2, dtype=dtype)(h)
    h = layers.GlobalAveragePooling1D(dtype=dtype)(h)
    model = keras.Model(tokens, layers.Dense(3, dtype=dtype)(h))
    set_random_weights(model)
    x = np.random.default_rng(0).integers(0, 7, (4, 5))
    return Problem(cross_entropy(model), model, (x, np.array([0, 1, 2, 1])))


def batch_normalization_in_training(dtype: str) -> Problem:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((3,), dtype=dtype),
            layers.Dense(4, "tanh", dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )
    set_random_weights(model)
    x = random(4, 6, 3, dtype=dtype)
    y = np.array([0, 1, 2, 1, 0, 2])
    return Problem(cross_entropy(model, training=True), model, (x, y))


def lstm(dtype: str, *, unroll: bool) -> Problem:
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((3, 3), dtype=dtype),
            layers.LSTM(2, unroll=unroll, dtype=dtype),
            layers.Dense(3, dtype=dtype),
        ]
    )
    set_random_weights(model)
    return Problem(
        cross_entropy(model), model, (random(3, 5, 3, 3, dtype=dtype), np.array([0, 1, 2, 1, 0]))
    )


def while_loop(dtype: str) -> Problem:
    w = tf.Variable(random(4, 4, dtype=dtype, scale=0.5))
    shift = tf.constant(random(5, 4, dtype=dtype))

    def loss() -> tf.Tensor:
        def step(i: tf.Tensor, state: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, tf.tanh(state * w + shift)

        _, state = tf.while_loop(lambda i, _: i < 5, step, (0, tf.ones_like(shift)))
        return tf.reduce_sum(state**2)

    return Problem(loss, w)


def cond(dtype: str) -> Problem:
    w = tf.Variable(random(6, 4, dtype=dtype))

    def loss() -> tf.Tensor:
        positive = tf.reduce_sum(w) > 0
        return tf.cond(
            positive, lambda: tf.reduce_sum(w**3), lambda: w[0] * w[1] * w[2] * w[3] + w[0] ** 4
        )

    return Problem(loss, w)


def tf_function(dtype: str) -> Problem:
    inner = mlp(dtype)
    return Problem(tf.function(inner.loss), inner.variables, inner.data)


def nested_tf_functions(dtype: str) -> Problem:
    w = {"a": tf.Variable(random(7, 3, dtype=dtype)), "b": [tf.Variable(random(8, 3, dtype=dtype))]}

    @tf.function
    def activation(z: tf.Tensor) -> tf.Tensor:
        return tf.sin(z) * tf.exp(0.1 * z)

    return Problem(lambda: tf.reduce_sum(activation(w["a"] * activation(w["b"][0]))), w)


def gathered(dtype: str) -> Problem:
    table = tf.Variable(random(9, 5, 3, dtype=dtype))
    head = tf.Variable(random(10, 3, dtype=dtype))
    rows = tf.constant([0, 3, 3, 1])
    return Problem(
        lambda: tf.reduce_mean(tf.exp(tf.linalg.matvec(tf.gather(table, rows), head))),
        {"table": table, "head": head},
    )


def own_gradient(dtype: str) -> Problem:
    w = tf.Variable(random(11, 4, dtype=dtype))

    @tf.custom_gradient
    def log_one_plus_exp(x: tf.Tensor) -> Any:
        e = tf.exp(x)
        return tf.math.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))

    return Problem(lambda: tf.reduce_sum(log_one_plus_exp(w) * w**2), w)


CASES: dict[str, Callable[[str], Problem]] = {
    "rosenbrock": rosenbrock,
    "mlp": mlp,
    "cnn with batch normalization": cnn,
    "attention with embedding": attention,
    "batch normalization in training": batch_normalization_in_training,
    "lstm rolled": lambda dtype: lstm(dtype, unroll=False),
    "lstm unrolled": lambda dtype: lstm(dtype, unroll=True),
    "while_loop": while_loop,
    "cond": cond,
    "tf.function": tf_function,
    "nested tf.functions": nested_tf_functions,
    "gather": gathered,
    "custom_gradient": own_gradient,
}

# Normalization by the batch's or layer's own moments: TensorFlow's second derivatives are wrong.
WRONG_IN_TENSORFLOW = {"attention with embedding", "batch normalization in training"}

LONG_CASES = ["attention with embedding", "lstm rolled", "lstm unrolled"]
