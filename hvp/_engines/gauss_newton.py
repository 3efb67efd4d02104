"""The rule of generalized Gauss-Newton matrices."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from hvp._engines.convexity import is_convex
from hvp._engines.prediction_rule import Output, PredictionRule
from hvp._engines.rule import Parts
from hvp._engines.taped import TapedGradient
from hvp._errors import InvalidLossError
from hvp._graphs.refusals import refuse_unless


@dataclass(frozen=True)
class GaussNewtonRule(PredictionRule):
    """The generalized Gauss-Newton matrix: `B` is the Hessian of the output loss.

    If the data are `divided` into batches, the loss has to be a mean. With `convex`, the loss is
    checked to be convex in the predictions.
    """

    divided: bool = False
    convex: bool = False

    @property
    def is_positive_semidefinite(self) -> bool:  # type: ignore[override]
        return self.convex

    @property
    def multiplies_once(self) -> bool:
        return not self.convex

    def prepare(self, output: Output) -> TapedGradient:
        has_examples = output.batch.has_examples
        if has_examples and (self.divided or self.convex):
            self.count(output)
        elif has_examples:
            self.refuse_sum(output)
        if self.convex:
            rows = tf.shape(output.predictions[0])[0] if has_examples else 1
            refuse_unless(
                is_convex(output.taped.vjp, output.predictions, rows),
                InvalidLossError(
                    "the output loss is not convex in the predictions: its Hessian has a negative "
                    "eigenvalue",
                    "a convex output loss, because convex=True says so",
                    "leave out convex, if the matrix may be indefinite",
                ),
            )
        return output.taped

    def curve(self, prepared: TapedGradient, tangents: Parts) -> Parts:
        return prepared.vjp(tangents)
