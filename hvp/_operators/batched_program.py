"""The loss over many batches: as many linearized and kept as memory allows, the rest each time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError, InvalidLossError, NonFiniteError, StaleOperatorError
from hvp._linearize.flatten import Flattener
from hvp._linearize.float64 import WideGradient
from hvp._linearize.gradient import value_and_gradient
from hvp._linearize.graph import GraphEngine, Run
from hvp._linearize.program import Engine, Linearized, Program, Remarks
from hvp._linearize.second_derivatives import Doubt
from hvp._linearize.trace import Resource
from hvp._operators.batches import Batch, Batches
from hvp._operators.data import Elements
from hvp._operators.in_graph import Slot
from hvp._operators.memory import Budget
from hvp._operators.staleness import Watch
from hvp._progress import progress_bar
from hvp._strategies import outside_strategies

# Shapes of batches that get a trace of their own; others share one, their lengths left open.
_SHAPES = 3
# Examples in a batch from which the memory of larger ones is estimated.
_PROBE = 32
# Makes a program of a function of nothing that reads some inputs.
_Make = Callable[[Callable[[], Any], Sequence[tf.Variable]], Program]


class BatchedProgram:
    """The mean of a loss over batches, to be linearized; has the interface of `Program`.

    Parameters
    ----------
    loss : callable
        Takes the elements of a batch; returns the mean over it.
    variables : nest
        What to differentiate with respect to.
    batches : Batches
        The data.
    engine, jit_compile
        As for `Program`.
    budget : Budget
        How much may be kept.
    regularization : callable or None
        Takes nothing; returns what is added once.
    total : bool
        Whether to sum over examples, not to average.
    progress : bool or "always"
        Whether to show a bar over the batches.
    products : bool
        Whether the derivative of the gradient is wanted; if not, nothing is kept of any batch.

    Attributes
    ----------
    nest, flattener
        As of `Program`.
    batch_evaluations : int
        Evaluations of the gradient of a batch, or of a piece of one.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        variables: Any,
        batches: Batches,
        *,
        engine: Engine,
        jit_compile: Any,
        budget: Budget,
        regularization: Callable[[], Any] | None,
        total: bool,
        progress: Any,
        products: bool = True,
    ) -> None:
        def make(function: Callable[[], Any], inputs: Sequence[tf.Variable]) -> Program:
            gradient = value_and_gradient(function)
            return Program(gradient, variables, engine, jit_compile, inputs, products)

        self._loss, self._make = loss, make
        self._batches, self._budget = batches, budget
        self._total, self._progress, self._products = total, progress, products
        self._shaped: dict[Any, _Shaped] = {}
        self._note = ""
        self._added = None if regularization is None else make(regularization, [])
        self.batch_evaluations = 0
        if budget.limited and batches.examples is not None:
            self._cut(batches.examples)
        first = next(iter(batches))
        self._first = self._of(first.elements).program
        expected = self._first.expected_nbytes + first.elements.nbytes
        self._examples = first.elements.examples
        self._nbytes_each = expected / self._examples
        self.nest, self.flattener = self._first.nest, self._first.flattener

    def _cut(self, examples: int) -> None:
        """Cut arrays into batches that fit: two small ones, traced, tell how large they may be."""
        sizes, expected = (max(1, min(_PROBE, examples) // 2), min(_PROBE, examples)), []
        for size in sizes:
            elements = self._batches.head(size)
            expected.append(self._of(elements).program.expected_nbytes + elements.nbytes)
        self._shaped.clear()
        each = (expected[1] - expected[0]) / max(1, sizes[1] - sizes[0])
        if sizes[0] == sizes[1]:
            each = expected[0]
        fits = self._budget.fitting(expected[0] - each * sizes[0], each)
        count = -(-examples // fits)
        self._batches.cut(-(-examples // count))

    @property
    def _programs(self) -> list[Program]:
        """The traces of all shapes of batches so far, and that of the regularization."""
        shaped = [shaped.program for shaped in self._shaped.values()]
        return shaped if self._added is None else [*shaped, self._added]

    @property
    def engine(self) -> str:
        """As of `Program`; the tape engine if it serves for batches of any shape."""
        engines = {program.engine for program in self._programs}
        return "tape" if "tape" in engines else "graph"

    @property
    def reads(self) -> tuple[Resource, ...]:
        """As of `Program`."""
        return _distinct(program.reads for program in self._programs)

    @property
    def batches(self) -> int | None:
        """How many there are."""
        return self._batches.count

    @property
    def works_in_graphs(self) -> bool:
        """Never: batches come from Python."""
        return False

    @property
    def uses_xla(self) -> bool | None:
        """As of `Program`."""
        return self._first.uses_xla

    @property
    def recomputes(self) -> bool | None:
        """As of `Program`."""
        found = [shaped.program.recomputes for shaped in self._shaped.values()]
        return None if None in found else any(found)

    @property
    def traces(self) -> int:
        """How often the loss was traced: for each of a few shapes of batches."""
        return sum(shaped.program.traces for shaped in self._shaped.values())

    @property
    def note(self) -> str:
        """As of `Program`."""
        notes = [program.note for program in self._programs]
        return "; ".join(dict.fromkeys(filter(None, [*notes, self._note])))

    @property
    def expected_nbytes(self) -> int:
        """Bytes of residuals and data of all batches, as far as the first one tells."""
        examples = self._batches.examples or self._examples
        return int(self._nbytes_each * examples)

    def nbytes(self, engine: Any) -> int | None:
        """Bytes that are kept."""
        return int(engine.nbytes)

    @property
    def seeds(self) -> tuple[Resource, ...]:
        """As of `Program`."""
        return _distinct(program.seeds for program in self._programs)

    @contextlib.contextmanager
    def preserving(self) -> Iterator[None]:
        """As of `Program`."""
        with contextlib.ExitStack() as stack:
            for program in self._programs:
                stack.enter_context(program.preserving())
            yield

    def in_float64(self) -> WideGradient | None:
        """As of `Program`, over all batches."""
        found = {id(s): s.program.in_float64(s.inputs) for s in self._shaped.values()}
        added = None if self._added is None else self._added.in_float64()
        if None in found.values() or (self._added is not None and added is None):
            return None

        def gradient(values: Sequence[tf.Tensor]) -> list[Any]:
            sums = _Sums([tf.float64] * len(values), tf.float64)
            for batch in self._batches:
                for elements, weight in self.pieces(batch):
                    evaluate = found[id(self._of(elements))]
                    assert evaluate is not None
                    inputs = [
                        t if t.dtype != tf.float32 else tf.cast(t, tf.float64)
                        for t in elements.tensors
                    ]
                    sums.add(weight, tf.zeros([]), evaluate([*values, *inputs]))
            if not self._total:
                sums.divide()
            if added is not None:
                sums.add(1.0, tf.zeros([]), added(values))
            return sums.gradient

        return gradient

    @property
    def remarks(self) -> Remarks | None:
        """As of `Program`."""
        remarks = [program.remarks for program in self._programs]
        known = [remark for remark in remarks if remark is not None]
        if len(known) < len(remarks):
            return None

        def together(lists: Iterable[list[Doubt]]) -> list[Doubt]:
            return list(dict.fromkeys(itertools.chain(*lists)))

        return Remarks(
            together(remark.custom for remark in known),
            together(remark.wrong_at_values for remark in known),
            together(remark.random for remark in known),
            together(remark.repeated for remark in known),
            any(remark.python for remark in known),
        )

    @property
    def draws(self) -> bool:
        """As of `Program`."""
        return any(program.draws for program in self._programs)

    def fingerprint(self) -> dict[str, str]:
        """As of `Program`, of all batches."""
        found = self._first.fingerprint()
        found["data"] = f"{found.get('data', '')} {self._batches.fingerprint()}"
        found["reduction"] = "sum" if self._total else "mean"
        if self._added is not None:
            added = self._added.fingerprint()
            found.update({f"{name} of the regularization": text for name, text in added.items()})
        return found

    @outside_strategies
    def linearize(self) -> tuple[tf.Tensor, BatchedEngine]:
        """Go through the batches, at the variables' values now; keep what fits."""
        self._batches.forget()
        sums = _Sums(self.flattener.dtypes, self.flattener.dtype)
        kept: list[tuple[float, Linearized]] = []
        used, all_kept = 0, True
        try:
            for batch in self.shown(self._batches):
                for elements, weight in self.pieces(batch):
                    value, engine, nbytes = self._linearize(elements, batch.index)
                    sums.add(weight, value, engine.outputs)
                    self._budget.saw(nbytes)
                    whole = elements is batch.elements
                    if not self._products:
                        engine.close()
                        continue
                    all_kept = all_kept and whole and self._budget.holds(used + nbytes)
                    if all_kept:
                        if isinstance(engine, GraphEngine):  # n numbers, for each batch
                            engine.release_outputs()
                        kept.append((weight, engine))
                        used += nbytes
                    else:
                        engine.close()
                if not all_kept:
                    self._refuse_draws()
            scale = 1.0 if self._total else sums.divide()
            added = None
            if self._added is not None:
                value, added = self._added.linearize()
                if all(output is None for output in added.outputs):
                    raise InvalidLossError(
                        "the regularization depends on none of the variables",
                        "a function of the variables",
                    )
                sums.add(1.0, value, added.outputs)
        except BaseException:
            for _, engine in kept:
                engine.close()
            raise
        streams = "keeps some batches and evaluates the others for each product"
        self._note = "" if all_kept else streams
        kept = [(weight * scale, engine) for weight, engine in kept]
        if added is not None:
            kept.append((1.0, added))
        count = len(kept) - (added is not None)
        later = None if all_kept else count
        watch = Watch(self.reads)  # of all shapes of batches, which are known by now
        watch.set()
        made = BatchedEngine(self, sums.gradient, kept, used, count, later, scale, watch)
        return sums.value, made

    def pieces(self, batch: Batch) -> Iterator[tuple[Elements, float]]:
        """Cut a batch into pieces that fit, with their weights."""
        examples = batch.elements.examples
        expected = round(self._nbytes_each * examples)
        count = self._budget.pieces(expected)
        if count <= 1:
            yield batch.elements, batch.weight
            return
        if examples < count:
            raise self._budget.too_small(expected, examples)
        size = -(-examples // count)  # all alike but the last: other shapes are other traces
        for start in range(0, examples, size):
            part = batch.elements.part(start, min(start + size, examples))
            yield part, self._batches.weight_of(part, batch.index)

    @outside_strategies
    def run(self, elements: Elements, index: int) -> Linearized:
        """Linearize a batch for the moment."""
        return self._linearize(elements, index)[1]

    def later(self, count: int) -> Iterable[Batch]:
        """Go through the batches from one on."""
        return self.shown(self._batches.after(count))

    def shown(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Show a bar, if one is wanted."""
        if not self._progress:
            return batches
        return progress_bar(self._progress, batches, total=self._batches.count, unit="batch")

    def _linearize(self, elements: Elements, index: int) -> tuple[tf.Tensor, Linearized, int]:
        shaped = self._of(elements)
        value, engine = shaped.linearize(elements)
        self.batch_evaluations += 1
        finite = engine.finite  # which the graph engine has computed
        if finite is None:
            results = [value, *(output for output in engine.outputs if output is not None)]
            finite = all(bool(tf.reduce_all(tf.math.is_finite(tensor))) for tensor in results)
        if not finite:
            engine.close()
            what = "gradient" if bool(tf.math.is_finite(value)) else "loss"
            raise NonFiniteError(
                f"the {what} of batch {index} is not finite",
                "a loss that is finite and differentiable at this point, for every batch",
                f"look at batch {index} of the data: NaN, infinite or extreme entries",
            )
        nbytes = (shaped.program.nbytes(engine) or 0) + elements.nbytes
        if elements.examples >= self._examples:  # smaller ones would count what they share
            self._examples = elements.examples
            self._nbytes_each = max(self._nbytes_each, nbytes / elements.examples)
        return value, engine, nbytes

    def _of(self, elements: Elements) -> _Shaped:
        """Return the program for batches of a shape."""
        shapes = tuple(tuple(tensor.shape) for tensor in elements.tensors)
        found = self._shaped.get(shapes)
        if found is None and len(self._shaped) >= _SHAPES:
            shapes = tuple((None,) * len(shape) for shape in shapes)
            found = self._shaped.get(shapes)
        if found is None:
            found = self._shaped[shapes] = _Shaped(self._loss, elements, shapes, self._make)
        return found

    def _refuse_draws(self) -> None:
        if self.draws:
            raise HvpError(
                "the loss draws random numbers, and not all batches fit in memory: those that are "
                "evaluated for each product would be of another function each time",
                "the same loss each time",
                "raise memory_limit, or draw with a Keras seed generator or tf.random.stateless_*",
            )


def _distinct(resources: Iterable[Iterable[Resource]]) -> tuple[Resource, ...]:
    """Return each variable's buffer once."""
    return tuple({id(r.handle): r for r in itertools.chain(*resources)}.values())


class BatchedEngine:
    """The derivative over all batches at a point; has the interface of `GraphEngine`.

    Parameters
    ----------
    program : BatchedProgram
        What it is of.
    outputs : list of (tf.Tensor or None)
        The gradient.
    kept : list of (float, engine)
        Linearizations that are kept, and how much each counts.
    nbytes : int
        What they take.
    batches_kept : int
        Of how many batches they are.
    later : int or None
        The first batch that is not kept; None if all are.
    scale : float
        Multiplies the weights of the rest.
    watch : Watch
        Of what the loss reads.
    """

    name = "batches"
    finite = None
    watched = None

    def __init__(
        self,
        program: BatchedProgram,
        outputs: list[Any],
        kept: list[tuple[float, Linearized]],
        nbytes: int,
        batches_kept: int,
        later: int | None,
        scale: float,
        watch: Watch,
    ) -> None:
        self.program, self.outputs, self.nbytes = program, outputs, nbytes
        self.batches_kept = batches_kept
        self._kept, self._later, self._scale, self._watch = kept, later, scale, watch

    @property
    def streams(self) -> bool:
        """Whether some batches are not kept."""
        return self._later is not None

    def vjp(self, cotangents: Sequence[tf.Tensor], run: Run | None = None) -> list[tf.Tensor]:
        """Apply the transposed derivative; as `GraphEngine.vjp`."""
        del run
        # float16 would lose what one batch adds to many.
        wide = self.program.flattener.dtype
        sums = [tf.zeros(c.shape, wide) for c in cotangents]
        for factor, engine in self._engines():
            parts = engine.vjp(cotangents)
            sums = [s + tf.cast(p, wide) * tf.constant(factor, wide) for s, p in zip(sums, parts)]
        return [tf.cast(s, c.dtype) for s, c in zip(sums, cotangents)]

    def vjp_flat(self, flat: tf.Tensor, flattener: Flattener, run: Run | None = None) -> tf.Tensor:
        """Apply it to and from one flat vector."""
        del run
        return self._sum(lambda engine: engine.vjp_flat(flat, flattener), flat)

    def vjp_flat_rows(
        self, rows: tf.Tensor, flattener: Flattener, run: Run | None = None
    ) -> tf.Tensor:
        """Apply it to each row of a block, all in one pass over the data."""
        del run
        return self._sum(lambda engine: engine.vjp_flat_rows(rows, flattener), rows)

    def close(self) -> None:
        """Release what is kept."""
        for _, engine in self._kept:
            engine.close()
        self._kept = []
        self._watch.release()

    def _sum(self, multiply: Callable[[Linearized], tf.Tensor], like: tf.Tensor) -> tf.Tensor:
        result = tf.zeros_like(like)
        for factor, engine in self._engines():
            result += multiply(engine) * tf.constant(factor, like.dtype)
        return result

    def _engines(self) -> Iterator[tuple[float, Linearized]]:
        """Go through the linearizations of all batches, kept or for the moment."""
        yield from self._kept
        if self._later is None:
            return
        changed = self._watch.changed()
        if changed:
            raise StaleOperatorError(
                f"variables that the loss reads have changed: {', '.join(map(repr, changed))}; and "
                "not all batches are kept",
                "the values at which the operator was evaluated",
                "call refresh(), or raise memory_limit",
            )
        for batch in self.program.later(self._later):
            for elements, weight in self.program.pieces(batch):
                engine = self.program.run(elements, batch.index)
                with contextlib.closing(engine):
                    yield weight * self._scale, engine


class _Shaped:
    """A loss traced for batches of one shape, which it reads from variables."""

    def __init__(
        self,
        loss: Callable[..., Any],
        elements: Elements,
        shapes: Sequence[Sequence[int | None]],
        make: _Make,
    ) -> None:
        tensors = elements.tensors
        self._slots = [Slot(t, tf.TensorShape(shape)) for t, shape in zip(tensors, shapes)]

        def bound() -> Any:
            # What a graph is told of a variable's shape is forgotten with the graph.
            read = [tf.ensure_shape(s.read(), shape) for s, shape in zip(self._slots, shapes)]
            return elements.with_tensors(read).call(loss)

        self.inputs = [slot.variable for slot in self._slots]
        self.program = make(bound, self.inputs)
        self._empty()

    def linearize(self, elements: Elements) -> tuple[tf.Tensor, Linearized]:
        for slot, tensor in zip(self._slots, elements.tensors):
            slot.assign(tensor)
        try:
            return self.program.linearize()
        finally:
            self._empty()

    def _empty(self) -> None:
        for slot in self._slots:
            slot.empty()


class _Sums:
    """Weighted sums of values and gradients."""

    def __init__(self, dtypes: Sequence[tf.DType], wide: tf.DType) -> None:
        self._value = tf.zeros([], tf.float64)
        self._gradient: list[Any] = [None] * len(dtypes)
        self._dtypes, self._wide = dtypes, wide
        self._weight = 0.0

    def add(self, weight: float, value: tf.Tensor, gradient: Sequence[Any]) -> None:
        """Add those of a batch."""
        self._value += weight * tf.cast(value, tf.float64)
        self._weight += weight
        for i, part in enumerate(gradient):
            if part is not None:
                part = tf.cast(part, self._wide) * tf.constant(weight, self._wide)
                self._gradient[i] = part if self._gradient[i] is None else self._gradient[i] + part

    def divide(self) -> float:
        """Divide by the sum of the weights; return what that means for each."""
        if self._weight == 0:
            raise HvpError("the weights of all batches are zero", "at least one that counts")
        scale = 1 / self._weight
        self._value *= scale
        self._gradient = [
            g if g is None else g * tf.constant(scale, g.dtype) for g in self._gradient
        ]
        return scale

    @property
    def value(self) -> tf.Tensor:
        """The sum of the values."""
        return self._value

    @property
    def gradient(self) -> list[Any]:
        """The sum of the gradients, in the variables' types."""
        pairs = zip(self._gradient, self._dtypes)
        return [g if g is None else tf.cast(g, dtype) for g, dtype in pairs]
