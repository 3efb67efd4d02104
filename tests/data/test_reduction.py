"""Results and products of batches put together, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from hvp._data.reduction import Mean, Stack
from hvp._engines.graph_program import Results
from hvp._engines.linear_map import LinearMap
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._vectors.space import Space
from tests.cases import random

SHAPES = [(2, 3), (0,), (4,)]
WEIGHTS = [2048.0, 1.0, 0.0, 0.25, 1.0]  # in float16, 2048 and 1 are 2048


class Far(ExecutionTarget):
    """Another process, as far as a reduction can tell."""

    is_remote, runs_xla = True, False


class Matrix(LinearMap):
    def __init__(self, matrix, domain, codomain):
        self.matrix, self.domain, self.codomain = matrix, domain, codomain

    def apply(self, vector, *, adjoint=False):
        return tf.constant(vector.numpy() @ (self.matrix if adjoint else self.matrix.T))


def space_of(*dtypes):
    return Space.of_tensors([tf.TensorSpec(*pair) for pair in zip(SHAPES, dtypes)])


@pytest.mark.parametrize("sites", [[LOCAL], [Far()], [LOCAL, Far(), Far()]])
@pytest.mark.parametrize("missing", [{}, {0: [2], 3: [0]}, {i: [1, 2] for i in range(5)}])
@pytest.mark.parametrize("dtypes", [["float16"] * 3, ["float32", "bfloat16", "float64"]])
def test_the_mean(sites, missing, dtypes):
    mean, states = Mean(space_of(*map(tf.as_dtype, dtypes))), dict.fromkeys(sites)
    values, terms = [], [[], [], []]
    for i, weight in enumerate(WEIGHTS):
        parts = [tf.cast(random(10 * i + j, *s), d) for j, (s, d) in enumerate(zip(SHAPES, dtypes))]
        parts = [None if j in missing.get(i, ()) else part for j, part in enumerate(parts)]
        site, value = sites[i % len(sites)], tf.constant(i - 7.5)
        states[site] = mean.add(states[site], i, weight, Results(value, parts), site)
        values.append(weight * (i - 7.5))
        for of_variable, part in zip(terms, parts):
            if part is not None:
                of_variable.append(weight * tf.cast(part, tf.float64).numpy())
    state = mean.merge([mean.bring(one, site, "") for site, one in states.items()])
    penalty = Results(tf.constant(0.5), [tf.ones((2, 3), dtypes[0]), None, None])
    for added, extra in ((None, [0, 0, 0]), (penalty, [1, 0, 0])):
        total = mean.results(state, 1 / 8, added)
        assert float(total.value) == sum(values) / 8 + extra[0] / 2
        for part, of_variable, more, dtype in zip(total.gradient, terms, extra, dtypes):
            assert (part is None) == (not of_variable)
            if part is not None:
                assert part.dtype == dtype
                want = sum(of_variable) / 8 + more
                tolerance = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype, 1e-6)
                np.testing.assert_allclose(tf.cast(part, tf.float64), want, tolerance, tolerance)


@pytest.mark.parametrize("rows", [(), (3,)])
@pytest.mark.parametrize("adjoint", [False, True])
def test_products_are_added_with_their_weights(rows, adjoint):
    space, v = space_of(*[tf.float64] * 3), random(9, *rows, 10, dtype="float64")
    matrices, weights = random(0, 4, 10, 10, dtype="float64"), [2.0, 0.5, 1.0, 3.0]
    terms = [(weight, Matrix(m, space, space)) for weight, m in zip(weights, matrices)]
    mean = Mean(space)
    here = mean.multiply(None, 0, terms[:2], tf.constant(v), adjoint=adjoint)
    here = mean.multiply(here, 1, terms[2:3], tf.constant(v), adjoint=adjoint)
    there = mean.multiply(None, 2, terms[3:], tf.constant(v), adjoint=adjoint)
    whole = np.tensordot(weights, matrices, 1)
    got = mean.product([here, there], adjoint=adjoint)
    np.testing.assert_allclose(got, v @ (whole if adjoint else whole.T), rtol=1e-12)


@pytest.mark.parametrize("rows", [(), (3,)])
def test_stacked_values_and_their_jacobian(rows):
    """Two outputs, of batches in pieces, which two places evaluate in any order."""
    space = space_of(*[tf.float64] * 3)
    stack, states, maps, wholes = Stack(space), [None, None], {}, {}
    for index, lengths in ((2, [2, 2, 1]), (0, [3, 2]), (1, [1])):
        maps[index] = []
        for piece, n in enumerate(lengths):
            seed = 10 * index + piece
            a, b = random(seed, n, 2, dtype="float64"), random(seed, n, dtype="float64")
            results = Results({"a": tf.constant(a), "b": tf.constant(b)}, None)
            states[index % 2] = stack.add(states[index % 2], index, 7.0, results, LOCAL)
            matrix = random(50 + seed, 10, 3 * n, dtype="float64")
            domain = Space.of_tensors(list(results.value.values()))
            maps[index].append((7.0, Matrix(matrix, domain, space)))
            wholes[seed] = a, b, matrix[:, : 2 * n], matrix[:, 2 * n :]
    a, b, *columns = zip(*(wholes[seed] for seed in sorted(wholes)))
    results = stack.results(stack.merge(states), 0.1)
    np.testing.assert_array_equal(results.value["a"], np.concatenate(a))
    np.testing.assert_array_equal(results.value["b"], np.concatenate(b))
    assert stack.domain.shapes == [(11, 2), (11,)]
    # All columns of the first output, then all those of the second.
    whole = np.concatenate([*columns[0], *columns[1]], axis=1)
    for adjoint in (False, True):
        v, parts = random(1, *rows, 10 if adjoint else 33, dtype="float64"), [None, None]
        for i in (1, 2, 0):
            state = parts[i % 2]
            parts[i % 2] = stack.multiply(state, i, maps[i], tf.constant(v), adjoint=adjoint)
        got = stack.product(parts, adjoint=adjoint)
        np.testing.assert_allclose(got, v @ (whole if adjoint else whole.T), rtol=1e-12)
