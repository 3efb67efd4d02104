"""Random programs: products of both engines, with and without recompute, against differences.

Differences of float64 gradients: no second derivative of TensorFlow's enters.
"""

import numpy as np
import pytest
from hypothesis import given

import hvp
from hvp._derivatives.missing import WRONG_AT_VALUES
from tests.cases import examples, long, random
from tests.fuzz.programs import Program, programs
from tests.fuzz.report import REPORT
from tests.fuzz.steps import FAMILIES

# Relative to the largest entry of the product; and how far from each other differences may be.
_CLOSE, _SETTLED = 1e-6, 1e-7
_CLOSE_IN_FLOAT32 = 2e-2
# Above this squares and cubes overflow in float32, and operators may refuse.
_LARGE_IN_FLOAT32 = 1e12
WAYS = {
    "graph": {},
    "tape": {"engine": "tape"},
    "graph, recomputed": {"recompute": True},
}
# One of these besides.
MORE_WAYS = {
    "tape, recomputed": {"engine": "tape", "recompute": True},
    "graph, float32": {"dtype": "float32"},
    "graph, XLA where it can": {"jit_compile": "auto"},
}


def product(program, v, *, dtype="float64", recompute=False, **options):
    made = program.made(dtype, recompute)
    with hvp.HessianOperator(made.loss, made.variables, **options) as H:
        if H.stats.engine != options.get("engine", "graph"):
            REPORT.fallbacks += 1
        # In the order of the nest, which is not that of the variables in dictionaries.
        order = H.flatten(unflattened(made, np.arange(made.size, dtype=np.float64)))
        result, gradient = np.empty(made.size), np.empty(made.size)
        places = order.astype(int)
        result[places], gradient[places] = H @ v[places].astype(H.dtype), H.gradient
        # Three columns that have nothing to do with each other.
        columns = random(made.size, made.size, 2, dtype="float64")
        columns = np.concatenate([v[places][:, np.newaxis], columns], axis=1).astype(H.dtype)
        apart = H @ columns - np.stack([H @ column for column in columns.T], axis=1)
    return result, np.abs(apart).max(), gradient


def unflattened(made, vector):
    """A nest like the variables, out of one vector in the order they were made in."""
    parts, start = {}, 0
    for variable in made.list:
        size = int(np.prod(variable.shape))
        parts[id(variable)] = vector[start : start + size].reshape(variable.shape)
        start += size
    return replaced(made.variables, parts)


def replaced(nest, parts):
    if isinstance(nest, dict):
        return {name: replaced(value, parts) for name, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(replaced(value, parts) for value in nest)
    return parts[id(nest)]


def check(program):
    """Compare all ways with differences; report what could not be compared."""
    truth = program.made()
    v = random(program.seed + 7, truth.size, dtype="float64")
    v /= np.linalg.norm(v)
    zero = truth.gradient()(np.zeros(truth.size))
    if not np.isfinite(zero).all() or not np.isfinite(truth.loss().numpy()):
        return REPORT.add("not finite", truth)
    want, apart = truth.differences(v)
    scale = max(np.abs(want).max(), 1e-3 * np.abs(zero).max(), 1e-6)
    if not apart <= _SETTLED * scale:
        return REPORT.add("differences do not settle", truth)
    largest = max(scale, np.abs(zero).max(), abs(float(truth.loss())))
    more = sorted(MORE_WAYS)[program.seed % len(MORE_WAYS)]
    for way, options in {**WAYS, more: MORE_WAYS[more]}.items():
        try:
            result, apart_in_block, gradient = product(program, v, **options)
        except hvp.NonFiniteError:
            if options.get("dtype") == "float32" and largest > _LARGE_IN_FLOAT32:
                continue
            raise
        except hvp.SecondDerivativeError as error:
            if not any(f"{kind} at" in str(error) for kind in WRONG_AT_VALUES):
                raise
            if options.get("recompute"):
                continue  # what values it has there cannot be looked at
            return REPORT.add("refused at zeros or equal values", truth)
        if options.get("dtype") == "float32":
            # Only where the gradient, at least, is not all rounding.
            if np.abs(gradient - zero).max() > 1e-4 * np.abs(zero).max():
                continue
            close = _CLOSE_IN_FLOAT32
        else:
            np.testing.assert_allclose(
                gradient, zero, atol=1e-9 * np.abs(zero).max() + 1e-14, err_msg=way
            )
            close = _CLOSE
        np.testing.assert_allclose(result, want, rtol=0, atol=close * scale, err_msg=way)
        # The columns are longer than v, which is of length one.
        exact = (1e-3 if close > _CLOSE else 1e-9) * np.sqrt(truth.size)
        assert apart_in_block <= exact * scale, f"{way}: a block differs from its columns"
    return REPORT.add("agree", truth)


# Their seeds choose one of the three other ways each.
FIXED = {
    "layers and indexing": Program(
        [("layers", "attention"), ("indexing", "gather")], 2, 3, 2, "corner", "dict", (0,)
    ),
    "loops and linear algebra": Program(
        [("control flow", "while"), ("linear algebra", "inverse")], 2, 2, 1, "huber", "list", (0, 1)
    ),
    "reductions and functions": Program(
        [("reductions", "softmax"), ("functions", "gelu")], 3, 2, 0, "no slope", "nested", (1,)
    ),
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.few(1)
def test_products_of_fixed_programs_are_differences_of_gradients(name):
    agreed = REPORT.outcomes["agree"]
    with REPORT.mismatch(FIXED[name]):
        check(FIXED[name])
    assert REPORT.outcomes["agree"] == agreed + 1  # nothing kept it from being compared


# The first example is always the simplest program; random ones come with `make fuzz`.
@pytest.mark.random
@pytest.mark.parametrize("family", [long(family) for family in FAMILIES])
def test_products_are_differences_of_gradients(family):
    @examples(1)
    @given(programs(family))
    def run(program):
        with REPORT.mismatch(program):
            check(program)

    run()


@pytest.mark.parametrize(
    ("family", "name"), [long(family, name) for family, steps in FAMILIES.items() for name in steps]
)
def test_each_step_alone(family, name):
    for loss in ("mean square", "corner", "no slope"):
        program = Program([(family, name)], 3, 3, 1, loss, "list", (0,))
        with REPORT.mismatch(program):
            check(program)
