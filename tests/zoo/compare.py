"""Comparisons for one model: `python -m tests.zoo.compare NAME` prints its row as JSON."""

from __future__ import annotations

import json
import re
import sys
import traceback
from dataclasses import asdict, dataclass

import keras
import numpy as np
import tensorflow as tf

import hvp
from tests.cases import Problem, flat_gradient, relative_error
from tests.zoo.models import DTYPES, MODELS, NOT_RECOMPUTED, PARTLY, REFUSED, SLOW

# Largest relative errors: against differences of gradients, and where only rounding may differ.
BOUNDS = {
    "float64": (1e-5, 1e-9),
    "float32": (1e-2, 1e-4),
    PARTLY: (1e-3, 1e-6),
    "mixed_float16": (5e-2, 1e-2),
    "mixed_bfloat16": (2e-1, 5e-2),
}
STENCIL = {1: 2 / 3, 2: -1 / 12}  # of order 4: it reaches over fewer kinks than one of order 8
STEPS = np.logspace(0, -7, 15)


@dataclass
class Row:
    """A line of the table, and whether it is as it should be."""

    model: str
    parameters: int | str = ""
    variables: int | str = ""
    dtype: str = ""
    engine: str = ""
    differences: str = ""
    block: str = ""
    recompute: str = ""
    note: str = ""
    passed: bool = True

    def check(self, column: str, error: float, bound: float) -> None:
        """Enter an error; the row fails if it is above the bound, or NaN."""
        setattr(self, column, f"{error:.0e}")
        self.expect(error <= bound, f"{column}: {error:.0e} is above {bound:.0e}")

    def expect(self, holds: bool, note: str) -> None:
        """Let the row fail unless something holds."""
        if not holds:
            self.passed = False
            self.remark(note)

    def remark(self, note: str) -> None:
        """Add to the note."""
        self.note = "; ".join(filter(None, [self.note, note]))


def reason(error: hvp.HvpError) -> str:
    """Return what was refused, without where."""
    return re.split(r" at '|; | \(|: ", error.problem)[0]


def build(name: str, policy: str) -> Problem:
    """Return a model's problem in the given precision, with the same weights each time."""
    policy = "float64" if policy == PARTLY else policy
    if policy in ("float32", "float64"):
        keras.config.set_floatx(policy)
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    return MODELS[name](keras.config.floatx())


class Gradient:
    """TensorFlow's own derivatives of a problem, where its variables are."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.variables = problem, problem.tensorflow_variables()
        self._sizes = np.cumsum([int(tf.size(v)) for v in self.variables])[:-1]
        self._values = [v.numpy() for v in self.variables]
        # Random seeds and moving averages, which an evaluation changes.
        state = getattr(problem.variables, "non_trainable_variables", [])
        self._state = [(s, s.value.numpy()) for s in state]
        self._gradient = tf.function(lambda: flat_gradient(problem, self.variables))

    def _change(self, change: np.ndarray) -> None:
        """Set all variables to what they were at first, plus a change."""
        parts = np.split(change, self._sizes)
        for variable, value, part in zip(self.variables, self._values, parts):
            variable.assign(value + part.reshape(value.shape))
        for variable, value in self._state:
            variable.assign(value)

    def _at(self, change: np.ndarray) -> np.ndarray:
        self._change(change)
        return self._gradient().numpy().astype("float64")

    def differences(self, v: np.ndarray, enough: float) -> tuple[np.ndarray, float]:
        """Return the derivative along a unit vector, and how far two neighbouring steps differ.

        Of all steps the two neighbours that agree best are believed.
        """
        best, apart, before = v, np.inf, None
        for step in STEPS:
            both = (
                (c, self._at(k * step * v) - self._at(-k * step * v)) for k, c in STENCIL.items()
            )
            now = sum(c * difference for c, difference in both) / step
            if before is not None and relative_error(before, now) < apart:
                best, apart = now, relative_error(before, now)
            if apart < enough:
                break
            before = now
        self._change(0 * v)
        return best, apart

    def nested_tapes(self, v: np.ndarray) -> np.ndarray:
        """Return the product by a tape over a tape."""

        @tf.function
        def product() -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(self.variables)
                gradient = flat_gradient(self.problem, self.variables)
            along = tape.gradient(gradient, self.variables, v, unconnected_gradients="zero")
            return tf.concat([tf.reshape(tf.convert_to_tensor(p), [-1]) for p in along], 0)

        return product().numpy()


def products(name: str, problem: Problem, V: np.ndarray, row: Row, bound: float) -> np.ndarray:
    """Multiply with three vectors: one by one, together, and with recomputation."""
    with hvp.HessianOperator(problem.loss, problem.variables, data=problem.data) as H:
        columns = np.stack([H @ v for v in V.T], axis=1)
        row.check("block", relative_error(H @ V, columns), bound)
        row.engine = H.stats.engine
        row.expect(row.engine == "graph", "not the graph engine")
        row.remark(H.stats.note)
    matrix = V.T.astype("float64") @ columns
    asymmetry = relative_error(matrix, matrix.T)
    row.expect(asymmetry <= bound, f"asymmetry {asymmetry:.0e}")
    if name in SLOW or not isinstance(problem.variables, keras.Model):
        row.recompute = "skipped: slow" if name in SLOW else "not a Keras model"
        return columns
    refusal = ""
    try:
        with hvp.HessianOperator(
            problem.loss, problem.variables, data=problem.data, recompute=True
        ) as H:
            row.check("recompute", relative_error(H @ V[:, 0], columns[:, 0]), bound)
    except hvp.RecomputeError as error:
        refusal = row.recompute = reason(error)
    expected = NOT_RECOMPUTED.get(name, "")
    row.expect(expected in refusal and bool(expected) == bool(refusal), "unexpected")
    return columns


def compare(name: str) -> Row:
    """Make all comparisons for a model."""
    policy = DTYPES.get(name, "float64")
    bound, rounding = BOUNDS[policy]
    problem = build(name, policy)
    variables = problem.tensorflow_variables()
    size = sum(int(tf.size(v)) for v in variables)
    row = Row(name, size, len(variables), policy)
    V = np.random.default_rng(0).standard_normal((size, 3))
    V = (V / np.linalg.norm(V, axis=0)).astype(variables[0].dtype.as_numpy_dtype)
    try:
        columns = products(name, problem, V, row, rounding)
    except hvp.HvpError as error:
        row.engine = "refused"
        row.remark(reason(error))
        row.expect(bool(REFUSED.get(name)) and REFUSED[name] in str(error), "unexpected")
        return row
    row.expect(name not in REFUSED, "should have been refused")
    gradient = Gradient(build(name, "float32") if "mixed" in policy else problem)
    derivative, apart = gradient.differences(V[:, 0].astype("float64"), bound / 1e4)
    if apart <= bound / 10:
        row.check("differences", relative_error(columns[:, 0], derivative), bound)
    else:
        row.differences = "not settled"
        error = relative_error(columns[:, 0], gradient.nested_tapes(V[:, 0]))
        row.expect(error <= rounding, "differs from nested tapes")
        row.remark(f"differences settled to {apart:.0e}, nested tapes differ by {error:.0e}")
    return row


def main(name: str) -> None:
    """Print the row, as the last line."""
    try:
        row = compare(name)
    except Exception as error:
        traceback.print_exc()
        row = Row(name, note=f"raised {type(error).__name__}", passed=False)
    print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main(sys.argv[1])
