"""The memory limit in numbers, recomputed from the formulas that the module states."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvp
from hvp._data.budget import Budget, MemoryFraction, amount
from tests.cases import examples

SIZES = {7: 7, 2.9: 2, np.int64(3000): 3000, "12": 12, "3 bytes": 3, "2m": 2 * 10**6, "1T": 10**12}
SIZES |= {" 1.5 KiB ": 1536, "1.5kB": 1500, "2MiB": 2 * 2**20, "1gib": 2**30, "0.5TiB": 2**39}
counts, limits = st.integers(0, 10**6), st.integers(1, 10**9)


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text):
    budget, limit = Budget(text), SIZES[text]
    assert (budget.can_hold(limit), budget.can_hold(limit + 1)) == (True, False)
    assert MemoryFraction(text, 1 / 4).nbytes == max(1, limit // 4)


@examples(200)
@given(limits, counts, st.integers(1, 10**6), st.sampled_from([1, 0.5, 0.1]))
def test_the_number_of_examples_in_a_batch(limit, shared, each, part):
    budget = Budget(MemoryFraction(limit, part))
    limit = max(1, int(limit * part))
    # The largest n with 3 (shared + n each) <= limit / 4, or else with <= limit.
    for times in (12, 3):
        size = (limit - times * shared) // (times * each)
        if size >= 1:
            assert budget.batch_size(shared, each) == size
            return
    with pytest.raises(hvp.TooLargeError):
        budget.batch_size(shared, each)


@examples(200)
@given(limits, st.lists(counts, max_size=5), counts)
def test_pieces_and_what_is_held_beside_the_largest_batch_so_far(limit, sizes, size):
    budget = Budget(limit)
    for earlier in sizes:
        budget.record(earlier)
    assert budget.can_hold(size) == (size + 3 * max(sizes, default=0) <= limit)
    assert budget.pieces(size) == max(1, (3 * size + limit - 1) // limit)
    assert Budget(None).pieces(size) == 1


@pytest.mark.parametrize(("examples_of_batch", "part"), [(1, 1), (8, 1), (8, 0.25)])
@pytest.mark.parametrize("expected", [400, 2717, 345000, 2**30])
def test_the_limit_that_a_message_advises_is_enough(expected, part, examples_of_batch):
    one = expected / examples_of_batch
    error = Budget(MemoryFraction("40B", part)).too_small(expected, examples_of_batch)
    assert amount(3 * one) in error.problem
    assert ("40 bytes" in error.problem, "10 bytes" in error.problem) == (True, part < 1)
    advised = MemoryFraction(re.search(r"[\d.e+]+ \w+$", error.expected)[0], part)
    assert Budget(advised).batch_size(0, one) >= 1
    assert advised.nbytes < 1.03 * 3 * one + 1


@pytest.mark.parametrize("nbytes", [1, 999, 1023, 2**10, 1010 * 2**10, 3e9, 1023.6 * 2**20])
def test_amounts_that_messages_show_can_be_passed(nbytes):
    assert MemoryFraction(amount(nbytes), 1).nbytes == pytest.approx(nbytes, rel=0.005)
