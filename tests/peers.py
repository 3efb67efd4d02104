"""Matrices of small networks by other frameworks, in float64.

Run in a process of its own, because PyTorch's compiler and TensorFlow end a process that imports
both: `python tests/peers.py torch matrices.npz`.
"""

import sys
from types import SimpleNamespace

import numpy as np

SHAPES = {
    "dense": [(4, 5), (5,), (5, 3)],
    "normalized": [(4, 5), (5,), (5,), (5, 3)],
    "attention": [(4, 6), (4, 6), (4, 5), (5, 3)],
}
MATRICES = ("hessian", "gauss-newton", "jacobian")
_draw = np.random.default_rng(0)
X, LABELS = _draw.standard_normal((6, 4)), np.arange(6) % 3
WEIGHTS = {
    network: [0.7 * _draw.standard_normal(shape) for shape in shapes]
    for network, shapes in SHAPES.items()
}


def logits(xp, network, parameters, x):
    """A network, written with what all frameworks have."""
    first, *middle, last = parameters
    h = x @ first
    if network == "dense":
        h = xp.tanh(h + middle[0])
    elif network == "normalized":
        centred = h - xp.sum(h) / 5
        h = xp.tanh(centred / xp.sqrt(xp.sum(centred**2) / 5 + 1e-3) * middle[0] + middle[1])
    else:
        scores = xp.exp(h @ xp.turned(x @ middle[0]) / 6**0.5)
        h = xp.tanh(scores / xp.sum(scores) @ (x @ middle[1]))
    return h @ last


def loss(xp, z):
    """Mean cross entropy."""
    chosen = xp.sum(z * xp.array(np.eye(3)[LABELS]))
    return xp.mean(xp.log(xp.sum(xp.exp(z))) - chosen)


def in_jax():
    import jax

    jax.config.update("jax_enable_x64", True)
    numpy = jax.numpy
    return SimpleNamespace(
        array=numpy.asarray, tanh=numpy.tanh, exp=numpy.exp, log=numpy.log, sqrt=numpy.sqrt,
        mean=numpy.mean, sum=lambda x: numpy.sum(x, -1, keepdims=True),
        turned=lambda x: numpy.swapaxes(x, -1, -2), hessian=jax.hessian, jacobian=jax.jacrev,
    )  # fmt: skip


def in_torch():
    import torch

    return SimpleNamespace(
        array=torch.as_tensor, tanh=torch.tanh, exp=torch.exp, log=torch.log, sqrt=torch.sqrt,
        mean=torch.mean, sum=lambda x: torch.sum(x, -1, keepdim=True),
        turned=lambda x: torch.transpose(x, -1, -2), hessian=torch.func.hessian,
        jacobian=torch.func.jacrev,
    )  # fmt: skip


def matrix_of(xp, network, matrix):
    """A matrix, from derivatives of functions of one flat vector."""
    x, flat = xp.array(X), xp.array(np.concatenate([w.ravel() for w in WEIGHTS[network]]))

    def model(flat):
        parts, start = [], 0
        for shape in SHAPES[network]:
            size = int(np.prod(shape))
            parts.append(flat[start : start + size].reshape(shape))
            start += size
        return logits(xp, network, parts, x)

    if matrix == "hessian":
        return np.asarray(xp.hessian(lambda flat: loss(xp, model(flat)))(flat))
    J = np.asarray(xp.jacobian(model)(flat)).reshape(18, -1)
    if matrix == "jacobian":
        return J
    curvature = xp.hessian(lambda z: loss(xp, z.reshape(6, 3)))(model(flat).reshape(-1))
    return J.T @ np.asarray(curvature) @ J


if __name__ == "__main__":
    framework, path = sys.argv[1:]
    functions = {"jax": in_jax, "torch": in_torch}[framework]()
    np.savez(path, **{f"{n} {m}": matrix_of(functions, n, m) for n in SHAPES for m in MATRICES})
