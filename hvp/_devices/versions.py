"""The version of TensorFlow that a worker runs.

TensorFlow does not support clusters with several versions, and has no call that returns the version
of a server. On Linux, the worker's list of loaded libraries shows where its TensorFlow is
installed, and the name of a folder next to it contains the version.
"""

from __future__ import annotations

import re

import tensorflow as tf

_LIBRARY = re.compile(rb"(/\S+)/tensorflow/libtensorflow_\w+\.so")
_FOLDER = re.compile(r"/tensorflow[a-z_]*-(\d+\.\d+)[^/]*\.dist-info$")


def version_of(device: str) -> str:
    """Return the version at a device, as in ``2.21``; empty if it is unknown.

    This waits for the device, which is given by its full name.
    """
    with tf.device(device):
        library = _LIBRARY.search(tf.io.read_file("/proc/self/maps").numpy())
        if library is None:
            return ""
        folders = tf.io.matching_files(library[1] + b"/tensorflow*.dist-info").numpy()
    found = [_FOLDER.search(folder.decode()) for folder in folders]
    return next((match[1] for match in found if match), "")


def own_version() -> str:
    """Return the version of this process."""
    return ".".join(tf.__version__.split(".")[:2])
