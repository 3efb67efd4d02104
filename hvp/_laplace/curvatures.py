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
from hvp._spectra.eigsh import eigsh
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
    made: Callable[[list[Block]], FactoredOperator],
    *,
    likelihood: str | None,
    rank: int,
) -> tuple[FactoredOperator, float]:
    """Return the curvature and the loss of the `arguments`: model, loss, variables and data.

    `made` returns the matrix with these blocks.
    """
    if kind in ("kfac", "ekfac"):
        K = (KFAC if kind == "kfac" else EKFAC)(*arguments, likelihood=likelihood, **options)
        return K, K.value
    nest = collect_variables(arguments[2])
    space = Space.of_variables(nest)
    every = np.arange(space.size)
    if kind == "full" and space.size > _LARGEST:
        raise TooLargeError(
            f"the curvature is 'full', and there are {space.size} weights",
            f"at most {_LARGEST}",
            "pass curvature='kfac' or 'low-rank', or fewer weights as subset",
        )
    with GaussNewtonOperator(*arguments, **options) as G:
        if kind == "full":
            values, vectors = eigen(G.to_dense()[np.newaxis], full=True)
            blocks = [_block("exact", nest, space, every, values[0], vectors)]
        elif kind == "low-rank":
            found = eigsh(G, min(rank, space.size), tol=_TOLERANCE)
            values = np.zeros(space.size)
            values[: len(found.eigenvalues)] = found.eigenvalues
            blocks = [_block(kind, nest, space, every, values, reflected(found.eigenvectors))]
        else:
            diagonal = G.diagonal(max_size=space.size)
            ends, blocks = np.cumsum([0, *space.sizes]), []
            for places in groups(space.paths).values():
                own = np.concatenate([every[ends[place] : ends[place + 1]] for place in places])
                blocks.append(_block("diagonal", nest, space, own, diagonal[own], None))
        return made(blocks), G.value


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
