"""Work that Ctrl-C must not leave half done."""

import pytest
import tensorflow as tf

from hvp._runtime import interrupts


def test_interrupts_while_variables_are_restored():
    w = [tf.Variable([float(i)]) for i in range(4)]
    calls = []

    def assign(i, value):
        calls.append(i)
        if len(calls) in (1, 3):
            raise KeyboardInterrupt
        w[i].assign(value)
        if len(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupts.put_back(
            (lambda value, i=i: assign(i, value), tf.constant([10.0 + i])) for i in range(4)
        )
    assert [float(v[0]) for v in w] == [10.0, 11.0, 12.0, 13.0]
