"""Making a traced function repeatable: the same inputs give the same results, and nothing else.

A function that is run again must not see that variables have changed meanwhile, must draw the
same random numbers, and must not update anything a second time. So in its graph, reads of
variables become inputs; random draws become functions of a seed; and whatever else has a state of
its own is run once, and its results are inputs of every later run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._errors import RecomputeError
from hvp._graphs.dataflow import CALLS, CONTROL_FLOW, functions_of, is_stateful
from hvp._graphs.inline import register_functions
from hvp._graphs.parts import ancestors, cut_out, data_inputs, node_of
from hvp._graphs.split import has_effects

_serials = itertools.count()

# Draws whose state TensorFlow hides in the operation, and their counterparts without a state.
_DRAWS = {
    "RandomStandardNormal": "StatelessRandomNormalV2",
    "RandomUniform": "StatelessRandomUniformV2",
    "RandomUniformInt": "StatelessRandomUniformIntV2",
    "TruncatedNormal": "StatelessTruncatedNormalV2",
}
_PHILOX = 1


@dataclass(frozen=True)
class Replay:
    """The repeatable part of a traced function.

    Attributes
    ----------
    part : GraphDef
        Nodes that make the results, none with a state.
    kept : list of str
        Tensors from nodes with a state, which the part takes as inputs.
    """

    part: Any
    kept: list[str]


def replay(flat: Any, results: Sequence[str], inputs: Sequence[str]) -> Replay:
    """Find the part of a graph that can be repeated.

    Parameters
    ----------
    flat : GraphDef
        Without calls, as `read_from_inputs` and `draw_from_seeds` leave it.
    results : sequence of str
        Names of the tensors wanted.
    inputs : sequence of str
        Names of tensors that are given.

    Returns
    -------
    Replay

    Raises
    ------
    RecomputeError
        If a result needs the state of something that cannot be kept.
    """
    nodes = {node.name: node for node in flat.node}
    functions = {f.signature.name: f for f in flat.library.function}
    given = {node_of(name) for name in inputs}
    stateful = {name for name, node in nodes.items() if is_stateful(node, functions)} - given

    def inside(name: str) -> bool:
        return name not in stateful and name not in given

    part = ancestors(nodes, results, inside)
    taken = [*results, *(tensor for name in part for tensor in data_inputs(nodes[name]))]
    kept = sorted({tensor for tensor in taken if node_of(tensor) in stateful})
    for tensor in kept:
        _refuse_unrepeatable(nodes[node_of(tensor)])
    return Replay(cut_out(flat, part, keep_controls=False), kept)


def _refuse_unrepeatable(node: Any) -> None:
    # What these hand over may differ from one order of derivative to the next.
    if node.op in CONTROL_FLOW:
        raise RecomputeError(
            f"the function has a loop or branch with a state in it: {node.op} at {node.name!r}",
            "state (random draws, updates of variables) outside of loops and branches",
            "draw the random numbers before the loop, or use stateless draws",
        )


def with_effects(flat: Any, pure: Replay, results: Sequence[str], inputs: Sequence[str]) -> Any:
    """Return the part of a graph that runs the first time: what is repeatable, kept or an effect.

    Parameters
    ----------
    flat : GraphDef
        The graph.
    pure : Replay
        Its repeatable part.
    results, inputs : sequence of str
        As for `replay`.
    """
    nodes = {node.name: node for node in flat.node}
    functions = {f.signature.name: f for f in flat.library.function}
    given = {node_of(name) for name in inputs}
    effects = [f"{name}:0" for name, node in nodes.items() if has_effects(node, functions)]
    wanted = [*results, *pure.kept, *(t for t in effects if node_of(t) not in given)]
    first = ancestors(nodes, wanted, lambda name: name not in given, controls=True)
    return cut_out(flat, first, keep_controls=True)


def same_nodes(
    first: Any,
    results: Sequence[str],
    again: Any,
    results_again: Sequence[str],
    inputs: dict[str, str],
) -> dict[str, str]:
    """Pair the operations of two traces of one function, which have to compute the same.

    Parameters
    ----------
    first, again : GraphDef
        Both traces, as `read_from_inputs` and `draw_from_seeds` leave them.
    results, results_again : sequence of str
        What the function returned in each.
    inputs : dict of str to str
        Inputs by their names in the second trace: those they have in the first.

    Returns
    -------
    dict of str to str
        Operations by their names in the second trace: those in the first.

    Raises
    ------
    RecomputeError
        If the two differ.
    """
    nodes = {node.name: node for node in first.node}
    nodes_again = {node.name: node for node in again.node}
    library = {f.signature.name: f for f in (*first.library.function, *again.library.function)}
    pairs: dict[str, str] = {}
    queue = list(zip(results, results_again))
    if len(results) != len(results_again):
        _refuse_other_function("its number of results", len(results), len(results_again))
    while queue:
        tensor, tensor_again = queue.pop()
        tensor = _through_identities(tensor, nodes, inputs.values())
        tensor_again = _through_identities(tensor_again, nodes_again, inputs)
        if tensor_again in inputs or tensor in inputs.values():
            if inputs.get(tensor_again) != tensor:
                _refuse_other_function("an input", tensor, tensor_again)
            continue
        name, name_again = node_of(tensor), node_of(tensor_again)
        if name_again in pairs:
            if pairs[name_again] != name:
                _refuse_other_function("an operation", pairs[name_again], name)
            continue
        pairs[name_again] = name
        one, other = nodes.get(name), nodes_again.get(name_again)
        if one is None or other is None:
            _refuse_other_function("a tensor from outside", name, name_again)
            continue
        if not _is_same(_what(one, library), _what(other, library)):
            _refuse_other_function(
                "an operation", f"{one.op} {name!r}", f"{other.op} {name_again!r}"
            )
        # A loop that is differentiated has more inputs than it had, and sometimes in another order.
        inputs_of_one, inputs_of_other = data_inputs(one), data_inputs(other)
        if one.op in CONTROL_FLOW and set(inputs_of_one) <= set(inputs_of_other):
            inputs_of_other = inputs_of_one
        queue += zip(inputs_of_one, inputs_of_other)
        if len(data_inputs(one)) != len(data_inputs(other)) and one.op not in CONTROL_FLOW:
            _refuse_other_function("an operation", name, name_again)
    return pairs


def _through_identities(tensor: str, nodes: dict[str, Any], inputs: Collection[str]) -> str:
    """Return where a tensor comes from; a call that was dissolved has left identities."""
    while tensor not in inputs:
        node = nodes.get(node_of(tensor))
        if node is None or node.op != "Identity":
            break
        tensor = data_inputs(node)[0]
    return tensor


def _what(node: Any, library: dict[str, Any]) -> tuple[str, Counter[Any]]:
    """Return what an operation computes, in a form that can be compared."""
    if node.op in CONTROL_FLOW:
        # Rewritten when it is differentiated: more results, and other names for all of it.
        constants = Counter(
            inner.attr["value"].SerializeToString()
            for function in functions_of(node)
            if function.name in library
            for inner in library[function.name].node_def
            if inner.op == "Const"
        )
        return node.op.replace("Stateless", ""), constants
    attributes = Counter(
        (name, value.SerializeToString(deterministic=True))
        for name, value in node.attr.items()
        # A function of Python's has another token in each trace.
        if not name.startswith("_") and name not in ("seed", "seed2", "token")
    )
    return node.op, attributes


def _is_same(first: tuple[str, Counter[Any]], again: tuple[str, Counter[Any]]) -> bool:
    """Whether an operation of the second trace does what one of the first does."""
    (kind, parts), (kind_again, parts_again) = first, again
    if {kind, f"Stateless{kind}"} & CONTROL_FLOW:  # it may have got constants of its derivative's
        return kind == kind_again and not parts - parts_again
    return kind == kind_again and parts == parts_again


def _refuse_other_function(what: str, first: Any, again: Any) -> None:
    raise RecomputeError(
        f"the function did something else when it was traced for a derivative: {what} was {first}, "
        f"and is now {again}",
        "Python code that does the same each time, with the same variables and tensors",
        "pass what changes as an argument (NumPy random numbers, counters, flags); in a loop that "
        "makes functions, bind its variable: lambda x, w=w: ...",
    )


def names_of_kept(
    flat: Any, pure: Replay, kept: Sequence[str], pairs: Mapping[str, str]
) -> list[str]:
    """Find what is kept of the first run in a later trace.

    Parameters
    ----------
    flat : GraphDef
        The later trace.
    pure : Replay
        Its repeatable part.
    kept : sequence of str
        What is kept, as named in the first trace.
    pairs : mapping of str to str
        As `same_nodes` returns it.

    Returns
    -------
    list of str
        Names in the later trace, some that nothing has where it needs nothing there.

    Raises
    ------
    RecomputeError
        If a derivative needs a state which the function itself does not have.
    """
    nodes = {node.name: node for node in flat.node}
    known = {first: again for again, first in pairs.items()}
    names = []
    for i, tensor in enumerate(kept):
        again = known.get(node_of(tensor))
        names.append(f"{again}:{tensor.partition(':')[2]}" if again else f"unused_kept_{i}:0")
    for tensor in pure.kept:
        if tensor not in names:
            node = nodes[node_of(tensor)]
            raise RecomputeError(
                f"the derivative of the function has a state of its own, that cannot be replayed: "
                f"{node.op} at {node.name!r}",
                "a derivative that depends on its inputs alone",
                "write that part with TensorFlow operations, or leave it outside of recompute",
            )
    return names


def order_after(part: Any, inputs: Mapping[str, tf.DType], first: Sequence[str]) -> Any:
    """Let all that takes some inputs wait until some tensors are there, if they do not need it.

    Parameters
    ----------
    part : GraphDef
        The graph.
    inputs : mapping of str to tf.DType
        What is held back, and its types.
    first : sequence of str
        Tensors to wait for.

    Returns
    -------
    GraphDef
        A part that gives the same; the same part, where one of `first` depends on the inputs.
    """
    nodes = {node.name: node for node in part.node}
    awaited = [tensor for tensor in first if node_of(tensor) in nodes]
    behind = ancestors(nodes, awaited, lambda name: name in nodes)
    if not awaited or any(t in inputs for name in behind for t in data_inputs(nodes[name])):
        return part
    ordered = cut_out(part, set(nodes), keep_controls=True)
    late = {tensor: f"{node_of(tensor)}/late" for tensor in inputs}
    for node in ordered.node:
        for i, tensor in enumerate(node.input):
            if tensor in late:
                node.input[i] = f"{late[tensor]}:0"
    for tensor, dtype in inputs.items():
        node = ordered.node.add(name=late[tensor], op="Identity")
        node.input.extend([tensor, *dict.fromkeys(f"^{node_of(t)}" for t in awaited)])
        node.attr["T"].type = dtype.as_datatype_enum
    return ordered


def read_from_inputs(flat: Any, variables: Mapping[str, tuple[str, tf.DType]]) -> None:
    """Turn reads of variables into uses of inputs, in loops and branches too.

    Parameters
    ----------
    flat : GraphDef
        Changed in place.
    variables : mapping of str to (str, tf.DType)
        From the name of a variable's tensor to that of the input that has its value, and the
        value's type.
    """
    if variables:
        _Reads(flat).rewrite(flat.node, dict(variables), in_function=False)
        register_functions(flat)


def draw_from_seeds(flat: Any) -> None:
    """Replace draws whose state is hidden by one draw of a seed, and draws that depend on it.

    Parameters
    ----------
    flat : GraphDef
        Changed in place.
    """
    for node in list(flat.node):
        if node.op in _DRAWS:
            _draw_from_seed(flat, node)


def _draw_from_seed(flat: Any, node: Any) -> None:
    given = {"shape": tf.as_dtype(node.attr["T"].type)}
    if node.op == "RandomUniformInt":
        given.update(dict.fromkeys(["minval", "maxval"], tf.as_dtype(node.attr["Tout"].type)))
    with tf.Graph().as_default() as graph:
        arguments = {n: tf.compat.v1.placeholder(dtype, name=n) for n, dtype in given.items()}
        seed = tf.raw_ops.RandomUniformInt(
            shape=[3],
            minval=tf.int64.min,
            maxval=tf.int64.max,
            seed=node.attr["seed"].i,
            seed2=node.attr["seed2"].i,
        )
        bits = tf.bitcast(tf.identity(seed, "seed"), tf.uint64)
        if "dtype" in node.attr:
            arguments["dtype"] = tf.as_dtype(node.attr["dtype"].type)
        draw = getattr(tf.raw_ops, _DRAWS[node.op])
        draw(key=bits[:1], counter=bits[1:], alg=_PHILOX, name="draw", **arguments)
    outside = dict(zip(given, node.input))
    waits = [name for name in node.input if name.startswith("^")]

    def renamed(tensor: str) -> str:
        name, _, index = tensor.lstrip("^").partition(":")
        return outside.get(name) or f"{node.name}/{name}:{index or 0}"

    for inner in graph.as_graph_def().node:
        if inner.name in given:
            continue
        inputs = [renamed(tensor) for tensor in inner.input]
        if inner.name == "draw":  # takes the place of the draw it replaces
            node.CopyFrom(_named(inner, node.name, [*inputs, *waits]))
        else:
            flat.node.add().CopyFrom(_named(inner, f"{node.name}/{inner.name}", inputs))


def _named(node: Any, name: str, inputs: Sequence[str]) -> Any:
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    copy.name = name
    del copy.input[:]
    copy.input.extend(inputs)
    return copy


# By the name of a variable: the name of its value, and the value's type.
_Variables = dict[str, tuple[str, tf.DType]]

# What reads a variable, what does the same with its value, and the attribute of the type.
_OF_VALUES = {
    "Identity": ("Identity", "T"),
    "ReadVariableOp": ("Identity", "T"),
    "ResourceGather": ("GatherV2", "Tparams"),
    "ResourceGatherNd": ("GatherNd", "Tparams"),
    "VariableShape": ("Shape", "T"),
}


class _Reads:
    """Replaces variables by their values, in a graph and in the functions it calls."""

    def __init__(self, flat: Any) -> None:
        self._library = flat.library
        self._functions = {f.signature.name: f for f in flat.library.function}
        self._made: dict[tuple[str, tuple[int, ...]], str] = {}

    def rewrite(self, nodes: Any, variables: _Variables, *, in_function: bool) -> dict[str, str]:
        """Rewrite nodes; return new names of results whose names had to change."""
        # In a function a result is named by its operation's argument too.
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
            elif node.op in _OF_VALUES:
                if node.op == "ReadVariableOp" and in_function:
                    renamed[f"{node.name}:value:0"] = f"{node.name}{output}:0"
                if node.op == "ResourceGather":
                    node.input.insert(2, f"{_add_axis(nodes, node)}{output}:0")
                _become_of_value(node, types[0])
        for node in nodes:
            for i, name in enumerate(node.input):
                node.input[i] = renamed.get(name, name)
        return renamed

    def _rewrite_call(self, node: Any, types: dict[int, tf.DType]) -> None:
        # What comes before the function's arguments is a predicate or branch index.
        skipped = 1 if node.op in ("If", "StatelessIf", "Case", "StatelessCase") else 0
        types = {i - skipped: dtype for i, dtype in types.items()}
        for function in functions_of(node):
            function.name = self._of_values(function.name, types)
        type_list = node.attr["T" if "T" in node.attr else "Tin"].list.type
        for i, dtype in types.items():
            type_list[i] = dtype.as_datatype_enum
        if "body" in node.attr:  # a loop hands its inputs on
            shapes = node.attr["output_shapes"].list.shape
            for i in types:
                if i < len(shapes):
                    shapes[i].Clear()
                    shapes[i].unknown_rank = True
        node.attr.pop("_output_shapes", None)

    def _of_values(self, name: str, types: dict[int, tf.DType]) -> str:
        """Return the name of a function that takes values where this one takes variables."""
        key = (name, tuple(sorted(types)))
        if key in self._made:
            return self._made[key]
        copy = self._library.function.add()
        copy.CopyFrom(self._functions[name])
        copy.signature.name = self._made[key] = f"{name}_values_{next(_serials)}"
        self._functions[copy.signature.name] = copy
        variables: _Variables = {}
        for i, dtype in types.items():
            argument = copy.signature.input_arg[i]
            _retype(argument, dtype)
            copy.arg_attr.pop(i, None)
            copy.resource_arg_unique_id.pop(i, None)
            variables[argument.name] = (argument.name, dtype)
        aliases = _with_aliases(copy.node_def, variables, ":output")
        renamed = self.rewrite(copy.node_def, variables, in_function=True)
        for out in copy.signature.output_arg:
            made = copy.ret[out.name]
            copy.ret[out.name] = renamed.get(made, made)
            if made in aliases:
                _retype(out, aliases[made][1])
        return copy.signature.name


def _with_aliases(nodes: Any, variables: _Variables, output: str) -> _Variables:
    """Add the further names that variables get: by identities, and by loops handing them on."""
    found = dict(variables)
    size = -1
    while size < len(found):
        size = len(found)
        for node in nodes:
            if node.op not in ("Identity", "While", "StatelessWhile"):
                continue
            for i, name in enumerate(node.input):
                if name in found:
                    alias = f"{node.name}{output}:{i}"
                    found[alias] = (alias, found[name][1])
    return found


def _retype(argument: Any, dtype: tf.DType) -> None:
    argument.type = dtype.as_datatype_enum
    del argument.handle_data[:]


def _add_axis(nodes: Any, node: Any) -> str:
    """Add the axis along which values are gathered, which for variables is implied."""
    axis = nodes.add(name=f"{node.name}/axis", op="Const")
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(node.attr["batch_dims"].i, tf.int32))
    node.attr["Taxis"].type = tf.int32.as_datatype_enum
    return str(axis.name)


def _become_of_value(node: Any, dtype: tf.DType) -> None:
    """Make an operation on a variable the same operation on its value."""
    kept = {"VariableShape": ["out_type"], "ResourceGather": ["batch_dims", "Tindices", "Taxis"]}
    kept["ResourceGatherNd"] = ["Tindices"]
    attributes = {name: node.attr[name] for name in kept.get(node.op, []) if name in node.attr}
    copies = {
        name: type(value).FromString(value.SerializeToString())
        for name, value in attributes.items()
    }
    node.op, type_attribute = _OF_VALUES[node.op]
    node.attr.clear()
    for name, value in copies.items():
        node.attr[name].CopyFrom(value)
    node.attr[type_attribute].type = dtype.as_datatype_enum
