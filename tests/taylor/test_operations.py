"""Every step of random programs: derivatives along a line are right, or refused by name."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import STENCIL, random
from tests.fuzz.programs import Parameters
from tests.fuzz.steps import FAMILIES

STEPS = [(family, name) for family, steps in FAMILIES.items() for name in steps]
SIZES = (4e-3, 5e-4, 6e-5)
BRANCHES = "cond", "cond of one", "case", "recomputed branch"
LOOPS = "while", "while of known length", "nested while", "scan", "fold", "map", "recomputed loop"
# What is refused, and the word that says why.
REFUSED = {
    **{("control flow", name): "If|Case" for name in BRANCHES},
    **{("control flow", name): "While|TensorList" for name in (*LOOPS, "autograph")},
    ("control flow", "tensor array"): "TensorList",
    ("layers", "lstm"): "While|TensorList",
    ("layers", "gru"): "While|TensorList",
    ("layers", "custom gradient"): "custom_gradient",
    ("layers", "recomputed"): "hvp.recompute",
    ("layers", "same max pool"): "SAME",
    ("layers", "max pool 1d"): "SAME",
    ("layers", "strided max pool"): "SAME",
    ("linear algebra", "matrix exponential"): "If",
}
# A float32 constant is part of it.
ROUNDED = {("functions", "rgb to gray"): 1e-4}
# TensorFlow takes these for constants, on purpose.
CONSTANT = {("control flow", "stop gradient")}


def derivative(function):
    """The derivative at zero by differences, of the two step sizes that agree best."""
    found = []
    for size in SIZES:
        after, before = (
            np.stack([function(tf.constant(sign * k * size, tf.float64)) for k in STENCIL])
            for sign in (1, -1)
        )
        found.append(np.tensordot(np.array(list(STENCIL.values())), after - before, 1) / size)
    apart = [np.abs(a - b).max(initial=0) for a, b in zip(found, found[1:])]
    return found[int(np.argmin(apart))]


@pytest.mark.few(6)
@pytest.mark.parametrize(("family", "name"), STEPS, ids=lambda value: str(value))
def test_a_step_is_right_or_refused(family, name):
    x = tf.constant(random(0, 3, 3, dtype="float64", scale=0.7))
    d = tf.constant(random(1, 3, 3, dtype="float64", scale=0.7))
    parameters = Parameters(2, "float64")

    def step(x):
        parameters.again()
        return FAMILIES[family][name](x, parameters)

    step(x)  # makes the parameters
    parameters.complete = True
    if (family, name) in REFUSED:
        with pytest.raises(hvp.SecondDerivativeError, match=REFUSED[family, name]):
            hvp.jet(step, x, d, order=2)
        return
    value, first, second = hvp.jet(step, x, d, order=2)
    np.testing.assert_allclose(value, step(x), rtol=1e-10, atol=1e-10)
    if (family, name) in CONSTANT:
        return
    close = ROUNDED.get((family, name), 1e-7)
    function = tf.function(step)
    want = derivative(lambda t: function(x + t * d).numpy())
    np.testing.assert_allclose(first, want, atol=close * (1 + np.abs(want).max(initial=0)))
    jets = tf.function(lambda t: hvp.jet(step, x + t * d, d, order=1)[1])
    want = derivative(lambda t: jets(t).numpy())
    np.testing.assert_allclose(second, want, atol=close * (1 + np.abs(want).max(initial=0)))
