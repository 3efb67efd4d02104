"""What Keras says of an optimizer that is none of its own."""

import keras
import pytest

import hvp


def test_compile_says_what_to_use():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"minimize\(\).*hvp\.keras\.optimizers\.KFAC, SOAP"):
        model.compile(hvp.NewtonCG, "mse")
