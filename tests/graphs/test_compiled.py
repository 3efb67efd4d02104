"""Products compiled by XLA, and what happens where it cannot."""

import logging

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._graphs import compiled
from tests.cases import CASES, Problem, dense_hessian, random, relative_error


def problem():
    w = [tf.Variable(random(0, 4, 3, dtype="float64")), tf.Variable(random(1, 3, dtype="float64"))]
    x = tf.constant(random(2, 6, 4, dtype="float64"))
    return lambda: tf.reduce_mean(tf.tanh(x @ w[0] + w[1]) ** 2), w


@pytest.mark.parametrize("jit_compile", [True, "auto"])
@pytest.mark.few(1)
def test_same_numbers(jit_compile):
    loss, w = problem()
    plain = hvp.HessianOperator(loss, w)
    H = hvp.HessianOperator(loss, w, jit_compile=jit_compile)
    assert H.stats.jit_compile is None
    V = random(3, 15, 5, dtype="float64")
    one = H @ V[:, 0]
    assert H.stats.jit_compile in ((True,) if jit_compile is True else (True, False))
    assert relative_error(one, plain @ V[:, 0]) < 1e-12
    assert relative_error(H @ V, plain @ V) < 1e-12
    assert np.array_equal(one, H @ V[:, 0])
    nest = H.unflatten(V[:, 0])
    assert relative_error(H.flatten(H.product(nest)), plain @ V[:, 0]) < 1e-12
    w[0].assign_add(tf.ones((4, 3), tf.float64))
    plain.refresh(), H.refresh()
    assert relative_error(H @ V, plain @ V) < 1e-12
    assert (H.stats.traces, H.stats.note) == (1, "")


def test_linearize_by_xla():
    loss, w = problem()
    with hvp.linearize(loss, w, jit_compile=True) as one, hvp.linearize(loss, w) as other:
        u = tf.ones([], tf.float64)
        for got, want in zip(one.vjp(u), other.vjp(u)):
            assert relative_error(got, want) < 1e-12
        v = [tf.ones_like(part) for part in w]
        assert relative_error(one.jvp(v), other.jvp(v)) < 1e-12


@pytest.mark.parametrize("faster", ["xla", "plain"])
def test_auto_stays_with_the_faster(monkeypatch, faster):
    compared = []

    def compare(xla, plain, tensors):
        compared.append(len(tensors))
        return faster == "xla"

    monkeypatch.setattr(compiled, "is_faster", compare)
    loss, w = problem()
    H = hvp.HessianOperator(loss, w, jit_compile="auto")
    for _ in range(3):
        H @ np.ones(15)
        H.refresh()
    assert len(compared) == 1
    assert H.stats.jit_compile is (faster == "xla")


class Timed:
    """A function that takes the given times, one after the other, by a clock of its own."""

    now = 0.0

    def __init__(self, *seconds):
        self._seconds = iter(seconds)

    def __call__(self, a):
        Timed.now += next(self._seconds)
        return a


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        ((5.0, 0.001, 0.001, 0.001), (0.003,) * 4),  # a clear case, after the first call
        ((0.001, 0.1, 0.001, 0.001), (0.003,) * 4),  # the machine was busy once
        ((1.0, 1.0), (3.0, 3.0)),  # once is enough
        ((0.001, *[0.002] * 4, 0.001), (0.0015,) * 6),  # almost the same, and busy until the end
    ],
)
def test_which_is_faster_is_measured(fast, slow, monkeypatch):
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: Timed.now)
    a = [tf.ones(3)]
    assert compiled.is_faster(Timed(*fast), Timed(*slow), a)
    assert not compiled.is_faster(Timed(*slow), Timed(*fast), a)


@pytest.mark.parametrize("jit_compile", [True, "auto"])
@pytest.mark.few(1)
def test_what_xla_cannot_compile_is_computed_without(jit_compile, caplog):
    """A loop's intermediate values are in lists, which XLA takes from nobody."""
    case = CASES["while_loop"]("float64")
    plain = hvp.HessianOperator(case.loss, case.variables)
    with caplog.at_level(logging.WARNING, "hvp"):
        H = hvp.HessianOperator(case.loss, case.variables, jit_compile=jit_compile)
        block = H @ np.eye(4)
        got = H @ np.ones(4)
    assert relative_error(block, plain.to_dense()) < 1e-12
    assert relative_error(got, plain @ np.ones(4)) < 1e-12
    assert H.stats.jit_compile is False
    assert H.stats.note.count("XLA cannot compile") == 1
    assert "loop or branch" in H.stats.note
    assert "XLA cannot compile" in caplog.text


@pytest.mark.parametrize("jit_compile", [True, "auto"])
@pytest.mark.few(1)
@pytest.mark.long
def test_xla_is_not_tried_where_lists_pass_through_a_branch(jit_compile):
    """It would end the process, at a block of columns after a single product."""
    w = tf.Variable([0.1, 0.2, 0.3], dtype=tf.float64)
    one = tf.ones([], tf.float64)

    def scanned():
        return tf.reduce_sum(tf.scan(lambda a, x: a * x * w[2], w, initializer=one))

    def loss():
        return tf.cond(w[0] > 0, scanned, lambda: tf.reduce_sum(w)) ** 2

    H = hvp.HessianOperator(loss, w, jit_compile=jit_compile)
    plain = hvp.HessianOperator(loss, w)
    assert relative_error(H @ np.ones(3), plain @ np.ones(3)) < 1e-12
    assert relative_error(H @ np.eye(3), dense_hessian(Problem(loss, w))) < 1e-8
    assert H.stats.jit_compile is False
    in_graph = tf.function(lambda v: H.product(v), jit_compile=True)
    with pytest.raises(hvp.GraphModeError, match="leave out jit_compile"):
        in_graph(tf.ones(3, tf.float64))


def test_the_argument_is_checked():
    loss, w = problem()
    with pytest.raises(hvp.HvpError, match="jit_compile is 'always'"):
        hvp.HessianOperator(loss, w, jit_compile="always")


def test_the_tape_takes_no_notice():
    loss, w = problem()
    H = hvp.HessianOperator(loss, w, engine="tape", jit_compile=True)
    H @ np.ones(15)
    assert H.stats.jit_compile is False
