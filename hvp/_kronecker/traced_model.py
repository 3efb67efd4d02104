"""A model in the graph that is being traced, with what enters its layers and comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._derivatives.corrections import corrected_derivatives
from hvp._derivatives.replace import replace_operations
from hvp._engines.prediction_rule import Output, PredictionRule
from hvp._engines.predictions import Predictions
from hvp._engines.rule import Parts
from hvp._engines.taped import TapedGradient
from hvp._errors import InvalidLossError
from hvp._graphs.folding import fold_shapes
from hvp._graphs.inline import inline_calls
from hvp._graphs.parts import ancestors, cut_out, import_part, node_of
from hvp._graphs.sizes import graph_def_with_shapes, take_sizes
from hvp._graphs.weights import WeightedGraph
from hvp._kronecker.layers import Layer, MatrixLayer, Weight, find_layers
from hvp._kronecker.roots import roots
from hvp._vectors.variables import VariableNest

# Up to this many backward passes stand in the graph one after the other; more run in a loop.
_MOST_UNROLLED = 16
# The names of the operations of the model that is differentiated begin with this.
_SCOPE = "hvp_layers"


@dataclass
class TracedModel:
    """What one batch contributes.

    Attributes
    ----------
    layers : list of Layer
        The layers.
    uncovered : list of str
        Names of weights that belong to none.
    examples : int or tf.Tensor
        The number of examples.
    output : Output
        The loss at the predictions.
    vectors : list of tf.Tensor
        What to propagate backward, for each tensor of the predictions.
    """

    layers: list[Layer]
    uncovered: list[str]
    examples: Any
    output: Output
    vectors: list[tf.Tensor]
    _tensors: dict[str, tf.Tensor]
    _predictions: list[tf.Tensor]

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
        """Trace a model into the present graph, and find its layers.

        Parameters
        ----------
        rule : PredictionRule
            The matrix, with the model and the loss.
        nest : VariableNest
            The weights.
        batch : Elements
            The data.
        signs : int
            As for `roots`.
        backward : bool, optional
            Whether gradients will be propagated backward.
        """
        graph = tf.compat.v1.get_default_graph()
        data = [tf.identity(tensor) for tensor in batch.tensors]
        named = batch.with_tensors(data)
        made: Predictions = named.call(lambda *elements: Predictions(rule.predict(*elements)))
        chosen = [made.tensors[i] for i in made.choose(rule.output_loss, named)]
        chosen = [tf.identity(part) for part in chosen]
        flat, rename = inline_calls(replace_operations(graph_def_with_shapes(graph)))
        fold_shapes(flat)
        starts = [tensor.name for tensor in data]
        results = [rename(tensor.name) for tensor in chosen]
        weighted = WeightedGraph(flat, starts, results)
        layers, uncovered = find_layers(weighted, _weights(nest, graph))
        wanted = list(dict.fromkeys([*results, *_tensors_of(layers)]))
        take_sizes(flat)
        known = {tensor.name: tensor for tensor in data}
        known.update({inside.name: inside for _, inside in graph.captures})
        ends = {node_of(name) for name in known}
        nodes = {node.name: node for node in flat.node}
        part = cut_out(flat, ancestors(nodes, wanted, lambda n: n not in ends), keep_controls=False)
        tensors = dict(zip(wanted, import_part(part, known, wanted, scope=_SCOPE)))
        predictions = [tensors[name] for name in results]

        def loss(parts: Parts, of: Any) -> Any:
            return made.loss(rule.output_loss, parts, of)

        taped = TapedGradient(lambda: loss(predictions, named), predictions)
        output = Output(taped, predictions, named, loss)
        if not predictions or predictions[0].shape.rank == 0:
            raise InvalidLossError(
                "the model returned a scalar", "predictions whose first axis counts the examples"
            )
        examples = data[0].shape[0] or tf.shape(data[0])[0]
        vectors = roots(rule, output, signs) if backward else []
        traced = cls(layers, uncovered, examples, output, vectors, tensors, predictions)
        if backward:
            traced.leave_out_unconnected()
        return traced

    def inputs(self, layer: Layer) -> list[list[tf.Tensor]]:
        """Return what enters the operations of a layer, for each of them."""
        forms = layer.forms if isinstance(layer, MatrixLayer) else [use[0] for use in layer.uses]
        return [[self._tensors[name] for name in form.inputs] for form in forms]

    def rows(self) -> dict[str, tf.Tensor]:
        """Return what should belong to one example after the other, along the second axis.

        It is what enters the matrices, and the results of operations entry by entry. The keys are
        the name of the weight, the place of its block in it and the number of the use.
        """
        rows = {}
        for layer in self.layers:
            key = f"{layer.names[0]} {int(layer.entries.min())}"
            if isinstance(layer, MatrixLayer):
                for number, (form, data) in enumerate(zip(layer.forms, self.inputs(layer))):
                    rows[f"{key}/{number}"] = form.rows(data, self.examples)
                continue
            for number, (use, _, _) in enumerate(layer.uses):
                if use.output:
                    result = self._tensors[use.output]
                    rows[f"{key}/{number}"] = tf.reshape(result, [1, self.examples, -1])
        return rows

    def derivative(self, tensor: str, value: str) -> tf.Tensor:
        """Return the derivative of a tensor's entries in the weight's entries that they are of."""
        source = self._tensors[value]
        with corrected_derivatives():
            sums = tf.reduce_sum(self._tensors[tensor])
            (gradient,) = tf.gradients(sums, [source], unconnected_gradients="zero")
        return gradient

    def backward(self, step: Callable[[list[Any]], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Add up what a function computes from the gradients that belong to each vector.

        Parameters
        ----------
        step : callable
            Takes the gradients in the results of all operations, as many lists as there are layers;
            returns tensors to be added up.
        """
        count = self.vectors[0].shape[0]
        if count is not None and count <= _MOST_UNROLLED:
            total: list[tf.Tensor] | None = None
            for number in range(count):
                terms = step(self._gradients([part[number] for part in self.vectors]))
                total = terms if total is None else [a + b for a, b in zip(total, terms)]
            assert total is not None
            return total
        first = step(self._gradients([part[0] for part in self.vectors]))

        def body(number: tf.Tensor, *total: tf.Tensor) -> list[tf.Tensor]:
            terms = step(self._gradients([part[number] for part in self.vectors]))
            return [number + 1, *(a + b for a, b in zip(total, terms))]

        end = tf.shape(self.vectors[0])[0]
        _, *sums = tf.while_loop(
            lambda number, *_: number < end, body, [tf.constant(1), *first], parallel_iterations=1
        )
        return sums

    def _gradients(self, weights: Sequence[tf.Tensor]) -> list[list[Any]]:
        names = _outputs_of(self.layers)
        wanted = list(dict.fromkeys(name for several in names for name in several if name))
        with corrected_derivatives():
            gradients = tf.gradients(
                self._predictions, [self._tensors[name] for name in wanted], list(weights)
            )
        by_name = dict(zip(wanted, gradients))
        return [[by_name.get(name) for name in several] for several in names]

    def leave_out_unconnected(self) -> None:
        """Leave out layers that no gradient reaches, as where a function has one of its own."""
        gradients = self._gradients([part[0] for part in self.vectors])
        kept = []
        for layer, names, parts in zip(self.layers, _outputs_of(self.layers), gradients):
            if all(part is not None or not name for name, part in zip(names, parts)):
                kept.append(layer)
            else:
                self.uncovered += layer.names
        self.layers = kept


def _weights(nest: VariableNest, graph: Any) -> list[Weight]:
    handles = {id(outside): inside.name for outside, inside in graph.captures}
    weights, first = [], 0
    for variable, name, shape in zip(nest.variables, nest.names, nest.shapes):
        weight = Weight(name, handles.get(id(variable.handle), ""), shape, first)
        weights.append(weight)
        first += weight.size
    return weights


def _outputs_of(layers: Sequence[Layer]) -> list[list[str]]:
    return [
        [form.output for form in layer.forms]
        if isinstance(layer, MatrixLayer)
        else [form.output for form, *_ in layer.uses]
        for layer in layers
    ]


def _tensors_of(layers: Sequence[Layer]) -> list[str]:
    """Return the names of all tensors that statistics are computed from."""
    names = [name for several in _outputs_of(layers) for name in several]
    for layer in layers:
        if isinstance(layer, MatrixLayer):
            names += [name for form in layer.forms for name in form.inputs]
        else:
            for form, tensor, value in layer.uses:
                names += [*form.inputs, tensor, value]
    return [name for name in names if name]
