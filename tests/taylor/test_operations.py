"""Every step of random programs: derivatives along a line are right, or refused by name."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from tests.cases import STENCIL, random
from tests.fuzz.programs import Parameters
from tests.fuzz.steps import FAMILIES

STEPS = [(family, name) for family, steps in FAMILIES.items() for name in steps]
STEP = 4e-3
REFUSED = set()


def differences(values, step=STEP):
    """The derivative, from values at multiples of a step, in the order of `offsets`."""
    halves = np.split(np.stack(values), 2)
    weights = np.array(list(STENCIL.values()))
    return np.tensordot(weights, halves[0] - halves[1], 1) / step


OFFSETS = np.array([sign * k for sign in (1, -1) for k in STENCIL]) * STEP


@pytest.mark.parametrize("rows", [3])
@pytest.mark.parametrize(("family", "name"), STEPS, ids=lambda value: str(value))
def test_a_step_is_right_or_refused(family, name, rows):
    x = tf.constant(random(0, rows, 3, dtype="float64", scale=0.7))
    d = tf.constant(random(1, rows, 3, dtype="float64"))
    parameters = Parameters(2, "float64")

    def step(x):
        parameters.again()
        return FAMILIES[family][name](x, parameters)

    step(x)  # makes the parameters
    parameters.complete = True
    if (family, name) in REFUSED:
        with pytest.raises(hvp.SecondDerivativeError, match="line"):
            hvp.jet(step, x, d, order=2)
        return
    found = hvp.jet(step, x, d, order=2)
    function = tf.function(step)
    jets = tf.function(lambda t: hvp.jet(step, x + t * d, d, order=1))
    values = [np.asarray(function(x)), *[np.asarray(function(x + t * d)) for t in OFFSETS]]
    np.testing.assert_allclose(found[0], values[0], rtol=1e-10, atol=1e-10)
    first = differences(values[1:])
    size = 1 + np.abs(first).max(initial=0)
    np.testing.assert_allclose(found[1], first, atol=1e-7 * size)
    second = differences([np.asarray(jets(tf.constant(t))[1]) for t in OFFSETS])
    size = 1 + np.abs(second).max(initial=0)
    np.testing.assert_allclose(found[2], second, atol=1e-6 * size)
