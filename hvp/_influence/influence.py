"""Influence functions: what leaving out training examples does to weights and to other losses."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import tensorflow as tf
from numpy.lib.format import open_memmap

from hvp._data.budget import Share
from hvp._errors import (
    CheckpointError,
    ConvergenceWarning,
    HvpError,
    InvalidDataError,
    StaleOperatorError,
    line_of,
)
from hvp._keras.compiled_loss import loss_of_model
from hvp._operators.hessian import HessianOperator
from hvp._operators.operator import core_of
from hvp._runtime.arguments import check_count
from hvp._runtime.checkpoint import Checkpoint
from hvp._runtime.digest import digest
from hvp._runtime.guard import OneProcess
from hvp._runtime.progress import check_progress, progress_bar
from hvp._runtime.strategies import outside_strategies
from hvp._snapshots.example_gradients import ExampleData, ExampleGradients
from hvp._solve.inverses import ArnoldiInverse, ExactInverse, NeumannInverse
from hvp._solve.solve import solve

_KRYLOV = ("cg", "block_cg", "minres")
_INVERSES: dict[str, Any] = {
    "exact": ExactInverse,
    "neumann": NeumannInverse,
    "arnoldi": ArnoldiInverse,
}
# With "auto", up to this many variables all eigenvalues are computed, once for all.
_EXACT = 1024
# Examples solved for together: so many, if so many bytes hold the vectors that takes.
_WIDEST, _BYTES, _VECTORS = 128, 2**30, 12


class TopInfluences(NamedTuple):
    """Training examples that matter most, for each test example.

    Attributes
    ----------
    helpful, harmful : ndarray of int
        Of shape `(n_test, k)`: their numbers, the most influential first. Without a helpful one its
        loss would rise, without a harmful one it would fall.
    helpful_scores, harmful_scores : ndarray
        Of the same shape: by how much.
    """

    helpful: np.ndarray
    helpful_scores: np.ndarray
    harmful: np.ndarray
    harmful_scores: np.ndarray


class InfluenceFunctions(OneProcess):
    """Predicts what would become of a model if training examples were left out, without training.

    Of weights that minimize the mean loss `L` of `n` training examples, with gradients `g_i` of the
    loss at each, leaving out example `i` changes the weights to first order by

        `parameter_change(i) = (H + damping I)^-1 g_i / n`,

    and the loss of a test example, of gradient `g_t`, by

        `scores[t, i] = g_t . (H + damping I)^-1 g_i / n`

    (Koh and Liang 2017 [KL]_, whose influence "of upweighting" is this times `-n`). A positive
    score says that the test loss rises without the training example: it was helpful.

    Parameters
    ----------
    loss : callable
        Takes the elements of a batch; returns the mean over its examples, each by itself. What it
        adds for the weights (weight decay) belongs to each example; then the prediction is of
        training again on the mean over the others. What `regularization` adds is left as it is.
    variables : nest
        As for `HessianOperator`; trained, where the formulas are to hold.
    train_data : tuple or dict of arrays, or iterable of such
        As for `HessianOperator`.
    damping : float, optional
        Makes the Hessian positive definite, where training did not end at a minimum, and shrinks
        influences along flat directions.
    solver : {"auto", "exact", "cg", "block_cg", "minres", "neumann", "arnoldi"} or callable
        Applies the inverse. ``"exact"`` by all eigenvalues, ``"auto"`` that up to 1024 variables
        and ``"block_cg"`` above; these and ``"cg"`` agree to `rtol`. ``"minres"`` is for Hessians
        that stay indefinite. ``"neumann"`` (LiSSA) and ``"arnoldi"`` are approximations, for
        comparison. A function takes the damped operator, and returns a `LinearOperator`.
    regularization : callable, optional
        Takes nothing, returns a scalar that is part of the training loss, once.
    test_loss : callable, optional
        Takes the elements of test data, returns a mean; what scores are changes of. `loss` by
        default.
    rtol : float, optional
        Of residuals, of the iterative solvers.
    maxiter : int, optional
        As for `solve`.
    memory_limit : int or str, optional
        Bytes that what is kept of the batches, and vectors at work, may take together, beside data
        and results.
    batch_size : int, optional
        Cuts arrays into batches of so many examples for products with the Hessian.
    progress : bool or "always", optional
        Shows bars over examples, by tqdm.
    **options
        Of `HessianOperator`: `engine`, `jit_compile`, `recompute`.

    Attributes
    ----------
    operator : HessianOperator
        The Hessian of the training loss, damped.
    n_train : int
        How many training examples there are.

    Raises
    ------
    InvalidLossError
        If the loss of a batch is not the mean of its examples' losses.
    HvpError
        As `HessianOperator`; if the loss draws random numbers, or another argument is not what it
        should be. Its methods raise it where conjugate gradients meet negative curvature.

    Warns
    -----
    ConvergenceWarning
        If a solution is less exact than `rtol`, or the exact inverse is of a damped Hessian with
        negative eigenvalues, so that the weights are no minimum.

    Notes
    -----
    Predictions are first order: of one example among hundreds they are good where training has
    converged to a minimum, and the less so the more examples leave together, the less damping there
    is in a deep network, and the further the weights are from a minimum.

    References
    ----------
    .. [KL] P. W. Koh and P. Liang, "Understanding black-box predictions via influence functions",
       ICML 2017. https://proceedings.mlr.press/v70/koh17a.html

    Examples
    --------
    Of the mean of some numbers, the influence of each is known:

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> x = np.array([1.0, 2.0, 6.0])
    >>> w = tf.Variable(x.mean())
    >>> influence = hvp.InfluenceFunctions(lambda x: tf.reduce_mean((x - w) ** 2) / 2, w, (x,))
    >>> influence.parameter_change(2)
    array([-1.])
    >>> influence.scores((np.array([0.0]),))
    array([[ 2.,  1., -3.]])
    """

    @outside_strategies
    def __init__(
        self,
        loss: Callable[..., Any],
        variables: Any,
        train_data: Any,
        *,
        damping: float = 0.0,
        solver: str | Callable[[HessianOperator], Any] = "auto",
        regularization: Callable[[], Any] | None = None,
        test_loss: Callable[..., Any] | None = None,
        rtol: float = 1e-5,
        maxiter: int | None = None,
        memory_limit: int | str | None = None,
        batch_size: int | None = None,
        progress: bool | Literal["always"] = False,
        **options: Any,
    ) -> None:
        names = ("auto", *_INVERSES, *_KRYLOV)
        if solver not in names and not callable(solver):
            raise HvpError(f"the solver is {solver!r}", " or ".join(map(repr, names)))
        refused = {"weight", "reduction", "on_stale"} & set(options)
        if refused:
            raise HvpError(
                f"the argument {sorted(refused)[0]} is given, which is none of influence functions",
                "a mean over examples that count alike, and refresh() after the weights changed",
            )
        check_progress(progress)
        self._train = ExampleData(train_data, "training")
        self.n_train = self._train.count
        self._progress, self._rtol, self._maxiter = progress, rtol, maxiter
        # Half of the limit is for the batches, a quarter each for gradients and for solutions.
        part = None if memory_limit is None else Share(memory_limit, 1 / 4).nbytes
        self.operator = HessianOperator(
            loss,
            variables,
            train_data,
            damping=damping,
            memory_limit=cast(Any, None if part is None else Share(memory_limit, 1 / 2)),
            batch_size=batch_size,
            regularization=regularization,
            **options,
        )
        snapshot = core_of(self.operator).snapshot
        if snapshot.facts.draws:
            raise HvpError(
                "the loss draws random numbers, so that an example has no one gradient",
                "the same loss each time",
                "leave out dropout: training=False",
            )
        self._gradients = ExampleGradients(loss, variables, snapshot, part)
        self._gradients.check_mean(self._train.first)
        self._test_gradients = self._gradients
        if test_loss is not None:
            self._test_gradients = ExampleGradients(test_loss, variables, snapshot, part)
        size = self.operator.shape[0]
        each = size * self.operator.dtype.itemsize * _VECTORS
        self._width = max(1, min(_WIDEST, (part or _BYTES) // each))
        self._solver = solver
        if solver == "auto":
            self._solver = "exact" if size <= _EXACT else "block_cg"
        self._inverse: Any = None
        self._evaluations = -1

    @classmethod
    def from_keras(
        cls,
        model: Any,
        train_data: Any,
        *,
        variables: Any = None,
        training: bool | None = False,
        **options: Any,
    ) -> InfluenceFunctions:
        """Return the influence functions of a Keras model's compiled loss.

        Parameters
        ----------
        model : keras.Model
            Compiled, and trained.
        train_data : tuple of arrays, or iterable of such
            `(x, y)` or `(x, y, sample_weight)`, or batches of them.
        variables : nest, optional
            The model's trainable variables by default; those of its last layers make a smaller
            problem.
        training : bool, optional
            Whether layers behave as in training.
        **options
            Of `InfluenceFunctions`.

        Returns
        -------
        InfluenceFunctions
            Of the loss with the model's regularizers, on the test loss without.

        Raises
        ------
        InvalidLossError
            If the model is not compiled, or its loss is not a mean of examples' losses.
        """
        loss, bare = (
            loss_of_model(model, training=training, by_examples=True, regularized=regularized)
            for regularized in (True, False)
        )
        options.setdefault("test_loss", bare)
        return cls(loss, model if variables is None else variables, train_data, **options)

    @outside_strategies
    def scores(self, test_data: Any, *, out: Any = None, checkpoint: Any = None) -> np.ndarray:
        """Predict how the loss of each test example changes when each training example is left out.

        Parameters
        ----------
        test_data : tuple or dict of arrays, or iterable of such
            Like the training data.
        out : str or Path, optional
            A file of NumPy's ``.npy`` format to write the scores to as they are found, where they
            are larger than memory; its room on the disk is taken first.
        checkpoint : str or Path, optional
            A file in which what is done is saved twice a minute and when interrupted, with others
            beside it whose names begin alike. The same call, started again, goes on from there,
            also after it was killed; that of other data, weights or settings is refused. With `out`
            the scores themselves stay there.

        Returns
        -------
        ndarray
            Of shape `(n_test, n_train)`, in the operator's dtype; positive where the training
            example was helpful. With `out` a memory map of the file.

        Raises
        ------
        StaleOperatorError
            If variables have changed: call `refresh`.
        CheckpointError
            If the checkpoint cannot be written, or is of another run.
        HvpError
            If `out` cannot be written, or there is no room.

        Notes
        -----
        Costs one solution for each test example, and the gradients of all training examples for
        each 128 test examples, or as many as `memory_limit` allows.
        """
        self._check()
        test = self._test(test_data)
        shape = (test.count, self.n_train)
        kept, done, column, made = self._resume(test, shape, out, checkpoint)
        with progress_bar(self._progress, total=shape[0], unit="test example", done=done) as bar:
            for first, elements in test.blocks(self._width):
                if first < done:
                    continue
                rows = self._test_gradients.of_all(elements, "test example", first)
                with _solving(checkpoint, first) as step:
                    solutions = tf.constant(self._solve(rows, step))
                    block = made[first : first + elements.examples]
                    for at, gradients in self._gradients.pieces(self._train):
                        end = at + int(gradients.shape[0])
                        if end <= column:
                            continue
                        found = tf.matmul(solutions, gradients, transpose_b=True) / self.n_train
                        block[:, at:end] = found.numpy()
                        if kept is not None and kept.due:
                            self._save(kept, done, end, made)
                    done, column = first + elements.examples, 0
                    if kept is not None:
                        self._save(kept, done, 0, made)
                bar.update(elements.examples)
        if isinstance(made, np.memmap):
            made.flush()
        return made

    @outside_strategies
    def self_influence(self, *, checkpoint: Any = None) -> np.ndarray:
        """Predict how the loss of each training example changes when it is itself left out.

        Large where an example is learned by heart: mislabelled or unusual ones.

        Parameters
        ----------
        checkpoint : str or Path, optional
            As for `scores`.

        Returns
        -------
        ndarray
            Of shape `(n_train,)`; not negative where the damped Hessian is positive definite.

        Notes
        -----
        Costs one solution for each training example.
        """
        self._check()
        kept, done, _, made = self._resume(None, (self.n_train,), None, checkpoint)
        with progress_bar(self._progress, total=self.n_train, unit="example", done=done) as bar:
            for first, elements in self._train.blocks(self._width):
                if first < done:
                    continue
                rows = self._gradients.of_all(elements, "training example", first)
                with _solving(checkpoint, first) as step:
                    found = np.einsum("kn,kn->k", self._solve(rows, step), rows)
                    made[first : first + len(found)] = found / self.n_train
                    if kept is not None:
                        self._save(kept, first + len(found), 0, made)
                bar.update(len(found))
        return made

    def top(self, test_data: Any, k: int = 10) -> TopInfluences:
        """Find the training examples that matter most to each test example.

        Parameters
        ----------
        test_data : tuple or dict of arrays, or iterable of such
            Like the training data.
        k : int, optional
            How many of each kind.

        Returns
        -------
        TopInfluences
        """
        check_count(k, "k")
        k = min(k, self.n_train)
        scores = self.scores(test_data)
        order = np.argsort(scores, axis=1, kind="stable")
        harmful, helpful = order[:, :k], order[:, ::-1][:, :k]

        def of(numbers: np.ndarray) -> np.ndarray:
            return np.take_along_axis(scores, numbers, axis=1)

        return TopInfluences(helpful, of(helpful), harmful, of(harmful))

    @outside_strategies
    def parameter_change(self, indices: Any) -> np.ndarray:
        """Predict how the weights change when training examples are left out together.

        Parameters
        ----------
        indices : int, or array_like of int or bool
            Which: numbers, or a mask of length `n_train`.

        Returns
        -------
        ndarray
            Of shape `(n,)`; `operator.unflatten` makes a nest like the variables of it. To first
            order the sum of the changes by each.
        """
        numbers = self._numbers(indices)
        self._check()
        total = np.zeros(self.operator.shape[0], np.float64)
        for _, elements in self._train.chosen(numbers):
            total += self._gradients.of_all(elements).sum(axis=0, dtype=np.float64)
        found = self._solve(total.astype(self.operator.dtype)[np.newaxis])[0]
        return found / np.asarray(self.n_train, found.dtype)

    @outside_strategies
    def group(self, indices: Any, test_data: Any = None) -> np.ndarray:
        """Predict how losses change when training examples are left out together.

        Parameters
        ----------
        indices : int, or array_like of int or bool
            Which: numbers, or a mask of length `n_train`.
        test_data : tuple or dict of arrays, or iterable of such, optional
            Whose losses; the training examples' own by default.

        Returns
        -------
        ndarray
            Of shape `(n_test,)`. To first order the sum of the scores of each.

        Notes
        -----
        Costs one solution, however many examples there are.
        """
        change = tf.constant(self.parameter_change(indices))
        test = self._train if test_data is None else self._test(test_data)
        gradients = self._gradients if test_data is None else self._test_gradients
        made = np.empty(test.count, self.operator.dtype)
        for at, rows in gradients.pieces(test):
            made[at : at + int(rows.shape[0])] = tf.linalg.matvec(rows, change).numpy()
        return made

    def refresh(self) -> None:
        """Evaluate again, at the values the variables have now."""
        self.operator.refresh()

    def __repr__(self) -> str:
        return (
            f"InfluenceFunctions({self.n_train} training examples, {self.operator.shape[0]} "
            f"variables, damping {self.operator.damping:g}, solver {self._solver!r})"
        )

    def _check(self) -> None:
        """Raise what a stale or closed operator raises, before anything is done."""
        try:
            _ = self.operator.value
        except StaleOperatorError as error:
            raise StaleOperatorError(error.problem, error.expected, "call refresh()") from None

    def _test(self, test_data: Any) -> ExampleData:
        """Return the test data, having made sure that the test loss takes them."""
        test = ExampleData(test_data, "test")
        try:
            self._test_gradients.prepare(test.first)
        except Exception as error:  # a loss, or Keras, may raise anything
            may_be_kind = isinstance(error, InvalidDataError) or not isinstance(error, HvpError)
            difference = self._train.first.differs(test.first) if may_be_kind else ""
            if not difference:
                raise
            reason = line_of(error)
            raise InvalidDataError(
                f"the loss of the test data cannot be computed ({type(error).__name__}: {reason}); "
                f"beside the training data, {difference}",
                "examples like those of the training data, with labels of the same kind",
            ) from error
        return test

    def _solve(self, rows: np.ndarray, checkpoint: Any = None) -> np.ndarray:
        """Apply the inverse to each row."""
        if self._solver in _KRYLOV:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = solve(
                    self.operator,
                    np.asarray(rows.T, order="C"),
                    method=cast(Any, self._solver),
                    rtol=self._rtol,
                    maxiter=self._maxiter,
                    checkpoint=checkpoint,
                )
            if "negative curvature" in result.outcomes:
                self._refuse_curvature(result.negative_curvature)
            for warning in caught:
                warnings.warn(warning.message, stacklevel=4)
            return np.ascontiguousarray(result.x.T)
        evaluations = self.operator.stats.gradient_evaluations
        if self._inverse is None or evaluations != self._evaluations:
            make: Any = self._solver
            if isinstance(make, str):
                make = _INVERSES[make]
            inverse = make(self.operator)
            if getattr(inverse, "shape", None) != self.operator.shape:
                raise HvpError(
                    f"the solver function returned {type(inverse).__name__} of shape "
                    f"{getattr(inverse, 'shape', None)}",
                    f"an operator of shape {self.operator.shape}: the inverse of the one it takes",
                )
            self._inverse, self._evaluations = inverse, evaluations
            if isinstance(self._inverse, ExactInverse):
                lowest = float(self._inverse.eigenvalues[0])
                if lowest < 0 and self._inverse.is_nonzero[0]:
                    self._warn_of_curvature(lowest)
        return np.ascontiguousarray(np.asarray(self._inverse @ rows.T).T, rows.dtype)

    def _refuse_curvature(self, directions: np.ndarray) -> None:
        norms = np.linalg.norm(directions, axis=0)
        along = directions[:, norms > 0] / norms[norms > 0]
        lowest = float(np.min(np.sum(along * (self.operator @ along), axis=0)))
        raise HvpError(
            "the damped Hessian is not positive definite, so that the weights are no minimum: "
            f"along some direction its curvature is {lowest:.3g}",
            "a model that is trained to a minimum, or more damping",
            f"raise damping (now {self.operator.damping:g}) by more than {-lowest:.3g}, or pass "
            "solver='minres'",
        )

    def _warn_of_curvature(self, lowest: float) -> None:
        warnings.warn(
            f"hvp.InfluenceFunctions: the damped Hessian has the eigenvalue {lowest:.3g}, so "
            "that the weights are no minimum: train further, or raise damping (now "
            f"{self.operator.damping:g})",
            ConvergenceWarning,
            stacklevel=4,
        )

    def _numbers(self, indices: Any) -> np.ndarray:
        found = np.asarray(indices)
        if found.dtype == bool and found.shape == (self.n_train,):
            found = np.flatnonzero(found)
        found = np.atleast_1d(found)
        if not found.size:
            raise HvpError("no indices are given", "at least one training example")
        if found.dtype.kind not in "iu" or found.ndim != 1:
            raise HvpError(
                f"the indices have shape {np.shape(indices)} and type {np.asarray(indices).dtype}",
                f"numbers of training examples, or a mask of shape ({self.n_train},)",
            )
        if found.min() < 0 or found.max() >= self.n_train:
            raise HvpError(
                f"the indices go from {found.min()} to {found.max()}",
                f"numbers from 0 to {self.n_train - 1}",
            )
        if len(np.unique(found)) != len(found):
            raise HvpError("an index is given twice", "each example once: it can leave only once")
        return found

    def _resume(
        self, test: ExampleData | None, shape: tuple[int, ...], out: Any, checkpoint: Any
    ) -> tuple[Checkpoint | None, int, int, np.ndarray]:
        """Return the checkpoint, how many rows are done, columns of the next, and the scores."""
        dtype = self.operator.dtype
        if checkpoint is None:
            return None, 0, 0, np.empty(shape, dtype) if out is None else _mapped(out, shape, dtype)
        is_named = isinstance(self._solver, str)
        settings = [self.operator.damping, self._rtol, self._maxiter, self._width]
        fingerprint = {
            "call": "InfluenceFunctions." + ("self_influence" if test is None else "scores"),
            **core_of(self.operator).fingerprint(),
            "training data": self._train.fingerprint(),
            # Of a function only what it does is known.
            "solver": str(self._solver)
            if is_named
            else digest(self._solve(np.ones((1, self.operator.shape[0]), dtype))),
            "settings": repr(settings),
            "out": "" if out is None else str(Path(out).resolve()),
        }
        if test is not None:
            fingerprint["test data"] = test.fingerprint()
            fingerprint["test loss"] = self._test_gradients.fingerprint(test.first)
        kept = Checkpoint(checkpoint, fingerprint)
        saved = kept.load()
        if not saved:
            made = np.empty(shape, dtype) if out is None else _mapped(out, shape, dtype)
            return kept, 0, 0, made
        done, column = (int(number) for number in saved["standing"])
        made = saved["scores"] if out is None else _mapped(out, shape, dtype, again=True)
        return kept, done, column, made

    def _save(self, kept: Checkpoint, done: int, column: int, made: np.ndarray) -> None:
        arrays = {"standing": np.array([done, column])}
        if isinstance(made, np.memmap):
            made.flush()
        else:
            arrays["scores"] = made
        kept.save(arrays)


@contextlib.contextmanager
def _solving(checkpoint: Any, first: int) -> Iterator[Path | None]:
    """Give a checkpoint for the solution of one block, removed when that is done or impossible."""
    if checkpoint is None:
        yield None
        return
    step = Path(f"{os.fspath(checkpoint)}.solve{first}")
    try:
        yield step
    except CheckpointError:  # it may be another run's
        raise
    except HvpError:
        step.unlink(missing_ok=True)
        raise
    step.unlink(missing_ok=True)


def _mapped(out: Any, shape: tuple[int, ...], dtype: Any, again: bool = False) -> np.ndarray:
    """Return a memory map of a file; its room is taken, for without room a map ends the process."""
    path = Path(out)
    try:
        if again:
            made = open_memmap(path, mode="r+")
            if made.shape == shape and made.dtype == dtype:
                return made
            raise HvpError(
                f"the file {path} has shape {made.shape} and type {made.dtype}",
                f"the scores that the checkpoint is of, of shape {shape}",
                "remove the checkpoint to begin anew",
            )
        made = open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if hasattr(os, "posix_fallocate") and size:
                os.posix_fallocate(file.fileno(), 0, size)
        return made
    except (OSError, ValueError) as error:
        raise HvpError(
            f"the scores cannot be written to {path} ({error})",
            f"a file with room for {' x '.join(map(str, shape))} numbers",
        ) from error
