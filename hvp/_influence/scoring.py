"""The predictions of `InfluenceFunctions`: gradients, linear solves, and scores from both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._data.elements import Elements
from hvp._errors import HvpError, InvalidDataError, StaleOperatorError, line_of
from hvp._influence.example_data import ExampleData
from hvp._influence.example_gradients import ExampleGradients
from hvp._influence.gradient_forms import ProjectedGradients
from hvp._influence.gradient_store import GradientStore
from hvp._influence.layer_gradients import LayerGradients
from hvp._influence.score_store import ScoreStore
from hvp._operators.hessian import HessianOperator
from hvp._operators.symmetric import evaluation_of
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.progress import progress_bar


class Scoring:
    """Computes the predictions of `InfluenceFunctions`, one block of linear systems at a time.

    The `operator` is the damped Hessian of the training loss, and `inverse` a `DampedInverse` or
    `FactoredInverse`. Gradients of training examples are computed again unless there is a `store`.
    """

    def __init__(
        self,
        operator: HessianOperator,
        train: ExampleData,
        gradients: ExampleGradients,
        test_gradients: ExampleGradients,
        inverse: Any,
        progress: Any,
        store: GradientStore | None = None,
    ) -> None:
        self._kept = store
        self.gradients, self.inverse = gradients, inverse
        self._test_gradients = test_gradients
        self._operator, self._train, self._progress = operator, train, progress
        # The evaluations for which the store is open but not filled, and for which it is full.
        self._opened = self._filled = -1

    @Uninterrupted()
    def scores(self, test_data: Any, out: Any, checkpoint: Any) -> np.ndarray:
        """Return `g_t . (H + damping I)^-1 g_i / n` for all test and training examples."""
        self._check_fresh()
        test = self._test_examples(test_data)
        shape = (test.count, self._train.count)
        store = self._store("scores", shape, test, out, checkpoint)
        unit = "test example"
        with progress_bar(self._progress, total=test.count, unit=unit, done=store.rows) as bar:
            for first, elements in test.blocks(self.inverse.width):
                if first < store.rows:
                    continue
                test_rows = self._test_gradients.of_all(elements, unit, first)
                with store.solving(first) as solver_checkpoint:
                    solutions = self.inverse.apply(test_rows, solver_checkpoint)
                    block = store.array[first : first + elements.examples]
                    for start, scores in self._scores_of(solutions, skip=store.columns):
                        end = start + int(scores.shape[1])
                        block[:, start:end] = scores.numpy()
                        store.complete_columns(end)
                    store.complete_rows(first + elements.examples)
                bar.update(elements.examples)
        store.flush()
        return store.array

    @Uninterrupted()
    def top(self, test_data: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers and scores of the `k` most harmful and the `k` most helpful examples.

        Each row is in increasing order. The scores of all examples are never in memory at once.
        """
        self._check_fresh()
        test = self._test_examples(test_data)
        numbers, values = [], []
        unit = "test example"
        with progress_bar(self._progress, total=test.count, unit=unit) as bar:
            for first, elements in test.blocks(self.inverse.width):
                rows = self._test_gradients.of_all(elements, unit, first)
                own = np.empty((len(rows), 0), np.int64), np.empty((len(rows), 0), rows.dtype)
                for start, scores in self._scores_of(self.inverse.apply(rows)):
                    own = _extremes(*own, start, scores.numpy(), k)
                numbers.append(own[0])
                values.append(own[1])
                bar.update(len(rows))
        return np.concatenate(numbers), np.concatenate(values)

    @Uninterrupted()
    def scores_by_part(self, test_data: Any, places: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return parts of scores by name: those of the entries `places[name]` of the gradients."""
        self._check_fresh()
        self._refuse_projection()
        test = self._test_examples(test_data)
        shape = test.count, self._train.count
        parts = {name: np.empty(shape, self._operator.dtype) for name in places}
        for first, elements in test.blocks(self.inverse.width):
            rows = self._test_gradients.of_all(elements, "test example", first)
            solutions = tf.constant(self.inverse.apply(rows))
            own = {name: tf.gather(solutions, at, axis=1) for name, at in places.items()}
            for start, gradients in self._pieces():
                end = start + int(gradients.shape[0])
                for name, at in places.items():
                    chosen = tf.gather(gradients, at, axis=1)
                    scores = tf.matmul(own[name], chosen, transpose_b=True) / self._train.count
                    parts[name][first : first + len(rows), start:end] = scores.numpy()
        return parts

    @Uninterrupted()
    def scores_by_token(self, test_data: Any, indices: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the parts of scores that belong to each position, and what belongs to none."""
        self._check_fresh()
        numbers = np.arange(self._train.count) if indices is None else self._train.numbers(indices)
        layers, length = self._layers_of_tokens()
        test = self._test_examples(test_data)
        tokens = np.zeros((test.count, len(numbers), length), self._operator.dtype)
        rest = np.zeros((test.count, len(numbers)), self._operator.dtype)
        with progress_bar(self._progress, total=test.count, unit="test example") as bar:
            for first, elements in test.blocks(self.inverse.width):
                rows = self._test_gradients.of_all(elements, "test example", first)
                solutions = self.inverse.apply(rows) / self._train.count
                end = first + len(rows)
                for columns, part in self._chosen(numbers, layers.at_once(self._few()), length):
                    by_position, unpositioned = layers.products(
                        part, tf.constant(solutions), length
                    )
                    tokens[first:end, columns] = by_position
                    rest[first:end, columns] = unpositioned
                bar.update(len(rows))
        return tokens, rest

    def _few(self) -> Elements:
        return self._train.first.part(0, min(2, self._train.first.examples))

    def _chosen(
        self, numbers: np.ndarray, at_once: int, length: int
    ) -> Iterator[tuple[np.ndarray, Elements]]:
        """Iterate over the training examples of these numbers, with their indices in `numbers`."""
        for first, elements in self._train.blocks(at_once):
            places = np.flatnonzero((numbers >= first) & (numbers < first + elements.examples))
            if len(places):
                tokens = int(elements.tensors[0].shape[1])
                if tokens != length:
                    raise HvpError(
                        f"training example {first} has {tokens} tokens, and the first has {length}",
                        "examples of one length",
                        "pad them, or pass examples= of one length as the data",
                    )
                yield places, elements.taken(numbers[places] - first)

    def _layers_of_tokens(self) -> tuple[LayerGradients, int]:
        """Return the layers and the number of tokens; at least one layer must work on tokens."""
        few = self._few()
        shape = few.tensors[0].shape
        length = int(shape[1]) if len(shape) > 1 else 1
        layers = self.gradients.by_layers(few)
        if isinstance(layers, str):
            raise HvpError(
                f"scores cannot be divided among the tokens: {layers}",
                "a loss of TensorFlow operations whose layers can be found in its graph",
                "use scores, or scores_by_layer",
            )
        if length < 2 or not layers.has_positions(few, length):
            raise HvpError(
                f"no layer has one position for each of the {length} entries along the second axis "
                f"of the first element of the data, whose shape is {tuple(shape)}",
                "sequences, with the tokens along the second axis, and layers that are applied to "
                "each token",
                "use scores, or scores_by_layer",
            )
        return layers, length

    def _scores_of(self, solutions: np.ndarray, skip: int = 0) -> Iterator[tuple[int, tf.Tensor]]:
        """Iterate over the scores of training examples, without pieces in the first `skip`."""
        if self._kept is not None:
            self._fill()
            solutions = self._kept.form.matching(solutions)
        vectors = tf.constant(solutions)
        for start, rows in self._pieces():
            if start + int(rows.shape[0]) > skip:
                yield start, tf.matmul(vectors, rows, transpose_b=True) / self._train.count

    def _pieces(self) -> Iterator[tuple[int, tf.Tensor]]:
        """Iterate over the gradients of training examples, stored or computed."""
        if self._kept is None:
            return self.gradients.pieces(self._train)
        self._fill()
        return self._kept.pieces(self.gradients.size)

    def _open(self) -> None:
        """Open the store of gradients, if there is one that is not full or open already.

        This takes a pass over the training data.
        """
        evaluations = self._operator.stats.gradient_evaluations
        if self._kept is not None and evaluations not in (self._opened, self._filled):
            self._kept.open()
            self._opened = evaluations

    def _fill(self) -> None:
        """Store the gradients of the training examples, unless that is done."""
        assert self._kept is not None
        evaluations = self._operator.stats.gradient_evaluations
        if self._filled == evaluations:
            return
        self._open()
        self._opened = -1
        if not self._kept.is_complete:
            done = 0
            with progress_bar(self._progress, total=self._train.count, unit="gradient") as bar:
                for end in self._kept.fill(self._rows_between):
                    bar.update(end - done)
                    done = end
        self._filled = evaluations

    def _rows_between(self, start: int, end: int) -> Iterator[tuple[int, np.ndarray]]:
        """Iterate over the rows to store for the training examples from `start` to `end - 1`."""
        assert self._kept is not None
        form = self._kept.form
        for first, part in self._train.blocks(form.at_once):
            last = first + part.examples
            if last <= start or first >= end:
                continue
            low, high = max(start, first), min(end, last)
            own = part.part(low - first, high - first)
            yield low, form.rows(own, low)

    def _refuse_projection(self) -> None:
        if self._kept is not None and isinstance(self._kept.form, ProjectedGradients):
            raise HvpError(
                "the gradients are kept as projections, which have no parts",
                "gradients that are kept whole, or not at all",
                "leave out projection",
            )

    @Uninterrupted()
    def self_influence(self, checkpoint: Any) -> np.ndarray:
        """Return `g_i . (H + damping I)^-1 g_i / n` for all training examples."""
        self._check_fresh()
        total = self._train.count
        store = self._store("self_influence", (total,), None, None, checkpoint)
        with progress_bar(self._progress, total=total, unit="example", done=store.rows) as bar:
            for first, elements in self._train.blocks(self.inverse.width):
                if first < store.rows:
                    continue
                rows = self.gradients.of_all(elements, "training example", first)
                end = first + len(rows)
                with store.solving(first) as solver_checkpoint:
                    solutions = self.inverse.apply(rows, solver_checkpoint)
                    store.array[first:end] = np.einsum("kn,kn->k", solutions, rows) / total
                    store.complete_rows(end)
                bar.update(len(rows))
        return store.array

    @Uninterrupted()
    def parameter_change(self, indices: Any) -> np.ndarray:
        """Return `(H + damping I)^-1 g / n`, where `g` is the sum of the examples' gradients."""
        numbers = self._train.numbers(indices)
        self._check_fresh()
        total = np.zeros(self._operator.shape[0], np.float64)
        for elements in self._train.selected(numbers):
            total += self.gradients.of_all(elements).sum(axis=0, dtype=np.float64)
        solution = self.inverse.apply(total.astype(self._operator.dtype)[np.newaxis])[0]
        return solution / np.asarray(self._train.count, solution.dtype)

    @Uninterrupted()
    def loss_changes(self, change: np.ndarray, test_data: Any) -> np.ndarray:
        """Return `g_t . change` for all test examples, or for all training examples."""
        if test_data is None:
            examples, gradients = self._train, self.gradients
        else:
            examples, gradients = self._test_examples(test_data), self._test_gradients
        vector = tf.constant(change)
        changes = np.empty(examples.count, self._operator.dtype)
        for start, rows in gradients.pieces(examples):
            changes[start : start + int(rows.shape[0])] = tf.linalg.matvec(rows, vector).numpy()
        return changes

    def _check_fresh(self) -> None:
        """Raise the error of a stale or closed operator before any work is done."""
        try:
            _ = self._operator.value
        except StaleOperatorError as error:
            raise StaleOperatorError(error.problem, error.expected, "call refresh()") from None

    def _test_examples(self, test_data: Any) -> ExampleData:
        """Return the test data, after a check that the test loss accepts them."""
        test = ExampleData(test_data, "test")
        try:
            self._test_gradients.prepare(test.first)
        except Exception as error:  # the user's loss, or Keras, may raise anything
            # Other errors of this package do not come from the kind of the data.
            may_be_data = isinstance(error, InvalidDataError) or not isinstance(error, HvpError)
            difference = test.first.difference_from(self._train.first) if may_be_data else ""
            if not difference:
                raise
            reason = line_of(error)
            raise InvalidDataError(
                f"the loss of the test data cannot be computed ({type(error).__name__}: {reason}); "
                f"compared with the training data, they have {difference}",
                "examples like those of the training data, with labels of the same kind",
            ) from error
        return test

    def _store(
        self, call: str, shape: tuple[int, ...], test: ExampleData | None, out: Any, checkpoint: Any
    ) -> ScoreStore:
        """Return the scores of a call, resumed from its checkpoint if there is one.

        Kept gradients of other weights are refused here, before anything is solved.
        """
        self._open()

        def fingerprint() -> dict[str, str]:
            of_inverse = self.inverse.fingerprint()
            texts = {
                "call": f"InfluenceFunctions.{call}",
                **evaluation_of(self._operator).fingerprint(),
                "training data": self._train.fingerprint(),
                **of_inverse,
                # The rows that are done are those of whole blocks.
                "settings": f"{of_inverse['settings']}, in blocks of {self.inverse.width}",
                "out": "" if out is None else str(Path(out).resolve()),
            }
            if test is not None:
                texts["test data"] = test.fingerprint()
                texts["test loss"] = self._test_gradients.fingerprint(test.first)
            return texts

        return ScoreStore(shape, self._operator.dtype, out, checkpoint, fingerprint)


def _extremes(
    numbers: np.ndarray, values: np.ndarray, start: int, scores: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns and scores of the `k` smallest and the `k` largest of each row so far.

    They are in increasing order; `scores` are those of the columns from `start` on.
    """
    columns = np.broadcast_to(np.arange(start, start + scores.shape[1]), scores.shape)
    numbers = np.concatenate([numbers, columns], axis=1)
    values = np.concatenate([values, scores], axis=1)
    # Of equal scores the first column comes first, whatever the pieces.
    order = np.lexsort((numbers, values), axis=1)
    if order.shape[1] > 2 * k:
        order = np.concatenate([order[:, :k], order[:, -k:]], axis=1)
    return np.take_along_axis(numbers, order, axis=1), np.take_along_axis(values, order, axis=1)
