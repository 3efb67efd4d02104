"""Names of TensorFlow's that are not public: when one moves, this fails first."""

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext


def test_definitions_of_operations():
    definition = op_def_registry.get("RandomUniform")
    assert definition.is_stateful
    assert [argument.name for argument in definition.output_arg] == ["output"]


def test_a_concrete_function_called_with_a_flat_list():
    double = tf.function(lambda a: 2.0 * a).get_concrete_function(tf.TensorSpec([2]))
    assert double._call_flat([tf.ones(2)], double.captured_inputs).numpy().tolist() == [2.0, 2.0]


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
