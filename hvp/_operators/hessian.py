"""The Hessian of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from hvp._data.elements import checked_loss
from hvp._engines.rule import HessianRule
from hvp._engines.settings import Engine, OnStale, Precision
from hvp._graphs.compiled import JitCompile
from hvp._keras.compiled_loss import compiled_problem
from hvp._operators.core import evaluated
from hvp._operators.damping import check_damping
from hvp._operators.operator import SymmetricOperator
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.arrays import check_array
from hvp._vectors.space import Space
from hvp._vectors.variables import collect_variables


class HessianOperator(SymmetricOperator):
    """The Hessian of a loss, as a scipy `LinearOperator`.

    The gradient of the loss is evaluated once, at the values the variables have now, and the
    intermediate results that its derivative needs are kept as *residuals*. Every product `H @ v`
    reuses them: `H v` is the derivative of `gradient . v` (Pearlmutter 1994 [1]_).

    Parameters
    ----------
    loss : callable
        A function that returns a real scalar tensor; it may be a `tf.function`. Without `data` it
        takes no arguments. With `data` it takes the elements of a batch and returns the mean over
        its examples.
    variables : nest
        The variables that the second derivatives are taken with respect to: any nest of
        `tf.Variable` and `keras.Variable`. A `tf.Module`, Keras layer or model stands for its
        trainable variables. Variables in float16 and bfloat16 give a float32 operator.
    data : tuple or dict of arrays, or iterable of such, optional
        The examples. Elements of a tuple are passed to the loss as positional arguments, entries of
        a dict as keyword arguments. An iterable provides batches: a `tf.data.Dataset`, a Keras
        `PyDataset`, a list, or any object that yields the same batches each time it is iterated
        over. The operator is the Hessian of the mean over all examples, regardless of batching,
        for which the loss must return the mean over the batch that it is given.
    batch_size : int, optional
        Divide a tuple or dict of arrays into batches of this many examples. The last batch may be
        smaller.
    damping : float, optional
        Add `damping * v` to every product.
    memory_limit : int or str, optional
        Upper bound on memory for cached residuals plus the batch being processed, in bytes or as a
        string such as ``"2GiB"``. The operator keeps the residuals of as many batches as fit, and
        evaluates the others again for each product. A batch that does not fit is divided. By
        default all residuals are kept, and a `RuntimeWarning` is issued if memory runs short.
    reduction : {"mean", "sum"}, optional
        With ``"sum"``, multiply the loss, which must be a mean, by the number of examples, or by
        the sum of the weights. This gives the Hessian of the sum over all examples.
    regularization : callable, optional
        A function of no arguments that returns a scalar. It is added once, regardless of batches
        and `reduction`.
    weight : callable, optional
        Set this if the loss averages over something other than examples, such as unmasked tokens.
        The function takes the elements of a batch, as the loss does, and returns how much the batch
        counts.
    progress : bool or "always", optional
        Show a progress bar over the batches in a terminal, or anywhere if ``"always"``. This
        requires tqdm.
    on_stale : {"raise", "refresh", "ignore"}, optional
        What to do when the operator is used after a variable changed that the loss reads, trained
        or frozen: raise `StaleOperatorError`, evaluate again, or return products for the old
        values. Integers that the loss itself updates (dropout seeds, counters) do not matter, nor
        do variables that the loss writes without reading (moving averages in training mode).
    engine : {"graph", "tape"}, optional
        How to compute products. The graph engine traces the loss once and compiles two functions,
        one for the evaluation and one for the product. The tape engine runs operation by operation
        from a persistent tape. If a loss cannot be traced, or not be divided in two because effects
        depend on `v`, the tape engine is used instead; ``stats`` and the log say why.
    jit_compile : bool or "auto", optional
        Whether XLA compiles the products of the graph engine. Compilation happens at the first
        product, which then takes seconds. ``"auto"`` times one product both ways and keeps the
        faster one. Products that XLA cannot compile (loops and branches, max pooling) are computed
        without it; ``stats`` and the log say why.
    recompute : bool, int or sequence of layers, optional
        Whether to save memory by recomputing a Keras model, which must be passed as `variables`.
        Only the tensors between segments of the model are kept, and each segment is computed again
        for each product. With ``True`` the segments are chosen automatically, an integer is their
        number, and a sequence lists sublayers: see `recompute_model`. Functions made by `recompute`
        are recomputed in any case, by either engine.
    precision : {"bfloat16", "float16"}, optional
        Compute the matrix products and convolutions of each product in this type, and store large
        residuals in it, which then take half the memory. Vectors, sums and everything else stay in
        the type of the variables, as do the loss and the gradient. The relative error of a product
        is then a few tenths of a percent, and at most about one percent; `hvp.check` measures it.
        `hvp.solve` refines its solutions to the tolerance that you ask for, and optimizers use the
        true gradient. Where the device is not faster in this type, ``stats`` and the log say so,
        and nothing changes. Loops and branches, and products of the tape engine, stay in full
        precision. On GPUs that have it, TensorFlow itself computes float32 products in TF32: see
        `tf.config.experimental.enable_tensor_float_32_execution`.
    devices : sequence of str or tf.config.LogicalDevice, or tf.distribute.Strategy, optional
        The devices to compute on, of this process or, after
        `tf.config.experimental_connect_to_cluster`, of others: ``["GPU:0", "GPU:1"]``,
        ``["/job:worker/task:0/device:CPU:0", ...]``. A strategy stands for the devices of its
        replicas. Data are divided among them, so that the loss must be a mean over examples; each
        device holds the residuals of its own part, and `memory_limit` holds for each. If a remote
        device fails, the others take over what it held. By default, variables that a strategy keeps
        on several devices let all of these take part if the data are divided; if the strategy
        connects several processes, each of them passes its share of the data, and makes the same
        calls.
    device_timeout : float, optional
        Seconds after which a remote device that does not answer counts as lost, and to wait for
        other processes of a strategy.

    Attributes
    ----------
    shape : tuple of int
        `(n, n)`, where `n` is the number of entries of all variables.
    dtype : numpy.dtype
        The widest type among the variables, at least float32.

    Raises
    ------
    InvalidLossError
        If the loss is not a function that returns a real scalar tensor; or is a sum over examples,
        where batches are averaged or `reduction` is ``"sum"``.
    InvalidVariablesError
        If `variables` contains anything else, or the loss depends on none of them.
    InvalidDataError
        If `data` is empty, the first axes of its elements differ, or the loss takes other
        arguments.
    NonFiniteError
        If the loss or its gradient is not finite.
    SecondDerivativeError
        If TensorFlow has no second derivative of an operation in the loss.
    DeviceError
        If none of the devices can be reached, or another process of a strategy fails.
    HvpError
        If another argument is invalid, all batches have weight zero, or batches would have to be
        evaluated again although the loss draws random numbers that cannot be repeated.
    TooLargeError
        If a single example does not fit in `memory_limit`.
    RecomputeError
        If the model cannot be divided as `recompute` asks, or the loss does not call it.

    Notes
    -----
    The constructor traces the loss once, together with its gradient and product, to learn which
    variables it reads and whether its second derivatives exist. It then evaluates the gradient
    once. With the graph engine the Python code of the loss runs for the trace only: everything the
    loss reads besides variables keeps the value it had then, even after `refresh`. Variables that
    the loss updates are restored afterwards. Each use checks whether the variables that the loss
    reads have changed.

    The operator is a context manager, which releases the residuals when it is left.

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

    You can pass it to any of scipy's solvers:

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
        precision: Precision | None = None,
        devices: Any = None,
        device_timeout: float = 600.0,
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
            precision=precision,
            devices=devices,
            device_timeout=device_timeout,
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
        """Return the Hessian of the loss that a Keras model was compiled with.

        Parameters
        ----------
        model : keras.Model
            A compiled model. Loss weights, multiple outputs and regularizers are handled as in
            `model.evaluate`.
        data : tuple of arrays, or iterable of such
            `(x, y)` or `(x, y, sample_weight)`, as for `model.fit`, or batches of these.
        variables : nest, optional
            The variables that the second derivatives are taken with respect to; by default the
            model's trainable variables.
        training : bool, optional
            Whether layers behave as in training (dropout, batch normalization).
        **options
            Further arguments of `HessianOperator`.

        Returns
        -------
        HessianOperator

        Raises
        ------
        InvalidLossError
            If the model is not compiled, or its loss is a sum over the batch instead of a mean; if
            an output has a mask and the data are divided without `weight`; if `reduction` is
            ``"sum"`` and the model has regularizers.

        Notes
        -----
        Keras divides by the number of examples, also with sample weights. If it averages over
        something else (outputs with a mask), pass `weight` to say how much a batch counts.

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
@Uninterrupted()
def hessian_vector_product(
    loss: Callable[..., Any], variables: Any, v: Any, data: Any = None
) -> Any:
    """Multiply the Hessian of a loss by one vector.

    Each call traces the loss and evaluates its gradient anew. For more than one vector make a
    `HessianOperator`, which does both once for all.

    Parameters
    ----------
    loss, variables, data
        As for `HessianOperator`.
    v : nest of tensors, tf.Tensor or ndarray
        A vector shaped like the variables, or a flat one of shape `(n,)`.

    Returns
    -------
    nest of tf.Tensor, tf.Tensor or ndarray
        The product, in the form of `v`.

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
