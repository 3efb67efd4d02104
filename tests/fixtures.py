"""What surrounds every test."""

import gc
import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

# Tests of several devices find three here, before TensorFlow is used for the first time.
_CPU = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(_CPU, [tf.config.LogicalDeviceConfiguration()] * 3)

# Python's part of each operation of TensorFlow takes a tenth less time without it.
tf.debugging.disable_traceback_filtering()

# What importing has made stays: the collector need not look through it again and again.
gc.collect()
gc.freeze()

_serials = itertools.count(1)
# Newer versions of Keras collect garbage each time unless told not to.
_parameters = inspect.signature(keras.backend.clear_session).parameters
KEEP_MEMORY = {"free_memory": False} if "free_memory" in _parameters else {}


def _collect():
    """Collect garbage now and then: with the graphs of many tests it takes as long as a test."""
    if next(_serials) % 25 == 0:
        gc.collect()
        gc.freeze()  # what is left belongs to modules, and need not be looked through again


@pytest.fixture(autouse=True)
def _seeded():
    """Start each test from the same random numbers, and forget its models afterwards."""
    np.random.seed(0)  # noqa: NPY002 - scipy's lobpcg tests draw from the global generator
    tf.random.set_seed(0)
    yield
    keras.backend.clear_session(**KEEP_MEMORY)
    _collect()
