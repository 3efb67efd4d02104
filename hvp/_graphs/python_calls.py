"""Calls of Python from inside graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from hvp._errors import HvpError


def call_python(
    function: Callable[..., Sequence[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
    specs: Sequence[tf.TensorSpec],
) -> list[tf.Tensor]:
    """Call a Python function of eager tensors when the graph being traced runs.

    `function` may call compiled functions. `specs` are the types and shapes of its results.
    HvpError is raised where TensorFlow would hang, see `can_wait_for_python`.
    """
    check_can_wait_for_python("the product")

    def noting(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        try:
            return function(*tensors)
        except HvpError as error:
            # Without the traceback, whose frames hold tensors: it may surface elsewhere.
            _raised[:] = [type(error)(*error.args)]
            raise

    results = tf.py_function(noting, tensors, [spec.dtype for spec in specs])
    for result, spec in zip(results, specs):
        result.set_shape(spec.shape)
    return results


# The last error of this package that Python raised inside a graph.
_raised: list[HvpError] = []


def error_of_python(error: tf.errors.OpError) -> HvpError | None:
    """Return the error of this package that a TensorFlow error reports, if there is one."""
    return _raised.pop() if _raised and str(_raised[0]) in error.message else None


def check_can_wait_for_python(doing: str) -> None:
    """Refuse to call Python from a graph where TensorFlow would hang."""
    if not can_wait_for_python():
        raise HvpError(
            f"{doing} calls Python inside a graph, and TensorFlow has one thread for the "
            "operations of graphs, which would wait for a function that only it could run",
            "a second thread, even on a machine with one core",
            "call tf.config.threading.set_inter_op_parallelism_threads(2) before TensorFlow is "
            "used for the first time, or multiply outside of tf.function",
        )


def can_wait_for_python() -> bool:
    """Return whether a graph may call Python that calls a compiled function.

    A thread that runs operations of graphs waits until Python returns. Meanwhile another thread of
    the same pool has to run the function that Python called. By default, the pool has as many
    threads as the process may use cores.
    """
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    from_environment = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    if not threads and from_environment.isdigit():  # TensorFlow ignores other texts
        threads = int(from_environment)
    return (threads or _core_count()) != 1


def _core_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
