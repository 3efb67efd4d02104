"""The tape engine: a persistent tape around one evaluation, products from what it recorded.

Works wherever TensorFlow's own eager gradients do, needs no graph, and is the reference other
engines are tested against. Its residuals live on the tape, op by op, so a product costs one
eager backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._errors import SecondDerivativeError
from hvp._interrupts import Uninterrupted
from hvp._linearize.dataflow import Dataflow
from hvp._linearize.derivatives import corrected_derivatives
from hvp._linearize.flatten import Flattener
from hvp._linearize.gradient import densify
from hvp._linearize.second_derivatives import (
    derivative_errors,
    find_doubts,
    refuse_missing_derivatives,
)
from hvp._strategies import outside_strategies


class TapeEngine:
    """The derivative of a function at a point, held on a persistent tape.

    Parameters
    ----------
    function : callable
        Takes nothing; returns a list of tensors, None where a result is identically zero. It is
        run once, here.
    variables : sequence of tf.Variable
        What to differentiate with respect to.
    certain : bool
        Whether it was established beforehand that no operation on the way lacks a derivative.
        If not, a None from TensorFlow raises: it may be a zero, or a derivative nobody wrote.

    Attributes
    ----------
    outputs : list of (tf.Tensor or None)
        The function's results.
    """

    name = "tape"

    def __init__(
        self,
        function: Callable[[], Sequence[tf.Tensor | None]],
        variables: Sequence[tf.Variable],
        *,
        certain: bool,
    ) -> None:
        self._variables = list(variables)
        self._certain = certain
        self._transposed: tuple[tf.GradientTape, list[tf.Tensor | None], list[tf.Tensor]] | None
        self._transposed = None
        # Without watch_accessed_variables=False a frozen layer's part would be recorded too.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(self._variables)
            self.outputs = list(function())
        self._tape: tf.GradientTape | None = tape
        # The graph engine finds these out as it runs.
        self.finite: tf.Tensor | None = None
        self.watched: list[tf.Tensor] | None = None

    def vjp(self, cotangents: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Apply the transposed derivative.

        Parameters
        ----------
        cotangents : sequence of tf.Tensor
            Shaped and typed like `outputs`; those for a None output are ignored.

        Returns
        -------
        list of tf.Tensor
            Shaped and typed like the variables.
        """
        gradient = _differentiate(self._tape, self.outputs, self._variables, cotangents)
        return self._dense(gradient, self._variables)

    def vjp_flat(self, flat: tf.Tensor, flattener: Flattener) -> tf.Tensor:
        """Apply `vjp` to and from one flat vector, where outputs are shaped like the variables."""
        return flattener.join(self.vjp(flattener.split(flat)))

    def vjp_flat_rows(self, rows: tf.Tensor, flattener: Flattener) -> tf.Tensor:
        """Apply `vjp_flat` to each row of a block, of shape `(k, n)`."""
        return flattener.join(self.vjp_rows(flattener.split(rows)))

    def vjp_rows(self, cotangents: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Apply `vjp` to each entry along a further first axis of the cotangents.

        A tape replays one cotangent at a time, so the cost is that of as many products.
        """
        rows = [self.vjp(row) for row in zip(*(tf.unstack(c) for c in cotangents))]
        return [tf.stack(parts) for parts in zip(*rows)]

    def jvp(self, tangents: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Apply the derivative.

        The first call records the transposed derivative on a second persistent tape, and keeps
        it: the derivative of a linear map is the map itself, whatever the point.

        Parameters
        ----------
        tangents : sequence of tf.Tensor
            Shaped and typed like the variables.

        Returns
        -------
        list of tf.Tensor
            Shaped and typed like `outputs`, None where those are.
        """
        if self._transposed is None:
            with Uninterrupted():
                self._transposed = self._record_transposed()
        tape, transposed, cotangents = self._transposed
        results = iter(
            self._dense(_differentiate(tape, transposed, cotangents, tangents), cotangents)
        )
        return [None if output is None else next(results) for output in self.outputs]

    def close(self) -> None:
        """Release the tape and everything on it."""
        self._tape = None
        self._transposed = None
        self.outputs = []

    def _record_transposed(
        self,
    ) -> tuple[tf.GradientTape, list[tf.Tensor | None], list[tf.Tensor]]:
        wanted = [output for output in self.outputs if output is not None]
        cotangents = [tf.zeros_like(output) for output in wanted]
        if self._certain:
            self._refuse_missing_in_transposed(wanted)
        with (
            corrected_derivatives(),
            tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape,
        ):
            tape.watch(cotangents)
            gradient = _differentiate(self._tape, wanted, self._variables, cotangents)
            gradient = [densify(g, v.shape) for g, v in zip(gradient, self._variables)]
        return tape, gradient, cotangents

    def _refuse_missing_in_transposed(self, outputs: Sequence[tf.Tensor]) -> None:
        """Look for lost derivatives between cotangents and the transposed derivative.

        They differ from those met between variables and outputs: the gradient of an image resize
        is the operation TensorFlow cannot differentiate, not the resize.
        """

        def transposed(*cotangents: tf.Tensor) -> list[tf.Tensor]:
            gradient = _differentiate(self._tape, outputs, self._variables, cotangents)
            return [densify(g, v.shape) for g, v in zip(gradient, self._variables)]

        specs = [tf.TensorSpec(output.shape, output.dtype) for output in outputs]
        concrete = tf.function(transposed, autograph=False).get_concrete_function(*specs)
        flow = Dataflow(concrete.graph.as_graph_def(), concrete.graph)
        sources = [flow.vertex(tensor.name) for tensor in concrete.inputs[: len(outputs)]]
        targets = [flow.vertex(tensor.name) for tensor in concrete.outputs]
        doubts = find_doubts(flow, sources, targets)
        refuse_missing_derivatives(doubts.missing + doubts.wrong_at_values)

    def _dense(self, gradient: Sequence[Any], like: Sequence[Any]) -> list[tf.Tensor]:
        """Make slices dense and Nones zero, where a None is known to mean zero."""
        if not self._certain and any(g is None for g in gradient):
            raise SecondDerivativeError(
                "TensorFlow answers None for a derivative, which may be a true zero or a "
                "derivative it does not have; the function could not be traced to tell",
                "a derivative, or a function that can be traced by tf.function",
                "write the loss with TensorFlow operations only (no .numpy(), no Python numbers "
                "made from tensors)",
            )
        return [
            tf.zeros(x.shape, x.dtype) if g is None else densify(g, x.shape)
            for g, x in zip(gradient, like)
        ]


def _differentiate(
    tape: tf.GradientTape, targets: Sequence[Any], sources: Sequence[Any], weights: Sequence[Any]
) -> list[Any]:
    """`tape.gradient`, with None among the targets taken as zero."""
    pairs = [(t, w) for t, w in zip(targets, weights) if t is not None]
    if not pairs:
        return [None] * len(sources)
    with Uninterrupted(), derivative_errors(), corrected_derivatives():
        gradient = outside_strategies(tape.gradient)
        return gradient([t for t, _ in pairs], sources, [w for _, w in pairs])
