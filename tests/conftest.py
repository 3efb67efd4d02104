"""Fixtures of all tests."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

# What importing has made stays: the collector need not look through it again and again.
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    """Start each test from the same random numbers, and forget its models afterwards."""
    np.random.seed(0)  # noqa: NPY002 - scipy's lobpcg tests draw from the global generator
    tf.random.set_seed(0)
    yield
    keras.backend.clear_session()
