"""How well an attribution predicts what training on part of the data leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvp._errors import HvpError, InvalidDataError
from hvp._runtime.arguments import check_count, check_number, check_seed
from hvp._runtime.checkpoint import Checkpoint
from hvp._runtime.digest import digest
from hvp._runtime.interrupts import Uninterrupted, deliver_interrupt
from hvp._runtime.progress import check_progress, progress_bar
from hvp._vectors.arrays import make_array

# Draws of subsets and test examples for standard errors.
_DRAWS = 400


@dataclass(frozen=True, repr=False)
class DatamodelingScore:
    """The result of `linear_datamodeling_score`.

    Attributes
    ----------
    score : float or dict of str to float
        The linear datamodeling score, for each of the attributions if these are a dict.
    standard_error : float or dict of str to float
        Its standard deviation over draws of subsets and test examples, by the bootstrap.
    by_test : ndarray or dict of str to ndarray
        The rank correlation of each test example, of shape `(tests,)`.
    draws : ndarray or dict of str to ndarray
        The scores of the bootstrap, of the same draws for all attributions.
    kept : ndarray of bool
        The subsets, of shape `(subsets, examples)`.
    outcomes : ndarray
        What training on each of them led to, of shape `(subsets, tests)`.
    """

    score: Any
    standard_error: Any
    by_test: Any
    draws: Any
    kept: np.ndarray
    outcomes: np.ndarray

    def __repr__(self) -> str:
        named = self.score if isinstance(self.score, dict) else {"": self.score}
        errors = self.standard_error if isinstance(self.score, dict) else {"": self.standard_error}
        shown = ", ".join(
            f"{name} {value:.3f} +- {errors[name]:.3f}".strip() for name, value in named.items()
        )
        return f"DatamodelingScore({shown}; {len(self.kept)} subsets)"

    def difference(self, one: str, other: str) -> tuple[float, float]:
        """Return how much higher the score of one attribution is than another's.

        Returns
        -------
        difference, standard_error : float
            The standard error is that of the difference, for the same subsets and test examples.
        """
        names = list(self.score) if isinstance(self.score, dict) else []
        if one not in names or other not in names:
            raise HvpError(f"the attributions are {one!r} and {other!r}", f"two of {names}")
        spread = np.std(self.draws[one] - self.draws[other], ddof=1)
        return self.score[one] - self.score[other], float(spread)


@Uninterrupted()
def linear_datamodeling_score(
    retrain: Any,
    scores: Any,
    *,
    subsets: int = 50,
    fraction: float = 0.5,
    seed: int = 0,
    progress: bool | Literal["always"] = False,
    checkpoint: Any = None,
) -> DatamodelingScore:
    """Measure how well scores predict what happens if half of the training examples are left out.

    The model is trained again on random subsets. For each test example, the sum of the scores of
    the examples that were left out is a prediction of its loss; the linear datamodeling score is
    the rank correlation of predictions and losses over subsets, averaged over test examples [Par]_.

    Parameters
    ----------
    retrain : callable, or DatamodelingScore
        Takes the numbers of the training examples to keep, an array, and returns the losses of all
        test examples after training on these alone, of shape `(tests,)`. Training depends on
        random numbers as well: return the mean over a few runs, to measure the scores and not the
        seeds. A former result stands for its subsets and losses, so that nothing is trained.
    scores : array_like of shape `(tests, examples)`, or dict of such
        As `InfluenceFunctions.scores` returns them: how much a loss rises without an example. A
        dict compares several attributions by name, on the same trained models.
    subsets : int, optional
        The number of subsets, and of calls of `retrain`.
    fraction : float, optional
        The part of the training examples that is kept.
    seed : int, optional
        Seed of the subsets.
    progress : bool or "always", optional
        Whether to show a progress bar over subsets, with tqdm, if the output is a terminal.
    checkpoint : str or Path, optional
        A file in which losses are saved after each subset. The same call resumes from it.

    Returns
    -------
    DatamodelingScore

    Raises
    ------
    InvalidDataError, HvpError
        If losses or scores are not finite, if shapes do not agree, or an argument is invalid.

    References
    ----------
    .. [Par] S. M. Park, K. Georgiev, A. Ilyas, G. Leclerc, A. Madry, "TRAK: attributing model
       behavior at scale", ICML 2023. https://arxiv.org/abs/2303.14186

    Examples
    --------
    If losses are sums over the examples that are left out, and these are the scores, the score is
    one.

    >>> import numpy as np
    >>> import hvp
    >>> scores = np.random.default_rng(0).standard_normal((3, 20))
    >>> def retrain(kept):
    ...     return scores.sum(axis=1) - scores[:, kept].sum(axis=1)
    >>> round(hvp.linear_datamodeling_score(retrain, scores, subsets=30).score, 6)
    1.0
    """
    check_progress(progress)
    seed = check_seed(seed)
    named = dict(scores) if isinstance(scores, Mapping) else {"": scores}
    named = {name: make_array(value) for name, value in named.items()}
    shapes = sorted({value.shape for value in named.values()})
    is_real = all(value.dtype.kind in "fiub" for value in named.values())
    is_finite = is_real and all(np.isfinite(value).all() for value in named.values())
    if len(shapes) != 1 or len(shapes[0]) != 2 or not is_finite:
        raise InvalidDataError(
            f"the scores have the shapes {shapes}{'' if is_finite else ', and are not all finite'}",
            "finite real numbers, of one shape (tests, examples)",
        )
    tests, examples = shapes[0]
    if isinstance(retrain, DatamodelingScore):
        kept, outcomes = retrain.kept, retrain.outcomes
    else:
        if not callable(retrain):
            raise HvpError(f"retrain is {type(retrain).__name__}", "a function, or a former result")
        check_count(subsets, "subsets", least=3)
        check_number(fraction, "fraction", positive=True)
        count = round(fraction * examples)
        if not 0 < count < examples:
            raise HvpError(f"the fraction {fraction} keeps {count} of {examples}", "some, not all")
        generator = np.random.default_rng(seed)
        kept = np.zeros((subsets, examples), bool)
        for row in kept:
            row[generator.choice(examples, count, replace=False)] = True
        outcomes = _trained(retrain, kept, tests, progress, checkpoint)
    if (len(kept[0]), len(outcomes[0])) != (examples, tests):
        raise InvalidDataError(
            f"the scores have the shape {(tests, examples)}, and the former result is for "
            f"{len(outcomes[0])} test and {len(kept[0])} training examples",
            "scores of the same examples",
        )
    left_out = (~kept).astype(np.float64)
    rng = np.random.default_rng(seed)
    sizes = len(kept), tests
    chosen = [[rng.integers(0, size, size) for size in sizes] for _ in range(_DRAWS)]
    by_test, draws = {}, {}
    for name, value in named.items():
        predictions = left_out @ value.T.astype(np.float64)
        by_test[name] = _correlations(predictions, outcomes)
        draws[name] = np.array(
            [
                _correlations(predictions[rows][:, columns], outcomes[rows][:, columns]).mean()
                for rows, columns in chosen
            ]
        )
    score = {name: float(value.mean()) for name, value in by_test.items()}
    error = {name: float(np.std(value, ddof=1)) for name, value in draws.items()}
    if isinstance(scores, Mapping):
        return DatamodelingScore(score, error, by_test, draws, kept, outcomes)
    return DatamodelingScore(score[""], error[""], by_test[""], draws[""], kept, outcomes)


def _correlations(predictions: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    """Return the rank correlation of each column; zero if one of them is constant."""
    from scipy.stats import rankdata  # takes longer to import than the rest of scipy

    ranks = [rankdata(values, axis=0) for values in (predictions, outcomes)]
    first, second = (one - one.mean(axis=0) for one in ranks)
    product = np.sum(first * second, axis=0)
    lengths = np.sqrt(np.sum(first**2, axis=0) * np.sum(second**2, axis=0))
    return np.divide(product, lengths, out=np.zeros_like(product), where=lengths > 0)


def _trained(
    retrain: Callable[[np.ndarray], Any],
    kept: np.ndarray,
    tests: int,
    progress: Any,
    checkpoint: Any,
) -> np.ndarray:
    """Return what training on each subset leads to."""
    outcomes, begun, file = np.zeros((len(kept), tests)), 0, None
    if checkpoint is not None:
        fingerprint = {"call": "hvp.linear_datamodeling_score", "subsets": digest(kept)}
        file = Checkpoint(checkpoint, {**fingerprint, "tests": str(tests)})
        saved = file.load()
        if saved:
            outcomes, begun = saved["outcomes"], int(saved["done"])
    with progress_bar(progress, total=len(kept), unit=" subsets", done=begun) as bar:
        for place in range(begun, len(kept)):
            deliver_interrupt()
            losses = np.asarray(retrain(np.flatnonzero(kept[place])), np.float64)
            if losses.shape != (tests,) or not np.isfinite(losses).all():
                raise InvalidDataError(
                    f"retrain returns losses of shape {losses.shape}, "
                    f"{int(np.sum(~np.isfinite(losses)))} of them not finite",
                    f"a finite loss for each of {tests} test examples",
                )
            outcomes[place] = losses
            if file is not None:
                file.save({"outcomes": outcomes, "done": np.array(place + 1)})
            bar.update(1)
    return outcomes
