"""Finds the layers of a model in its graph: which weights have a Kronecker-factored block.

A layer is identified by the operations that read its weights, not by the class that built them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hvp._errors import HvpError
from hvp._graphs.graph import data_inputs, node_of, with_index
from hvp._graphs.weights import Use, WeightedGraph
from hvp._kronecker.forms import PASSED, EntrywiseForm, GatherForm, MatrixForm, form_of
from hvp._vectors.variables import VariableNest


@dataclass(frozen=True)
class Layer:
    """Weights that have a block: matrices with the bias that is added, or single entries.

    The operations `forms` use the weights `names`. The indices of these in the flat vector are
    `entries`, of shape `(K, I, O)` for matrices, where a bias is the last of the `I` rows, and
    `(d,)` for weights that multiply or are added entry by entry. For each form, `tensors` has the
    tensor that enters the operation and the one that holds the weight, if the first is a function
    of the second, else empty strings.
    """

    names: tuple[str, ...]
    entries: np.ndarray
    forms: list[Any] = field(default_factory=list)
    tensors: list[tuple[str, str]] = field(default_factory=list)
    has_bias: bool = False

    @property
    def is_entrywise(self) -> bool:
        """Whether the weights multiply or are added entry by entry."""
        return isinstance(self.forms[0], EntrywiseForm)

    @property
    def is_table(self) -> bool:
        """Whether rows are looked up, not multiplied."""
        return isinstance(self.forms[0], GatherForm)


def find_layers(
    graph: WeightedGraph, nest: VariableNest, handles: Mapping[int, str]
) -> tuple[list[Layer], list[str]]:
    """Return the layers in the order of their weights, and the names of weights without one.

    The `handles` are the tensors that stand for variables in the graph, by the `id` of their
    handles outside. An `HvpError` is raised if a weight is used in two ways, for example both
    looked up and multiplied.
    """
    layers: list[Layer] = []
    uncovered: list[str] = []
    first = 0
    for number, (variable, name) in enumerate(zip(nest.variables, nest.names)):
        shape, handle = tuple(variable.shape), handles.get(id(variable.handle))
        uses = graph.uses(number, handle, shape) if handle else []
        grouped = _grouped(name, np.arange(first, first + math.prod(shape)), uses, graph)
        first += math.prod(shape)
        if grouped is None:
            uncovered.append(name)
        else:
            layers += grouped
    matrices = [layer for layer in layers if not layer.is_entrywise]
    entrywise = [layer for layer in layers if layer.is_entrywise]
    joined = _with_biases(matrices, entrywise, graph)
    return sorted(joined, key=lambda layer: int(layer.entries.min())), uncovered


def _grouped(
    name: str, places: np.ndarray, uses: Sequence[Use], graph: WeightedGraph
) -> list[Layer] | None:
    """Group uses by the entries that they use, or return None if one of them has no known form."""
    groups: dict[Any, Layer] = {}
    for use in uses:
        form = form_of(use, graph)
        if form is None or use.view is None:
            return None
        is_matrix = isinstance(form, MatrixForm)
        entries = form.arrange(use.view) if isinstance(form, MatrixForm) else use.view
        if len(np.unique(entries)) < entries.size:
            return None
        key = isinstance(form, GatherForm), is_matrix, entries.shape, entries.tobytes()
        own = places[entries if is_matrix else entries.reshape(-1)]
        same = groups.setdefault(key, Layer((name,), own))
        same.forms.append(form)
        same.tensors.append((use.tensor, use.value) if use.is_scaled else ("", ""))
    used = np.zeros(len(places), np.int8)
    for same in groups.values():
        own = same.entries.reshape(-1) - places[:1]
        if used[own].any():
            raise HvpError(
                f"the weight {name!r} is used in two ways: "
                + " and ".join(dict.fromkeys(use.node.op for use in uses)),
                "weights that every operation uses in the same way",
                f"leave {name!r} out of the variables",
            )
        used[own] = 1
    if not used.all():  # the predictions do not depend on these entries
        nothing = EntrywiseForm([], "", (), 0.0)
        groups["rest"] = Layer((name,), places[used == 0], [nothing], [("", "")])
    return list(groups.values())


def _with_biases(
    matrices: list[Layer], entrywise: list[Layer], graph: WeightedGraph
) -> list[Layer]:
    """Join biases with the matrices whose products they are added to."""
    layers: list[Layer] = list(matrices)
    for other in entrywise:
        place = _place_of_bias(other, layers[: len(matrices)], graph)
        if place is None:
            layers.append(other)
            continue
        layer = layers[place]
        bias = layer.forms[0].bias(other.entries, layer.entries.shape[0])
        layers[place] = replace(
            layer,
            names=layer.names + other.names,
            entries=np.concatenate([layer.entries, bias[:, np.newaxis]], axis=1),
            has_bias=True,
        )
    return layers


def _place_of_bias(other: Layer, layers: Sequence[Layer], graph: WeightedGraph) -> int | None:
    outputs: dict[str, int] = {}
    for place, layer in enumerate(layers):
        outputs.update({form.output: place for form in layer.forms})
    added = []
    for form, (tensor, _) in zip(other.forms, other.tensors):
        node = graph.nodes.get(node_of(form.output)) if form.output else None
        is_added = node is not None and node.op in ("BiasAdd", "Add", "AddV2") and not tensor
        source = _product_before(node, outputs, graph) if is_added else None
        if source is None:
            return None
        added.append(source)
    places = {outputs[output] for output in added}
    if len(places) != 1:
        return None
    place = places.pop()
    layer = layers[place]
    groups, _, width = layer.entries.shape
    if layer.has_bias or layer.is_table or sorted(added) != sorted(f.output for f in layer.forms):
        return None
    arranged = layer.forms[0].bias(other.entries, groups)
    if arranged is None or arranged.size != groups * width:
        return None
    product, size = layer.forms[0], groups * width
    fits = all(_is_along_columns(form, product, size, graph) for form in other.forms)
    return place if fits else None


def _product_before(node: Any, outputs: dict[str, int], graph: WeightedGraph) -> str | None:
    """Return the product to which an addition adds, if nothing else uses that product."""
    for start in data_inputs(node):
        tensor = with_index(start)
        while tensor not in outputs:
            before = graph.nodes[node_of(tensor)]
            if before.op not in PASSED or len(graph.consumers(tensor)) != 1:
                break
            tensor = with_index(data_inputs(before)[0])
        if tensor in outputs and len(graph.consumers(tensor)) == 1:
            return tensor
    return None


def _is_along_columns(form: EntrywiseForm, product: Any, width: int, graph: WeightedGraph) -> bool:
    """Whether the entries of a bias lie along the axes of the result that are the columns."""
    result = graph.shape(form.output)
    if result.rank is None:
        return False
    shape = list(form.shape)
    if getattr(product, "channels_first", False):
        shape = [1] * (result.rank - len(shape)) + shape
        return shape[1] == width and math.prod(shape) == width
    while shape and shape[0] == 1 and math.prod(shape[1:]) == width:
        shape = shape[1:]
    sizes = result[result.rank - len(shape) :].as_list()
    return None not in sizes and math.prod(sizes) == width and sizes == shape
