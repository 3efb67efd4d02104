"""The mean curvature of a Laplace approximation, as a matrix whose eigenvectors are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from hvp._errors import TooLargeError
from hvp._kronecker.block import Block, eigen, exact, reflected
from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.kfac import EKFAC, KFAC
from hvp._operators.gauss_newton import GaussNewtonOperator
from hvp._operators.symmetric import evaluation_of
from hvp._spectra.eigsh import eigsh
from hvp._vectors.resources import Resource
from hvp._vectors.selection import groups
from hvp._vectors.space import Space
from hvp._vectors.variables import VariableNest, collect_variables

Curvature = Literal["kfac", "ekfac", "full", "diagonal", "low-rank"]
# A matrix of more rows is not formed.
_LARGEST = 4096
# Eigenvectors are wanted up to this part of the largest eigenvalue.
_TOLERANCE = 1e-6


def curvature_of(
    kind: Curvature,
    arguments: Sequence[Any],
    options: dict[str, Any],
    made: Callable[[list[Block], Sequence[Resource]], FactoredOperator],
    *,
    likelihood: str | None,
    rank: int,
) -> Callable[[], tuple[FactoredOperator, float]]:
    """Return a function that returns the curvature and the loss at the weights of its call.

    The `arguments` are model, loss, variables and data, which are traced once. `made` returns the
    matrix with these blocks, which were computed from some variables.
    """
    nest = collect_variables(arguments[2])
    size = Space.of_variables(nest).size
    if kind == "full" and size > _LARGEST:
        raise TooLargeError(
            f"the curvature is 'full', and there are {size} weights",
            f"at most {_LARGEST}",
            "pass curvature='kfac' or 'low-rank', or fewer weights as subset",
        )
    matrix: Any
    if kind in ("kfac", "ekfac"):
        matrix = (KFAC if kind == "kfac" else EKFAC)(*arguments, likelihood=likelihood, **options)
    else:
        matrix = GaussNewtonOperator(*arguments, **options)
    is_evaluated = True

    def evaluated() -> tuple[FactoredOperator, float]:
        nonlocal is_evaluated
        if not is_evaluated:
            matrix.refresh()
        is_evaluated = False
        if isinstance(matrix, KFAC):
            return matrix, matrix.value
        blocks, loss = _blocks(kind, matrix, nest, rank), matrix.value
        reads = evaluation_of(matrix).snapshot.facts.reads
        matrix.close()  # which frees memory; what was traced remains
        return made(blocks, reads), loss

    return evaluated


def _blocks(kind: Curvature, G: GaussNewtonOperator, nest: VariableNest, rank: int) -> list[Block]:
    space = Space.of_variables(nest)
    every = np.arange(space.size)
    if kind == "full":
        values, vectors = eigen(G.to_dense()[np.newaxis], full=True)
        return [_block("exact", nest, space, every, values[0], vectors)]
    if kind == "low-rank":
        found = eigsh(G, min(rank, space.size), tol=_TOLERANCE)
        values = np.zeros(space.size)
        values[: len(found.eigenvalues)] = found.eigenvalues
        return [_block(kind, nest, space, every, values, reflected(found.eigenvectors))]
    diagonal = G.diagonal(max_size=space.size)
    ends, blocks = np.cumsum([0, *space.sizes]), []
    for places in groups(space.paths).values():
        own = np.concatenate([every[ends[place] : ends[place + 1]] for place in places])
        blocks.append(_block("diagonal", nest, space, own, diagonal[own], None))
    return blocks


def _block(
    kind: str,
    nest: VariableNest,
    space: Space,
    entries: np.ndarray,
    values: np.ndarray,
    left: np.ndarray | None,
) -> Block:
    ends = np.cumsum(space.sizes)
    places = sorted(set(np.searchsorted(ends, entries, side="right").tolist()))
    names = tuple(nest.names[place] for place in places)
    scales = exact(np.maximum(values.astype(np.float64), 0))
    return Block.of(names, kind, exact(entries), (left, None), scales, space.dtype)
