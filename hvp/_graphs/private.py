"""All private names of TensorFlow that this package uses, each with the reason.

`tests/graphs/test_private.py` tests what is expected of each of them, so that a change in
TensorFlow is noticed there first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# `tf.custom_gradient` is the public way to record an operation with a custom gradient. But its
# derivatives refer to tensors of the graph in which it was called, so that a `tf.function` that
# contains one can be differentiated from outside once, not twice. The public
# `GradientTape.stop_recording` stops one tape, whereas every tape and forward accumulator has to
# stop recording here.
# What TensorFlow optimizes in a graph before it runs is set by `tf.config.optimizer` for the whole
# process, and for single calls by options of the context alone. How operations are sent to other
# processes is a property of the executor of a thread, which nothing public sets.
from tensorflow.python.eager import context, executor, record

# The definitions of operations say which are stateful, and list the number and types of their
# results, which a FunctionDef does not contain.
from tensorflow.python.framework import op_def_registry, ops

# There is no public way to know whether a graph is being traced for XLA. XLA cannot call Python,
# not even in a branch that never runs.
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# Whether a tape or a forward accumulator follows a tensor is known to `record` for tapes alone.
from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes

# Attributes of nodes, which no documentation lists: the shapes of results; the function that
# differentiates an operation; that a call is not dissolved; that XLA compiles a function; and which
# operations have to be on one device.
SHAPES, GRADIENT_TYPE, NO_INLINE = "_output_shapes", "_gradient_op_type", "_noinline"
MUST_COMPILE, COLOCATED_WITH = "_XlaMustCompile", "_class"
# TensorFlow looks at every operation of a function for effects that have an order. The attribute
# turns that off, for a function that has none.
DISABLE_ORDER = "_disable_acd"
# What the names of operations begin with that tapes add, and of those in which `tf.gradients`
# differentiates a call, loop or branch: nothing else tells which operations are derivatives.
TAPE_PREFIX, GRADIENT_SCOPE = "gradient_tape/", "_grad/"

__all__ = [
    "COLOCATED_WITH",
    "DISABLE_ORDER",
    "GRADIENT_SCOPE",
    "GRADIENT_TYPE",
    "MUST_COMPILE",
    "NO_INLINE",
    "SHAPES",
    "TAPE_PREFIX",
    "addresses_of_workers",
    "call_flat",
    "change_cluster",
    "copies_of",
    "gradient_of_type",
    "is_for_xla",
    "is_of_tape",
    "may_record",
    "op_def_registry",
    "record",
    "replace_gradient_of_type",
    "resumed",
    "send_operations_one_by_one",
]


def is_for_xla() -> bool:
    """Return whether XLA will compile the graph being traced."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def may_record(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether a tape or forward accumulator follows one of the tensors."""
    return bool(PossibleTapeGradientTypes(list(tensors)))


@contextlib.contextmanager
def resumed() -> Iterator[None]:
    """Let tapes record that are opened here, where `record.stop_recording` has stopped all."""
    tapes, was_stopped = record.pywrap_tfe, record.pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if was_stopped:
        tapes.TFE_Py_TapeSetRestartOnThread()
    try:
        yield
    finally:
        if was_stopped:
            tapes.TFE_Py_TapeSetStopOnThread()


def is_of_tape(name: str) -> bool:
    """Return whether a tape made an operation for a derivative, as only its name tells."""
    return TAPE_PREFIX in name


def copies_of(handle: tf.Tensor) -> list[tf.Variable]:
    """Return all copies of a variable that a strategy keeps, in the order of the replicas.

    What a graph captures is the `handle` of one copy; only a private attribute of it leads to the
    variable as a whole. The list is empty if no strategy made the variable.
    """
    container = getattr(handle, "_distributed_container", None)
    whole = None if container is None else container()
    if whole is None:
        return []
    return list(whole.distribute_strategy.experimental_local_results(whole))


def call_flat(
    concrete: Any,
    tensors: Sequence[tf.Tensor],
    captured: Sequence[tf.Tensor],
    *,
    light_optimization: bool,
) -> Any:
    """Call a concrete function on eager tensors of the right types and shapes.

    The public `__call__` binds arguments by name and checks each of them, which takes about as long
    as a small product. Nor is there a public way to run a function on another device with the
    variables of that device, passed as `captured` in place of the tensors that it captured.
    `light_optimization` leaves out, before the first call, the optimizations of the graph that take
    long and gain nothing for a graph without functions on a CPU.
    """
    if not light_optimization:
        return concrete._call_flat(list(tensors), list(captured))
    now = context.context()
    before = now.function_call_options
    now.function_call_options = _brief(before.config_proto_serialized, before.executor_type)
    try:
        return concrete._call_flat(list(tensors), list(captured))
    finally:
        now.function_call_options = before


