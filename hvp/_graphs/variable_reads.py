"""Reads of variables as inputs of a graph and of the functions that it calls.

A later run must see the values that the variables had in the first one. Loops and branches pass
variables to their bodies as resource handles, so that the bodies and the types in the calls change
along with the reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvp._graphs.dataflow import CALLS, CONTROL_FLOW, functions_of
from hvp._graphs.graph import Graph
from hvp._graphs.inline import register_functions
from hvp._graphs.private import SHAPES
from hvp._graphs.sizes import note_shapes, shapes_of

_serials = itertools.count()

# From the name of a variable's handle to the name of its value, and the value's type.
_Variables = dict[str, tuple[str, tf.DType]]

# From an operation on a variable's handle to the operation that does the same with its value, and
# the name of the attribute that holds the value's type.
ON_VALUE = {
    "Identity": ("Identity", "T"),
    "ReadVariableOp": ("Identity", "T"),
    "ResourceGather": ("GatherV2", "Tparams"),
    "ResourceGatherNd": ("GatherNd", "Tparams"),
    "VariableShape": ("Shape", "T"),
}
# The attributes that both operations have.
_COMMON_ATTRIBUTES = {
    "VariableShape": ["out_type"],
    "ResourceGather": ["batch_dims", "Tindices", "Taxis"],
    "ResourceGatherNd": ["Tindices"],
}


def read_from_inputs(flat: Any, variables: Mapping[str, tuple[str, tf.DType]]) -> None:
    """Turn reads of variables into uses of inputs, in loops and branches too, in place.

    `variables` maps the name of each variable's handle to the name of the input that holds its
    value, and the value's type.
    """
    if variables:
        _Rewriter(flat).rewrite(flat.node, dict(variables), in_function=False)
        register_functions(flat)


class _Rewriter:
    """Replaces variables by their values in a graph and in the functions that it calls."""

    def __init__(self, flat: Any) -> None:
        self._library = flat.library
        self._functions = Graph(flat).functions
        # From a function and the places of its variables to the name of the rewritten function.
        self._rewritten: dict[tuple[str, tuple[int, ...]], str] = {}

    def rewrite(self, nodes: Any, variables: _Variables, *, in_function: bool) -> dict[str, str]:
        """Rewrite nodes, and return the new names of results that had to be renamed."""
        # In a function, the name of a result includes the name of the operation's output argument.
        output = ":output" if in_function else ""
        variables = _with_aliases(nodes, variables, output)
        renamed: dict[str, str] = {}
        for node in list(nodes):
            types = {i: variables[x][1] for i, x in enumerate(node.input) if x in variables}
            if not types:
                continue
            for i in types:
                node.input[i] = variables[node.input[i]][0]
            if node.op in CONTROL_FLOW | CALLS:
                self._rewrite_call(node, types)
            elif node.op in ON_VALUE:
                if node.op == "ReadVariableOp" and in_function:
                    renamed[f"{node.name}:value:0"] = f"{node.name}{output}:0"
                if node.op == "ResourceGather":
                    node.input.insert(2, f"{_add_axis(nodes, node)}{output}:0")
                _apply_to_value(node, types[0])
        for node in nodes:
            for i, name in enumerate(node.input):
                node.input[i] = renamed.get(name, name)
        return renamed

    def _rewrite_call(self, node: Any, types: dict[int, tf.DType]) -> None:
        # The predicate or branch index comes before the function's arguments.
        skipped = 1 if node.op in ("If", "StatelessIf", "Case", "StatelessCase") else 0
        types = {i - skipped: dtype for i, dtype in types.items()}
        for function in functions_of(node):
            function.name = self._taking_values(function.name, types)
        type_list = node.attr["T" if "T" in node.attr else "Tin"].list.type
        for i, dtype in types.items():
            type_list[i] = dtype.as_datatype_enum
        if "body" in node.attr:  # a loop's inputs are its outputs too
            shapes = node.attr["output_shapes"].list.shape
            for i in types:
                if i < len(shapes):
                    shapes[i].Clear()
                    shapes[i].unknown_rank = True
        node.attr.pop(SHAPES, None)

    def _taking_values(self, name: str, types: dict[int, tf.DType]) -> str:
        """Return the name of the function that takes values where this one takes variables."""
        key = (name, tuple(sorted(types)))
        if key in self._rewritten:
            return self._rewritten[key]
        copy = self._library.function.add()
        copy.CopyFrom(self._functions[name])
        copy.signature.name = self._rewritten[key] = f"{name}_values_{next(_serials)}"
        self._functions[copy.signature.name] = copy
        variables: _Variables = {}
        for i, dtype in types.items():
            argument = copy.signature.input_arg[i]
            _set_type(argument, dtype)
            copy.arg_attr.pop(i, None)
            copy.resource_arg_unique_id.pop(i, None)
            variables[argument.name] = (argument.name, dtype)
        aliases = _with_aliases(copy.node_def, variables, ":output")
        renamed = self.rewrite(copy.node_def, variables, in_function=True)
        for out in copy.signature.output_arg:
            result = copy.ret[out.name]
            copy.ret[out.name] = renamed.get(result, result)
            if result in aliases:
                _set_type(out, aliases[result][1])
        return copy.signature.name


def _with_aliases(nodes: Any, variables: _Variables, output: str) -> _Variables:
    """Add the names that variables get from identities and as results of loops."""
    aliases = dict(variables)
    size = -1
    while size < len(aliases):
        size = len(aliases)
        for node in nodes:
            if node.op not in ("Identity", "While", "StatelessWhile"):
                continue
            for i, name in enumerate(node.input):
                if name in aliases:
                    alias = f"{node.name}{output}:{i}"
                    aliases[alias] = (alias, aliases[name][1])
    return aliases


def _set_type(argument: Any, dtype: tf.DType) -> None:
    argument.type = dtype.as_datatype_enum
    del argument.handle_data[:]


def _add_axis(nodes: Any, node: Any) -> str:
    """Add the constant axis that `GatherV2` takes; `ResourceGather` implies it."""
    axis = nodes.add(name=f"{node.name}/axis", op="Const")
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(node.attr["batch_dims"].i, tf.int32))
    node.attr["Taxis"].type = tf.int32.as_datatype_enum
    return str(axis.name)


def _apply_to_value(node: Any, dtype: tf.DType) -> None:
    """Replace an operation on a variable by the same operation on its value."""
    copies = {
        name: type(node.attr[name]).FromString(node.attr[name].SerializeToString())
        for name in _COMMON_ATTRIBUTES.get(node.op, [])
        if name in node.attr
    }
    shapes = shapes_of(node)
    node.op, type_attribute = ON_VALUE[node.op]
    node.attr.clear()
    note_shapes(node, shapes)
    for name, value in copies.items():
        node.attr[name].CopyFrom(value)
    node.attr[type_attribute].type = dtype.as_datatype_enum
