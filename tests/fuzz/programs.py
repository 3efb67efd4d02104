"""Random programs: what to differentiate, and the derivative by differences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

import hvp
from tests.cases import STENCIL, random
from tests.fuzz.steps import FAMILIES

_LARGEST = 24
LOSSES = {
    "mean square": lambda y, p: tf.reduce_mean(tf.square(y - 0.3)),
    "logsumexp": lambda y, p: tf.reduce_logsumexp(y),
    "huber": lambda y, p: tf.reduce_mean(tf.sqrt(1 + tf.square(y))),
    "cubes": lambda y, p: tf.reduce_sum(tf.tanh(y) ** 3),
    "pairs": lambda y, p: tf.reduce_mean(tf.sin(y[:, :1]) * tf.cos(y[:, 1:])),
    # The gradient from above is zero, of all entries but one, or of all: but its derivative is not.
    "corner": lambda y, p: tf.sin(y[-1, -1] + 0.3) ** 3,
    "no slope": lambda y, p: tf.reduce_sum(y * p.zeros(*y.shape)),
}
NESTS = {
    "list": lambda variables: list(variables),
    "dict": lambda variables: {f"v{i}": variable for i, variable in enumerate(variables)},
    "nested": lambda variables: (variables[0], [{"rest": tuple(variables[1:])}]),
}
_STEPS = (4e-3, 1e-3, 1e-4)


class Program:
    """A loss of some variables, made of steps; the same in every type of number.

    Parameters
    ----------
    names : sequence of (str, str)
        Families of steps, and steps in them.
    rows, columns : int
        Of the first matrix, which is the first variable.
    seed : int
        Of the variables' values.
    loss, nest : str
        Of `LOSSES` and `NESTS`.
    recomputed : tuple of int
        Which steps are recomputed when that is asked for.
    """

    def __init__(
        self,
        names: list[tuple[str, str]],
        rows: int,
        columns: int,
        seed: int,
        loss: str,
        nest: str,
        recomputed: tuple[int, ...] = (),
    ) -> None:
        self.names, self.rows, self.columns, self.seed = names, rows, columns, seed
        self.loss, self.nest, self.recomputed = loss, nest, recomputed

    def __repr__(self) -> str:
        return (
            f"Program({self.names!r}, {self.rows}, {self.columns}, {self.seed}, "
            f"{self.loss!r}, {self.nest!r}, {self.recomputed!r})"
        )

    def made(self, dtype: str = "float64", recompute: bool = False) -> Made:
        """Return it with variables, of one type."""
        return Made(self, dtype, recompute)


class Made:
    """A program with its variables."""

    def __init__(self, program: Program, dtype: str, recompute: bool) -> None:
        self._program, self.dtype = program, dtype
        self._recomputed = program.recomputed if recompute else ()
        self._x = tf.Variable(
            random(program.seed, program.rows, program.columns, dtype=dtype, scale=0.7)
        )
        self._parameters = Parameters(program.seed, dtype)
        self.loss()  # makes the variables
        self.list = [self._x, *self._parameters.variables]
        self.variables = NESTS[program.nest](self.list)

    def loss(self) -> tf.Tensor:
        """Compute the loss, a scalar."""
        x = tf.convert_to_tensor(self._x)
        self._parameters.again()
        for number, (family, name) in enumerate(self._program.names):
            step = FAMILIES[family][name]
            if number in self._recomputed and self._parameters.complete:
                x = _recompute(step, x, self._parameters)
            else:
                x = step(x, self._parameters)
            x = _matrix(x)
        loss = LOSSES[self._program.loss](x, self._parameters)
        self._parameters.complete = True
        return loss

    @property
    def size(self) -> int:
        """How many numbers the variables hold."""
        return sum(int(tf.size(v)) for v in self.list)

    @functools.cached_property
    def _gradient(self) -> Any:
        @tf.function
        def gradient() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = self.loss()
            parts = tape.gradient(loss, self.list)
            return tf.concat(
                [
                    tf.reshape(tf.zeros_like(v) if g is None else tf.convert_to_tensor(g), [-1])
                    for g, v in zip(parts, self.list)
                ],
                0,
            )

        return gradient

    def gradient(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return the gradient as a function of the change from where the variables are."""
        at = [tf.identity(v) for v in self.list]
        sizes = np.cumsum([int(tf.size(v)) for v in self.list])[:-1]

        def at_change(change: np.ndarray) -> np.ndarray:
            try:
                for v, a, part in zip(self.list, at, np.split(change, sizes)):
                    v.assign(a + part.reshape(a.shape))
                return self._gradient().numpy()
            finally:
                for v, a in zip(self.list, at):
                    v.assign(a)

        return at_change

    def differences(self, v: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the derivative of the gradient along a vector, and about how wrong it is.

        Of several steps the two neighbours that agree best are believed.
        """
        gradient = self.gradient()
        found = [
            sum(c * (gradient(k * h * v) - gradient(-k * h * v)) for k, c in STENCIL.items()) / h
            for h in _STEPS
        ]
        apart = [np.abs(a - b).max() for a, b in zip(found, found[1:])]
        best = int(np.argmin(apart))
        return found[best + 1], float(apart[best])

    def operations(self) -> set[str]:
        """Return the types of the operations in the loss and its gradient."""

        graph = self._gradient.get_concrete_function().graph.as_graph_def()
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        return {node.op for node in nodes}


class Parameters:
    """Gives the parameters that steps ask for: new ones the first time, then the same again."""

    def __init__(self, seed: int, dtype: str) -> None:
        self._seed, self._dtype = seed, dtype
        self.variables: list[Any] = []
        self._given: list[Any] = []
        self.position = 0
        self.complete = False

    def again(self) -> None:
        """Begin anew."""
        self.position = 0

    def __call__(self, *shape: int) -> tf.Tensor:
        """Give a parameter."""
        return tf.convert_to_tensor(self._give(lambda: self._variable(shape)))

    def zeros(self, *shape: int) -> tf.Tensor:
        """Give a parameter that is zero."""
        return tf.convert_to_tensor(self._give(lambda: self._variable(shape, scale=0)))

    def layer(self, make: Callable[[], Any]) -> Any:
        """Give a Keras layer, whose weights become parameters when it is first called."""
        layer = self._give(lambda: self._layer(make))
        return layer

    def _give(self, make: Callable[[], Any]) -> Any:
        if self.position == len(self._given):
            self._given.append(make())
        self.position += 1
        return self._given[self.position - 1]

    def _variable(self, shape: tuple[int, ...], scale: float = 0.7) -> tf.Variable:
        seed = self._seed + 1000 + len(self.variables)
        self.variables.append(tf.Variable(random(seed, *shape, dtype=self._dtype, scale=scale)))
        return self.variables[-1]

    def _layer(self, make: Callable[[], Any]) -> Any:
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self._dtype)
        try:
            layer = make()
        finally:
            keras.config.set_dtype_policy(policy)
        return _Watched(layer, self)

    def add(self, weights: list[Any]) -> None:
        """Take a layer's weights for parameters."""
        for weight in weights:
            seed = self._seed + 1000 + len(self.variables)
            weight.assign(random(seed, *weight.shape, dtype=self._dtype, scale=0.7))
            self.variables.append(weight.value)


class _Watched:
    """A layer that hands in its weights after the first call, which makes them."""

    def __init__(self, layer: Any, parameters: Parameters) -> None:
        self._layer, self._parameters, self._built = layer, parameters, False

    def __call__(self, *inputs: tf.Tensor) -> tf.Tensor:
        if not self._built:
            self._layer(*inputs)
            self._parameters.add(self._layer.trainable_weights)
            self._built = True
        return self._layer(*inputs)


def _recompute(step: Any, x: tf.Tensor, parameters: Parameters) -> tf.Tensor:
    """Recompute a step; its parameters are closed over, in the order they were made."""
    start = parameters.position

    def run(x: tf.Tensor) -> tf.Tensor:
        parameters.position = start
        return step(x, parameters)

    made = hvp.recompute(run)(x)
    end = parameters.position
    if end == start:  # nothing was traced: what it asks for is known from the first time
        run(x)
    return made


def _matrix(y: tf.Tensor) -> tf.Tensor:
    """At least two by two, and not too large."""
    flat = tf.reshape(y, [-1])[:_LARGEST]
    if flat.shape[0] < 4:
        flat = tf.concat([flat, tf.sin(flat), tf.cos(flat), flat**2], 0)
    rows = 3 if flat.shape[0] % 3 == 0 and flat.shape[0] >= 6 else 2
    return tf.reshape(flat[: flat.shape[0] // rows * rows], [rows, -1])


@st.composite
def programs(draw: Any, family: str) -> Program:
    """Steps, the first of a family, and the others of any."""
    first = (family, draw(st.sampled_from(sorted(FAMILIES[family]))))
    every = [(f, name) for f, steps in FAMILIES.items() for name in steps]
    rest = draw(st.lists(st.sampled_from(every), max_size=4))
    names = [first, *rest]
    return Program(
        names,
        draw(st.integers(2, 3)),
        draw(st.integers(2, 4)),
        draw(st.integers(0, 10**6)),
        draw(st.sampled_from(sorted(LOSSES))),
        draw(st.sampled_from(sorted(NESTS))),
        tuple(sorted(draw(st.sets(st.integers(0, len(names) - 1), min_size=1)))),
    )
