"""Traces of a function and its derivatives, compiled as programs that can be repeated.

A program is repeatable if its results depend on nothing but its inputs. Three things in a trace
could make them differ from one run to the next:

- *Reads of variables.* The values of the variables become inputs, so that a derivative sees the
  values of the call and not later ones.
- *Random draws.* They become stateless draws from a seed, which is drawn in the first run.
- *Other stateful operations*, such as the update of a moving average or the draw of a seed. They
  run in the first run only. Their results (the *state* of the call) are inputs of later runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._derivatives.replace import replace_operations
from hvp._graphs.graph import Graph
from hvp._graphs.inline import inline_calls
from hvp._graphs.private import GRADIENT_TYPE
from hvp._graphs.variable_reads import read_from_inputs
from hvp._recompute.captured import CapturedVariable
from hvp._recompute.compile_part import compile_part
from hvp._recompute.order import spec_of
from hvp._recompute.postpone import postpone
from hvp._recompute.replay import replay, with_effects
from hvp._recompute.retrace import match_traces, names_of_state
from hvp._recompute.seeded_draws import draw_from_seeds


@dataclass(frozen=True)
class OrderTrace:
    """One order's trace, in which the function itself returned the tensors `function_results`."""

    concrete: Any
    graph_def: Any
    function_results: list[str]
    cotangents: list[tf.TensorSpec]


class Programs:
    """Compiles the traces of one function and its derivatives.

    The function reads the `variables`, and uses the `tensors` from outside.
    """

    def __init__(
        self,
        arguments: Sequence[tf.TensorSpec],
        variables: Sequence[CapturedVariable],
        tensors: Sequence[tf.Tensor],
    ) -> None:
        self._argument_count = len(arguments)
        self._variables = list(variables)
        self._tensors = list(tensors)
        self._specs = [spec_of(x) for x in (*arguments, *variables, *tensors)]
        self._first: _Graph
        self._state_names: list[str] = []
        self._state_specs: list[tf.TensorSpec] = []

    @property
    def state_count(self) -> int:
        """The number of stateful results that the first run passes to later runs."""
        return len(self._state_names)

    @property
    def base_count(self) -> int:
        """The number of inputs of a derivative before the cotangents."""
        return len(self._specs) + len(self._state_names)

    def compile_first(self, trace: OrderTrace) -> Any:
        """Compile the function itself, which returns its results and then the state."""
        graph = self._graph_of(trace)
        inputs = [*graph.inputs, *graph.captured]
        self._first = graph
        _, self._state_names = replay(graph.program, graph.results, inputs)
        results = [*graph.results, *self._state_names]
        part = with_effects(graph.program, results, inputs)
        run = compile_part(part, graph.captured, graph.inputs, self._specs, results, whole=False)
        self._state_specs = [spec_of(tensor) for tensor in run.outputs[len(graph.results) :]]
        return run

    def compile_derivative(
        self,
        trace: OrderTrace,
        *,
        tangents: Sequence[int] = (),
        held_back: int = 0,
        precision: tf.DType | None = None,
    ) -> Any:
        """Compile a derivative, a function of arguments, variables, tensors, state and cotangents.

        The results at the indices `tangents` are computed before the first `held_back` cotangents
        are used. Large matrix products and convolutions are computed in `precision`.
        """
        graph = self._graph_of(trace)
        part, stateful = replay(
            graph.program, graph.results, [*graph.inputs, *graph.cotangents, *graph.captured]
        )
        first_inputs = dict(zip(graph.inputs, self._first.inputs))
        pairs = match_traces(
            self._first.program,
            self._first.function_results,
            graph.program,
            graph.function_results,
            first_inputs,
        )
        state = names_of_state(graph.program, stateful, self._state_names, pairs)
        if held_back:
            held = zip(graph.cotangents[:held_back], trace.cotangents)
            part = postpone(
                part,
                dict(held),
                [graph.results[place] for place in tangents],
            )
        names = [*graph.inputs, *state, *graph.cotangents]
        specs = [*self._specs, *self._state_specs, *trace.cotangents]
        return compile_part(
            part, graph.captured, names, specs, graph.results, whole=True, precision=precision
        )

    def _graph_of(self, trace: OrderTrace) -> _Graph:
        """Make reads of variables and random draws in a trace repeatable."""
        concrete = trace.concrete
        flat, rename = inline_calls(replace_operations(trace.graph_def))
        own = [rename(tensor.name) for tensor in concrete.inputs]
        arguments, own = own[: self._argument_count], own[self._argument_count :]
        cotangents, own = own[: len(trace.cotangents)], own[len(trace.cotangents) :]
        captured = dict(zip(own, concrete.captured_inputs))
        name_of = {id(tensor): name for name, tensor in captured.items()}
        values = [f"value_{i}:0" for i in range(len(self._variables))]
        tensors = [name_of.get(id(t), f"unused_{i}:0") for i, t in enumerate(self._tensors)]
        read_from_inputs(
            flat,
            {
                name_of[id(variable.handle)]: (value, variable.dtype)
                for value, variable in zip(values, self._variables)
                if id(variable.handle) in name_of
            },
        )
        draw_from_seeds(flat)
        # The gradients of recomputed functions inside. Nothing differentiates what is compiled from
        # the graph: its derivatives are traced from Python, too. Without these names, equal layers
        # are equal.
        for node in flat.node:
            node.attr.pop(GRADIENT_TYPE, None)
        return _Graph(
            program=Graph(flat),
            results=[rename(tensor.name) for tensor in concrete.outputs],
            function_results=[rename(name) for name in trace.function_results],
            inputs=[*arguments, *values, *tensors],
            cotangents=cotangents,
            captured={name: t for name, t in captured.items() if name not in tensors},
        )


@dataclass(frozen=True)
class _Graph:
    """A trace without calls, in which variables are inputs and draws come from seeds.

    The function itself returned the tensors with the names `function_results`. The `inputs` are the
    arguments, the values of variables and the tensors from outside; one that this trace does not
    use has the name of no node. `captured` has other resources from outside, such as tables and
    variables that the function changes.
    """

    program: Graph
    results: list[str]
    function_results: list[str]
    inputs: list[str]
    cotangents: list[str]
    captured: dict[str, tf.Tensor]
