"""The graph engine: the traced product, split in two compiled functions.

The function and its transposed derivative are traced together, once. What does not depend on the
cotangent becomes one function, run once for each point; what does becomes another, run for each
product, with the residuals as arguments. Both serve every later point.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._linearize.flatten import Flattener
from hvp._linearize.graph_parts import import_part
from hvp._linearize.inline import inline_calls
from hvp._linearize.second_derivatives import refuse_missing_derivatives
from hvp._linearize.split import split
from hvp._linearize.trace import TracedGraph

# Columns in one call of a block product: at most so many, and so many bytes of residuals times
# columns.
_WIDEST = 64
_BLOCK_BYTES = 2**30


class GraphProgram:
    """The two functions of a traced graph.

    Parameters
    ----------
    traced : TracedGraph
        The function and its transposed derivative.
    variables : sequence of tf.Variable
        What it is differentiated with respect to.
    flattener : Flattener
        Of the variables.

    Attributes
    ----------
    residuals : list of str
        Names of the tensors that are kept between the two.
    product_part : GraphDef
        What runs for each product.

    Raises
    ------
    UnsplittableError
        If something that must run once depends on the cotangent.
    """

    def __init__(
        self, traced: TracedGraph, variables: Sequence[tf.Variable], flattener: Flattener
    ) -> None:
        self.traced = traced
        self._flattener = flattener
        self.variables = list(variables)
        flat, rename = inline_calls(traced.graph_def)
        self._captures = {rename(name): tensor for name, tensor in traced.captures.items()}
        self._cotangents = [rename(name) for name in traced.cotangents]
        self._auxiliary = None if traced.auxiliary is None else rename(traced.auxiliary)
        self._outputs = [None if name is None else rename(name) for name in traced.outputs]
        self._results = [rename(name) for name in traced.vjp if name is not None]
        self._wanted = list(dict.fromkeys(_present([self._auxiliary, *self._outputs])))
        parts = split(flat, self._cotangents, self._results, self._wanted)
        self._once_part, self.product_part = parts.once, parts.product
        self.residuals = parts.residuals
        reads = {node.name for node in flat.node if node.op == "ReadVariableOp"}
        # A variable's value shares the variable's buffer, and costs nothing to keep.
        self.owned = [name.partition(":")[0] not in reads for name in self.residuals]
        # Concrete functions: what is called for each product looks at no signature.
        self._once = _concrete(self._import_once, [])
        by_name = dict(zip(self._wanted, self._once.outputs))
        outputs = [by_name[name] for name in _present(self._outputs)]
        self._cotangent_specs = [tf.TensorSpec(o.shape, o.dtype) for o in outputs]
        kept = self._once.outputs[len(self._wanted) :]
        self._residual_specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in kept]
        self.product = _concrete(
            self._import_product, [*self._cotangent_specs, *self._residual_specs]
        )

    @functools.cached_property
    def flat_product(self) -> Any:
        """The product from and to one flat vector, where outputs are shaped like the variables."""
        flat = tf.TensorSpec([self._flattener.size], self._flattener.dtype)
        return _concrete(self._import_flat_product, [flat, *self._residual_specs])

    @functools.cached_property
    def flat_columns(self) -> Any:
        """The same for a block of columns, of shape `(n, k)`."""
        flat = tf.TensorSpec([self._flattener.size, None], self._flattener.dtype)
        return _concrete(self._import_flat_columns, [flat, *self._residual_specs])

    @functools.cached_property
    def transposed(self) -> Any:
        """The derivative by the cotangents, for the tangents of the variables that matter."""
        tangents = [
            tf.TensorSpec(variable.shape, variable.dtype)
            for variable, name in zip(self.variables, self.traced.vjp)
            if name is not None
        ]
        specs = [*tangents, *self._cotangent_specs, *self._residual_specs]
        return _concrete(self._import_transposed, specs)

    def linearize(self) -> tuple[Any, GraphEngine]:
        """Run the first function, at the variables' values now."""
        results = self._once()
        found: dict[str | None, Any] = dict(zip(self._wanted, results))
        outputs = [found.get(name) for name in self._outputs]
        return found.get(self._auxiliary), GraphEngine(self, outputs, results[len(self._wanted) :])

    def _import_once(self) -> list[tf.Tensor]:
        known = {name: tf.identity(tensor) for name, tensor in self._captures.items()}
        return import_part(self._once_part, known, [*self._wanted, *self.residuals])

    def _import_product(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        known = dict(zip([*self._cotangents, *self.residuals], tensors))
        return import_part(self.product_part, known, self._results)

    def _import_flat_product(self, flat: tf.Tensor, *residuals: tf.Tensor) -> tf.Tensor:
        fed = self.fed(self._flattener.split(flat), self._outputs)
        products = self._import_product(*fed, *residuals)
        return self._flattener.join(self.with_zeros(products))

    def _import_flat_columns(self, block: tf.Tensor, *residuals: tf.Tensor) -> tf.Tensor:
        # All columns in one operation where TensorFlow knows how, else in a loop in the graph.
        flat = tf.vectorized_map(
            lambda column: self._import_flat_product(column, *residuals), tf.transpose(block)
        )
        return tf.transpose(flat)

    def fed(self, cotangents: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Leave out the cotangents of outputs that are identically zero."""
        return [c for c, output in zip(cotangents, outputs) if output is not None]

    def with_zeros(self, products: Sequence[tf.Tensor]) -> list[Any]:
        """Put zeros where the transposed derivative is zero for a variable."""
        found = iter(products)
        return [
            tf.zeros(variable.shape, variable.dtype) if name is None else next(found)
            for name, variable in zip(self.traced.vjp, self.variables)
        ]

    def _import_transposed(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        count = len(self._results)
        tangents, rest = list(tensors[:count]), tensors[count:]
        cotangents = list(rest[: len(self._cotangents)])
        products = self._import_product(*rest)
        return tf.gradients(products, cotangents, tangents, unconnected_gradients="zero")


class GraphEngine:
    """The derivative of a function at a point, held as the residuals of its traced graph.

    Parameters
    ----------
    program : GraphProgram
        The functions.
    outputs : list of (tf.Tensor or None)
        The function's results.
    residuals : sequence of tf.Tensor
        What the second function needs of the first.
    """

    name = "graph"

    def __init__(
        self, program: GraphProgram, outputs: list[Any], residuals: Sequence[tf.Tensor]
    ) -> None:
        self._program = program
        self._residuals = list(residuals)
        self.outputs = outputs

    @property
    def nbytes(self) -> int:
        """Bytes of the residuals, without the variables' own values; variants count nothing."""
        return sum(
            tensor.dtype.size * tensor.shape.num_elements()
            for tensor, owned in zip(self._residuals, self._program.owned)
            if owned and tensor.dtype not in (tf.variant, tf.resource)
        )

    def vjp(self, cotangents: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Apply the transposed derivative; as `TapeEngine.vjp`."""
        fed = self._program.fed(cotangents, self.outputs)
        return self._program.with_zeros(self._program.product(*fed, *self._residuals))

    def vjp_flat(self, flat: tf.Tensor, flattener: Flattener) -> tf.Tensor:
        """Apply `vjp` to and from one flat vector, in one call; as `TapeEngine.vjp_flat`."""
        del flattener  # it is compiled in
        return self._program.flat_product(flat, *self._residuals)

    def vjp_flat_columns(self, block: tf.Tensor, flattener: Flattener) -> tf.Tensor:
        """Apply `vjp_flat` to each column of a block, many columns in one call.

        A column's intermediate values take about what the residuals take, so that their size
        bounds how many columns one call may have.
        """
        del flattener  # it is compiled in
        width = max(1, min(_WIDEST, _BLOCK_BYTES // max(1, self.nbytes)))
        chunks = [block[:, i : i + width] for i in range(0, int(block.shape[1]), width)]
        products = [self._program.flat_columns(chunk, *self._residuals) for chunk in chunks]
        return products[0] if len(products) == 1 else tf.concat(products, axis=1)

    def jvp(self, tangents: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Apply the derivative; as `TapeEngine.jvp`."""
        doubts = self._program.traced.transposed_doubts()
        refuse_missing_derivatives(doubts.missing + doubts.wrong_at_zero)
        zeros = [tf.zeros_like(output) for output in self.outputs if output is not None]
        used = [t for t, name in zip(tangents, self._program.traced.vjp) if name is not None]
        results = iter(self._program.transposed(*used, *zeros, *self._residuals))
        return [None if output is None else next(results) for output in self.outputs]

    def close(self) -> None:
        """Release the residuals."""
        self._residuals = []
        self.outputs = []


def _concrete(function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _present(names: Sequence[str | None]) -> list[str]:
    return [name for name in names if name is not None]
