"""A program that a strategy connects with others of its kind: each prints the same lines.

Call it with the number of the process and the addresses of all. It prints what must be the same in
every process, numbers as digests of their bits.
"""

import hashlib
import json
import os
import sys

import numpy as np
import tensorflow as tf
from scipy.sparse.linalg import cg, eigsh

import hvp
from hvp._devices.loopback import listening, restrict
from tests.cases import FUZZ
from tests.devices.problem import AT, DENSE, Network, V, X, Y, close, gradient

# The shares are of different sizes.
SHARES = slice(None, 9), slice(9, None)
SIZE = len(AT)


def bits(*arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def said_by(function, kind=hvp.HvpError):
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


def matrices(network, loss, data):
    dense_sum = len(X) * DENSE + np.eye(SIZE)
    added = {"regularization": lambda: tf.nn.l2_loss(network.w) + tf.nn.l2_loss(network.b)}
    always = [
        ({}, DENSE),
        ({"batch_size": 2, "memory_limit": 1600, "engine": "tape"}, DENSE),
        ({**added, "reduction": "sum", "batch_size": 5}, dense_sum),
    ]
    further = [
        ({"batch_size": 4}, DENSE),
        ({"batch_size": 2, "memory_limit": 1600}, DENSE),
        ({"devices": "CPU:0"}, DENSE),
        (added, DENSE + np.eye(SIZE)),
    ]
    for options, want in always + (further if FUZZ else []):
        with hvp.HessianOperator(loss, network, data, **options) as H:
            close(H @ V, want @ V)
            close(tf.function(H.product)(tf.constant(V[:, 0])), want @ V[:, 0])
            assert options or hvp.check(H).ok
            print(sorted(options), bits(H @ V, H.gradient, H.value))


def of_keras(strategy, data):
    """A compiled model, and one with a mask, whose examples do not count alike."""
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.Input((X.shape[1],)), keras.layers.Dense(2, "tanh")])
        masked = keras.Sequential(
            [keras.Input((3, 1)), keras.layers.Masking(), keras.layers.GRU(2)]
        )
        masked.add(keras.layers.RepeatVector(3))
        masked.add(keras.layers.Masking())
    model.compile(loss="mse")
    masked.compile(loss="mse")
    model.layers[0].kernel.assign(AT[2:].reshape(-1, 2))
    model.layers[0].bias.assign(AT[:2])
    order = [*range(2, SIZE), 0, 1]  # the kernel comes first
    with hvp.HessianOperator.from_keras(model, data) as H:
        close(H @ V[order], (DENSE @ V)[order], 1e-5)
    sequences = np.ones((5, 3, 1)), np.ones((5, 3, 2))
    text = said_by(lambda: hvp.HessianOperator.from_keras(masked, sequences))
    assert "mask" in text, text


def main(index):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    restrict(listening())
    with strategy.scope():
        network = Network()

    def loss(x, y):
        return tf.reduce_mean((network(x) - y) ** 2)

    data = X[SHARES[index]], Y[SHARES[index]]
    matrices(network, loss, data)

    H = hvp.HessianOperator(loss, network, data, batch_size=5)
    close(H.gradient, gradient(AT))
    damped, steps = H.damped(1.0), []
    x, _ = cg(damped, H.gradient, rtol=1e-8, callback=lambda _: steps.append(1))
    close(x, np.linalg.solve(DENSE + np.eye(SIZE), gradient(AT)), 1e-6)
    print("cg", len(steps), bits(x))
    values, vectors = eigsh(H, k=2, v0=np.ones(SIZE))
    every = np.linalg.eigvalsh(DENSE)
    close(np.sort(values), np.sort(every[np.argsort(-np.abs(every))[:2]]))
    print("eigsh", H.stats.products, bits(values, vectors))
    result = hvp.solve(damped, H.gradient, rtol=1e-8)
    close(result.x, np.linalg.solve(DENSE + np.eye(SIZE), gradient(AT)), 1e-6)
    print("solve", bits(result.x))

    print(said_by(lambda: H @ np.random.default_rng(index).standard_normal(SIZE)))
    bad = data[0].copy()
    bad[0, 0] = np.nan if index == 1 else 0
    text = said_by(lambda: hvp.HessianOperator(loss, network, (bad, data[1])))
    assert ("is not finite" if index == 1 else "1 of the 2 processes") in text
    if FUZZ:
        of_keras(strategy, data)
    if index == 1:
        network.b.assign_add([1.0, 0.0])
    text = said_by(lambda: hvp.HessianOperator(loss, network, data))
    print(text)
    network.b.assign(AT[:2])

    text = said_by(lambda: hvp.InfluenceFunctions(loss, network, data))
    assert "a strategy of 2 processes" in text, text

    whole = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    with hvp.HessianOperator(loss, network, strategy.experimental_distribute_dataset(whole)) as D:
        close(D @ V, DENSE @ V)
        print("a distributed data set", bits(D @ V))

    options = {"regularization": lambda: 0.1 * tf.nn.l2_loss(network.w), "batch_size": 5}
    always = {
        "NewtonCG": lambda: hvp.NewtonCG(loss, network, data, **options).minimize(maxiter=6),
    }
    further = {
        "minimize": lambda: hvp.minimize(loss, network, data, maxiter=6, **options),
        "NewtonCG with samples": lambda: hvp.NewtonCG(
            loss, network, data, hessian_batch_size=6
        ).minimize(maxiter=3),
    }
    for name, run in {**always, **(further if FUZZ else {})}.items():
        network.w.assign(AT[2:].reshape(network.w.shape))
        network.b.assign(AT[:2])
        before = float(loss(*data))
        run()
        assert float(loss(*data)) < before
        print(name, bits(network.w.numpy(), network.b.numpy()))

    H = hvp.HessianOperator(loss, network, data, device_timeout=3)
    if index == 0:  # the other one has ended its work, or died
        text = said_by(lambda: H @ np.ones(SIZE), hvp.DeviceError)
        assert "over 2 processes failed" in text, text
        sys.stdin.close()
    else:
        sys.stdin.read()
    print("whole", flush=True)
    os._exit(0)  # without TensorFlow's own end, which waits for the other


if __name__ == "__main__":
    number, *workers = sys.argv[1:]
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": int(number)}}
    )
    main(int(number))
