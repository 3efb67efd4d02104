"""Losses that are sums of terms, each of them a mean over a data set of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._data.batches import Batches
from hvp._data.elements import NO_DATA, Elements, checked_loss, convert_batch
from hvp._engines.options import Options
from hvp._engines.rule import Arguments, Evaluated, HessianRule, Parts, Rule, WeightedSum
from hvp._errors import HvpError, InvalidDataError, InvalidLossError


@dataclass(frozen=True)
class Terms(Rule):
    """The sum of matrices of several losses, by the names of their data sets, each times a factor.

    A batch holds examples of one data set, or of all of them.
    """

    rules: Mapping[str, Rule]
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def is_hessian(self) -> bool:  # type: ignore[override]
        return all(rule.is_hessian for rule in self.rules.values())

    @property
    def is_positive_semidefinite(self) -> bool:  # type: ignore[override]
        positive = all(rule.is_positive_semidefinite for rule in self.rules.values())
        return positive and all(weight >= 0 for weight in self.factors.values())

    def evaluate(self, variables: Sequence[tf.Variable], batch: Arguments) -> Evaluated:
        own = [(self.factors.get(n, 1.0), self.rules[n], part) for n, part in parts_of(batch)]
        total = WeightedSum(own)
        evaluated = total.evaluate(variables, NO_DATA)
        return dataclasses.replace(evaluated, state=(total, evaluated.state))

    def multiply(self, state: tuple[WeightedSum, Any], vector: Parts) -> Parts:
        total, own = state
        return total.multiply(own, vector)

    def value(self, batch: Arguments) -> Any:
        """Return the loss of a batch alone, without derivatives."""
        pairs = [(self.factors.get(n, 1.0), self.rules[n].value(p)) for n, p in parts_of(batch)]
        return sum(value * factor for factor, value in pairs)

    def on(self, data: Any, options: Options) -> tuple[Terms, Elements | Batches]:
        """Return these terms with factors from the options, and their data as one or many batches.

        Raise `InvalidDataError` if the data do not fit the terms.
        """
        if not isinstance(data, Mapping) or set(data) != set(self.rules):
            given = ", ".join(map(repr, data)) if isinstance(data, Mapping) else type(data).__name__
            raise InvalidDataError(
                f"the loss has terms for {', '.join(map(repr, self.rules))}, and the data are "
                f"{given}",
                "a dict with one data set for each term",
                "pass data={'name': (x, y), ...} with the names of the losses",
            )
        weights = options.weight if options.weight is not None else {}
        if not isinstance(weights, Mapping) or not set(weights) <= set(self.rules):
            named = ", ".join(map(repr, weights)) if isinstance(weights, Mapping) else "a function"
            raise HvpError(
                f"the argument weight is for {named}, and the terms of the loss are "
                f"{', '.join(map(repr, self.rules))}",
                "a dict such as {'boundary': 10.0}; a term without weight counts once",
            )
        if options.reduction == "sum" or options.memory_limit is not None:
            raise HvpError(
                "reduction='sum' or memory_limit is given for a loss with several data sets",
                "the sum of the means over each data set, in batches of batch_size",
                "pass weight={'name': number of examples, ...}, and batch_size",
            )
        sets = {name: convert_batch(data[name], f"data[{name!r}]") for name in self.rules}
        if options.batch_size is None and options.devices is None:
            whole = {name: elements.as_data() for name, elements in sets.items()}
            return dataclasses.replace(self, factors=dict(weights)), Elements(whole, by_name=True)
        # Batches are averaged; the weights of all of them add up to the number of terms.
        times = {name: weights.get(name, 1.0) * len(sets) for name in sets}
        batches = _InTurn(sets, options.batch_size)
        source = Batches(batches, None, batches.share, separate=True)
        return dataclasses.replace(self, factors=times), source


class _InTurn:
    """The batches of several data sets, one set after the other."""

    def __init__(self, sets: Mapping[str, Elements], size: int | None) -> None:
        self._sets = sets
        self._batches = {n: Batches(s.as_data(), size, None) for n, s in sets.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for name, batches in self._batches.items():
            for batch in batches:
                yield {name: batch.elements.as_data()}

    def share(self, **part: Any) -> float:
        """Return the part of its data set that a batch is."""
        [(name, elements)] = part.items()
        return int(tf.nest.flatten(elements)[0].shape[0]) / self._sets[name].examples


def parts_of(batch: Arguments) -> list[tuple[str, Elements]]:
    """Return the names of the data sets of which a batch holds examples, and these."""
    assert isinstance(batch, Elements)
    return [
        (name, Elements(part if by_name else dict(enumerate(part)), by_name))
        for name, part in batch.by_key.items()
        for by_name in [isinstance(part, dict)]
    ]


def hessian_rule(loss: Any) -> Rule:
    """Return the rule of the Hessian of a loss, or of a dict of losses by data sets."""
    return by_data_sets(loss, lambda one: HessianRule(checked_loss(one)))


def by_data_sets(loss: Any, make: Callable[[Any], Rule]) -> Rule:
    """Return what `make` makes of a loss; of a dict of losses, the sum over these."""
    if not isinstance(loss, Mapping):
        return make(loss)
    if not loss or not all(isinstance(name, str) for name in loss):
        raise InvalidLossError(
            f"the loss is a dict with the keys {list(loss)}",
            "a function, or a dict of functions with the names of data sets as keys",
        )
    return Terms({name: make(one) for name, one in loss.items()})
