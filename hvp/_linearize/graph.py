"""The graph engine: the traced product, split in two compiled functions.

The function and its transposed derivative are traced together, once. What does not depend on the
cotangent becomes one function, run once for each point; what does becomes another, run for each
product, with the residuals as arguments. Both serve every later point.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvp._interrupts import Uninterrupted
from hvp._linearize.compiled import Compiled, JitCompile
from hvp._linearize.dataflow import CALLS, CONTROL_FLOW
from hvp._linearize.derivatives import corrected_derivatives
from hvp._linearize.flatten import Flattener
from hvp._linearize.graph_parts import import_part, nbytes, node_of
from hvp._linearize.inline import KEPT_WHOLE, inline_calls
from hvp._linearize.packing import Packing
from hvp._linearize.second_derivatives import refuse_missing_derivatives
from hvp._linearize.split import split
from hvp._linearize.trace import Resource, TracedGraph, differ
from hvp._linearize.variants import variant_nbytes
from hvp._linearize.vectorized import NotVectorizedError, vectorized

# Rows in one call of a block product: at most so many, and so many bytes of residuals times rows.
# What a row computes on the way takes about what the residuals take: beyond the processor's cache
# a row takes longer than in a smaller block, up to a fourth.
_WIDEST = 64
_BLOCK_BYTES = 2**24
# Rows of the block that is compared with single products.
_COMPARED_ROWS = 2

# Runs a function of a program on some tensors and on residuals.
Run = Callable[..., Any]


class GraphProgram:
    """The functions of a traced graph.

    Parameters
    ----------
    traced : TracedGraph
        The function and its transposed derivative.
    variables : sequence of tf.Variable
        What it is differentiated with respect to.
    flattener : Flattener
        Of the variables.
    reads : sequence of Resource
        Variables whose values are wanted along with each linearization.
    jit_compile : bool or "auto"
        Whether XLA compiles the product.
    report : callable
        Told, in words, when XLA cannot.

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
        self,
        traced: TracedGraph,
        variables: Sequence[tf.Variable],
        flattener: Flattener,
        reads: Sequence[Resource],
        jit_compile: JitCompile,
        report: Callable[[str], None],
    ) -> None:
        self.traced = traced
        self.variables = list(variables)
        self._flattener = flattener
        self._reads = list(reads)
        self._jit_compile = jit_compile
        self._report = report
        flat, rename = inline_calls(traced.graph_def)
        self._captures = {rename(name): tensor for name, tensor in traced.captures.items()}
        self._cotangents = [rename(name) for name in traced.cotangents]
        self._auxiliary = None if traced.auxiliary is None else rename(traced.auxiliary)
        self._outputs = [None if name is None else rename(name) for name in traced.outputs]
        self._results = [rename(name) for name in traced.vjp if name is not None]
        self._wanted = list(dict.fromkeys(_present([self._auxiliary, *self._outputs])))
        parts = split(flat, self._cotangents, self._results, self._wanted)
        self._once_part, self.product_part = parts.once, parts.product
        # A variable itself, whose shape a product may ask for, is the same at every point.
        self._handles = {
            name: tensor for name, tensor in self._captures.items() if tensor.dtype == tf.resource
        }
        self.residuals = [name for name in parts.residuals if name not in self._handles]
        nodes = {node.name: node for node in flat.node}
        # A variable's value shares the variable's buffer, and a tensor that the function uses from
        # outside is there anyway: they cost nothing to keep.
        borrowed = ("Placeholder", "ReadVariableOp")
        self.owned = [nodes[node_of(name)].op not in borrowed for name in self.residuals]
        # Whether rows of a block are multiplied one after the other.
        self._rolled = any(_is_not_vectorized(node) for node in self.product_part.node)
        self._rows_are_right: bool | None = None
        self._packing: Packing | None = None
        self._once = Compiled(self._import_once, [], False, report)
        made = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in self._once.outputs[1:]]
        by_name = dict(zip(self._wanted, made))
        self._cotangent_specs = [by_name[name] for name in _present(self._outputs)]
        self.residual_specs = made[len(self._wanted) + len(self._reads) :]
        if self._packing is not None:
            self.owned = [True] * len(self.residual_specs)
        # Made now, so that what cannot be made is known now.
        same_shapes = [o and by_name[o].shape for o in self._outputs] == [
            v.shape for v in self.variables
        ]
        if same_shapes:
            _ = self.watched_product if self.can_watch else self.flat_product
        else:
            _ = self.product

    @functools.cached_property
    def product(self) -> Compiled:
        """The product, from the cotangents and the residuals."""
        return self._compiled(self._import_product, self._cotangent_specs)

    @functools.cached_property
    def flat_product(self) -> Compiled:
        """The product from and to one flat vector, where outputs are shaped like the variables."""
        flat = tf.TensorSpec([self._flattener.size], self._flattener.dtype)
        return self._compiled(self._import_flat_product, [flat])

    @property
    def can_watch(self) -> bool:
        """Whether `watched_product` exists: where residuals are few and small."""
        return self._packing is not None

    @functools.cached_property
    def watched_product(self) -> Compiled:
        """`flat_product`, and whether variables have changed since the residuals were computed."""
        flat = tf.TensorSpec([self._flattener.size], self._flattener.dtype)
        return self._compiled(self._import_watched_product, [flat])

    def rows_product(self, residuals: Sequence[tf.Tensor]) -> Compiled:
        """Return the product with the rows of a block, of shape `(k, n)`.

        The first time, a block of random rows is multiplied and compared with products of single
        vectors. `tf.vectorized_map` converts some operations wrongly, without an error; should it
        have done so here, rows are multiplied one after the other from then on.

        Parameters
        ----------
        residuals : sequence of tf.Tensor
            Those of a linearization.
        """
        if self._rows_are_right is None:
            with Uninterrupted():
                self._rows_are_right = self._compare_rows(residuals)
            if self._rows_are_right is False:
                self._rolled = True
                del self.flat_rows
                self._report(
                    "multiplies blocks one column after the other: TensorFlow's vectorized_map "
                    "computes them wrongly"
                )
        return self.flat_rows

    def _compare_rows(self, residuals: Sequence[tf.Tensor]) -> bool | None:
        """Tell whether a block product agrees with single ones; None if that cannot be told."""
        function = self.flat_rows
        if self._rolled:
            return True
        shape = (_COMPARED_ROWS, self._flattener.size)
        rows = tf.random.stateless_normal(shape, (1, 2), dtype=self._flattener.dtype)
        block = function(rows, *residuals)
        single = tf.stack([self._single(row, residuals) for row in tf.unstack(rows)])
        if not tf.reduce_all(tf.math.is_finite(single)):
            return None
        return self._flattener.agree(block, single, tf.norm(single))

    def _single(self, row: tf.Tensor, residuals: Sequence[tf.Tensor]) -> tf.Tensor:
        if self.can_watch:
            return self.watched_product(row, *residuals)[0]
        return self.flat_product(row, *residuals)

    @functools.cached_property
    def flat_rows(self) -> Compiled:
        """The same for the rows of a block, of shape `(k, n)`."""
        single = self.watched_product if self.can_watch else self.flat_product
        self._rolled |= any(map(_is_converted_wrongly, single.graph.get_operations()))
        flat = tf.TensorSpec([None, self._flattener.size], self._flattener.dtype)
        # XLA takes minutes for convolutions over a further axis, and in loops.
        convolutions = any("Conv" in node.op for node in self.product_part.node)
        jit_compile = False if convolutions else self._jit_compile
        specs = [flat, *self.residual_specs]
        return Compiled(self._import_flat_rows, specs, jit_compile, self._report)

    @functools.cached_property
    def transposed(self) -> Compiled:
        """The derivative by the cotangents, for the tangents of the variables that matter."""
        tangents = [
            tf.TensorSpec(variable.shape, variable.dtype)
            for variable, name in zip(self.variables, self.traced.vjp)
            if name is not None
        ]
        return self._compiled(self._import_transposed, [*tangents, *self._cotangent_specs])

    @property
    def uses_xla(self) -> bool | None:
        """Whether XLA computes products with one vector; None before the first."""
        names = ("watched_product", "flat_product", "product")
        made = [self.__dict__[name] for name in names if name in self.__dict__]
        return next((m.uses_xla for m in made if m.uses_xla is not None), None)

    @property
    def expected_nbytes(self) -> int:
        """Bytes of the residuals, as far as their shapes are known."""
        sizes = [nbytes(spec) for spec, owned in zip(self.residual_specs, self.owned) if owned]
        return sum(sizes)

    def linearize(self) -> tuple[Any, GraphEngine]:
        """Run the first function, at the variables' values now."""
        finite, *results = self._once()
        wanted, rest = results[: len(self._wanted)], results[len(self._wanted) :]
        found: dict[str | None, Any] = dict(zip(self._wanted, wanted))
        outputs = [found.get(name) for name in self._outputs]
        watched, residuals = rest[: len(self._reads)], rest[len(self._reads) :]
        return found.get(self._auxiliary), GraphEngine(self, outputs, residuals, finite, watched)

    def _compiled(self, function: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Compiled:
        return Compiled(function, [*specs, *self.residual_specs], self._jit_compile, self._report)

    def _import_once(self) -> list[tf.Tensor]:
        # First, before the function itself writes to any of them.
        watched = [resource.read() for resource in self._reads]
        made = import_part(self._once_part, self._captures, [*self._wanted, *self.residuals])
        wanted, residuals = made[: len(self._wanted)], made[len(self._wanted) :]
        finite = [tf.reduce_all(tf.math.is_finite(t)) for t in wanted if t.dtype.is_floating]
        packed = self._pack([*watched, *residuals], len(watched))
        return [tf.reduce_all(finite), *wanted, *watched, *packed]

    def _pack(self, tensors: list[tf.Tensor], watched: int) -> list[tf.Tensor]:
        """Pack residuals, with the values of the variables to compare with, if they are small."""
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        packing = Packing(specs)
        if not self._results or not packing.pays or packing.buffers == len(tensors) - watched:
            return tensors[watched:]
        self._packing = packing
        return self._packing.pack(tensors)

    def unpack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Take residuals apart, if they are packed."""
        if self._packing is None or len(tensors) == len(self.residuals):
            return list(tensors)
        return self._packing.unpack(tensors)[len(self._reads) :]

    def changed(self, *residuals: tf.Tensor) -> tf.Tensor:
        """Tell whether variables differ from the values they had, which are packed."""
        assert self._packing is not None
        now = self._packing.pack([resource.read() for resource in self._reads])
        changed = [differ(new, old[: new.shape[0]]) for new, old in zip(now, residuals)]
        return tf.reduce_any(changed)

    def _import_product(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        count = len(self._cotangents)
        given = [*tensors[:count], *self.unpack(tensors[count:])]
        known = {**self._handles, **dict(zip([*self._cotangents, *self.residuals], given))}
        made = import_part(self.product_part, known, self._results)
        # Where a shape was computed, and is now a residual, TensorFlow forgets what it is.
        named = [v for v, name in zip(self.variables, self.traced.vjp) if name is not None]
        return [
            tensor if tensor.shape.is_fully_defined() else tf.ensure_shape(tensor, variable.shape)
            for tensor, variable in zip(made, named)
        ]

    def _import_flat_product(self, flat: tf.Tensor, *residuals: tf.Tensor) -> tf.Tensor:
        fed = self.fed(self._flattener.split(flat))
        products = self._import_product(*fed, *residuals)
        return self._flattener.join(self.with_zeros(products))

    def _import_watched_product(
        self, flat: tf.Tensor, *residuals: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return self._import_flat_product(flat, *residuals), self.changed(*residuals)

    def _import_flat_rows(self, rows: tf.Tensor, *residuals: tf.Tensor) -> tf.Tensor:
        def product(row: tf.Tensor) -> tf.Tensor:
            return self._import_flat_product(row, *residuals)

        # All rows in one operation where TensorFlow knows how, else in a loop in the graph.
        if not self._rolled:
            with contextlib.suppress(NotVectorizedError):
                return vectorized(product, rows)
        return tf.map_fn(product, rows)

    def fed(self, cotangents: Sequence[Any]) -> list[Any]:
        """Leave out the cotangents of outputs that are identically zero."""
        return [c for c, output in zip(cotangents, self._outputs) if output is not None]

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
        with corrected_derivatives():
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
    finite : tf.Tensor
        Whether all results are.
    watched : sequence of tf.Tensor
        The values of the variables that the function reads, before it ran.
    """

    name = "graph"

    def __init__(
        self,
        program: GraphProgram,
        outputs: list[Any],
        residuals: Sequence[tf.Tensor],
        finite: tf.Tensor,
        watched: Sequence[tf.Tensor],
    ) -> None:
        self.program = program
        self.residuals = list(residuals)
        self.outputs = outputs
        self.finite: tf.Tensor | None = finite
        self.watched: list[tf.Tensor] | None = list(watched)

    @property
    def nbytes(self) -> int | None:
        """Bytes of the residuals without the variables' own values; None if it cannot be told."""
        total = 0
        for tensor, owned in zip(self.residuals, self.program.owned):
            if not owned:
                continue
            size = variant_nbytes(tensor) if tensor.dtype == tf.variant else nbytes(tensor)
            if size is None:
                return None
            total += size
        return total

    def vjp(self, cotangents: Sequence[tf.Tensor], run: Run | None = None) -> list[tf.Tensor]:
        """Apply the transposed derivative; as `TapeEngine.vjp`.

        Parameters
        ----------
        cotangents : sequence of tf.Tensor
            Shaped and typed like `outputs`.
        run : callable, optional
            Runs one of the program's functions on some tensors and residuals of its own; with
            those of this engine by default.
        """
        fed = self.program.fed(cotangents)
        return self.program.with_zeros((run or self._run)(self.program.product, *fed))

    def watched_vjp_flat(self, flat: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Apply `vjp_flat`; tell too whether variables have changed, where the program can."""
        return self._run(self.program.watched_product, flat)

    def vjp_flat(self, flat: tf.Tensor, flattener: Flattener, run: Run | None = None) -> tf.Tensor:
        """Apply `vjp` to and from one flat vector, in one call; as `TapeEngine.vjp_flat`."""
        del flattener  # it is compiled in
        return (run or self._run)(self.program.flat_product, flat)

    @property
    def rows(self) -> int:
        """How many rows one call of a block product should have."""
        return max(1, min(_WIDEST, _BLOCK_BYTES // max(1, self.nbytes or 0)))

    def vjp_flat_rows(
        self, rows: tf.Tensor, flattener: Flattener, run: Run | None = None
    ) -> tf.Tensor:
        """Apply `vjp_flat` to each row of a block, many rows in one call."""
        del flattener  # it is compiled in
        run, width = run or self._run, self.rows
        if width == 1:
            return in_parts(
                lambda part: run(self.program.flat_product, part[0])[tf.newaxis], rows, width
            )
        with tf.init_scope():
            function = self.program.rows_product(self.residuals)
        return in_parts(lambda part: run(function, part), rows, width)

    def jvp(self, tangents: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
        """Apply the derivative; as `TapeEngine.jvp`."""
        doubts = self.program.traced.transposed_doubts()
        refuse_missing_derivatives(doubts.missing + doubts.wrong_at_values)
        zeros = [tf.zeros_like(output) for output in self.outputs if output is not None]
        used = [t for t, name in zip(tangents, self.program.traced.vjp) if name is not None]
        results = iter(self.program.transposed(*used, *zeros, *self.residuals))
        return [None if output is None else next(results) for output in self.outputs]

    def release_outputs(self) -> None:
        """Let go of the results; `vjp` does without them, `jvp` does not."""
        self.outputs = []

    def _run(self, function: Compiled, *tensors: tf.Tensor) -> Any:
        return function(*tensors, *self.residuals)

    def close(self) -> None:
        """Release the residuals."""
        self.residuals = []
        self.outputs = []


def in_parts(
    function: Callable[[tf.Tensor], tf.Tensor], rows: tf.Tensor, at_most: int
) -> tf.Tensor:
    """Apply a function to the rows of a block, some at a time, now or in the graph being traced.

    Parameters
    ----------
    function : callable
        Takes and returns a block, row by row.
    rows : tf.Tensor
        Of shape `(k, n)`.
    at_most : int
        How many rows it may be given.
    """
    count = rows.shape[0]
    if count is not None and count <= at_most:
        return function(rows)
    if tf.executing_eagerly():
        size = -(-count // -(-count // at_most))  # all alike but the last
        return tf.concat([function(rows[i : i + size]) for i in range(0, count, size)], axis=0)
    total = tf.shape(rows)[0]
    parts = tf.maximum(1, -(-total // at_most))
    size = -(-total // parts)
    results = tf.TensorArray(
        rows.dtype, parts, infer_shape=False, element_shape=[None, rows.shape[1]]
    )
    _, results = tf.while_loop(
        lambda part, _: part < parts,
        lambda part, made: (
            part + 1,
            made.write(part, function(rows[part * size : (part + 1) * size])),
        ),
        [tf.constant(0), results],
        parallel_iterations=1,
    )
    return tf.ensure_shape(results.concat(), rows.shape)


def _is_not_vectorized(node: Any) -> bool:
    """Whether `tf.vectorized_map` fails, or should not be used.

    It fails on imported loops, and where it forgets an attribute. What is recomputed is computed
    again because there is no room for it, still less for that of many columns.
    """
    recomputes = node.op in CALLS and KEPT_WHOLE in node.attr["f"].func.name
    padded = "explicit_paddings" in node.attr and node.attr["explicit_paddings"].list.i
    return node.op in CONTROL_FLOW or recomputes or bool(padded)


def _is_converted_wrongly(operation: tf.Operation) -> bool:
    """Whether `tf.vectorized_map` converts an operation of a traced product wrongly.

    It multiplies the filter gradient of a convolution in groups for many cotangents as if they were
    channels of one, in the order of the vectors and then the groups, where TensorFlow expects the
    groups and then the vectors.
    """
    if operation.type != "Conv2DBackpropFilter":
        return False
    axis = 1 if operation.get_attr("data_format") == b"NCHW" else 3
    channels, kernel = operation.inputs[0].shape, operation.outputs[0].shape
    known = channels.rank == 4 and kernel.rank == 4 and channels[axis] and kernel[2]
    return not known or channels[axis] != kernel[2]


def _present(names: Sequence[str | None]) -> list[str]:
    return [name for name in names if name is not None]
