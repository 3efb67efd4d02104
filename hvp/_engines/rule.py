"""Rules: the few lines that tell one curvature matrix from another."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._engines.taped import TapedFunction, TapedGradient

# The parts of a vector, one for each variable or output; None stands for zeros.
Parts = Sequence[Any]


class Arguments:
    """What the functions of a rule are called with: nothing; in a subclass, a batch of data."""

    has_examples = False

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a function with these arguments."""
        return function()

    def first(self) -> Arguments:
        """Return the first example alone."""
        return self

    def in_columns(self) -> Arguments:
        """Return the same with tensors of shape `(n, 1)` for those of shape `(n,)`, if any."""
        return self


@dataclass(frozen=True)
class Evaluated:
    """What a rule evaluates once at each point.

    Attributes
    ----------
    value
        The loss, a scalar; or the values of a function.
    gradient
        The gradient of the loss, with None for variables that it does not depend on. It is None
        altogether for matrices that do not belong to a scalar.
    state
        What `Rule.multiply` needs besides the vector: usually functions on tapes.
    domain
        Tensors that the parts of the vector are shaped like; the variables if None. A product is
        always shaped like the variables.
    """

    value: Any
    gradient: Parts | None
    state: Any
    domain: Sequence[tf.Tensor] | None = None


class Rule(abc.ABC):
    """A matrix, as a program: what to evaluate once, and how to multiply by a vector.

    A rule is written as if it ran anew for each product. Tracing it shows which operations do not
    depend on the vector; these run once for each point, even if they are part of `multiply`.

    Attributes
    ----------
    stacks
        Whether the values of batches are stacked, one after the other, instead of averaged.
    evaluates
        What is evaluated once, for messages.
    is_hessian
        Whether the matrix is the derivative of the gradient.
    is_positive_semidefinite
        Whether it is known that no eigenvalue is negative.
    needs_graph
        Whether the rule can only be evaluated by tracing it.
    """

    stacks = False
    needs_graph = False
    evaluates = "the gradient"
    is_hessian = False
    is_positive_semidefinite = False

    @abc.abstractmethod
    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        """Evaluate at the variables' values, on a batch of data."""

    @abc.abstractmethod
    def multiply(self, state: Any, vector: Parts) -> Parts:
        """Multiply by a vector, linearly."""

    def value(self, batch: Arguments) -> Any:
        """Return the loss of a batch alone, without derivatives; None if there is no loss."""
        del batch

    def weights(self, variables: Sequence[tf.Variable]) -> Sequence[tf.Variable]:
        """Return the variables from which the results are computed."""
        return variables


@dataclass(frozen=True)
class HessianRule(Rule):
    """The Hessian of a loss: `H v` is the derivative of `gradient . v`.

    `loss` takes the elements of a batch and returns a real scalar.
    """

    loss: Callable[..., Any]
    is_hessian = True

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        gradient = TapedGradient(lambda: batch.call(self.loss), variables, once=True)
        return Evaluated(gradient.value, gradient.outputs, gradient)

    def multiply(self, state: TapedGradient, vector: Parts) -> Parts:
        return state.vjp(vector)

    def value(self, batch: Arguments) -> Any:
        return batch.call(self.loss)


@dataclass(frozen=True)
class PullbackRule(Rule):
    """The transposed Jacobian of a function, `J^T u`; its transpose is `J v`.

    `function` takes the elements of a batch and returns a nest of floating-point tensors.
    """

    function: Callable[..., Any]
    stacks = True
    evaluates = "the function"

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        value: Any = None

        def outputs() -> list[tf.Tensor]:
            nonlocal value
            value = batch.call(self.function)
            return tf.nest.flatten(value)

        taped = TapedFunction(outputs, variables, once=True)
        return Evaluated(value, None, taped, domain=taped.outputs)

    def multiply(self, state: TapedFunction, vector: Parts) -> Parts:
        return state.vjp(vector)


_FACTS = ("stacks", "needs_graph", "evaluates", "is_hessian", "is_positive_semidefinite")


@dataclass(frozen=True)
class Within(Rule):
    """A rule that is evaluated, and that multiplies, within contexts."""

    rule: Rule
    evaluating: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    multiplying: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        for name in _FACTS:
            object.__setattr__(self, name, getattr(self.rule, name))

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        with self.evaluating():
            return self.rule.evaluate(variables, batch)

    def multiply(self, state: Any, vector: Parts) -> Parts:
        with self.multiplying():
            return self.rule.multiply(state, vector)

    def value(self, batch: Arguments) -> Any:
        with self.evaluating():
            return self.rule.value(batch)

    def weights(self, variables: Sequence[tf.Variable]) -> Sequence[tf.Variable]:
        return self.rule.weights(variables)


@dataclass(frozen=True)
class WeightedSum(Rule):
    """A weighted sum of matrices, each of a function of its own.

    Each term has its weight, its rule, and the data it is evaluated on; None stands for the data of
    the whole sum.
    """

    terms: Sequence[tuple[float, Rule, Arguments | None]]

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        states: list[Any] = []
        value: Any = None
        gradient: Parts = [None] * len(variables)
        for weight, rule, own in self.terms:
            at = rule.evaluate(variables, own or batch)
            states.append(at.state)
            value = _add(value, at.value, weight)
            if at.gradient is not None:
                gradient = [_add(a, b, weight) for a, b in zip(gradient, at.gradient)]
        return Evaluated(value, gradient, states)

    def multiply(self, state: Sequence[Any], vector: Parts) -> Parts:
        total: Parts = [None] * len(vector)
        for (weight, rule, _), own in zip(self.terms, state):
            total = [_add(a, b, weight) for a, b in zip(total, rule.multiply(own, vector))]
        return total


def _add(total: Any, term: Any, weight: float) -> Any:
    """Add a term times a number, in the type of the sum; None stands for zero."""
    if term is None:
        return total
    if weight != 1:
        term = term * tf.constant(weight, term.dtype)
    return term if total is None else total + tf.cast(term, total.dtype)
