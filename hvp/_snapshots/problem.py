"""Build a snapshot from what the caller passes: a matrix, its data and options."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._data.batches import Batches, OneBatch
from hvp._data.data_sets import Terms, hessian_rule
from hvp._data.elements import (
    NO_DATA,
    Elements,
    convert_batch,
    explain_dtypes,
)
from hvp._data.execution import Execution
from hvp._data.varied import varied_examples
from hvp._derivatives.gradient import check_scalar
from hvp._engines.options import Options
from hvp._engines.plan import Plan
from hvp._engines.prediction_rule import PredictionRule
from hvp._engines.rule import HessianRule, PullbackRule, Rule, WeightedSum, Within
from hvp._engines.single_plan import SinglePlan
from hvp._errors import (
    HvpError,
    InvalidDataError,
    InvalidLossError,
    NonFiniteError,
    RecomputeError,
    SecondDerivativeError,
    reason_of,
)
from hvp._recompute.keras_segments import segments_of
from hvp._runtime.user_warning import warn
from hvp._snapshots.means import EXAMPLES, refuse_coupling, refuse_sum
from hvp._snapshots.snapshot import Snapshot
from hvp._vectors.strategies import process_count, strategy_of
from hvp._vectors.variables import VariableNest, collect_variables

# Two values of one loss differ by less, relatively, if nothing was corrected.
_SAME = 1e-4
# What TensorFlow raises when an operation does not take its arguments.
_OF_AN_OPERATION = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError)


@dataclass(frozen=True)
class Problem:
    """A rule with its variables and data, and the options of the call.

    `rule` evaluates each batch, and multiplies by its matrix. `variables` are as the caller passed
    them, and so are `data` unless they are a single batch, which is converted. `source` holds the
    same examples: one batch, which is empty without data, or many.
    """

    rule: Rule
    variables: Any
    data: Any
    source: Elements | Batches
    options: Options

    @classmethod
    def of(cls, rule: Rule, variables: Any, data: Any, options: Options) -> Problem:
        """Decide whether the data are one batch or many.

        Raise `InvalidDataError` if the data do not fit the options.
        """
        divides = (options.batch_size, options.memory_limit, options.weight) != (None,) * 3
        if data is None and divides:
            raise InvalidDataError(
                "batch_size, memory_limit or weight is passed without data",
                "data that can be divided",
                "pass data=(x, y), and a loss that takes x and y",
            )
        if data is None and options.reduction == "sum":
            raise InvalidDataError(
                "reduction='sum' is passed without data",
                "data, by the number of whose examples the loss is multiplied",
                "leave it out, and let the loss itself sum",
            )
        source: Elements | Batches
        if isinstance(rule, Terms):
            rule, source = rule.on(data, options)
        elif isinstance(options.weight, Mapping):
            raise HvpError(
                "the argument weight is a dict",
                "a function, because the loss has no terms",
                "pass the loss as a dict with the same keys, or multiply it yourself",
            )
        elif data is None:
            source = NO_DATA
        elif isinstance(data, Elements) or (not divides and isinstance(data, (tuple, dict))):
            source = convert_batch(data, "data")
        else:
            source = Batches(data, options.batch_size, options.weight)
        # The tensors replace the arrays that they were converted from.
        data = source if isinstance(source, Elements) else data
        return cls(rule, variables, data, source, options)

    @property
    def regularization(self) -> Rule | None:
        """The term that is added once, regardless of batching."""
        added = self.options.regularization
        return None if added is None else HessianRule(_as_tensor(added))

    @property
    def total(self) -> bool:
        """Whether to sum over examples instead of averaging."""
        return self.options.reduction == "sum"

    @property
    def is_positive_semidefinite(self) -> bool:
        """Whether the matrix is known to have no negative eigenvalue."""
        return self.rule.is_positive_semidefinite and self.regularization is None

    def whole_function(self) -> Callable[[], Any] | None:
        """Return the loss, or the function of a Jacobian, on all data.

        Return None for other matrices, and if the data are many batches.
        """
        rule, source, added = self.rule, self.source, self.options.regularization
        if not isinstance(source, Elements) or self.options.devices:
            return None
        if isinstance(rule, PullbackRule):
            return lambda: source.call(rule.function)
        if not rule.is_hessian:
            return None
        factor = float(source.examples) if self.total and source.has_examples else 1.0

        def whole() -> tf.Tensor:
            value = check_scalar(rule.value(source)) * factor
            return value if added is None else value + tf.cast(_as_tensor(added)(), value.dtype)

        return whole

    def first_batch(self) -> Elements:
        """Return the first batch, or all examples if there is only one batch."""
        if isinstance(self.source, Elements):
            return self.source
        return next(iter(self.source)).elements

    def few_examples(self) -> Elements:
        """Return a few examples that differ, from all data if these are arrays."""
        arrays = self.source.arrays if isinstance(self.source, Batches) else None
        return varied_examples(self.first_batch() if arrays is None else arrays, EXAMPLES)

    def _few_of_each(self) -> Iterator[tuple[str, Elements]]:
        """Iterate over the data sets of a sum, by name, with a few examples of each."""
        for name, data in self.data.items():
            yield name, varied_examples(convert_batch(data, name), EXAMPLES)

    def snapshot(self, inputs: Sequence[tf.Variable] = (), **changes: Any) -> Snapshot:
        """Evaluate at the current values of the variables.

        `inputs` are variables that hold data: a change of these does not make a snapshot stale.
        `changes` replace options of the caller.
        """
        options = dataclasses.replace(self.options, **changes)

        def make_plan() -> Plan:
            return self._plan(options, inputs)

        try:
            snapshot = Snapshot(
                make_plan, options.on_stale, rule=self.rule, function=self.whole_function()
            )
        except (*_OF_AN_OPERATION, TypeError, ValueError) as error:
            explain_dtypes(error, self.data, lambda: collect_variables(self.variables).dtypes)
            # A missing kernel is not the fault of the data.
            if isinstance(error, _OF_AN_OPERATION) and "OpKernel" not in str(error):
                reason = reason_of(error)
                if self._can_be_computed():
                    raise SecondDerivativeError(
                        "TensorFlow's derivative of the loss failed, although the loss can be "
                        f"computed: {reason}",
                        "operations whose derivatives TensorFlow computes on this device, in the "
                        "type of the variables",
                        "replace the operation, or use variables in float32, for which TensorFlow "
                        "has more kernels",
                    ) from error
                labels = "label" in reason.lower()
                raise InvalidLossError(
                    f"an operation of the loss failed: {reason}",
                    "a loss that can be computed from the data",
                    "check that labels are integers from 0 to the number of classes less one"
                    if labels
                    else "check the shapes and values of the data; calling the loss on one batch "
                    "shows the line that fails",
                ) from error
            raise
        except NonFiniteError as error:
            self._blame_data(error)
            raise
        if options.recompute is not False and snapshot.facts.recomputes is False:
            snapshot.close()
            raise RecomputeError(
                "the argument recompute has no effect: the loss does not call the model",
                "a loss that calls the model it is differentiated by",
                "call the model itself, not a tf.function of it that was traced before",
            )
        with contextlib.ExitStack() as on_error:
            on_error.enter_context(contextlib.closing(snapshot))
            self._refuse_other_means(snapshot)
            self._compare_values(snapshot)
            on_error.pop_all()
        return snapshot

    def _can_be_computed(self) -> bool:
        """Return whether the loss itself can be computed, without its derivatives."""
        try:
            return self.rule.value(self.first_batch()) is not None
        except Exception:  # of any kind: the error that was raised before is told
            return False

    def _blame_data(self, error: NonFiniteError) -> None:
        """Raise a more specific error if the data contain NaN or infinity."""
        if isinstance(self.source, Elements):
            bad = [f"data[{key!r}]" for key in self.source.not_finite()]
            if bad:
                raise NonFiniteError(
                    f"{error.problem}, and {' and '.join(bad)} contains NaN or infinity",
                    "data that are finite",
                    "remove or replace these entries",
                ) from error

    def _compare_values(self, snapshot: Snapshot) -> None:
        """Warn if correcting TensorFlow's derivatives has changed the value of the loss."""
        plan, rule = snapshot.plan, self.rule
        if not (isinstance(rule, HessianRule) and isinstance(plan, SinglePlan)):
            return
        is_whole = not self.total and self.regularization is None
        if not (snapshot.facts.differentiates and is_whole) or snapshot.facts.draws:
            return
        try:
            with snapshot.with_seeds():
                theirs = float(rule.value(self.first_batch()))
        except (TypeError, ValueError, LookupError, tf.errors.OpError):
            return  # it can be computed in graphs only, or not at all without the corrections
        ours = float(snapshot.value())
        if abs(ours - theirs) <= _SAME * max(abs(ours), abs(theirs)):
            return
        plan.add_note(
            f"contains derivatives that TensorFlow has wrong: its value is {theirs:.6g} in "
            f"TensorFlow, and {ours:.6g} with the right ones"
        )
        warn(
            f"the loss contains derivatives that TensorFlow computes wrongly: its value is "
            f"{ours:.6g} with the right ones, which are differentiated here, and {theirs:.6g} in "
            "TensorFlow, for example during training",
            RuntimeWarning,
        )

    def _refuse_other_means(self, snapshot: Snapshot) -> None:
        """Reject a loss that is not a mean over the examples of a batch, if it has to be."""
        plan, rule = snapshot.plan, self.rule
        source, divided = self.source, plan.divides and plan.batches != 1
        if isinstance(rule, Terms) and divided:
            for name, few in self._few_of_each():
                if rule.rules[name].is_hessian:
                    refuse_sum(rule.rules[name], snapshot, few)
                refuse_coupling(rule.rules[name], snapshot, few)
        if source is NO_DATA or not isinstance(rule, (HessianRule, PredictionRule)):
            return
        if self.options.weight is not None or not (self.total or divided or plan.cuts):
            return
        few = self.few_examples()
        if isinstance(rule, HessianRule):
            refuse_sum(rule, snapshot, few)
        # The mean over batches of the caller's own is what was asked for, unless they were cut.
        if plan.cuts or (divided and (isinstance(source, Elements) or source.arrays is not None)):
            refuse_coupling(rule, snapshot, few)

    def _plan(self, options: Options, inputs: Sequence[tf.Variable]) -> Plan:
        nest, rule, added = collect_variables(self.variables), self.rule, self.regularization
        if options.recompute is not False:
            rule = Within(rule, segments_of(self.variables, options.recompute))
        source = self.source
        if not rule.stacks:
            source, options = self._spread(nest, options)
        for device in options.devices or ():
            device.check_version()
        if isinstance(source, Batches) or options.devices is not None:
            batches = source if isinstance(source, Batches) else OneBatch(source)
            return Execution(rule, nest, batches, options, regularization=added, total=self.total)
        factor = float(source.examples) if self.total and source is not NO_DATA else 1.0
        if added is not None:
            rule = WeightedSum([(factor, rule, None), (1.0, added, NO_DATA)])
        elif factor != 1:
            rule = WeightedSum([(factor, rule, None)])
        return SinglePlan(rule, nest, options, lambda: source, inputs)

    def _spread(self, nest: VariableNest, options: Options) -> tuple[Elements | Batches, Options]:
        """Choose the devices, and divide the data among them."""
        source, strategy = self.source, strategy_of(nest.variables)
        # What is divided may be divided among replicas; other processes have to be asked.
        spreads = process_count(strategy) > 1 or isinstance(source, Batches)
        if options.devices is None and strategy is not None and spreads:
            options = dataclasses.replace(options, devices=strategy)
        several = options.devices is not None and len(options.devices) > 1
        if several and isinstance(source, Elements) and source is not NO_DATA:
            source = Batches(source.as_data(), None, None)
        return source, options


def evaluate_loss(
    loss: Callable[..., Any] | Rule,
    variables: Any,
    data: Any = None,
    *,
    inputs: Sequence[tf.Variable] = (),
    products: bool = True,
    **options: Any,
) -> Snapshot:
    """Evaluate a loss, its gradient and its Hessian, at the current values of the variables.

    A rule as `loss` stands for another matrix than the Hessian. `inputs` are variables that hold
    data: a change of these does not make the snapshot stale. `products` tells whether to prepare
    products. All other arguments are as for `HessianOperator`, and so are the errors.
    """
    rule = loss if isinstance(loss, Rule) else hessian_rule(loss)
    return Problem.of(rule, variables, data, Options(products=products, **options)).snapshot(inputs)


def _as_tensor(regularization: Callable[[], Any]) -> Callable[[], Any]:
    """Allow a regularization to return a Python number or an integer, such as an empty sum."""

    def scalar() -> Any:
        value = regularization()
        if not isinstance(value, (tf.Tensor, tf.Variable)):
            # In float64, so that the sum with the loss is as exact as the loss.
            return tf.constant(value, tf.float64)
        return value if value.dtype.is_floating else tf.cast(value, tf.float64)

    return scalar
