"""The graph engine's functions: a traced rule, split in two that are each compiled.

The rule's evaluation and its product are traced together, once. What does not depend on the vector
becomes one function, run once for each point; what does becomes another, run for each product, with
the residuals as arguments. Both serve every later point.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import scipy.sparse
import tensorflow as tf

from hvp._derivatives.replace import replace_operations
from hvp._derivatives.suspects import refuse_missing_derivatives
from hvp._engines.graph_product import Compilation, GraphProduct
from hvp._engines.trace import TracedGraph
from hvp._engines.transposition import transposed_product
from hvp._graphs.compiled import Compiled, JitCompile
from hvp._graphs.dataflow import (
    BRANCHES,
    CALLS,
    CONTROL_FLOW,
    KEPT_WHOLE,
    functions_of,
    input_dtypes,
    output_dtypes,
)
from hvp._graphs.graph import Graph, TensorName, data_inputs, node_of, with_index
from hvp._graphs.inline import inline_calls
from hvp._graphs.low_precision import in_low_precision
from hvp._graphs.matrix_products import for_many_vectors, on_all_cores
from hvp._graphs.schedule import in_order_if_large
from hvp._graphs.simplify import simplified
from hvp._graphs.sizes import BORROWED, nbytes
from hvp._graphs.sparsity import pattern_of
from hvp._graphs.split import has_effects, split
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._graphs.wide import in_float64
from hvp._vectors.packing import Packing
from hvp._vectors.resources import Resource, differ
from hvp._vectors.space import Space

# A call of a function takes as long to trace as the import of this many operations.
_FEW_OPERATIONS = 100
_MATRIX_PRODUCTS = frozenset(["BatchMatMul", "BatchMatMulV2", "Einsum", "MatMul"])

_log = logging.getLogger("hvp")


class Results(NamedTuple):
    """What is evaluated once per point.

    `gradient` is None if there is no loss. `finite` tells whether the value and the gradient are
    finite; None if nobody has looked. `watched` holds the values of the variables that were read,
    taken before the function ran; None if they were not taken.
    """

    value: Any
    gradient: list[Any] | None
    finite: tf.Tensor | None = None
    watched: list[tf.Tensor] | None = None


class GraphProgram:
    """The compiled functions of a traced rule.

    `codomain` is the space of products, and of vectors that are shaped like them. The values of the
    variables `reads` are returned along with each evaluation. `report` is called with a message if
    XLA cannot compile products. Matrix products and convolutions of the product are computed, and
    large residuals stored, in `precision`; by default in the types of the graph. With `wide`, what
    was traced in float32 is computed in float64, except for the results. `watches` says that
    products are to tell, where they can, whether variables have changed. The constructor raises
    UnsplittableError if something that must run once depends on the vector.

    Attributes
    ----------
    precision
        The low precision; None if nothing is large enough for it.
    residuals
        Names of the tensors that pass from the first function to the second.
    residual_specs
        What products take in their place: packed together where they are small.
    owned
        Which of `residual_specs` take memory of their own.
    product_part, once_part
        What runs for each product, and what runs once per point.
    gains_from_width
        Whether products of many vectors at once take less time even if they exceed the cache.
    passes_lists
        Whether lists of tensors pass through loops or branches of a product, which XLA cannot
        compile.
    """

    def __init__(
        self,
        traced: TracedGraph,
        codomain: Space,
        reads: Sequence[Resource],
        jit_compile: JitCompile,
        report: Callable[[str], None],
        precision: tf.DType | None = None,
        wide: bool = False,
        watches: bool = True,
    ) -> None:
        self._traced, self._codomain, self._reads = traced, codomain, list(reads)
        self._watches = watches
        flat, rename = inline_calls(replace_operations(traced.graph_def))
        self._captures = {rename(name): tensor for name, tensor in traced.captures.items()}
        self._vectors = [rename(name) for name in traced.vectors]
        self._renamed = {name: rename(name) for name in traced.results}
        self._products = [rename(name) for name in traced.products if name is not None]
        if wide:
            flat, narrow = in_float64(flat, [*self._captures, *self._vectors])
            self._renamed = {name: narrow(flat_name) for name, flat_name in self._renamed.items()}
            self._products = [narrow(name) for name in self._products]
        self._results_of_once = list(dict.fromkeys(self._renamed.values()))
        graph = simplified(flat, [*self._results_of_once, *self._products])
        self.once_part, product, residuals, self._dependent = split(
            graph, self._vectors, self._products, self._results_of_once
        )
        # A variable itself, whose shape a product may ask for, is the same at every point.
        self._handles = {
            name: tensor for name, tensor in self._captures.items() if tensor.dtype == tf.resource
        }
        self.residuals = [name for name in residuals if name not in self._handles]
        nodes = graph.nodes
        self._owned = [nodes[node_of(name)].op not in BORROWED for name in self.residuals]
        self._rounded: set[str] = set()
        if precision is not None:
            own = (name for name, owned in zip(self.residuals, self._owned) if owned)
            types = {name: _dtype_of(name, nodes) for name in own if name not in self._products}
            product, self._rounded, count = in_low_precision(
                product, precision, types, self._products
            )
            inside = any(precision.name in name for name in product.functions)
            precision = precision if count or self._rounded or inside else None
        self.precision = precision
        self._product_in_any_order = product
        self.product_part = on_all_cores(in_order_if_large(product, self._products))
        self._settings = jit_compile, report
        self._compile()

    def _compile(self, packs: bool = True) -> None:
        """Trace and compile the two functions, with residuals packed where that saves time."""
        jit_compile, report = self._settings
        self.passes_lists = _passes_lists(self.product_part)
        self.gains_from_width = _multiplies_matrices(self.product_part)
        if jit_compile and self.passes_lists:
            # XLA refuses some of these with an error, and ends the process at others.
            jit_compile = False
            reason = "a loop or branch in the loss passes on lists of tensors"
            _log.warning("XLA cannot compile a product: %s", reason)
            report(f"XLA cannot compile a product ({reason}); TensorFlow runs it without XLA")
        self._packs = packs
        self._packing: Packing | None = None
        self._complete = not packs
        nodes, functions = self.once_part.graph_def.node, self.once_part.functions
        self._once_has_effects = any(has_effects(node, functions) for node in nodes)
        self._once = Compiled(
            self._import_once,
            [],
            False,
            report,
            light_optimization=not any(map(_has_functions, nodes)),
            pure=not self._once_has_effects,
        )
        outputs = [tf.TensorSpec(t.shape, t.dtype) for t in self._once.outputs[1:]]
        self._first_residual = len(self._results_of_once) + len(self._reads)
        self.residual_specs = outputs[self._first_residual :]
        packed = self._packing is not None
        self.owned = [True] * len(self.residual_specs) if packed else self._owned
        self._compilation = Compilation(
            self.residual_specs,
            jit_compile,
            report,
            by_columns=any(_is_not_vectorized(node) for node in self.product_part.graph_def.node),
            xla_for_blocks=not any("Conv" in node.op for node in self.product_part.graph_def.node),
            light_optimization=not any(map(_has_functions, self.product_part.graph_def.node)),
            is_large=len(self.product_part.graph_def.node) > _FEW_OPERATIONS,
            changed=self.changed if self.tells_changes and self._watches else None,
        )
        specs = self._traced.vector_specs
        same = specs == self._codomain.specs
        domain = self._codomain if same else Space.of_tensors(specs)
        self.product = GraphProduct(
            self._import_product,
            specs,
            domain,
            self._codomain,
            self._compilation,
            multiply_each=self._import_product_of_each,
        )
        if self._products:
            self.product.make()

    @property
    def tells_changes(self) -> bool:
        """Whether residuals also hold the values of variables, because these are few and small."""
        return self._packing is not None

    @functools.cached_property
    def transposed(self) -> GraphProduct:
        """Products with the transpose: the derivative of the product with respect to the vector.

        This raises SecondDerivativeError if TensorFlow lacks the derivative of an operation.
        """
        suspects = self._traced.transposed_suspects()
        refuse_missing_derivatives(suspects.missing + suspects.wrong_at_values)
        specs, zeros = self._traced.vector_specs, self.zero_vector_count
        import_product = functools.partial(self._import_connected, part=self._product_in_any_order)
        part, transposed = transposed_product(import_product, specs, self.residual_specs, zeros)

        def multiply(
            vector: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor], many: bool = False
        ) -> list[tf.Tensor]:
            pairs = zip(vector, self._traced.products)
            connected = [part for part, name in pairs if name is not None]
            return transposed(connected, residuals, many)

        return GraphProduct(
            multiply,
            self._codomain.specs,
            self.product.codomain,
            self.product.domain,
            dataclasses.replace(
                self._compilation,
                residuals=[*specs[:zeros], *self.residual_specs],
                by_columns=any(_is_not_vectorized(node) for node in part.graph_def.node),
            ),
            multiply_each=functools.partial(multiply, many=True),
        )

    @property
    def zero_vector_count(self) -> int:
        """Number of vectors of zeros that the transposed product takes before the residuals.

        They are shaped like the vector's parts. If all shapes are static, there are none, and the
        product contains the zeros itself.
        """
        return 0 if self.product.domain is not None else len(self._traced.vector_specs)

    @property
    def expected_nbytes(self) -> int:
        """Bytes of the residuals, as far as their shapes are known."""
        sizes = [nbytes(spec) for spec, owned in zip(self.residual_specs, self.owned) if owned]
        return sum(sizes)

    def evaluate(self, place: ExecutionTarget = LOCAL) -> tuple[Results, list[tf.Tensor]]:
        """Run the first function at the variables' current values; return the residuals too."""
        finite, *tensors = self._once(place=place)
        if not self._complete and tf.executing_eagerly():
            if self._packing is not None and not self._packing.fits(
                tensors[self._first_residual :]
            ):
                # TensorFlow 2.16 may lose parts of a concatenation when it folds constants.
                self._compile(packs=False)
                return self.evaluate(place)
            self._complete = True
        results, rest = tensors[: len(self._results_of_once)], tensors[len(self._results_of_once) :]
        by_name = dict(zip(self._results_of_once, results))

        def tensor(name: str | None) -> Any:
            return None if name is None else by_name[self._renamed[name]]

        gradient = self._traced.gradient
        evaluated = Results(
            tf.nest.map_structure(tensor, self._traced.value),
            None if gradient is None else [tensor(name) for name in gradient],
            finite,
            list(rest[: len(self._reads)]),
        )
        return evaluated, list(rest[len(self._reads) :])

    def unpack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Unpack residuals, if they are packed."""
        if self._packing is None or len(tensors) == len(self.residuals):
            return list(tensors)
        return self._packing.unpack(tensors)[len(self._reads) :]

    def pattern(
        self, tensors: Sequence[tf.Tensor], shapes: Sequence[Any], sizes: Sequence[int]
    ) -> Any:
        """Return where products depend on vectors, by rows.

        `shapes` are those of the vector's parts at this point, and `sizes` those of the product's.
        """
        known = {**self._handles, **dict(zip(self.residuals, self.unpack(tensors)))}
        pairs = zip(shapes, self._traced.vector_specs)
        specs = [tf.TensorSpec(shape, spec.dtype) for shape, spec in pairs]
        vectors = dict(zip(self._vectors, specs))
        found = iter(pattern_of(self._product_in_any_order, vectors, known, self._products))
        of_parts = [None if name is None else next(found) for name in self._traced.products]
        width = sum(spec.shape.num_elements() for spec in specs)
        empty = [scipy.sparse.csr_array((size, width), dtype=bool) for size in sizes]
        parts = [none if part is None else part for part, none in zip(of_parts, empty)]
        return scipy.sparse.vstack(parts, format="csr")

    def changed(self, *residuals: tf.Tensor) -> tf.Tensor:
        """Return whether variables differ from the values that are packed with the residuals."""
        assert self._packing is not None
        now = self._packing.pack([resource.read() for resource in self._reads])
        changed = [differ(new, old[: new.shape[0]]) for new, old in zip(now, residuals)]
        return tf.reduce_any(changed)

    def _import_once(self) -> list[tf.Tensor]:
        own = {} if self._once_has_effects else self._own_reads()
        # First, before the function itself writes to any of them.
        others = {id(r): r.read() for r in self._reads if id(r) not in own}
        names = [*self._results_of_once, *self.residuals, *own.values()]
        tensors = self.once_part.imported(self._captures, names)
        first, end = len(self._results_of_once), len(tensors) - len(own)
        results, residuals = tensors[:first], tensors[first:end]
        others.update(zip(own, tensors[end:]))
        watched = [others[id(resource)] for resource in self._reads]
        residuals = [
            tf.cast(tensor, self.precision) if name in self._rounded else tensor
            for name, tensor in zip(self.residuals, residuals)
        ]
        # One for all tensors of a rank: each constant is an operation of its own.
        axes = functools.cache(lambda rank: None if rank is None else tf.range(rank))
        finite = [
            tf.reduce_all(tf.math.is_finite(t), axes(t.shape.rank))
            for t in _joined_if_small([t for t in results if t.dtype.is_floating])
        ]
        packed = self._pack([*watched, *residuals], len(watched))
        all_finite = finite[0] if len(finite) == 1 else tf.reduce_all(finite)
        return [all_finite, *results, *watched, *packed]

    def _own_reads(self) -> dict[int, str]:
        """Return the names of tensors that are values of variables, by the identity of these."""
        handles = {id(tensor): with_index(name) for name, tensor in self._captures.items()}
        values = {
            (with_index(node.input[0]), node.attr["dtype"].type): f"{node.name}:0"
            for node in self.once_part.graph_def.node
            if node.op == "ReadVariableOp"
        }
        places = {id(r): (handles.get(id(r.handle)), r.dtype.as_datatype_enum) for r in self._reads}
        return {key: values[place] for key, place in places.items() if place in values}

    def _pack(self, tensors: list[tf.Tensor], watched: int) -> list[tf.Tensor]:
        """Pack residuals together with the values of watched variables, if they are small."""
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        packing = Packing(specs)
        wanted = self._packs and self._products and packing.pays
        if not wanted or packing.buffers == len(tensors) - watched:
            return tensors[watched:]
        self._packing = packing
        return self._packing.pack(tensors)

    def _import_product(
        self, vector: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor], part: Graph | None = None
    ) -> list[tf.Tensor]:
        products = iter(self._import_connected(vector, residuals, part))
        parts = [None if name is None else next(products) for name in self._traced.products]
        return self._codomain.with_zeros(parts)

    def _import_product_of_each(
        self, vector: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        part = for_many_vectors(self._product_in_any_order, self._dependent)
        return self._import_product(vector, residuals, part)

    def _import_connected(
        self, vector: Sequence[tf.Tensor], residuals: Sequence[tf.Tensor], part: Graph | None = None
    ) -> list[tf.Tensor]:
        """Import the parts of the product that are not identically zero."""
        values = [*vector, *self.unpack(residuals)]
        known = {**self._handles, **dict(zip([*self._vectors, *self.residuals], values))}
        tensors = (part or self.product_part).imported(known, self._products)
        pairs = zip(self._codomain.shapes, self._traced.products)
        shapes = [shape for shape, name in pairs if name is not None]
        # Where a shape was computed, and is now a residual, TensorFlow forgets what it is.
        return [
            tensor if tensor.shape.is_fully_defined() else tf.ensure_shape(tensor, shape)
            for tensor, shape in zip(tensors, shapes)
        ]


def _dtype_of(tensor: str, nodes: Mapping[str, Any]) -> tf.DType:
    name, index = TensorName.of(tensor)
    return output_dtypes(nodes[name])[index]


def _joined_if_small(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenate tensors where that is faster than looking at each of them."""
    packing = Packing([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
    return packing.pack(tensors) if packing.pays else tensors


def _passes_lists(part: Graph) -> bool:
    """Return whether lists of tensors enter a part of a graph, or pass through a branch of it."""
    branches = (node for node in part.all_nodes if node.op in BRANCHES)
    types = {dtype for node in branches for dtype in (*input_dtypes(node), *output_dtypes(node))}
    entering = {
        dtype
        for node in part.graph_def.node
        for tensor, dtype in zip(data_inputs(node), input_dtypes(node))
        if node_of(tensor) not in part.nodes
    }
    return tf.variant in types | entering


def _has_functions(node: Any) -> bool:
    return any(True for _ in functions_of(node))


def _multiplies_matrices(graph: Graph) -> bool:
    """Return whether a graph without functions multiplies matrices, and convolves nothing."""
    nodes = graph.graph_def.node
    multiplies = any(node.op in _MATRIX_PRODUCTS for node in nodes)
    return multiplies and not any("Conv" in node.op or _has_functions(node) for node in nodes)


def _is_not_vectorized(node: Any) -> bool:
    """Return whether `tf.vectorized_map` fails, or should not be used.

    It fails on imported loops, and where it forgets an attribute. Values are recomputed where there
    is no room for them, still less for those of many columns.
    """
    recomputes = node.op in CALLS and KEPT_WHOLE in node.attr["f"].func.name
    padded = "explicit_paddings" in node.attr and node.attr["explicit_paddings"].list.i
    return node.op in CONTROL_FLOW or recomputes or bool(padded)
