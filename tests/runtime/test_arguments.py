"""Arguments that are no numbers, or none of the right kind, are refused by name and value."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._runtime.arguments import check_count, check_flag, check_number, check_seed


@pytest.mark.parametrize("value", [0, 3, np.int32(3), np.uint8(1), 2**31 - 1, 2**100])
def test_counts_and_seeds_become_integers(value):
    assert type(check_count(value, "x", least=0)) is int
    assert check_seed(value) == value


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "1", np.nan, [1]])
def test_other_seeds_are_refused(value):
    with pytest.raises(hvp.HvpError, match="argument seed is"):
        check_seed(value)


@pytest.mark.parametrize("value", [0, 0.5, np.float32(0.5), np.int64(1), 1e300])
def test_numbers_pass(value):
    assert check_number(value, "x") == value


@pytest.mark.parametrize(
    "value", [-1e-300, np.nan, np.inf, -np.inf, True, "1", 1j, np.complex64(1)]
)
def test_other_numbers_are_refused(value):
    with pytest.raises(hvp.HvpError, match="argument x is"):
        check_number(value, "x")


def test_bounds_of_numbers_hold():
    for refused in (0, 0.0, 1, 1.5):
        with pytest.raises(hvp.HvpError, match=f"argument x is {refused}.*less than 1"):
            check_number(refused, "x", positive=True, below=1)
    assert check_number(0.999, "x", positive=True, below=1) == 0.999
    assert check_number(np.inf, "x", finite=False) == np.inf
    for refused in (-np.inf, np.nan):
        with pytest.raises(hvp.HvpError, match="argument x is"):
            check_number(refused, "x", finite=False)
    with pytest.raises(hvp.HvpError, match=r"argument seed is 2147483648.*2147483647"):
        check_seed(2**31, below=2**31)


def test_flags_are_true_or_false():
    assert check_flag(np.True_, "x") is True
    for refused in (1, 0, None, "True"):
        with pytest.raises(hvp.HvpError, match="argument x is"):
            check_flag(refused, "x")


def test_calls_refuse_them_too():
    w = tf.Variable([1.0, 2.0])
    with hvp.HessianOperator(lambda: tf.reduce_sum(w**4), w) as H:
        solver = hvp.Solver(H)
        for call, named in (
            (lambda: solver.solve(np.ones(2, "float32"), damping=np.inf), "damping is inf"),
            (lambda: solver.solve(np.ones(2, "float32"), damping="x"), "damping is"),
            (lambda: hvp.solve(H, np.ones(2, "float32"), rtol=np.nan), "rtol is nan"),
            (lambda: hvp.minimize(H, maxiter="x"), "maxiter is 'x'"),
            (lambda: hvp.check(H, seed=-1), "seed is -1"),
            (lambda: hvp.eigsh(H, 1, tol=-1.0), "tol is -1.0"),
            (lambda: hvp.NewtonCG(H, w, forcing=None), "forcing is None.*eisenstat-walker"),
            (lambda: hvp.trace(H, method="x"), "argument method is 'x'.*'exact' or 'hutchinson'"),
            (lambda: solver.solve(np.ones(2, "float32"), method="cg"), "method is 'cg'.*'auto'"),
        ):
            with pytest.raises(hvp.HvpError, match=named):
                call()
        # What scipy, NumPy and threads take is taken.
        assert hvp.trace(H, seed=2**100).estimate == 60.0
        hvp.minimize(H, maxiter=2e0)
    with hvp.HessianOperator(
        lambda x: tf.reduce_mean(w * x) ** 2,
        w,
        (np.ones((4, 2), "float32"),),
        devices=["CPU:0"],
        device_timeout=np.inf,
    ) as H:
        assert H.shape == (2, 2)
