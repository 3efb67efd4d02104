"""Linear regression at its minimum, where influence functions have a closed form."""

import numpy as np
import tensorflow as tf

N, P, T = 40, 5, 7
rng = np.random.default_rng(0)
X, Y = rng.standard_normal((N, P)), rng.standard_normal(N)
X_TEST, Y_TEST = rng.standard_normal((T, P)), rng.standard_normal(T)
RIDGE = 0.1


def ridge(dtype="float64"):
    """Return linear regression at its minimum: variable, loss with and without penalty, data."""
    A = X.T @ X / N + RIDGE * np.eye(P)
    w = tf.Variable(np.linalg.solve(A, X.T @ Y / N).astype(dtype))

    def bare(x, y):
        return tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2) / 2

    def loss(x, y):
        return bare(x, y) + RIDGE / 2 * tf.reduce_sum(w**2)

    return w, loss, bare, (X.astype(dtype), Y.astype(dtype))


def closed_form(w, penalized=True):
    """Return the Hessian, and the gradients of training and test examples as rows."""
    w = w.numpy().astype("float64")
    train = (X @ w - Y)[:, None] * X + (RIDGE * w if penalized else 0)
    test = (X_TEST @ w - Y_TEST)[:, None] * X_TEST
    return X.T @ X / N + RIDGE * np.eye(P), train, test


TEST = (X_TEST, Y_TEST)
