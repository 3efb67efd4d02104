"""Finds the layers of a model in its graph: which weights have a Kronecker-factored block.

A layer is identified by the operations that read its weights, not by the class that built them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hvp._errors import HvpError
from hvp._graphs.graph import data_inputs, node_of, with_index
from hvp._graphs.weights import Use, WeightedGraph
from hvp._kronecker.forms import PASSED, EntrywiseForm, Form, GatherForm, MatrixForm, form_of


@dataclass(frozen=True)
class MatrixLayer:
    """Weights that are matrices, with the bias that is added to the product, if any.

    The operations `forms` use the weights `names`, whose indices in the flat vector are `entries`,
    of shape `(K, I, O)`. A bias is the last of the `I` rows.
    """

    names: tuple[str, ...]
    forms: tuple[MatrixForm, ...]
    entries: np.ndarray
    has_bias: bool = False

    @property
    def is_table(self) -> bool:
        """Whether rows are looked up, not multiplied."""
        return isinstance(self.forms[0], GatherForm)


@dataclass(frozen=True)
class EntrywiseLayer:
    """Weights that multiply or are added entry by entry.

    Each use has two tensors besides its form: the one that enters the operation and the one that
    holds the weight, if the first is a function of the second, else empty strings. The indices
    `entries` of the weights in the flat vector have the shape `(d,)`.
    """

    names: tuple[str, ...]
    uses: tuple[tuple[EntrywiseForm, str, str], ...]
    entries: np.ndarray


Layer = Any  # MatrixLayer or EntrywiseLayer


@dataclass(frozen=True)
class Weight:
    """A variable as the graph knows it.

    The tensor `handle` stands for it in the graph, and is empty if the graph does not read it. Its
    first entry has the index `first` in the flat vector.
    """

    name: str
    handle: str
    shape: tuple[int, ...]
    first: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass
class _Uses:
    """Uses of the same entries, arranged in the same way."""

    entries: np.ndarray
    forms: list[Form] = field(default_factory=list)
    tensors: list[tuple[str, str]] = field(default_factory=list)


def find_layers(graph: WeightedGraph, weights: Sequence[Weight]) -> tuple[list[Layer], list[str]]:
    """Return the layers in the order of their weights, and the names of weights without one.

    An `HvpError` is raised if a weight is used in two ways, for example both looked up and
    multiplied.
    """
    matrices: list[MatrixLayer] = []
    entrywise: list[EntrywiseLayer] = []
    uncovered: list[str] = []
    for number, weight in enumerate(weights):
        uses = graph.uses(number, weight.handle, weight.shape) if weight.handle else []
        grouped = _grouped(weight, uses, graph)
        if grouped is None:
            uncovered.append(weight.name)
            continue
        for same in grouped:
            if isinstance(same.forms[0], MatrixForm):
                forms: Any = tuple(same.forms)
                matrices.append(MatrixLayer((weight.name,), forms, same.entries + weight.first))
            else:
                triples: Any = tuple((f, *t) for f, t in zip(same.forms, same.tensors))
                entries = same.entries.reshape(-1) + weight.first
                entrywise.append(EntrywiseLayer((weight.name,), triples, entries))
    layers: list[Layer] = [*_with_biases(matrices, entrywise, graph)]
    layers.sort(key=lambda layer: int(layer.entries.min()))
    return layers, uncovered


def _grouped(weight: Weight, uses: Sequence[Use], graph: WeightedGraph) -> list[_Uses] | None:
    """Group uses by the entries that they use, or return None if one of them has no known form."""
    groups: dict[Any, _Uses] = {}
    for use in uses:
        form = form_of(use, graph)
        if form is None or use.view is None:
            return None
        is_matrix = isinstance(form, MatrixForm)
        entries = form.arrange(use.view) if isinstance(form, MatrixForm) else use.view
        if len(np.unique(entries)) < entries.size:
            return None
        kind = isinstance(form, GatherForm), is_matrix
        same = groups.setdefault((kind, entries.shape, entries.tobytes()), _Uses(entries))
        same.forms.append(form)
        same.tensors.append((use.tensor, use.value) if use.is_scaled else ("", ""))
    used = np.zeros(weight.size, np.int8)
    for same in groups.values():
        if used[same.entries.reshape(-1)].any():
            raise HvpError(
                f"the weight {weight.name!r} is used in two ways: "
                + " and ".join(dict.fromkeys(use.node.op for use in uses)),
                "weights that every operation uses in the same way",
                f"leave {weight.name!r} out of the variables",
            )
        used[same.entries.reshape(-1)] = 1
    if not used.all():  # the predictions do not depend on these entries
        groups["rest"] = _Uses(np.flatnonzero(used == 0), [_nothing()], [("", "")])
    return list(groups.values())


def _nothing() -> EntrywiseForm:
    return EntrywiseForm([], "", (), 0.0)


def _with_biases(
    matrices: list[MatrixLayer], entrywise: list[EntrywiseLayer], graph: WeightedGraph
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


def _place_of_bias(
    other: EntrywiseLayer, layers: Sequence[MatrixLayer], graph: WeightedGraph
) -> int | None:
    outputs: dict[str, int] = {}
    for place, layer in enumerate(layers):
        outputs.update({form.output: place for form in layer.forms})
    added = []
    for form, tensor, _ in other.uses:
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
    fits = all(_is_along_columns(form, product, size, graph) for form, *_ in other.uses)
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
