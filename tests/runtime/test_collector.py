"""Python's garbage collector rests while a loss is traced, and runs afterwards as it did before."""

import gc

import pytest
import tensorflow as tf

import hvp


def traced(seen, error=None):
    """Build an operator whose loss notes whether the collector is enabled, and may raise."""
    w = tf.Variable([1.0, 2.0])

    def loss():
        seen.append(gc.isenabled())
        if error is not None:
            raise error
        return tf.reduce_sum(w**3)

    with hvp.HessianOperator(loss, w) as H:
        return H @ [1.0, 1.0]


@pytest.fixture(autouse=True)
def _as_before():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


def test_it_rests_while_a_loss_is_traced():
    gc.enable()
    seen = []
    assert traced(seen).tolist() == [6, 12]
    assert set(seen) == {False}
    assert gc.isenabled()


def test_it_is_enabled_after_an_error():
    gc.enable()
    with pytest.raises(hvp.HvpError, match="sought"):
        traced([], hvp.HvpError("the error that is sought"))
    assert gc.isenabled()


def test_it_stays_disabled_if_it_was():
    gc.disable()
    traced([])
    assert not gc.isenabled()
