"""The Hessian of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from hvp._data.elements import checked_loss
from hvp._engines.rule import HessianRule
from hvp._engines.settings import Engine, OnStale
from hvp._graphs.compiled import JitCompile
from hvp._keras.compiled_loss import compiled_problem
from hvp._operators.core import evaluated
from hvp._operators.operator import SymmetricOperator, check_damping
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.arrays import check_array
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables


class HessianOperator(SymmetricOperator):
    """The Hessian of a loss, as a scipy `LinearOperator`.

    Evaluates the loss's gradient once, at the values the variables have now, and keeps what the
    gradient's derivative needs; every product `H @ v` reuses it (Pearlmutter 1994 [1]_).

    Parameters
    ----------
    loss : callable
        With `data=None` takes nothing; else takes the elements of `data` and returns the mean
        over the examples. Returns a real scalar tensor. May be a `tf.function`.
    variables : nest
        What the second derivatives are with respect to: any nest of `tf.Variable` and
        `keras.Variable`; a `tf.Module`, Keras layer or model stands for its trainable variables.
        float16 and bfloat16 variables make a float32 operator.
    data : tuple or dict of arrays, or iterable of such, optional
        The examples: elements become positional arguments of the loss, entries keyword arguments.
        An iterable gives batches: a `tf.data.Dataset`, a Keras `PyDataset`, a list, or what else
        gives the same batches each time it is gone through. The operator is the Hessian of the mean
        over all examples, however they are divided.
    batch_size : int, optional
        Cuts a tuple or dict of arrays into batches of so many examples; the last may be smaller.
    damping : float, optional
        Adds `damping * v` to every product.
    memory_limit : int or str, optional
        Bytes (or such as ``"2GiB"``) that what is kept and one batch at work may take together. As
        many batches are kept as fit, the others are evaluated again for each product; a batch that
        does not fit is cut. By default all are kept, with a `RuntimeWarning` where memory gets
        short.
    reduction : {"mean", "sum"}, optional
        ``"sum"`` multiplies by the number of examples, or by the sum of the weights.
    regularization : callable, optional
        Takes nothing, returns a scalar that is added once, whatever the batches and reduction.
    weight : callable, optional
        Takes the elements of a batch, as the loss does; returns how much the batch counts, where
        its loss is a mean over something else than examples (unmasked tokens, sample weights).
    progress : bool or "always", optional
        Shows a bar over the batches, by tqdm, on a terminal; with ``"always"`` anywhere.
    on_stale : {"raise", "refresh", "ignore"}, optional
        What happens on use after a variable that the loss reads, trained or frozen, has changed:
        raise `StaleOperatorError`, evaluate again, or answer for the old values. Integers that the
        loss itself updates (dropout seeds, counters) do not count, nor do variables that only
        follow the loss (moving averages in training mode).
    engine : {"graph", "tape"}, optional
        What computes products: two compiled functions, split from one trace of the loss, or a
        persistent tape, operation by operation. Where a loss cannot be traced, or not be split
        (effects that depend on `v`), the tape serves, and ``stats`` and a line in the log say why.
    jit_compile : bool or "auto", optional
        Whether XLA compiles products of the graph engine: once, when the first is computed, which
        then takes seconds. ``"auto"`` also times one product both ways, and stays with the faster.
        What XLA cannot compile (loops and branches, max pooling) is computed without, and ``stats``
        and a line in the log say why.
    recompute : bool, int or sequence of layers, optional
        Whether to keep only what passes between segments of a Keras model, given as `variables`,
        and compute the rest again for each product, a segment at a time. ``True`` chooses the
        segments, an integer says how many, a sequence lists sublayers: see `recompute_model`. A
        loss that calls functions made by `recompute` is recomputed in any case, with either engine.

    Attributes
    ----------
    shape : tuple of int
        `(n, n)`, with `n` the number of entries of all variables.
    dtype : numpy.dtype
        The widest of the variables', at least float32.

    Raises
    ------
    InvalidLossError
        If the loss is not a function that returns a real scalar tensor.
    InvalidVariablesError
        If `variables` are not, or the loss depends on none of them.
    InvalidDataError
        If `data` are empty, their first axes differ, or the loss takes other arguments.
    NonFiniteError
        If the loss or its gradient is not finite.
    SecondDerivativeError
        If an operation in the loss has no second derivative in TensorFlow.
    HvpError
        If another argument is not what it should be, all batches have weight zero, or the loss
        draws random numbers that cannot be repeated where batches are evaluated again.
    TooLargeError
        If a single example does not fit in `memory_limit`.
    RecomputeError
        If `recompute` is asked for and the model cannot be cut so, or the loss does not call it.

    Notes
    -----
    The constructor traces the loss once, together with its gradient and product, to learn what it
    reads and whether its second derivatives exist, and evaluates the gradient once. With the graph
    engine, the loss's Python code runs for the trace only: what it reads besides variables stays as
    it was then, also after `refresh`. State that the loss updates is put back afterwards. Each use
    looks whether the variables the loss reads have changed.

    A context manager: leaving it releases what is kept.

    References
    ----------
    .. [1] B. A. Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6(1),
       147-160, 1994. https://doi.org/10.1162/neco.1994.6.1.147

    Examples
    --------
    The Hessian of `sum(w**4) / 12` is diagonal, with entries `w**2`:

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> H = hvp.HessianOperator(lambda: tf.reduce_sum(w**4) / 12, w)
    >>> H @ np.ones(3)
    array([1., 4., 9.], dtype=float32)
    >>> H.stats.gradient_evaluations, H.stats.products
    (1, 1)

    Any solver of scipy's takes it:

    >>> from scipy.sparse.linalg import cg
    >>> x, info = cg(H, H.gradient)
    >>> np.allclose(x, H.gradient / [1, 4, 9], rtol=1e-4), info
    (True, 0)
    """

    @outside_strategies
    def __init__(
        self,
        loss: Callable[..., Any],
        variables: Any,
        data: Any = None,
        *,
        batch_size: int | None = None,
        damping: float = 0.0,
        memory_limit: int | str | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        regularization: Callable[[], Any] | None = None,
        weight: Callable[..., Any] | None = None,
        progress: bool | Literal["always"] = False,
        on_stale: OnStale = "raise",
        engine: Engine = "graph",
        jit_compile: JitCompile = False,
        recompute: bool | int | Sequence[Any] = False,
    ) -> None:
        damping = check_damping(damping)
        core = evaluated(
            HessianRule(checked_loss(loss)),
            variables,
            data,
            batch_size=batch_size,
            memory_limit=memory_limit,
            reduction=reduction,
            regularization=regularization,
            weight=weight,
            progress=progress,
            on_stale=on_stale,
            engine=engine,
            jit_compile=jit_compile,
            recompute=recompute,
        )
        super().__init__(core, damping)

    @classmethod
    def from_keras(
        cls,
        model: Any,
        data: Any,
        *,
        variables: Any = None,
        training: bool = False,
        **options: Any,
    ) -> HessianOperator:
        """Return the Hessian of the loss a Keras model was compiled with.

        Parameters
        ----------
        model : keras.Model
            Compiled. Loss weights, several outputs and regularizers count as in `model.evaluate`.
        data : tuple of arrays, or iterable of such
            `(x, y)` or `(x, y, sample_weight)`, as for `model.fit`, or batches of them.
        variables : nest, optional
            What the second derivatives are with respect to; the model's trainable variables by
            default.
        training : bool, optional
            Whether layers behave as in training (dropout, batch normalization).
        **options
            Of `HessianOperator`.

        Returns
        -------
        HessianOperator

        Raises
        ------
        InvalidLossError
            If the model is not compiled, or its loss is a sum over the batch, not a mean; if an
            output has a mask, and the data are divided without `weight`; if `reduction` is
            ``"sum"`` and the model has regularizers.

        Notes
        -----
        Keras divides by the number of examples, also with sample weights. Where it averages over
        something else (outputs with a mask), say by `weight` how much a batch counts.

        Examples
        --------
        >>> import keras
        >>> import numpy as np
        >>> import hvp
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.compile(loss="mse")
        >>> x, y = np.eye(3), np.ones(3)
        >>> H = hvp.HessianOperator.from_keras(model, (x, y), batch_size=2)
        >>> H.to_dense().round(3)
        array([[0.667, 0.   , 0.   ],
               [0.   , 0.667, 0.   ],
               [0.   , 0.   , 0.667]], dtype=float32)
        """
        loss, variables = compiled_problem(model, data, variables, training, options)
        return cls(loss, variables, data, **options)


@outside_strategies
def hessian_vector_product(
    loss: Callable[..., Any], variables: Any, v: Any, data: Any = None
) -> Any:
    """Multiply the Hessian of a loss by one vector.

    For more than one vector make a `HessianOperator`: it evaluates the gradient once for all.

    Parameters
    ----------
    loss, variables, data
        As for `HessianOperator`.
    v : nest of tensors, tf.Tensor or ndarray
        Shaped like the variables, or flat of shape `(n,)`.

    Returns
    -------
    nest of tf.Tensor, tf.Tensor or ndarray
        In the form of `v`.

    Raises
    ------
    HvpError
        As `HessianOperator` and its `product`.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import hvp
    >>> w = tf.Variable([1.0, 2.0, 3.0])
    >>> loss = lambda: tf.reduce_sum(w**4) / 12
    >>> hvp.hessian_vector_product(loss, w, tf.ones(3)).numpy()
    array([1., 4., 9.], dtype=float32)
    """
    space = Space.of_variables(collect_variables(variables))
    is_array = isinstance(v, np.ndarray) and v.shape == (space.size,)
    if is_array:
        check_array(v, space.size, space.dtype.as_numpy_dtype, ndims=(1,))
    elif not space.is_flat(v):
        space.parts_of_nest(v)
    with HessianOperator(loss, variables, data) as operator:
        if is_array:
            return operator.matvec(v)
        return operator.product(v)