@functools.lru_cache
def _brief(config: bytes, executor: Any) -> Any:
    """Return options for a call, as in a configuration but with light optimization."""
    proto = tf.compat.v1.ConfigProto.FromString(config)
    options = proto.graph_options.rewrite_options
    # All graphs are optimized twice otherwise.
    options.meta_optimizer_iterations = options.ONE
    options.memory_optimization = options.NO_MEM_OPT
    options.disable_tfg_optimizer = True
    for name in _LEFT_OUT:
        setattr(options, name, options.OFF)
    return context.FunctionCallOptions(executor, proto)


def send_operations_one_by_one() -> Callable[[], None]:
    """Let this thread, until it ends, send each operation to a worker in a call of its own.

    TensorFlow sends operations in a stream by default. After the worker has died, it opens another
    stream and waits for the worker to come back, without end and without an error; and whatever
    waits for all operations waits with it, such as Keras's `model.fit`. Single calls take the same
    time, but end with an error.

    Return a function that makes TensorFlow forget errors of this thread, which it would raise again
    in later operations. The thread has to keep it.
    """
    calls = executor.new_executor(enable_async=False, enable_streaming_enqueue=False)
    # What `context.executor_scope` puts back at its end would wait for all other threads.
    context.context().executor = calls
    return calls.clear_error


# For functions, loops, other devices, debugging, and for what merging and scheduling in this
# package has done already.
_LEFT_OUT = """
    common_subgraph_elimination debug_stripper function_optimization implementation_selector
    layout_optimizer loop_optimization pin_to_host_optimization scoped_allocator_optimization
    shape_optimization
""".split()


def gradient_of_type(kind: str) -> tuple[bool, Any]:
    """Return whether a gradient is registered for a type of operation, and the gradient.

    TensorFlow registers None for operations that are not differentiable.
    """
    registry = _gradient_registry()
    return (True, registry.lookup(kind)) if kind in registry.list() else (False, None)


# tf.custom_gradient registers a function of its own, which calls that of the user.
def module_of_gradient(kind: str) -> str:
    """Return the module in which the function of a `tf.custom_gradient` is; empty if not found."""
    _, gradient = gradient_of_type(kind)
    for name in ("tape_grad_fn", "grad_fn"):
        if gradient is None:
            break
        gradient = inspect.getclosurevars(gradient).nonlocals.get(name)
    return getattr(gradient, "__module__", "")


def replace_gradient_of_type(kind: str, gradient: Any) -> None:
    """Replace a registered gradient; `tf.RegisterGradient` only adds new ones."""
    registry = _gradient_registry()
    registry._registry[kind] = {**registry._registry[kind], "type": gradient}


def _gradient_registry() -> Any:
    return getattr(ops, "gradient_registry", None) or ops._gradient_registry


# TensorFlow knows which workers it is connected to, and at which addresses; nothing public tells.
def addresses_of_workers() -> dict[tuple[str, int], str]:
    """Return the network addresses of the other tasks of the cluster, by job and number."""
    now = context.context().get_server_def()
    if now is None:
        return {}
    tasks = ((job.name, *task) for job in now.cluster.job for task in job.tasks.items())
    own = now.job_name, now.task_index
    return {(job, task): address for job, task, address in tasks if (job, task) != own}


# The public `tf.config.experimental_connect_to_cluster` does this too if it gets the very cluster
# that it got before, which only the caller has. With any other TensorFlow forgets all tensors.
def change_cluster(addresses: Mapping[tuple[str, int], str | None]) -> None:
    """Connect to workers, or leave those whose address is None; tensors on all others stay valid.

    This waits, and keeps all of Python waiting, for every worker that is to stay or to leave,
    except for a leaving worker whose process has ended.
    """
    now = context.context()
    server_def = type(now.get_server_def())()
    server_def.CopyFrom(now.get_server_def())
    jobs = {job.name: job for job in server_def.cluster.job}
    for (name, task), address in addresses.items():
        if address is not None:
            jobs[name].tasks[task] = address
        elif task in jobs[name].tasks:
            del jobs[name].tasks[task]
    now.update_server_def(server_def)
