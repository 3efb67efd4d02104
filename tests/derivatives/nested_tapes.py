"""What TensorFlow's own nested tapes give where nothing corrects them."""

import numpy as np
import tensorflow as tf

from tests.cases import Problem, random, relative_error

MESSAGES = ("registry has no entry", "is not implemented", "unsupported operand", "no gradient")


def is_wrong_in_tensorflow(problem: Problem, hessian: np.ndarray) -> bool:
    """Whether nested tapes raise, have no derivative, or give a wrong Hessian-vector product."""
    variables = problem.tensorflow_variables()
    v = random(2, hessian.shape[0])
    parts = np.split(v, np.cumsum([int(tf.size(w)) for w in variables])[:-1])
    vector = [tf.cast(part.reshape(w.shape), w.dtype) for w, part in zip(variables, parts)]
    try:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                value = problem.loss()
            gradient = inner.gradient(value, variables, unconnected_gradients="zero")
            gradient = [tf.convert_to_tensor(part) for part in gradient]
        product = outer.gradient(gradient, variables, vector, unconnected_gradients="zero")
    except Exception as error:
        return any(message in str(error) for message in MESSAGES)
    product = np.concatenate([np.ravel(tf.convert_to_tensor(part)) for part in product])
    return not relative_error(product, hessian @ v) < 1e-2  # true also where it is NaN
