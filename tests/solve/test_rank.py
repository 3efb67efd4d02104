"""Preconditioners of the rank that pays for a number of right-hand sides."""

import numpy as np
import pytest

import hvp
from tests import inside
from tests.cases import crossed
from tests.solve.systems import columns, matrix, operator

N, DAMPING = 300, 1.0
DECAY = np.geomspace(1e4, 1e-3, N)
FLAT = np.linspace(1, 2, N)


def count(A, k, M, method="cg", **options):
    """Return the number of products; the solution is compared with a dense one."""
    b = columns(N, k)
    options = {"damping": DAMPING, "rtol": 1e-8, **options}
    result = hvp.solve(A, b, method=method, M=M, **options)
    assert result.converged.all()
    dense = A if isinstance(A, np.ndarray) else A.to_dense()
    right = np.linalg.solve(dense + options["damping"] * np.eye(N), b)
    assert np.linalg.norm(result.x - right) < 1e-6 * np.linalg.norm(right)
    return result.products


@pytest.mark.parametrize(
    ("kind", "method", "k"), crossed(["operator", "matrix"], ["cg", "block_cg"], [1, 16])
)
@pytest.mark.few(1)
def test_it_saves_products_where_eigenvalues_decay(kind, method, k):
    A = matrix(DECAY)
    A = operator(A) if kind == "operator" else A
    without, rank_8 = (count(A, k, M, method) for M in (None, hvp.NystromPreconditioner(A, 8)))
    automatic = count(A, k, "auto", method)
    assert automatic < 0.7 * without
    assert automatic < 0.9 * (rank_8 + 8)


def test_the_rank_grows_with_the_number_of_columns():
    b = columns(N, 64)
    few, many = (inside.rank_that_pays(matrix(DECAY), b[:, :k], DAMPING) for k in (1, 64))
    assert 8 < few < many <= N // 2


@pytest.mark.parametrize("method", ["cg", "block_cg"])
@pytest.mark.few(1)
def test_where_nothing_pays_it_costs_eight_products(method):
    A = matrix(FLAT)
    assert count(A, 3, "auto", method) <= count(A, 3, None, method) + 8


@pytest.mark.parametrize("options", [{"damping": 0.0}, {"method": "minres"}])
@pytest.mark.few(1)
def test_where_nothing_is_known_there_is_no_preconditioner(options):
    A = matrix(FLAT)
    assert count(A, 2, "auto", **options) == count(A, 2, None, **options)


def test_the_damping_of_the_operator_counts():
    H = operator(matrix(DECAY))
    assert count(H.damped(DAMPING), 4, "auto", damping=0.0) == count(H, 4, "auto")


def test_small_systems_are_still_solved_exactly():
    A = matrix(FLAT[:40])
    assert hvp.solve(A, np.ones(40), M="auto", damping=1.0).method == "exact"


def test_zero_right_hand_sides_cost_nothing():
    result = hvp.solve(matrix(DECAY), np.zeros((N, 2)), method="cg", M="auto", damping=1.0)
    assert not result.x.any()
    assert result.products == 0


@pytest.mark.long
def test_a_solver_begins_with_a_sketch_and_remembers_it():
    A = matrix(DECAY)
    solver = hvp.Solver(A)
    fresh = hvp.solve(A, columns(N, 16), method="block_cg", damping=DAMPING, rtol=1e-8)
    counts = []
    for seed in (1, 2, 3):
        b = columns(N, 16, seed)
        result = solver.solve(b, method="block_cg", damping=DAMPING, rtol=1e-8)
        right = np.linalg.solve(A + DAMPING * np.eye(N), b)
        assert np.linalg.norm(result.x - right) < 1e-6 * np.linalg.norm(right)
        counts.append(result.products)
    assert counts[0] < 0.7 * fresh.products
    assert max(counts[1:]) < counts[0]


@pytest.mark.few(0)
def test_recycling_rests_where_it_does_not_pay():
    """Of operators with nothing in common, old directions know nothing: one solve finds out."""
    b = columns(N, 1)[:, 0]
    total = fresh = 0
    A = matrix(DECAY)
    solver = hvp.Solver(A)
    for seed in range(12):
        A[:] = matrix(np.geomspace(100, 1, N) if seed else DECAY, seed)
        solver.changed()
        result = solver.solve(b, method="block_cg", damping=DAMPING)
        assert np.linalg.norm(b - A @ result.x - DAMPING * result.x) <= 1.1e-5 * np.linalg.norm(b)
        if seed > 1:
            total += result.products
            fresh += hvp.solve(A, b, method="block_cg", damping=DAMPING).products
    assert total < 1.1 * fresh
