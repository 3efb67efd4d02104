"""Losses to minimize, with independently known minima."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import tensorflow as tf

import hvp
from tests.cases import random


@dataclass
class Minimized:
    """A loss, its variables, and its minimum."""

    loss: Callable[..., Any]
    variables: Any
    data: Any
    solution: np.ndarray


@functools.cache
def _traced_once(problem: Callable[..., Minimized], *arguments: Any) -> Any:
    built = problem(*arguments)
    start = [variable.numpy() for variable in tf.nest.flatten(built.variables)]
    return built, hvp.HessianOperator(built.loss, built.variables, built.data), start


def traced(
    problem: Callable[..., Minimized], *arguments: Any
) -> tuple[Minimized, hvp.HessianOperator]:
    """Return a problem at its start, and its Hessian, which is traced once for all tests.

    An operator may be minimized many times, since a run leaves it unchanged.
    """
    built, operator, start = _traced_once(problem, *arguments)
    for variable, value in zip(tf.nest.flatten(built.variables), start):
        variable.assign(value)
    return built, operator


def ridge_logistic(dtype: str = "float64", examples: int = 30) -> Minimized:
    """Logistic regression with weight decay. NumPy computes the minimum by Newton's method."""
    x = random(0, examples, 3, dtype="float64")
    y = (x @ [1.0, -2.0, 0.5] + random(1, examples, dtype="float64") > 0).astype("float64")
    weights = tf.Variable(random(2, 3, dtype=dtype))
    bias = tf.Variable(np.zeros((), dtype))

    def loss(x: Any, y: Any) -> Any:
        logits = tf.linalg.matvec(x, weights) + bias
        entropy = tf.nn.sigmoid_cross_entropy_with_logits(y, logits)
        return tf.reduce_mean(entropy) + 0.05 * (tf.reduce_sum(weights**2) + bias**2)

    # The order is that of tf.nest for the dict below, with the bias first.
    A = np.concatenate([np.ones((examples, 1)), x], axis=1)
    w = np.zeros(4)
    for _ in range(50):
        p = 1 / (1 + np.exp(-A @ w))
        gradient = A.T @ (p - y) / examples + 0.1 * w
        hessian = (A.T * (p * (1 - p))) @ A / examples + 0.1 * np.eye(4)
        w = w - np.linalg.solve(hessian, gradient)
    assert np.abs(gradient).max() < 1e-14
    data = (x.astype(dtype), y.astype(dtype))
    return Minimized(loss, {"bias": bias, "weights": weights}, data, w)


def rosenbrock_start(size: int) -> np.ndarray:
    """The customary hard starting point."""
    return np.where(np.arange(size) % 2 == 0, -1.2, 1.0)


def rosenbrock(size: int, dtype: str = "float64") -> Minimized:
    """Rosenbrock's function as defined in scipy."""
    w = tf.Variable(rosenbrock_start(size).astype(dtype))

    def loss() -> Any:
        return tf.reduce_sum(100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2)

    return Minimized(loss, w, None, np.ones(size))


def extended_rosenbrock(size: int) -> Minimized:
    """The sum of Rosenbrock functions of two variables, one for each pair of variables."""
    w = tf.Variable(rosenbrock_start(size))

    def loss() -> Any:
        odd, even = w[::2], w[1::2]
        return tf.reduce_sum(100 * (even - odd**2) ** 2 + (1 - odd) ** 2)

    return Minimized(loss, w, None, np.ones(size))


def saddle(dtype: str = "float64", at: tuple[float, float] = (1.0, 0.0)) -> Minimized:
    """A saddle at (0, 0), and minima at (0, 1) and (0, -1); convex along the first axis."""
    w = tf.Variable(np.array(at, dtype))

    def loss() -> Any:
        return w[0] ** 2 / 2 + w[1] ** 4 / 4 - w[1] ** 2 / 2

    return Minimized(loss, w, None, np.array([0.0, 1.0]))


rosen, rosen_der = scipy.optimize.rosen, scipy.optimize.rosen_der
rosen_hess_prod = scipy.optimize.rosen_hess_prod
