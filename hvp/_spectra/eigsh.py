"""`hvp.eigsh`: some eigenvalues of an operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg

from hvp._errors import ConvergenceWarning, HvpError
from hvp._operators.symmetric import symmetric_matrix
from hvp._runtime.arguments import check_choice, check_count, check_number
from hvp._runtime.figures import COLOR, axes
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.user_warning import warn
from hvp._spectra.eigenvalues import CHOICES, BlockLanczos, EigenPairs
from hvp._spectra.near_zero import NearZero
from hvp._spectra.probes import Probes, probing
from hvp._vectors.arrays import check_array
from hvp._vectors.nests import unflattened
from hvp._vectors.space import Space

Which = Literal["LA", "SA", "LM", "BE", "near 0"]

# Up to this size, or where a large part of all eigenvalues is asked for, all are computed.
_DENSE, _PART = 256, 8
_DENSE_LARGEST = 4096
# The default of `tol`, by the type of the operator.
_TOLERANCES = {"float32": 1e-4, "float64": 1e-8}
# The default of `max_products`, in units of n, and its least value.
_PRODUCTS, _FEWEST_PRODUCTS = 10, 1000


@dataclass(frozen=True, repr=False)
class EigenResult:
    """Some eigenvalues of an operator, and how accurate they are.

    Attributes
    ----------
    eigenvalues : ndarray
        Shape `(k,)`, in float64: in decreasing order for ``"LA"`` and ``"BE"``, in increasing order
        for ``"SA"``, by decreasing absolute value for ``"LM"`` and by increasing absolute value for
        ``"near 0"``.
    eigenvectors : ndarray
        As columns, of shape `(n, k)`, in the operator's dtype.
    residual_norms : ndarray
        Norms of `A x - lambda x`, computed by products with the eigenvectors, of shape `(k,)`. The
        operator has an eigenvalue at most this far away.
    converged : ndarray of bool
        Whether each residual is within the tolerance, of shape `(k,)`.
    products : int
        Number of products with a vector.
    """

    eigenvalues: np.ndarray
    eigenvectors: np.ndarray
    residual_norms: np.ndarray
    converged: np.ndarray
    products: int
    _space: Space | None = None

    @property
    def nests(self) -> list[Any]:
        """The eigenvectors as nests like the variables of the operator.

        Raises
        ------
        HvpError
            If the operator does not come from this package.
        """
        if self._space is None:
            raise HvpError(
                "the operator has no variables", "an operator of this package", "use eigenvectors"
            )
        return [unflattened(self._space, vector) for vector in self.eigenvectors.T]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Unpack into eigenvalues and eigenvectors, like the results of scipy and NumPy."""
        yield self.eigenvalues
        yield self.eigenvectors

    def __repr__(self) -> str:
        values = np.array2string(self.eigenvalues[:6], precision=4, separator=", ")
        more = f" and {len(self.eigenvalues) - 6} more" if len(self.eigenvalues) > 6 else ""
        return (
            f"EigenResult({values}{more}; {int(self.converged.sum())} of {len(self.converged)} "
            f"converged, residual norms up to {self.residual_norms.max():.2g}, "
            f"{self.products} products)"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the eigenvalues in their order, with bars of the residual norms.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; by default a new figure.

        Returns
        -------
        matplotlib Axes

        Raises
        ------
        HvpError
            If matplotlib is not installed.
        """
        ax = axes(ax)
        places = np.arange(1, len(self.eigenvalues) + 1)
        ax.errorbar(
            places,
            self.eigenvalues,
            yerr=self.residual_norms,
            fmt="o",
            color=COLOR,
            markersize=4,
            capsize=2,
            label="with the norm of its residual",
        )
        ax.axhline(0, color="0.6", linewidth=0.8, linestyle=":")
        ax.set(xlabel="place in the order", ylabel="eigenvalue")
        ax.set_title("Eigenvalues", loc="left")
        ax.legend(frameon=False, fontsize="small")
        ax.xaxis.get_major_locator().set_params(integer=True)
        return ax


@Uninterrupted()
def eigsh(
    A: Any,
    k: int = 6,
    which: Which = "LA",
    *,
    tol: float | None = None,
    max_products: int | None = None,
    v0: Any = None,
    seed: int = 0,
    progress: bool | Literal["always"] = False,
) -> EigenResult:
    """Compute eigenvalues at the ends of a symmetric operator's spectrum, or nearest to zero.

    Parameters
    ----------
    A : HessianOperator, or another operator of this package or of scipy, or a matrix
        Real and symmetric. Its damping is included.
    k : int, optional
        How many eigenvalues to compute, at most `n`.
    which : {"LA", "SA", "LM", "BE", "near 0"}, optional
        The largest, the smallest, those of largest absolute value, those at both ends (half of them
        at each end, with one more of the largest if `k` is odd), or those nearest to zero.
    tol : float, optional
        Upper bound on residual norms, relative to the largest absolute eigenvalue found so far. By
        default 1e-4 in float32, and 1e-8 in float64. The error of a separate eigenvalue is of the
        order of the square of this.
    max_products : int, optional
        Upper bound on the number of products; by default `10 * n`, and at least 1000. A run for
        ``"near 0"`` ends after the step that reaches it, which may take some more.
    v0 : array_like, optional
        Vectors to begin with, of shape `(n,)` or `(n, m)`, such as the eigenvectors of an earlier
        point. They do not change the result, only how soon it is found.
    seed : int, optional
        The random seed.
    progress : bool or "always", optional
        Whether to show the number of products, with tqdm, if the output is a terminal. With
        ``"always"`` it is shown in any case.

    Returns
    -------
    EigenResult
        With `eigenvalues`, `eigenvectors`, `residual_norms` and `converged`. It unpacks into
        eigenvalues and eigenvectors, as the results of scipy's functions do.

    Warns
    -----
    ConvergenceWarning
        If an eigenvalue has not converged.

    Raises
    ------
    InvalidVectorError
        If `v0` has another shape or kind, or entries that are not finite.
    NonFiniteError
        If a product is not finite.
    GraphModeError
        If the function is called while TensorFlow traces a graph.
    HvpError
        If another argument is invalid.

    Notes
    -----
    The method is block Lanczos with thick restarts and full reorthogonalization. Multiple
    eigenvalues are found as often as they occur, because a run with a block of new random vectors
    has to confirm converged values. For ``"near 0"`` the basis grows by solutions of linear systems
    (the shift-invert residual Arnoldi method), each of which takes many products if the operator is
    ill-conditioned. The basis takes memory for about `2 k + 32` vectors of `n` numbers. If `n` is
    at most 256, the dense matrix is computed instead. If `n` is at most 4096, it is computed if
    more than an eighth of all eigenvalues are requested, or if `n` products were not enough.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0, 4.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> values, vectors = hvp.eigsh(H, 2)
    >>> values.round(4), vectors.shape
    (array([16.,  9.]), (4, 2))
    """
    matrix = symmetric_matrix(A, "eigsh")
    size, name = matrix.size, matrix.dtype.name
    check_count(k, "k")
    if k > size:
        raise HvpError(
            f"k is {k}, and the matrix is {size} x {size}", f"at most {size} eigenvalues"
        )
    check_choice(which, "which", get_args(Which))
    tol = _TOLERANCES[name] if tol is None else check_number(tol, "tol")
    # Rounding errors of products remain in residuals.
    tol = max(tol, 8 * float(np.finfo(matrix.dtype.as_numpy_dtype).eps))
    if max_products is None:
        max_products = max(_FEWEST_PRODUCTS, _PRODUCTS * size)
    check_count(max_products, "max_products", 4 * k)
    starts = None
    if v0 is not None:
        dimensions = (2,) if np.ndim(v0) == 2 else (1,)
        v0 = check_array(v0, size, matrix.dtype.as_numpy_dtype, ndims=dimensions, name="v0")
        starts = np.ascontiguousarray(v0.reshape(size, -1).T)
    is_dense = size <= _DENSE or (size <= _DENSE_LARGEST and k * _PART > size)
    choose = CHOICES[which]
    with probing(matrix, progress, seed, None) as probes:
        if is_dense and size <= max_products:
            pairs = _dense(probes, k, choose)
        else:
            run: BlockLanczos | NearZero
            if which == "near 0":
                run = NearZero(probes, k, tol)
            else:
                run = BlockLanczos(probes, k, choose, which == "LM", tol)
            # What takes more products than the whole matrix is better taken from that.
            may_be_dense = size <= _DENSE_LARGEST and max_products >= 2 * size + k
            pairs = run.run(starts, size if may_be_dense else max_products)
            if may_be_dense and (pairs.residual_norms > 2 * tol * pairs.scale).any():
                pairs = _dense(probes, k, choose)
        products = probes.products
    order = choose(pairs.values)
    if which == "BE":
        order = np.argsort(-pairs.values)
    converged = pairs.residual_norms <= 2 * tol * pairs.scale
    result = EigenResult(
        pairs.values[order],
        np.ascontiguousarray(pairs.vectors[order].T),
        pairs.residual_norms[order],
        converged[order],
        products,
        matrix.space if matrix.has_variables else None,
    )
    if not converged.all():
        warn(
            f"{int(np.sum(~converged))} of {k} eigenvalues have not converged after {products} "
            "products: their residual norms are too large; raise max_products or tol",
            ConvergenceWarning,
        )
    return result


def _dense(probes: Probes, k: int, choose: Any) -> EigenPairs:
    """Compute all eigenvalues, and return those that are wanted."""
    dtype = probes.matrix.dtype.as_numpy_dtype
    dense = probes.multiply(np.eye(probes.matrix.size, dtype=dtype)).astype(np.float64)
    values, vectors = scipy.linalg.eigh((dense + dense.T) / 2)
    chosen = choose(values)[:k]
    chosen_vectors = vectors[:, chosen].T.astype(dtype)
    residuals = chosen_vectors.astype(np.float64) @ dense
    residuals -= values[chosen, np.newaxis] * chosen_vectors
    scale = float(np.abs(values).max())
    return EigenPairs(values[chosen], chosen_vectors, np.linalg.norm(residuals, axis=1), scale)
