"""Small tensors packed into one buffer for each dtype."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from hvp._vectors.packing import Packing
from tests.cases import examples

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.uint8]
shapes = st.lists(st.integers(0, 3), max_size=3)
specs = st.lists(st.builds(tf.TensorSpec, shapes, st.sampled_from(DTYPES)), max_size=8)


@examples(40)
@given(specs)
def test_unpack_inverts_pack(specs):
    packing, rng = Packing(specs), np.random.default_rng(0)
    tensors = [tf.cast(rng.integers(0, 99, spec.shape), spec.dtype) for spec in specs]
    buffers = packing.pack(tensors)
    # One for each dtype, in the order of the first of each.
    by_dtype = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).extend(np.ravel(tf.cast(tensor, tf.float64)))
    assert packing.buffers == len(by_dtype)
    assert [buffer.dtype for buffer in buffers] == list(by_dtype)
    assert [np.asarray(tf.cast(b, tf.float64)).tolist() for b in buffers] == [*by_dtype.values()]
    assert (packing.pays, packing.fits(buffers)) == (True, True)
    for i in range(len(buffers)):
        longer = tf.concat([buffers[i], tf.zeros([1], buffers[i].dtype)], 0)
        assert not packing.fits([*buffers[:i], longer, *buffers[i + 1 :]])
    unpacked = packing.unpack(buffers)
    assert len(unpacked) == len(tensors)
    for tensor, again in zip(tensors, unpacked):
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
        assert tf.reduce_all(again == tensor)


@pytest.mark.parametrize(
    ("shape", "dtype", "pays"),
    [
        ([2**16 - 2], tf.float32, True),  # with two numbers of four bytes 256 KiB
        ([2**16 - 1], tf.float32, False),
        ([2**15 - 1], tf.float64, True),
        ([None], tf.float32, False),
        ([1], tf.bool, False),
        ([1], tf.string, False),
    ],
)
def test_what_is_packed(shape, dtype, pays):
    assert Packing([tf.TensorSpec([2], tf.int32), tf.TensorSpec(shape, dtype)]).pays == pays
