"""SOAP: Adam in the eigenvectors of Shampoo's preconditioner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvp._errors import HvpError
from hvp._runtime.arguments import check_count, check_number
from hvp._training.means import kept


@dataclass(frozen=True)
class _Side:
    """One side of a matrix of weights: which it is, the mean of `G G^T`, and its eigenvectors."""

    axis: int
    moment: Any
    basis: Any


@keras.saving.register_keras_serializable(package="hvp")
class SOAP(keras.optimizers.Optimizer):
    """Adam in the basis in which Shampoo preconditions, as a Keras optimizer.

    For a matrix of weights with gradients `G`, running means of `G G'` and `G' G` say in which
    directions of its rows and columns gradients vary together. Adam runs in their eigenvectors,
    where its assumption that entries vary independently is nearly right [Vya]_. It needs no other
    pass over the data, and no access to the loss: pass it to `compile`.

    Parameters
    ----------
    learning_rate : float or schedule, optional
        As for Adam.
    beta_1, beta_2 : float, optional
        How much of the running means of gradients and of their squares is kept in each step.
    shampoo_beta : float, optional
        The same for the means of `G G'` and `G' G`.
    epsilon : float, optional
        Is added to the root of the mean of squares.
    interval : int, optional
        The eigenvectors follow every so many steps.
    largest : int, optional
        A side of a matrix with more rows or columns keeps its unit vectors, which saves the memory
        of two matrices of this size.
    name : str, optional
        The name of the optimizer.
    **options
        As for every Keras optimizer: `weight_decay`, `clipnorm`, `clipvalue`, `global_clipnorm`,
        `use_ema`, `loss_scale_factor`, `gradient_accumulation_steps` and others.

    Raises
    ------
    HvpError
        If an argument is invalid.

    Notes
    -----
    A kernel with more than two axes is a matrix with as many columns as its last axis is long.
    Vectors have Adam alone. The first step of a matrix measures gradients, and changes no weight of
    it.

    A step takes six products of matrices more than Adam does, for each matrix of weights, and every
    `interval` steps six others and two QR factorizations: one step of the power method brings the
    eigenvectors closer to those of the means.

    References
    ----------
    .. [Vya] N. Vyas et al., "SOAP: Improving and stabilizing Shampoo using Adam", ICLR 2025.
       https://arxiv.org/abs/2409.11321

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> import hvp
    >>> layer = keras.layers.Dense(1, kernel_initializer="zeros")
    >>> model = keras.Sequential([keras.Input((3,)), layer])
    >>> model.compile(hvp.keras.optimizers.SOAP(3e-3), "mse")
    >>> history = model.fit(np.ones((8, 3)), np.ones(8), epochs=20, verbose=0)
    >>> history.history["loss"][-1] < history.history["loss"][0]
    True
    """

    def __init__(
        self,
        learning_rate: Any = 3e-3,
        beta_1: float = 0.95,
        beta_2: float = 0.95,
        shampoo_beta: float = 0.95,
        epsilon: float = 1e-8,
        interval: int = 10,
        largest: int = 4096,
        name: str = "soap",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name, **options)
        betas = {"beta_1": beta_1, "beta_2": beta_2, "shampoo_beta": shampoo_beta}
        for argument, value in betas.items():
            check_number(value, argument, below=1.0)
        check_number(epsilon, "epsilon", positive=True)
        self.beta_1, self.beta_2, self.shampoo_beta = beta_1, beta_2, shampoo_beta
        self.epsilon = epsilon
        self.interval = check_count(interval, "interval")
        self.largest = check_count(largest, "largest")

    def build(self, variables: Any) -> None:
        """Make the state: two means like each variable, and two matrices for each of its sides."""
        if self.built:
            return
        super().build(variables)
        self._means, self._squares, self._sides = [], [], []
        for variable in variables:
            if not variable.dtype.startswith("float"):
                raise HvpError(f"{variable.path} is {variable.dtype}", "weights of a real type")
            self._means.append(self.add_variable_from_reference(variable, "mean"))
            self._squares.append(self.add_variable_from_reference(variable, "square"))
            sides = []
            for axis, size in enumerate(_matrix_shape(variable.shape)):
                if size <= self.largest:
                    name = f"{variable.path.replace('/', '_')}_{'rows' if axis == 0 else 'columns'}"
                    shape, dtype = (size, size), variable.dtype
                    moment = self.add_variable(shape, "zeros", dtype, name=f"{name}_moment")
                    basis = self.add_variable(shape, "zeros", dtype, name=f"{name}_basis")
                    sides.append(_Side(axis, moment, basis))
            self._sides.append(sides)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable; called by Keras."""
        # The way of Keras' own optimizers to find what they keep for a variable.
        place = self._get_variable_index(variable)
        sides, average, square = self._sides[place], self._means[place], self._squares[place]
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        shape = _matrix_shape(variable.shape) or tuple(variable.shape)
        matrix = tf.reshape(gradient, shape)
        done = tf.cast(tf.convert_to_tensor(self.iterations), tf.int32)
        rate = tf.cast(learning_rate, variable.dtype)

        def measure() -> None:
            for side in sides:
                moment = _moment(matrix, side.axis) * (1 - self.shampoo_beta)
                self.assign(side.moment, moment)
                self.assign(side.basis, tf.linalg.eigh(moment)[1][:, ::-1])

        def step() -> None:
            count = tf.cast(done if sides else done + 1, variable.dtype)
            turned = _turned(matrix, sides, back=False)
            mean = kept(self, average, tf.reshape(turned, variable.shape), self.beta_1)
            squared = kept(self, square, tf.reshape(turned**2, variable.shape), self.beta_2)
            corrected = tf.sqrt(tf.reshape(squared, shape) / (1 - self.beta_2**count))
            correction = (1 - self.beta_1**count) * (corrected + self.epsilon)
            direction = tf.reshape(mean, shape) / correction
            change = tf.reshape(_turned(direction, sides, back=True), variable.shape)
            self.assign_sub(variable, rate * change)
            for side in sides:
                kept(self, side.moment, _moment(matrix, side.axis), self.shampoo_beta)
            if sides:
                tf.cond(done % self.interval == 0, follow, lambda: None)

        def follow() -> None:
            """Turn the eigenvectors, and the means, which are in terms of them."""
            mean = _turned(tf.reshape(average, shape), sides, back=True)
            for side in sides:
                moment, basis = tf.convert_to_tensor(side.moment), tf.convert_to_tensor(side.basis)
                images = moment @ basis
                order = tf.argsort(tf.reduce_sum(basis * images, axis=0), direction="DESCENDING")
                ordered = tf.gather(tf.reshape(square, shape), order, axis=side.axis)
                self.assign(square, tf.reshape(ordered, variable.shape))
                self.assign(side.basis, tf.linalg.qr(tf.gather(images, order, axis=1))[0])
            self.assign(average, tf.reshape(_turned(mean, sides, back=False), variable.shape))

        if sides:
            tf.cond(done == 0, measure, step)
        else:
            step()

    def get_config(self) -> dict[str, Any]:
        """Return what `from_config` makes the same optimizer of."""
        names = ("beta_1", "beta_2", "shampoo_beta", "epsilon", "interval", "largest")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def _matrix_shape(shape: Any) -> tuple[int, ...]:
    """Return rows and columns of a variable; nothing if it is a vector or number."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else ()


def _moment(matrix: tf.Tensor, axis: int) -> tf.Tensor:
    return tf.matmul(matrix, matrix, transpose_a=axis == 1, transpose_b=axis == 0)


def _turned(matrix: tf.Tensor, sides: list[_Side], *, back: bool) -> tf.Tensor:
    """Return a matrix in terms of the eigenvectors, or `back` again."""
    for side in sides:
        basis = tf.convert_to_tensor(side.basis)
        if side.axis == 0:
            matrix = tf.matmul(basis, matrix, transpose_a=not back)
        else:
            matrix = tf.matmul(matrix, basis, transpose_b=back)
    return matrix
