"""The layers of the graph being traced, with their inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._derivatives.corrections import corrected_derivatives
from hvp._derivatives.replace import replace_operations
from hvp._graphs.folding import fold_shapes
from hvp._graphs.graph import Graph
from hvp._graphs.inline import inline_calls
from hvp._graphs.sizes import graph_def_with_shapes, take_sizes
from hvp._graphs.weights import WeightedGraph
from hvp._kronecker.layers import Layer, find_layers
from hvp._vectors.variables import VariableNest

# The names of the operations that are differentiated begin with this.
_SCOPE = "hvp_layers"


@dataclass
class LayeredGraph:
    """A copy of the traced graph in which the layers are known.

    The copy computes the `results` of the traced graph. The weights with the names `uncovered`
    belong to no layer.
    """

    layers: list[Layer]
    uncovered: list[str]
    results: list[tf.Tensor]
    _tensors: dict[str, tf.Tensor]

    @classmethod
    def of(
        cls, nest: VariableNest, data: Sequence[tf.Tensor], results: Sequence[tf.Tensor]
    ) -> LayeredGraph:
        """Find the layers of the graph being traced, from `data` to `results`, and import a copy.

        A weight that is used in two ways is refused.
        """
        graph = tf.compat.v1.get_default_graph()
        flat, rename = inline_calls(replace_operations(graph_def_with_shapes(graph)))
        fold_shapes(flat)
        ends = [rename(tensor.name) for tensor in results]
        weighted = WeightedGraph(Graph(flat), [tensor.name for tensor in data], ends)
        handles = {id(outside): inside.name for outside, inside in graph.captures}
        layers, uncovered = find_layers(weighted, nest, handles)
        wanted = list(dict.fromkeys([*ends, *_tensors_of(layers)]))
        take_sizes(flat)
        known = {tensor.name: tensor for tensor in data}
        known.update({inside.name: inside for _, inside in graph.captures})
        part = Graph(flat).computing(wanted, known)
        tensors = dict(zip(wanted, part.imported(known, wanted, scope=_SCOPE)))
        return cls(layers, uncovered, [tensors[name] for name in ends], tensors)

    def inputs(self, layer: Layer) -> list[list[tf.Tensor]]:
        """Return the inputs of each operation of a layer."""
        return [[self._tensors[name] for name in form.inputs] for form in layer.forms]

    def output(self, name: str) -> tf.Tensor:
        """Return the output of an operation of a layer."""
        return self._tensors[name]

    def derivative(self, tensor: str, value: str) -> tf.Tensor:
        """Return the derivative of a tensor's entries with respect to the entries of the weight."""
        source = self._tensors[value]
        with corrected_derivatives():
            sums = tf.reduce_sum(self._tensors[tensor])
            (gradient,) = tf.gradients(sums, [source], unconnected_gradients="zero")
        return gradient

    def gradients(self, weights: Sequence[tf.Tensor] | None = None) -> list[list[Any]]:
        """Return the gradients in the outputs of the operations of each layer.

        The results are multiplied by `weights` before they are summed; None stands for ones.
        """
        names = _outputs_of(self.layers)
        wanted = list(dict.fromkeys(name for several in names for name in several if name))
        with corrected_derivatives():
            gradients = tf.gradients(
                self.results,
                [self._tensors[name] for name in wanted],
                None if weights is None else list(weights),
            )
        by_name = dict(zip(wanted, gradients))
        return [[by_name.get(name) for name in several] for several in names]

    def leave_out_unconnected(self, gradients: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Leave out layers that no gradient reaches, as behind a function with its own gradient.

        The gradients of the remaining layers are returned.
        """
        layers, kept = [], []
        for layer, names, parts in zip(self.layers, _outputs_of(self.layers), gradients):
            if all(part is not None or not name for name, part in zip(names, parts)):
                layers.append(layer)
                kept.append(list(parts))
            else:
                self.uncovered += layer.names
        self.layers = layers
        return kept


def _outputs_of(layers: Sequence[Layer]) -> list[list[str]]:
    return [[form.output for form in layer.forms] for layer in layers]


def _tensors_of(layers: Sequence[Layer]) -> list[str]:
    """Return the names of all tensors that are needed later."""
    names = [name for several in _outputs_of(layers) for name in several]
    for layer in layers:
        names += [name for form in layer.forms for name in form.inputs]
        names += [name for pair in layer.tensors for name in pair]
    return [name for name in names if name]
