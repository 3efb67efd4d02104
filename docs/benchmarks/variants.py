"""The ways of computing a product that the benchmark compares.

Each maps a NumPy array to a NumPy array, of shape `(n,)` or, for blocks, `(n, k)`. Whatever can be
done once for a point is done in `prepare`, outside the timing; conversions are inside.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networks_tensorflow
import numpy as np
import tensorflow as tf
from networks_tensorflow import join, split
from workloads import Workload

import hvp

Multiply = Callable[[np.ndarray], Any]

LOOP = 100  # iterations of the loops in a graph
SETTINGS = {
    "hvp, tape": {"engine": "tape"},
    "hvp, graph": {"engine": "graph", "jit_compile": False},
    "hvp, graph, XLA": {"engine": "graph", "jit_compile": True},
    "hvp, auto": {"engine": "graph", "jit_compile": "auto"},
}


@dataclass(frozen=True)
class Variant:
    """One way of computing.

    Attributes
    ----------
    name : str
        What the table calls it.
    family : str
        "hvp", "tensorflow" or "peer".
    prepare : callable
        Takes a workload; returns the function that is timed.
    kind : str
        "product", "block", "loop" (of products in a graph), "gradient", "refresh" or "rate".
    kernel_axes : tuple of int, optional
        How the flat vector stores convolution kernels, if not as TensorFlow does.
    """

    name: str
    family: str
    prepare: Callable[[Workload], Multiply]
    kind: str = "product"
    kernel_axes: tuple[int, ...] | None = None

    def products(self, workload: Workload) -> int:
        """How many products one call computes."""
        return {"block": workload.block, "loop": LOOP}.get(self.kind, 1)


def _bind(workload: Workload) -> tuple[Callable[[], tf.Tensor], list[tf.Variable]]:
    loss, variables = networks_tensorflow.bind(workload)
    batch = tuple(map(tf.constant, workload.batch))
    return lambda: loss(*batch), variables


def _to_host(multiply: Callable[[tf.Tensor], tf.Tensor]) -> Multiply:
    return lambda v: multiply(tf.constant(v)).numpy()


# TensorFlow, by hand.


def gradient(workload: Workload) -> Multiply:
    """One gradient, compiled: the unit of the others' costs. The vector is ignored."""
    loss, variables = _bind(workload)

    @tf.function
    def compiled() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss()
        return join(tape.gradient(value, variables))

    def run(_: np.ndarray) -> tf.Tensor:
        answer = compiled()
        tf.test.experimental.sync_devices()
        return answer

    return run


