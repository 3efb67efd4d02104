"""Every public use on every family of models, against dense matrices in float64.

A raw error of TensorFlow or Python is a failure. What is refused names what to do instead, which
the table tries.
"""

import functools
import random as python_random

import pytest

import hvp
from tests.cases import long
from tests.uses.families import FAMILIES
from tests.uses.uses import USES, Subject

subject = functools.lru_cache(maxsize=2)(Subject)

# These divide the data, or take examples one by one.
DIVIDING = {
    name for name in USES if name.startswith(("influence", "kronecker", "factors", "laplace"))
} | {
    "gradients by token",
    "fisher: empirical",
    "fisher: type-2",
    "fisher: monte-carlo",
    "gauss newton",
    "option: batches",
    "option: devices",
    "option: memory limit",
    "option: streamed",
}


def refused(use, family):
    """What is refused, the words that the error must have, and the use that it leads to."""
    if use == "option: recompute" and not is_keras(family):
        return "hvp.recompute|sublayers", "product"
    if FAMILY_COUPLES[family] and use in DIVIDING - RIGHT_WHEN_COUPLED:
        return "independent|depends on several|mix examples|training=False", "product"
    return None


def is_keras(family):
    made = FAMILIES[family]("float32").variables
    return hasattr(made, "layers") and type(made).__module__.startswith("keras")


FAMILY_COUPLES = {name: name == "batch normalization in training" for name in FAMILIES}
# The output loss of these is a mean, whatever the model does.
RIGHT_WHEN_COUPLED = {name for name in DIVIDING if name.startswith(("fisher", "gauss newton"))}


# These take long, and are paired with each other by `make test-all` alone.
LONG_FAMILIES = ("lstm", "gru", "recurrent", "loop", "scan", "bidirectional")
LONG_FAMILIES += ("ragged", "map_fn", "branch", "list")
# Not at all by default.
LONGEST = ("lstm in a loop", "masked bidirectional", "bidirectional", "convolutional lstm")
LONGEST += ("stacked lstm",)
LONG_USES = ("factors", "fisher", "gradients by", "influence", "inverse", "jacobian", "newton")
LONG_USES += ("derivative", "laplac", "minimize", "optimizer", "option", "report")
LONG_USES += ("block", "eigenvalues", "low precision", "precondition", "slice", "solve", "trace")


def table():
    """Return all pairs; those that run by default have each use and each other family once."""
    chance = python_random.Random(0)
    short = [name for name in FAMILIES if not is_long(name, LONG_FAMILIES)]
    uses = list(USES)
    chance.shuffle(short)
    chance.shuffle(uses)
    cheap = [use for use in uses if not is_long(use, LONG_USES)]
    longer = [name for name in FAMILIES if is_long(name, LONG_FAMILIES)]
    longer = [name for name in longer if name not in LONGEST]
    always = {(cheap[i % len(cheap)], family) for i, family in enumerate(longer)}
    others = [use for use in uses if use not in dict(always)]
    always |= {(use, short[i % len(short)]) for i, use in enumerate(others)}
    pairs = [(use, family) for family in FAMILIES for use in USES]
    return [pair if pair in always else long(*pair) for pair in pairs]


def is_long(name, words):
    return any(word in name for word in words)


@pytest.mark.parametrize(("use", "family"), table())
@pytest.mark.filterwarnings("ignore::hvp.ConvergenceWarning")
def test_a_use_of_a_family(use, family, capfd):
    expected = refused(use, family)
    if expected is None:
        USES[use](subject(family))
    else:
        words, instead = expected
        with pytest.raises(hvp.HvpError, match=words):
            USES[use](subject(family))
        USES[instead](subject(family))
    assert "pfor" not in capfd.readouterr().err
