"""A function of tensors, compiled by TensorFlow alone or by XLA."""

from __future__ import annotations

import logging
import math
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union

import tensorflow as tf

from hvp._errors import line_of
from hvp._graphs.private import DISABLE_ORDER, MUST_COMPILE, call_flat
from hvp._graphs.python_calls import error_of_python
from hvp._graphs.refusals import refusal_of
from hvp._graphs.target import LOCAL, ExecutionTarget, has_cpus_only, scope_of_tracing
from hvp._runtime.collector import no_collections
from hvp._runtime.interrupts import Uninterrupted

JitCompile = Union[bool, Literal["auto"]]

# Rounds in which two functions are timed: the bounds on their number, and the ratio of times that
# ends the comparison early. A single round is enough for functions that take this many seconds.
_MIN_ROUNDS, _MAX_ROUNDS = 3, 5
_CLEAR_RATIO = 2.0
_LONG = 0.1

_log = logging.getLogger("hvp")


class Compiled:
    """A function of tensors, traced once for fixed shapes, and compiled by XLA if that is faster.

    With `jit_compile="auto"`, the first call times both versions and chooses the faster one for
    good; `uses_xla` is None until then. If XLA cannot compile the function, TensorFlow runs it
    without XLA, a message is logged, and `report` is called with it. `forgets` releases the Python
    function, and everything it refers to, once it is traced; it can then not be traced for XLA.
    `eager` runs the function without a graph, because graphs cannot call it. `light_optimization`
    makes TensorFlow spend less time on optimizing the graph, which must have no functions and be
    made by this package. `pure` says that the function has no effects, such as an assignment:
    TensorFlow then need not look for them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[tf.TensorSpec],
        jit_compile: JitCompile,
        report: Callable[[str], None] = lambda message: None,
        forgets: bool = False,
        eager: bool = False,
        light_optimization: bool = False,
        pure: bool = False,
    ) -> None:
        self._function: Any = function
        self._specs = list(specs)
        self._jit_compile = jit_compile
        self._report = report
        self._nested: Any = tf.function(function, autograph=False)
        self.uses_xla: bool | None = None
        self._calling: Any = None
        self._eager = eager
        self._attributes = {DISABLE_ORDER: True} if pure else None
        self._light_optimization = light_optimization and jit_compile is False and has_cpus_only()
        if eager:
            return
        self._chosen = self._traced(jit_compile is True)
        if forgets:
            self._function = self._nested = None
        if jit_compile is False:
            self.uses_xla = False

    def __call__(self, *tensors: tf.Tensor, place: ExecutionTarget = LOCAL) -> Any:
        """Run on eager tensors of the right types and shapes, or inside a graph."""
        if self._eager:
            return self._function(*tensors)
        eager = tf.executing_eagerly()
        if not eager and place is LOCAL:
            return self._chosen(*tensors)
        if eager and self.uses_xla is None:
            self._choose(tensors, place)
        return self._run(self._chosen, tensors, place)

    def _run(self, concrete: Any, tensors: Sequence[tf.Tensor], place: ExecutionTarget) -> Any:
        try:
            if place is LOCAL:
                captured = concrete.captured_inputs
                return call_flat(
                    concrete, tensors, captured, light_optimization=self._light_optimization
                )
            return self._run_there(concrete, tensors, place)
        except tf.errors.OpError as error:
            original = error_of_python(error) or refusal_of(error)
            if original is None:
                raise
            raise original from error

    def _run_there(
        self, concrete: Any, tensors: Sequence[tf.Tensor], place: ExecutionTarget
    ) -> Any:
        if not place.runs_xla:
            concrete = self._within(concrete)
        with place.scope():
            captured = place.captured(concrete.captured_inputs)
            return call_flat(
                concrete, tensors, captured, light_optimization=self._light_optimization
            )

    def inline(self, *tensors: tf.Tensor) -> Any:
        """Add a call of the function to the graph being traced, which decides how to compile it.

        Importing the operations instead would hide them from tapes, which would then take the
        results for constants.
        """
        return self._nested(*tensors)

    @property
    def outputs(self) -> list[tf.Tensor]:
        """The symbolic results, with their shapes and types."""
        return list(self._chosen.outputs)

    @property
    def graph(self) -> Any:
        """The graph, whose operations may have other names in another process."""
        return self._chosen.graph

    @Uninterrupted()
    def _choose(self, tensors: Sequence[tf.Tensor], place: ExecutionTarget) -> None:
        """Choose, with these arguments, whether XLA compiles the function."""
        # If XLA was demanded, its graph has been traced already; otherwise it is traced now.
        first = self._chosen
        demanded = self._jit_compile is True
        xla = first if demanded else self._traced(True)
        try:
            self._run(xla, tensors, place)
        except tf.errors.ResourceExhaustedError:
            raise
        except tf.errors.OpError as error:
            reason = _reason(error)
            _log.warning("XLA cannot compile a product: %s", reason)
            self._report(f"XLA cannot compile a product ({reason}); TensorFlow runs it without XLA")
            self._chosen = self._traced(False) if demanded else first
            self.uses_xla = False
            return
        one, other = (lambda *t, f=f: self._run(f, t, place) for f in (xla, first))
        self.uses_xla = demanded or is_faster(one, other, tensors)
        self._chosen = xla if self.uses_xla else first

    def _within(self, concrete: Any) -> Any:
        """Return a function that calls another one, if XLA compiles that."""
        attributes = concrete.function_def.attr
        # Asking for an attribute that is not there would add it, and TensorFlow refuse to call it.
        if MUST_COMPILE not in attributes or not attributes[MUST_COMPILE].b:
            return concrete
        if self._calling is None:
            self._calling = tf.function(lambda *tensors: concrete(*tensors), autograph=False)
            with scope_of_tracing():
                self._calling = self._calling.get_concrete_function(*self._specs)
        return self._calling

    def choose_for(self, symbolic: Sequence[tf.Tensor], rest: Sequence[tf.Tensor]) -> None:
        """Choose whether XLA compiles it, with zeros for symbolic tensors, followed by `rest`."""
        if self.uses_xla is None:
            shapes = [[8 if size is None else size for size in t.shape] for t in symbolic]
            zeros = [tf.zeros(shape, t.dtype) for shape, t in zip(shapes, symbolic)]
            self._choose([*zeros, *rest], LOCAL)

    def _traced(self, jit_compile: bool) -> Any:
        function = tf.function(
            self._function,
            autograph=False,
            jit_compile=jit_compile or None,
            experimental_attributes=self._attributes,
        )
        with Uninterrupted(), no_collections(), scope_of_tracing():
            return function.get_concrete_function(*self._specs)


def is_faster(one: Any, other: Any, tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether the first function is faster: they take turns, and their best times count."""
    best = [math.inf, math.inf]
    for turn in range(_MAX_ROUNDS):
        for index, function in enumerate((one, other)):
            if turn == 0:
                _seconds(function, tensors)  # to warm up
            best[index] = min(best[index], _seconds(function, tensors))
        enough = turn + 1 >= _MIN_ROUNDS or min(best) > _LONG
        if enough and max(best) > _CLEAR_RATIO * min(best):
            break
    return best[0] < best[1]


def _seconds(function: Any, tensors: Sequence[tf.Tensor]) -> float:
    start = time.perf_counter()
    result = function(*tensors)
    tf.nest.map_structure(lambda tensor: tensor.numpy(), result)
    return time.perf_counter() - start


def _reason(error: Exception) -> str:
    text = line_of(error)
    if "variant" in text:
        return "a loop or branch in the loss passes on lists of tensors, which XLA does not support"
    text = re.sub(r"\{\{.*?\}\}|\b__\w+", "", text)
    return textwrap.shorten(text, 160, placeholder=" ...")
