"""The options of matrices: declared once, checked, and shown in signatures and documentation."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._engines.options import NAMES, Options, without

TAKE_ALL = [hvp.HessianOperator, hvp.GaussNewtonOperator, hvp.FisherOperator]
TAKE_SOME = [
    hvp.JacobianOperator,
    hvp.KFAC,
    hvp.EKFAC,
    hvp.InfluenceFunctions,
    hvp.NewtonCG,
    hvp.ScipyObjective,
    hvp.minimize,
    hvp.linearize,
]


@pytest.mark.parametrize("call", TAKE_ALL + TAKE_SOME)
def test_signatures_and_documentation_name_them(call):
    parameters = inspect.signature(call).parameters
    names = [name for name in NAMES if name in parameters]
    assert "options" not in parameters or call is hvp.minimize  # whose `options` are scipy's
    assert "memory_limit" in names
    assert call not in TAKE_ALL or names == list(NAMES)
    assert "{option" not in call.__doc__
    for name in names:
        if call is not hvp.linearize and call is not hvp.EKFAC:
            assert name in call.__doc__
        if name not in ("on_stale", "progress"):
            assert parameters[name].default == getattr(Options(), name)


def test_each_is_documented():
    for name in NAMES:
        assert f"{name} : " in hvp.HessianOperator.__doc__


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": 1.5},
        {"reduction": "median"},
        {"regularization": 1.0},
        {"weight": 2},
        {"progress": "sometimes"},
        {"on_stale": "wait"},
        {"engine": "xla"},
        {"engine": None},
        {"jit_compile": "never"},
        {"precision": "half"},
        {"device_timeout": -1},
        {"device_timeout": True},
    ],
)
def test_bad_values_are_named_before_any_work(options):
    (name, value), calls = *options.items(), []
    w = tf.Variable([1.0])

    def loss(x):
        calls.append(x)
        return tf.reduce_mean(x * w)

    with pytest.raises(hvp.HvpError, match=name) as caught:
        hvp.HessianOperator(loss, w, (np.ones((3, 1), "float32"),), **options)
    assert str(value) in str(caught.value) or type(value).__name__ in str(caught.value)
    assert not calls


@pytest.mark.parametrize("private", ["products", "wide"])
@pytest.mark.parametrize("call", TAKE_ALL)
def test_private_ones_are_refused(call, private):
    w = tf.Variable([1.0])
    functions = [lambda x: x * w] * (1 if call is hvp.HessianOperator else 2)
    with pytest.raises(hvp.InvalidOptionError, match=private):
        call(*functions, w, (np.ones((3, 1), "float32"),), **{private: False})


def test_the_nearest_name_is_suggested():
    with pytest.raises(hvp.InvalidOptionError, match="batch_size"):
        hvp.HessianOperator(lambda: 1.0, tf.Variable(1.0), batchsize=3)
    with pytest.raises(hvp.InvalidOptionError, match="JacobianOperator"):
        hvp.JacobianOperator(lambda: 1.0, tf.Variable(1.0), reduction="sum")


def test_all_but_some_keep_their_order():
    some = without("engine", "devices")
    assert [name for name in NAMES if name in some] == list(some)
    assert set(NAMES) - set(some) == {"engine", "devices"}
