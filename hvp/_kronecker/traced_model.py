"""A model that is being traced, with the loss at its predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._engines.prediction_rule import Output, PredictionRule, refuse_penalties
from hvp._engines.predictions import Predictions
from hvp._engines.rule import Parts
from hvp._engines.taped import TapedGradient
from hvp._errors import InvalidLossError
from hvp._kronecker.layered_graph import LayeredGraph
from hvp._kronecker.roots import roots
from hvp._vectors.variables import VariableNest

# Up to this many backward passes stand in the graph one after the other; more run in a loop.
_MOST_UNROLLED = 16


@dataclass
class TracedModel:
    """The contribution of one batch, with the loss at the predictions as its `output`.

    `vectors` has what to propagate backward from each tensor of the predictions.
    """

    graph: LayeredGraph
    examples: Any
    output: Output
    vectors: list[tf.Tensor]

    @classmethod
    def of(
        cls,
        rule: PredictionRule,
        nest: VariableNest,
        batch: Any,
        signs: int,
        *,
        backward: bool = True,
    ) -> TracedModel:
        """Trace a model into the current graph; there are no `vectors` unless `backward`."""
        data = [tf.identity(tensor) for tensor in batch.tensors]
        named = batch.with_tensors(data)
        made: Predictions = named.call(lambda *elements: Predictions(rule.predict(*elements)))
        chosen = [made.tensors[i] for i in made.choose(rule.output_loss, named)]
        chosen = [tf.identity(part) for part in chosen]
        graph = LayeredGraph.of(nest, data, chosen)
        predictions = graph.results

        def loss(parts: Parts, of: Any) -> Any:
            return made.loss(rule.output_loss, parts, of)

        taped = TapedGradient(lambda: loss(predictions, named), predictions)
        output = Output(taped, predictions, named, loss)
        refuse_penalties(lambda: loss(predictions, named), nest.variables)
        if not predictions or predictions[0].shape.rank == 0:
            raise InvalidLossError(
                "the model returned a scalar", "predictions whose first axis counts the examples"
            )
        examples = data[0].shape[0] or tf.shape(data[0])[0]
        vectors = roots(rule, output, signs) if backward else []
        if backward:
            first = graph.gradients([part[0] for part in vectors])
            graph.leave_out_unconnected(first)
        return cls(graph, examples, output, vectors)

    def rows(self) -> dict[str, tf.Tensor]:
        """Return tensors that should hold one example after the other along their second axis.

        These are the inputs of matrices, the results of entrywise operations, and the predictions.
        The keys are made of the weight's name, which predictions have none of, the index of its
        block and the number of the use.
        """
        rows = {}
        for layer in self.graph.layers:
            key = f"{layer.names[0]} {int(layer.entries.min())}"
            if not layer.is_entrywise:
                for number, (form, data) in enumerate(zip(layer.forms, self.graph.inputs(layer))):
                    rows[f"{key}/{number}"] = form.rows(data, self.examples)
                continue
            for number, use in enumerate(layer.forms):
                if use.output:
                    result = self.graph.output(use.output)
                    rows[f"{key}/{number}"] = tf.reshape(result, [1, self.examples, -1])
        for number, part in enumerate(self.graph.results):
            if part.shape.rank and part.shape[0] == self.examples:
                rows[f" predictions/{number}"] = tf.reshape(part, [1, self.examples, -1])
        return rows

    def backward(self, step: Callable[[list[Any]], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Sum the tensors that `step` computes from the gradients that belong to each vector.

        `step` takes the gradients in the results of all operations, one list for each layer.
        """
        count = self.vectors[0].shape[0]
        if count is not None and count <= _MOST_UNROLLED:
            total: list[tf.Tensor] | None = None
            for number in range(count):
                terms = step(self.graph.gradients([part[number] for part in self.vectors]))
                total = terms if total is None else [a + b for a, b in zip(total, terms)]
            assert total is not None
            return total
        first = step(self.graph.gradients([part[0] for part in self.vectors]))

        def body(number: tf.Tensor, *total: tf.Tensor) -> list[tf.Tensor]:
            terms = step(self.graph.gradients([part[number] for part in self.vectors]))
            return [number + 1, *(a + b for a, b in zip(total, terms))]

        end = tf.shape(self.vectors[0])[0]
        _, *sums = tf.while_loop(
            lambda number, *_: number < end, body, [tf.constant(1), *first], parallel_iterations=1
        )
        return sums