def _nested_tapes(workload: Workload) -> Callable[[tf.Tensor], tf.Tensor]:
    loss, variables = _bind(workload)

    def multiply(v: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                value = loss()
            gradients = inner.gradient(value, variables)
        vectors = split(workload, v)
        return join(outer.gradient(gradients, variables, output_gradients=vectors))

    return multiply


def nested_tapes(workload: Workload) -> Multiply:
    """Nested tapes, operation by operation."""
    return _to_host(_nested_tapes(workload))


def compiled_nested_tapes(workload: Workload, jit_compile: bool = False) -> Multiply:
    """Nested tapes in a `tf.function`."""
    return _to_host(tf.function(_nested_tapes(workload), jit_compile=jit_compile))


def persistent_tape(workload: Workload) -> Multiply:
    """Put a persistent tape around the gradient, which is evaluated once."""
    loss, variables = _bind(workload)
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as inner:
            value = loss()
        gradients = inner.gradient(value, variables)

    def multiply(v: tf.Tensor) -> tf.Tensor:
        vectors = split(workload, v)
        return join(outer.gradient(gradients, variables, output_gradients=vectors))

    return _to_host(multiply)


def forward_over_reverse(workload: Workload) -> Multiply:
    """Put a forward accumulator around the gradient, in a `tf.function`."""
    loss, variables = _bind(workload)

    @tf.function
    def multiply(v: tf.Tensor) -> tf.Tensor:
        with tf.autodiff.ForwardAccumulator(variables, split(workload, v)) as accumulator:
            with tf.GradientTape() as tape:
                value = loss()
            gradients = tape.gradient(value, variables)
        return join(accumulator.jvp(gradients))

    return _to_host(multiply)


def matrix_product(size: int = 2048) -> Callable[[Workload], Multiply]:
    """Make the product of two square matrices: what the machine can do at best."""

    def prepare(_: Workload) -> Multiply:
        matrix = tf.random.stateless_normal((size, size), (0, 0))
        multiply = tf.function(tf.matmul)

        def run(_: np.ndarray) -> None:
            multiply(matrix, matrix)
            tf.test.experimental.sync_devices()

        return run

    return prepare


# This library.


@functools.cache
def operator(workload: Workload, name: str) -> hvp.HessianOperator:
    """Make the operator of one of `SETTINGS`, once for a workload."""
    return make_operator(workload, name)


def make_operator(workload: Workload, name: str) -> hvp.HessianOperator:
    """Make a fresh operator."""
    loss, variables = networks_tensorflow.bind(workload)
    return hvp.HessianOperator(loss, variables, workload.batch, **SETTINGS[name])


def release_operators() -> None:
    """Forget the operators of a workload that is done."""
    operator.cache_clear()


def library(workload: Workload, name: str) -> Multiply:
    """`H @ v`, of a vector or a block."""
    return operator(workload, name).__matmul__


def refresh(workload: Workload, name: str) -> Multiply:
    """`H.refresh()`; the vector is ignored."""
    H = operator(workload, name)

    def run(_: np.ndarray) -> None:
        H.refresh()
        tf.test.experimental.sync_devices()

    return run


def library_loop(workload: Workload, name: str, jit_compile: bool) -> Multiply:
    """`LOOP` normalized products in a loop of a `tf.function`."""
    H = operator(workload, name)

    def step(i: tf.Tensor, v: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        v = H.product(v)
        return i + 1, v / tf.norm(v)

    @functools.partial(tf.function, jit_compile=jit_compile, autograph=False)
    def iterate(v: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, v: i < LOOP, step, (tf.constant(0), v))[1]

    return _to_host(iterate)


# Peers.


def _jax_linearize(workload: Workload) -> Callable:
    import jax
    import networks_jax as networks

    parameters, batch = networks.arrays(workload)
    _, linear = jax.linearize(
        jax.grad(lambda p: networks.loss(workload, p, *batch)),
        parameters,
    )
    return linear


def jax_linearize(workload: Workload) -> Multiply:
    """`jax.linearize` of the gradient; its residuals are arguments of the jitted linear map."""
    import jax
    import networks_jax as networks

    linear = _jax_linearize(workload)
    apply = jax.jit(lambda linear, v: networks.join(linear(networks.split(workload, v))))
    return lambda v: np.asarray(apply(linear, v))


def jax_linearize_block(workload: Workload) -> Multiply:
    """Vectorize the same over the columns of a block."""
    import jax
    import networks_jax as networks

    linear = _jax_linearize(workload)

    @jax.jit
    def apply(linear: Callable, block: jax.Array) -> jax.Array:
        def multiply(v: jax.Array) -> jax.Array:
            return networks.join(linear(networks.split(workload, v)))

        return jax.vmap(multiply, 1, 1)(block)

    return lambda block: np.asarray(apply(linear, block))


def jax_forward_over_reverse(workload: Workload) -> Multiply:
    """`jax.jvp` of `jax.grad`, jitted: the gradient again for every vector."""
    import jax
    import networks_jax as networks

    parameters, batch = networks.arrays(workload)

    @jax.jit
    def apply(parameters: list, batch: tuple, v: jax.Array) -> jax.Array:
        derivative = jax.grad(lambda p: networks.loss(workload, p, *batch))
        _, product = jax.jvp(derivative, (parameters,), (networks.split(workload, v),))
        return networks.join(product)

    return lambda v: np.asarray(apply(parameters, batch, v))


def jax_loop(workload: Workload) -> Multiply:
    """`LOOP` normalized products of the linearized gradient in a jitted `fori_loop`."""
    import jax
    import jax.numpy as jnp
    import networks_jax as networks

    linear = _jax_linearize(workload)

    @jax.jit
    def iterate(linear: Callable, v: jax.Array) -> jax.Array:
        def step(_: int, v: jax.Array) -> jax.Array:
            v = networks.join(linear(networks.split(workload, v)))
            return v / jnp.linalg.norm(v)

        return jax.lax.fori_loop(0, LOOP, step, v)

    return lambda v: np.asarray(iterate(linear, v))


def torch_retained_graph(workload: Workload) -> Multiply:
    """Take the gradient with its graph, once; products by `retain_graph=True`."""
    import networks_torch as networks
    import torch

    network = networks.Network(workload)
    parameters = list(network.parameters())
    x, y = networks.batch(workload)
    value = torch.nn.functional.cross_entropy(network(x), y)
    gradients = torch.autograd.grad(value, parameters, create_graph=True)

    def multiply(v: np.ndarray) -> np.ndarray:
        vectors = networks.split(workload, torch.from_numpy(v))
        products = torch.autograd.grad(gradients, parameters, vectors, retain_graph=True)
        return networks.join(products).numpy()

    return multiply


def torch_model(workload: Workload) -> tuple[Callable, tuple]:
    """Return the logits as a function of the parameters, and the parameters."""
    import networks_torch as networks
    import torch

    network = networks.Network(workload)
    names = [name for name, _ in network.named_parameters()]
    parameters = tuple(parameter.detach() for parameter in network.parameters())
    x, _ = networks.batch(workload)

    def logits(parameters: tuple) -> torch.Tensor:
        return torch.func.functional_call(network, dict(zip(names, parameters)), (x,))

    return logits, parameters


def _torch_gradient(workload: Workload) -> tuple[Callable, tuple]:
    """Return the gradient as a function of the parameters, and the parameters."""
    import networks_torch as networks
    import torch

    logits, parameters = torch_model(workload)
    _, y = networks.batch(workload)

    def loss(parameters: tuple) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits(parameters), y)

    return torch.func.grad(loss), parameters


def compiled_by_torch(multiply: Callable, *shape: int) -> Multiply:
    """Compile a product now, for vectors or blocks of a shape."""
    import torch

    compiled = torch.compile(multiply)

    def run(v: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return compiled(torch.from_numpy(v)).numpy()

    run(np.ones(shape, np.float32))
    return run


def torch_linearize(workload: Workload, block: bool = False) -> Multiply:
    """`torch.func.linearize` of the gradient, once; the linear map under `torch.compile`."""
    import networks_torch as networks
    import torch

    gradient, parameters = _torch_gradient(workload)
    _, linear = torch.func.linearize(gradient, parameters)

    def multiply(v: torch.Tensor) -> torch.Tensor:
        return networks.join(linear(tuple(networks.split(workload, v))))

    if block:
        return compiled_by_torch(torch.vmap(multiply, 1, 1), workload.size, workload.block)
    return compiled_by_torch(multiply, workload.size)


def torch_forward_over_reverse(workload: Workload) -> Multiply:
    """`torch.func.jvp` of `torch.func.grad`, compiled: the gradient again for every vector."""
    import networks_torch as networks
    import torch

    gradient, parameters = _torch_gradient(workload)

    def multiply(v: torch.Tensor) -> torch.Tensor:
        tangents = tuple(networks.split(workload, v))
        return networks.join(torch.func.jvp(gradient, (parameters,), (tangents,))[1])

    return compiled_by_torch(multiply, workload.size)


def curvlinops_hessian(workload: Workload) -> Multiply:
    """Make the Hessian of curvlinops, as a scipy operator."""
    import networks_torch as networks
    import torch
    from curvlinops import HessianLinearOperator

    network = networks.Network(workload)
    H = HessianLinearOperator(
        network,
        torch.nn.CrossEntropyLoss(),
        list(network.parameters()),
        [networks.batch(workload)],
        check_deterministic=False,
    )
    return H.to_scipy(np.float32).__matmul__


def _library_variants() -> list[Variant]:
    variants = []
    for name in SETTINGS:
        product = functools.partial(library, name=name)
        variants += [
            Variant(name, "hvp", product),
            Variant(f"{name}, block", "hvp", product, "block"),
        ]
        if "graph" in SETTINGS[name].values():
            update = functools.partial(refresh, name=name)
            variants.append(Variant(f"{name}, refresh", "hvp", update, "refresh"))
    return variants


def _loop_variants() -> list[Variant]:
    loops = []
    for name, jit_compile in (("hvp, auto", False), ("hvp, auto", True)):
        prepare = functools.partial(library_loop, name=name, jit_compile=jit_compile)
        where = "XLA tf.function" if jit_compile else "tf.function"
        loops.append(Variant(f"{name}, loop in {where}", "hvp", prepare, "loop"))
    return loops


def _peer_variants() -> list[Variant]:
    variants = []
    if importlib.util.find_spec("jax"):
        variants += [
            Variant("JAX linearize", "peer", jax_linearize),
            Variant("JAX linearize, block", "peer", jax_linearize_block, "block"),
            Variant("JAX forward-over-reverse", "peer", jax_forward_over_reverse),
            Variant("JAX linearize, loop in jit", "peer", jax_loop, "loop"),
        ]
    if importlib.util.find_spec("torch"):
        stored = (3, 0, 1, 2)
        block = functools.partial(torch_linearize, block=True)
        for name, prepare, kind in (
            ("PyTorch retained graph", torch_retained_graph, "product"),
            ("PyTorch linearize, compiled", torch_linearize, "product"),
            ("PyTorch linearize, compiled, block", block, "block"),
            ("PyTorch forward-over-reverse, compiled", torch_forward_over_reverse, "product"),
        ):
            variants.append(Variant(name, "peer", prepare, kind, kernel_axes=stored))
    if importlib.util.find_spec("curvlinops"):
        in_order = (3, 2, 0, 1)
        variants.append(Variant("curvlinops", "peer", curvlinops_hessian, kernel_axes=in_order))
    return variants


def _tensorflow_variants() -> list[Variant]:
    xla = functools.partial(compiled_nested_tapes, jit_compile=True)
    return [
        Variant("gradient", "tensorflow", gradient, "gradient"),
        Variant("TF nested tapes, eager", "tensorflow", nested_tapes),
        Variant("TF persistent tapes, eager", "tensorflow", persistent_tape),
        Variant("TF nested tapes, tf.function", "tensorflow", compiled_nested_tapes),
        Variant("TF nested tapes, XLA", "tensorflow", xla),
        Variant("TF forward-over-reverse, tf.function", "tensorflow", forward_over_reverse),
        Variant("matrix product", "tensorflow", matrix_product(), "rate"),
    ]


def all_variants(workload: Workload) -> list[Variant]:
    """Everything that is timed on a workload with what is installed."""
    variants = _tensorflow_variants() + _library_variants() + _loop_variants() + _peer_variants()
    return [v for v in variants if v.kind != "loop" or workload.name == "mlp-small"]
