"""Batches of every kind of data: what a pass yields, what it reads, and what it refuses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvp
from hvp._data.batches import Batches, OneBatch
from hvp._data.elements import convert_batch
from tests.cases import random

X, Y = random(0, 5, 2), np.arange(5)
RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0], [], [4.0], [5.0]])
DIAGONAL = np.diag([1.0, 2, 3, 4, 5])
SPARSE = tf.sparse.from_dense(DIAGONAL)
PARTS = [(X[a : a + 2], Y[a : a + 2]) for a in (0, 2, 4)]


class Dataset(keras.utils.PyDataset):
    """As Keras iterates over one: by numbers, and not beyond their count."""

    num_batches = 3

    def __getitem__(self, index):
        return PARTS[index % 3]


class Counted:
    """Yields batches and counts how many were asked for."""

    def __init__(self, batches):
        self.batches, self.read = batches, 0

    def __iter__(self):
        for batch in self.batches:
            self.read += 1
            yield batch


def of(data, batch_size=None, weight=None):
    return Batches(data, batch_size, weight)


tensors = tf.data.Dataset.from_tensor_slices
SOURCES = {
    "arrays": lambda: of((X, Y), 2),
    "names": lambda: of({"y": Y, "x": X}, 2),
    "tf.data": lambda: of(tensors((X, Y)).batch(2)),
    "PyDataset": lambda: of(Dataset()),
    "tuples": lambda: of(PARTS),
    "dicts": lambda: of([{"y": y, "x": x} for x, y in PARTS]),
    "iterable": lambda: of(Counted(PARTS)),
    "weights": lambda: of({"y": Y, "x": X}, 2, lambda x, y: tf.reduce_sum(y) - 1),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_a_pass_yields(kind):
    batches = SOURCES[kind]()
    assert batches.count is None
    for _ in range(2):
        passed = list(batches)
        assert [batch.index for batch in passed] == [0, 1, 2]
        weights = [0, 4, 3] if kind == "weights" else [2, 2, 1]
        assert [batch.weight for batch in passed] == weights
        for batch, (x, y) in zip(passed, PARTS):
            by_key = batch.elements.by_key
            np.testing.assert_array_equal(by_key.get(0, by_key.get("x")), x)
            np.testing.assert_array_equal(by_key.get(1, by_key.get("y")), y)
        assert batches.count == 3
    assert [batch.index for batch in batches.after(2)] == [2]
    assert [batch.index for batch in batches.select({0, 2}.__contains__)] == [0, 2]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("whole", [RAGGED, SPARSE], ids=["ragged", "sparse"])
def test_ragged_and_sparse_tensors(whole, place):
    passed = list(of(tensors((whole, Y)).batch(2)))
    assert [batch.weight for batch in passed] == [2, 2, 1]
    leaf = passed[0].elements.leaves[0]
    rows = leaf.to_list() if whole is RAGGED else tf.sparse.to_dense(leaf).numpy().tolist()
    assert rows == ([[1], [2, 3]] if whole is RAGGED else DIAGONAL[:2].tolist())
    try:  # arrays may be refused, by name
        passed = list(of((whole, Y) if place == 0 else (Y, whole), 2))
    except hvp.InvalidDataError as error:
        assert f"data[{place}]" in str(error)  # noqa: PT017 - either will do
    else:
        assert [batch.weight for batch in passed] == [2, 2, 1]


def test_a_pass_reads_one_batch_ahead_and_none_beyond():
    for passed in (1, 2, 3):
        source = Counted(PARTS)
        one_pass = iter(of(source))
        for number in range(1, passed + 1):
            next(one_pass)
            assert source.read <= number + 1
        one_pass.close()
        assert source.read <= passed + 1
    assert source.read == 3


REFUSED = {
    "weight": (((X, Y), 2, lambda x, y: len(y) - 1.5), ["batch 2", "-0.5"]),
    "no number": (((X, Y), 2, lambda x, y: np.nan if len(y) == 1 else 1.0), ["batch 2", "nan"]),
    "batch_size": ((PARTS, 2), ["batch_size=2", "list", "unbatch()"]),
    "scalar": (([(X, Y), (X, np.float32(1))],), ["batch 1[1]", "scalar"]),
    "lengths": (([{"x": X, "y": Y[:2]}],), ["batch 0['x'] has 5", "batch 0['y'] has 2"]),
    "variable": (([(X, tf.Variable(X))],), ["batch 0[1]", "variable"]),
    "rank": (([(X, Y), (X[:, 0], Y)],), ["batch 1", "batch 0", "(5,)", "(5, 2)"]),
    "names": (([{"x": X}, {"z": X}],), ["batch 1", "'x'", "'z'"]),
    "structure": (([({"a": X},), ({"b": X},)],), ["batch 1", "'a'", "'b'"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind):
    arguments, shown = REFUSED[kind]
    with pytest.raises(hvp.InvalidDataError) as caught:
        list(of(*arguments))
    assert not [text for text in shown if text not in str(caught.value).replace("Batch", "batch")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.zeros(500), np.where(np.arange(500) == 40, 1e-300, 0)),
        (X, X.view(np.int32)),
        (X, X.reshape(2, 5)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (RAGGED, tf.RaggedTensor.from_row_lengths(RAGGED.flat_values, [2, 1, 0, 1, 1])),
        (SPARSE, tf.sparse.from_dense(np.rot90(DIAGONAL))),
    ],
    ids=["value", "dtype", "shape", "text", "lengths of rows", "places"],
)
def test_changes_are_noticed(before, after):
    source = Counted([(before,)])
    batches = of(source)
    list(batches)
    source.batches = [(after,)]
    with pytest.raises(hvp.InvalidDataError, match="batch 0 "):
        list(batches)
    whole = [OneBatch(convert_batch((x,), "data")) for x in (before, after)]
    assert whole[0].fingerprint() == batches.fingerprint() != whole[1].fingerprint()


def test_a_keras_data_set_without_end_is_refused():
    class Endless(Dataset):
        num_batches = property(lambda self: None)

    with pytest.raises(hvp.InvalidDataError, match=r"Endless.*num_batches"):
        of(Endless())
