"""Private names of TensorFlow: when one moves, this fails first."""

import inspect
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context, executor, record
from tensorflow.python.framework import op_def_registry, ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hvp._graphs.private import (
    DISABLE_ORDER,
    GRADIENT_TYPE,
    addresses_of_workers,
    call_flat,
    copies_of,
    may_record,
    module_of_gradient,
    resumed,
    send_operations_one_by_one,
)


def test_definitions_of_operations():
    definition = op_def_registry.get("RandomUniform")
    assert definition.is_stateful
    assert [argument.name for argument in definition.output_arg] == ["output"]


def test_the_registry_of_gradients():
    registry = getattr(ops, "gradient_registry", None) or ops._gradient_registry
    entry = registry._registry["Sin"]
    assert entry["type"] is registry.lookup("Sin")
    assert "Sin" in registry.list()
    assert "SoftsignGrad" in registry.list()  # which `hvp` has registered


def test_what_a_tape_keeps_of_an_operation_that_is_taken_for_a_constant():
    seen = []

    def gradient(operation, upstream):
        seen.append(operation.inputs)
        return [None, None]

    x = tf.ones((1, 2, 2, 1))
    registry = getattr(ops, "gradient_registry", None) or ops._gradient_registry
    before = registry._registry["ResizeBilinearGrad"]
    registry._registry["ResizeBilinearGrad"] = {**before, "type": gradient}
    try:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.raw_ops.ResizeBilinearGrad(grads=x, original_image=x)
        tape.gradient(y, x)
    finally:
        registry._registry["ResizeBilinearGrad"] = before
    # TensorFlow 2.16 takes it for an operation whose gradient is not known, and keeps all.
    assert seen == [None] or len(seen[0]) == 2


def test_a_concrete_function_called_with_a_flat_list():
    double = tf.function(lambda a: 2.0 * a).get_concrete_function(tf.TensorSpec([2]))
    assert double._call_flat([tf.ones(2)], double.captured_inputs).numpy().tolist() == [2.0, 2.0]


def test_the_copies_of_a_variable_by_the_handle_of_one():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        variable = tf.Variable([1.0])
    graph = tf.function(lambda: 2.0 * variable).get_concrete_function()
    (captured,) = graph.captured_inputs
    assert [copy.device[-5:] for copy in copies_of(captured)] == ["CPU:0", "CPU:1"]
    assert copies_of(tf.Variable([1.0]).handle) == []


def test_whether_a_trace_is_for_xla():
    seen = []

    def look(a):
        seen.append(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
        return a

    tf.function(look)(tf.ones(2))
    tf.function(look, jit_compile=True)(tf.ones(2))
    tf.function(
        lambda a: tf.while_loop(lambda i, a: i < 1, lambda i, a: (i + 1, look(a)), (0, a)),
        jit_compile=True,
    )(tf.ones(2))
    assert seen == [False, True, True]


def test_one_operation_for_all_that_records():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape, tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as forward:
        tape.watch(x)
        assert record.should_record_backprop([x])
        with record.stop_recording():
            y = x * x
        record.record_operation("Tripled", [y], [x], lambda dy: [3.0 * dy])
    assert tape.gradient(y, x).numpy() == 3.0
    assert forward.jvp(y).numpy() == 3.0


def test_tapes_record_where_all_were_stopped():
    x = tf.constant(3.0)
    with record.stop_recording():
        with resumed(), tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        with tf.GradientTape() as other:
            other.watch(x)
            z = x * x
    assert tape.gradient(y, x).numpy() == 6.0
    assert other.gradient(z, x) is None


def test_what_tapes_and_accumulators_follow():
    x, y, z = tf.constant(3.0), tf.constant(3.0), tf.Variable(3.0, trainable=False)
    assert not may_record([x])
    with tf.GradientTape() as tape, tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)):
        tape.watch([y, z])
        assert may_record([x])
        assert may_record([y])
        assert may_record([z.handle])
        assert not may_record([tf.constant(3.0)])


def test_options_of_a_call():
    """A function can be optimized in another way than others in this process."""
    options = context.context().function_call_options
    config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    other = context.FunctionCallOptions(options.executor_type, config)
    assert other.config_proto_serialized != options.config_proto_serialized
    double = tf.function(lambda a: 2.0 * a).get_concrete_function(tf.TensorSpec([2]))
    context.context().function_call_options = other
    try:
        assert context.context().function_call_options is other
        assert double._call_flat([tf.ones(2)], double.captured_inputs).numpy().tolist() == [2, 2]
    finally:
        context.context().function_call_options = options


def test_a_brief_call_leaves_out_some_optimizations_and_keeps_what_is_set():
    seen = []

    class Function:
        def _call_flat(self, tensors, captured):
            options = context.context().function_call_options
            config = tf.compat.v1.ConfigProto.FromString(options.config_proto_serialized)
            seen.append(config.graph_options.rewrite_options)

    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        call_flat(Function(), [], [], light_optimization=False)
        call_flat(Function(), [], [], light_optimization=True)
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": True, **before})
    plain, brief = seen
    assert brief.remapping == plain.remapping == plain.OFF
    assert brief.meta_optimizer_iterations == brief.ONE != plain.meta_optimizer_iterations
    assert brief.loop_optimization == brief.OFF != plain.loop_optimization


def test_a_brief_call_leaves_the_options_alone():
    double = tf.function(lambda a: 2.0 * a).get_concrete_function(tf.TensorSpec([2]))
    before = context.context().function_call_options
    assert call_flat(double, [tf.ones(2)], [], light_optimization=True).numpy().tolist() == [
        2.0,
        2.0,
    ]
    assert context.context().function_call_options is before
    checked = tf.function(lambda a: tf.debugging.check_numerics(a, "entries"), autograph=False)
    broken = checked.get_concrete_function(tf.TensorSpec([2]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        call_flat(broken, [tf.fill([2], np.nan)], [], light_optimization=True)
    assert context.context().function_call_options is before


def test_the_executor_of_a_thread():
    streams = inspect.signature(executor.new_executor).parameters["enable_streaming_enqueue"]
    assert streams.default is True
    done = []

    def work():
        forget_errors = send_operations_one_by_one()
        done.append((tf.ones(2) + 1.0).numpy().tolist())
        forget_errors()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [[2.0, 2.0]]


def test_the_workers_that_tensorflow_is_connected_to():
    assert context.context().get_server_def() is None
    assert callable(context.context().update_server_def)
    assert addresses_of_workers() == {}


def test_a_function_without_order_runs_nothing_but_what_its_results_need():
    variable = tf.Variable(0.0)

    def count(x):
        variable.assign_add(1.0)
        return 2.0 * x

    for attributes, expected in [({DISABLE_ORDER: True}, 0.0), (None, 1.0)]:
        variable.assign(0.0)
        function = tf.function(count, autograph=False, experimental_attributes=attributes)
        assert function(tf.ones(2)).numpy().tolist() == [2.0, 2.0]
        assert variable.numpy() == expected


def test_the_function_of_a_custom_gradient_tells_its_module():
    @tf.custom_gradient
    def own(x):
        return 2 * x, lambda upstream: 2 * upstream

    def found(function):
        graph = tf.function(function).get_concrete_function(tf.TensorSpec([2])).graph
        [kind] = [
            operation.get_attr(GRADIENT_TYPE).decode()
            for operation in graph.get_operations()
            if operation.type == "IdentityN"
        ]
        return module_of_gradient(kind)

    assert found(own) == __name__
    assert found(tf.nn.silu).startswith("tensorflow.")
    assert module_of_gradient("Tanh") == ""
