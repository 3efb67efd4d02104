"""A disk that is full."""

import contextlib

import pytest


@contextlib.contextmanager
def files_of_at_most(size):
    """Limit the size of the files that this process writes, as a full disk does."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
