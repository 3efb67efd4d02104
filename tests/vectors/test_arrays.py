"""Arrays at the boundary: one dtype, one shape, finite."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import hvp
from hvp._vectors.arrays import check_array, check_product
from tests.cases import examples

KINDS = ["bool", "int8", "uint64", "float16", tf.bfloat16.as_numpy_dtype, "float32", "float64"]
TARGETS = ["float32", "float64"]


@examples(100)
@given(st.sampled_from(KINDS), st.sampled_from(TARGETS), st.lists(st.integers(0, 99)), st.data())
def test_real_numbers_are_cast_and_not_copied_without_need(kind, target, numbers, data):
    array = np.array(numbers, "int64").astype(kind)
    checked = check_array(array, len(numbers), np.dtype(target), ndims=(1,))
    assert checked.dtype == target
    assert (checked is array) == (array.dtype == target)
    np.testing.assert_array_equal(checked, array.astype("float64"))
    if numbers and array.dtype.kind in "fV":
        places = data.draw(st.sets(st.integers(0, len(numbers) - 1), min_size=1))
        array[list(places)] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        with pytest.raises(hvp.InvalidVectorError, match=f"gradient has {len(places)} .*{target}"):
            check_array(array, len(numbers), np.dtype(target), ndims=(1,), name="the gradient")
        with pytest.raises(hvp.NonFiniteError, match=f" {len(places)} "):
            check_product(array)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_finite_numbers_whose_sum_overflows(dtype):
    array = np.full(9, np.finfo(dtype).max, dtype)
    assert check_product(array) is array
    assert check_array(array, 9, array.dtype, ndims=(1,)) is array
    assert check_product(np.empty((0, 3), dtype)).shape == (0, 3)
