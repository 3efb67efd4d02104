"""One batch: its tensors, and parts of it."""

import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._data.elements import NO_DATA, convert_batch
from tests.cases import random

X, Y = random(0, 4, 2), np.array([3, 1, 0, 2])
RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0]])
BATCHES = {
    "tuple": ((X, Y), 4 * 2 * 4 + 4 * 8),
    "dict": ({"y": Y, "x": {"a": X, "b": (X, X)}}, 3 * 4 * 2 * 4 + 4 * 8),
    "ragged": ((Y, RAGGED), 4 * 8 + 4 * 4 + 5 * 8),
}


def rows(nest):
    leaves = tf.nest.flatten(nest)
    return [x.to_list() if hasattr(x, "to_list") else np.asarray(x).tolist() for x in leaves]


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_and_parts_of_it(kind):
    data, nbytes = BATCHES[kind]
    whole = convert_batch(data, "data")
    assert (whole.examples, whole.nbytes, whole.has_examples) == (4, nbytes, True)
    assert (NO_DATA.examples, NO_DATA.nbytes, NO_DATA.has_examples) == (1, 0, False)
    tf.nest.assert_same_structure(whole.as_data(), data)
    parts = {(0, 1, 2, 3): whole, (1, 2): whole.part(1, 3), (3,): whole.part(3, 9)}
    parts |= {(0,): whole.first(), (3, 0, 3): whole.taken([3, 0, 3])}
    for places, part in parts.items():
        assert rows(part.as_data()) == [[leaf[i] for i in places] for leaf in rows(data)]
        assert rows(part.with_tensors(part.tensors).by_key) == rows(part.by_key)
        assert part.examples == len(places)


@pytest.mark.parametrize("method", ["first", "part", "taken"])
def test_sparse_tensors_are_divided_or_refused(method):
    whole = convert_batch((tf.sparse.from_dense(np.diag([1.0, 2.0])),), "data")
    arguments = {"first": (), "part": (0, 1), "taken": ([0],)}[method]
    try:
        part = getattr(whole, method)(*arguments)
    except hvp.InvalidDataError:
        return
    np.testing.assert_array_equal(tf.sparse.to_dense(part.leaves[0]), [[1, 0]])


def test_elements_that_are_not_finite():
    nan, inf = X.copy(), {"a": X, "b": RAGGED / [[0.0]]}
    nan[3, 1] = np.nan
    assert convert_batch((X, nan, Y, inf), "data").not_finite() == [1, 3]


def test_complex_elements_that_are_not_finite():
    nan = np.where(Y[:, np.newaxis] == 3, np.nan, X)
    assert convert_batch({"x": X * (1 + 1j), "z": nan * 1j}, "data").not_finite() == ["z"]
