"""Nests to flat vectors and back."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import hvp
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables
from tests.cases import examples

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
variables = st.builds(
    lambda shape, dtype: tf.Variable(tf.zeros(shape, dtype)),
    shapes,
    st.sampled_from([tf.float16, tf.bfloat16, tf.float32, tf.float64]),
)
nests = st.recursive(
    variables,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
).filter(lambda nest: any(v.shape.num_elements() for v in tf.nest.flatten(nest)))


@examples(60)
@given(nests, st.integers(0, 2**16))
def test_split_inverts_join(nest, seed):
    space = Space.of_variables(collect_variables(nest))
    # Small integers are exact in every dtype.
    rng = np.random.default_rng(seed)
    flat = tf.cast(rng.integers(-9, 9, space.size), space.dtype)
    parts = space.split(flat)
    assert [(tuple(p.shape), p.dtype) for p in parts] == list(zip(space.shapes, space.dtypes))
    np.testing.assert_array_equal(space.join(parts), flat)
    packed = space.nest_of_parts(parts)
    tf.nest.assert_same_structure(packed, tf.nest.map_structure(lambda v: 0, nest))
    # Against NumPy, in tf.nest order.
    leaves = [np.asarray(tf.cast(p, tf.float64)).reshape(-1) for p in tf.nest.flatten(packed)]
    np.testing.assert_array_equal(np.concatenate(leaves), flat)
    columns = space.split(tf.stack([flat, -flat]))
    np.testing.assert_array_equal(space.join(columns), tf.stack([flat, -flat]))


def test_operators_flatten_in_the_form_they_are_given():
    w = {"a": tf.Variable([[1.0, 2.0]]), "b": tf.Variable(tf.ones(1, tf.bfloat16))}
    H = hvp.HessianOperator(lambda: tf.reduce_sum(w["a"] ** 2) + tf.cast(w["b"][0], tf.float32), w)
    flat = H.flatten({"a": np.array([[1, 2]]), "b": np.array([3])})
    assert isinstance(flat, np.ndarray)
    assert flat.dtype == np.float32
    np.testing.assert_array_equal(flat, [1, 2, 3])
    assert tf.is_tensor(H.flatten(w))
    nest = H.unflatten(flat)
    assert isinstance(nest["a"], np.ndarray)
    assert nest["b"].dtype == tf.bfloat16.as_numpy_dtype
    assert tf.is_tensor(H.unflatten(tf.constant(flat))["a"])
    with pytest.raises(hvp.InvalidVectorError, match=r"shape \(4,\)"):
        H.unflatten(np.ones(4))
    with pytest.raises(hvp.InvalidVectorError, match="complex"):
        H.unflatten(np.ones(3) * 1j)


@examples(60)
@given(nests, st.integers(0, 2**16))
def test_arrays_become_parts_and_parts_an_array(nest, seed):
    space = Space.of_variables(collect_variables(nest))
    flat = np.random.default_rng(seed).integers(-9, 9, space.size)
    for dtype in ("float32", "float64", space.dtype.as_numpy_dtype):
        parts = space.parts_of_array(flat.astype(dtype))
        assert [(tuple(p.shape), p.dtype) for p in parts] == list(zip(space.shapes, space.dtypes))
        leaves = [np.asarray(tf.cast(part, tf.float64)).ravel() for part in parts]
        np.testing.assert_array_equal(np.concatenate(leaves), flat)
        array = space.array_of_parts(parts)
        assert (array.dtype, parts) == (space.dtype.as_numpy_dtype, [])
        np.testing.assert_array_equal(array, flat)


def test_a_part_of_a_space():
    specs = [tf.TensorSpec([2], tf.float16), tf.TensorSpec([0]), tf.TensorSpec([1, 3], tf.float64)]
    space = Space.of_tensors(specs)
    one, two = space.subspace([0]), space.subspace([0, 2])
    assert (one.size, one.dtype, two.size, two.dtype) == (2, tf.float32, 5, tf.float64)
    zeros = space.with_zeros([None, None, tf.ones([1, 3], tf.float64)])
    np.testing.assert_array_equal(space.join(zeros), [0, 0, 1, 1, 1])
    for vector in (np.arange(2.0), [np.arange(2)], (np.arange(2),)):
        parts = one.vector_of(vector)
        np.testing.assert_array_equal(parts[0] if isinstance(parts, list) else parts, [0, 1])
    for nest, shown in (
        ([np.ones(2), np.ones(3)], ["'output 2'", "(3,)", "(1, 3)"]),
        ([np.ones(2)], ["[.]", "[., .]"]),
        (np.ones((5, 1)), ["(5, 1)", "(5,)"]),
    ):
        with pytest.raises(hvp.InvalidVectorError) as caught:
            two.vector_of(nest)
        assert not [text for text in shown if text not in str(caught.value)]


@pytest.mark.parametrize(("error", "agrees"), [(0.009, True), (0.011, False)])
def test_vectors_agree_if_each_part_does(error, agrees):
    """A hundredth of the part that differs, though that is small next to the other."""
    space = Space.of_tensors([tf.TensorSpec([2], tf.float64), tf.TensorSpec([3], tf.float64)])
    exact = tf.constant([[1e3, -1e3, 1e-3, 2e-3, 2e-3]] * 2, tf.float64)
    other = exact + error * tf.constant([[0.0] * 5, [0, 0, 0, 3e-3, 0]], tf.float64) * 2**0.5
    assert space.agree(other, exact, tf.constant(1e3, tf.float64)) == agrees
