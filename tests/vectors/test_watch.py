"""Changes of variables: any bit of any value, whatever changed it, and nothing else."""

import numpy as np
import pytest
import tensorflow as tf

from hvp._vectors.resources import Resource
from hvp._vectors.watch import Watch

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "int8", "int64", "bool"]


def watched(*variables, copies=()):
    resources = [Resource.of(variable, f"variable {i}") for i, variable in enumerate(variables)]
    watch = Watch(resources, [(i, Resource.of(copy, f"copy of {i}")) for i, copy in copies])
    watch.set()
    return watch


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_value_is_noticed_and_an_equal_one_is_not(dtype):
    one, other = (tf.Variable(tf.cast([0, 1, 1], dtype)) for _ in range(2))
    watch = watched(one, other)
    assert watch.changed() == []
    other.assign(tf.cast([0, 1, 1], dtype))
    assert watch.changed() == []
    other.assign(tf.cast([0, 1, 0], dtype))
    assert watch.changed() == ["variable 1"]
    one.assign(tf.cast([1, 1, 1], dtype))
    assert watch.changed() == ["variable 0", "variable 1"]


CHANGES = {
    "row": lambda v: v.scatter_update(tf.IndexedSlices([[2.0]], [1])),
    "entry": lambda v: v[0, 0].assign(3.0),
    "added": lambda v: v.assign_add([[0.0], [2e-38]]),
    "sign of zero": lambda v: v.assign([[-0.0], [0.0]]),
    "row alike": lambda v: v.scatter_update(tf.IndexedSlices([[0.0]], [1])),
    "back": lambda v: (v.assign_add([[1.0], [1.0]]), v.assign_sub([[1.0], [1.0]])),
    "nan": lambda v: v.assign([[np.nan], [0.0]]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_all_kinds(change):
    variable = tf.Variable([[0.0], [0.0]])
    watch = watched(variable)
    CHANGES[change](variable)
    want = [] if change in ("row alike", "back") else ["variable 0"]
    assert watch.changed() == watch.changed() == want
    watch.set()
    variable.assign(variable.value() + 0.0 if change == "nan" else variable.value())
    assert watch.changed() == []  # NaN is NaN


def test_copies_and_values_of_another_time():
    one, other, copy = tf.Variable([1.0]), tf.Variable([2.0]), tf.Variable([2.0])
    watch = watched(one, other, copies=[(1, copy), (1, other), (0, one)])
    assert (watch.has_copies, watched(one).has_copies) == (True, False)
    assert (watch.changed(), watch.disagreeing()) == ([], [])
    copy.assign([3.0])
    assert (watch.changed(), watch.disagreeing()) == (["copy of 1"], [])
    watch.set()
    assert (watch.changed(), watch.disagreeing()) == ([], ["variable 1"])
    watch.set([tf.constant([1.0]), tf.constant([3.0])])
    assert (watch.changed(), watch.disagreeing()) == (["variable 1"], ["variable 1"])
