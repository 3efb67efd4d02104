"""Influence functions: how leaving out training examples changes the weights and other losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvp._data.budget import MemoryFraction
from hvp._data.elements import checked_loss
from hvp._engines.options import Options, declared, without
from hvp._engines.rule import HessianRule
from hvp._errors import HvpError
from hvp._influence.damped_inverse import DampedInverse, check_solver
from hvp._influence.example_data import ExampleData
from hvp._influence.example_gradients import ExampleGradients
from hvp._influence.factored_inverse import FactoredInverse
from hvp._influence.gradient_forms import gradient_form
from hvp._influence.gradient_store import GradientStore
from hvp._influence.scoring import Scoring
from hvp._keras.compiled_loss import CompiledModel, loss_of_model
from hvp._keras.from_keras import FromKeras
from hvp._kronecker.kfac import EKFAC, KFAC
from hvp._operators.curvature import Curvature, check_curvature, composed, rule_of
from hvp._operators.damping import check_damping
from hvp._operators.gauss_newton import GaussNewtonOperator
from hvp._operators.hessian import HessianOperator
from hvp._operators.matrix import evaluated
from hvp._operators.symmetric import SymmetricOperator, evaluation_of
from hvp._runtime.arguments import check_count, check_number, refuse_unknown
from hvp._runtime.guard import OneProcess
from hvp._runtime.interrupts import Uninterrupted
from hvp._runtime.strategies import outside_strategies
from hvp._vectors.selection import groups
from hvp._vectors.strategies import process_count, strategy_of
from hvp._vectors.variables import collect_variables


class TopInfluences(NamedTuple):
    """The most influential training examples for each test example.

    Attributes
    ----------
    helpful, harmful : ndarray of int
        Numbers of training examples, of shape `(n_test, k)`, the most influential first. Without a
        helpful example the loss of the test example would rise, without a harmful one it would
        fall.
    helpful_scores, harmful_scores : ndarray
        Their scores, of the same shape.
    """

    helpful: np.ndarray
    helpful_scores: np.ndarray
    harmful: np.ndarray
    harmful_scores: np.ndarray


class TokenScores(NamedTuple):
    """Scores, divided among the tokens of the training examples.

    Attributes
    ----------
    tokens : ndarray
        The contribution of each token, of shape `(n_test, n_examples, n_tokens)`.
    rest : ndarray
        What belongs to no token, of shape `(n_test, n_examples)`.
    """

    tokens: np.ndarray
    rest: np.ndarray


# What belongs to the matrix alone, and not to gradients of examples.
_OF_MATRIX = frozenset(
    """
    batch_size regularization engine jit_compile recompute precision devices device_timeout
    """.split()
)

_OPTIONS = without("reduction", "weight", "on_stale")
_INSTEAD = {
    "reduction": "the mean is over examples that count equally",
    "weight": "the mean is over examples that count equally: pass a pair (model, output_loss), "
    "whose loss averages within each example first, with weights in the data if there is padding",
    "on_stale": "call refresh() after the weights changed",
    **{
        name: f"make the matrix with it: curvature=hvp.EKFAC.from_keras(model, data, {name}=...)"
        for name in ("likelihood", "fisher")
    },
}


@declared(_OPTIONS)
class InfluenceFunctions(FromKeras, OneProcess):
    """Predicts the effect of leaving out training examples, without training again.

    The weights minimize the mean loss `L` of `n` training examples; `H` is its Hessian, and `g_i`
    is the gradient of the loss at example `i`. To first order, leaving out example `i` changes the
    weights by

        `parameter_change(i) = (H + damping I)^-1 g_i / n`,

    and the loss of a test example with gradient `g_t` by

        `scores[t, i] = g_t . (H + damping I)^-1 g_i / n`

    (Koh and Liang 2017 [KL]_, whose "influence of upweighting" is this times `-n`). A positive
    score means that the test loss rises without the training example: the example is helpful.

    Parameters
    ----------
    loss : callable, or pair of callables
        Takes the elements of a batch, and returns the mean over its examples, each of them
        independent of the others. A penalty on the weights (weight decay) inside this loss counts
        as part of each example's loss; the prediction is then for training on the mean over the
        remaining examples. Use `regularization` for a penalty that stays as it is.
    variables : nest
        As for `HessianOperator`. The formulas hold for variables that are trained to a minimum.
    train_data : tuple or dict of arrays, or iterable of such
        As for `HessianOperator`.
    curvature : {"hessian", "gauss-newton"}, operator or KFAC, optional
        The matrix whose inverse is applied. Gauss-Newton matrices of convex output losses are
        positive semi-definite also where training did not end at a minimum. The `loss` is then a
        pair `(model, output_loss)`, as for `GaussNewtonOperator`. An operator of the same
        variables, such as a `FisherOperator`, is used as it is, with its own options. A `KFAC` or
        `EKFAC` matrix is its own solver.
    damping : float, optional
        Multiple of the identity that is added to the Hessian. It makes the Hessian positive
        definite if training did not end at a minimum, and shrinks influences along flat directions.
    solver : str or callable, optional
        How the inverse is applied: ``"auto"``, ``"exact"``, ``"cg"``, ``"block_cg"``,
        ``"minres"``, ``"ekfac"``, ``"kfac"`` or ``"neumann"``. ``"exact"`` computes all
        eigenvalues; ``"auto"`` stands for ``"exact"`` up to 1024 variables, and for ``"block_cg"``
        beyond. These and ``"cg"`` agree to `rtol`. ``"minres"`` is for Hessians that are indefinite
        even with damping. ``"neumann"`` (LiSSA) is an approximation, for comparison. ``"ekfac"``
        and ``"kfac"`` approximate the Gauss-Newton matrix by Kronecker factors, regardless of
        `curvature`, and need no linear solve: use them for models with too many weights for the
        other solvers. A function takes the damped operator, and returns its inverse as a
        `LinearOperator`.
    test_loss : callable, optional
        Takes the elements of test data, and returns a mean. Scores are changes of this loss; the
        default is `loss`.
    rtol : float, optional
        Relative tolerance of the iterative solvers, for the residual of each system.
    maxiter : int, optional
        As for `solve`.
    gradients : str or Path, optional
        A folder in which to store the gradients of the training examples. The first call that needs
        them computes them, and resumes where a killed process stopped; later calls and processes
        read them, so that scores of other test data take one product and no pass over the training
        data. The gradient of a layer is stored as its factors where these take less than half of
        the space; those of a dense layer are its input and the gradient with respect to its
        output. A folder that belongs to other weights,
        other data or another loss raises an error.
    projection : int, optional
        Store a random projection of each gradient to this many numbers. The score of two gradients
        is then an estimate, whose standard error is at most ``sqrt(2 / projection)`` times the
        product of their lengths: in the metric of the inverse for ``"ekfac"`` and ``"kfac"``, which
        is the root of the product of their self-influences. Scores that are much smaller than that
        are lost in this noise.
    **options
        As for `HessianOperator`: {option_names}. `memory_limit` is also for the vectors of the
        solver, but not for data and results. `batch_size` is for products with the matrix. The
        progress bar is over examples. Gradients of single examples are computed in this process in
        any case.

    Attributes
    ----------
    operator : LinearOperator
        The damped matrix of the training loss.
    n_train : int
        Number of training examples.

    Raises
    ------
    InvalidLossError
        If the loss of a batch is not the mean of its examples' losses.
    HvpError
        As `HessianOperator`. Also if the loss draws random numbers, or if another argument is
        invalid. The methods raise it if conjugate gradients meet negative curvature.

    Warns
    -----
    ConvergenceWarning
        If a solution is less accurate than `rtol`, or if ``"exact"`` finds a negative eigenvalue of
        the damped Hessian, so that the weights are not a minimum.

    Notes
    -----
    Predictions are first order. They are good for one example among hundreds if training has
    converged to a minimum. They become worse the more examples are left out together, the smaller
    the damping is in a deep network, and the further the weights are from a minimum.

    References
    ----------
    .. [KL] P. W. Koh and P. Liang, "Understanding black-box predictions via influence functions",
       ICML 2017. https://proceedings.mlr.press/v70/koh17a.html

    Examples
    --------
    For the mean of some numbers, the influence of each number is known:

    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import hvp
    >>> x = np.array([1.0, 2.0, 6.0])
    >>> w = tf.Variable(x.mean())
    >>> influence = hvp.InfluenceFunctions(lambda x: tf.reduce_mean((x - w) ** 2) / 2, w, (x,))
    >>> influence.parameter_change(2)
    array([-1.])
    >>> influence.scores((np.array([0.0]),))
    array([[ 2.,  1., -3.]])
    """

    @outside_strategies
    @Uninterrupted()
    def __init__(
        self,
        loss: Callable[..., Any],
        variables: Any,
        train_data: Any,
        *,
        curvature: Curvature | SymmetricOperator = "hessian",
        damping: float = 0.0,
        solver: str | Callable[[HessianOperator], Any] = "auto",
        test_loss: Callable[..., Any] | None = None,
        rtol: float = 1e-5,
        maxiter: int | None = None,
        gradients: Any = None,
        projection: int | None = None,
        **options: Any,
    ) -> None:
        check_solver(solver)
        check_number(rtol, "rtol")
        _check_projection(projection, gradients)
        checked = Options.of("InfluenceFunctions", options, _OPTIONS, _INSTEAD)
        processes = process_count(strategy_of(collect_variables(variables).variables))
        if processes > 1:
            raise HvpError(
                f"the variables belong to a strategy of {processes} processes, each of which has a "
                "part of the examples",
                "one process that has all training examples",
                "let one process compute, with the machines of the others as devices=",
            )
        train = ExampleData(train_data, "training")
        self.n_train = train.count
        # Half of the limit is for the batches, a quarter for gradients and a quarter for solutions.
        quarter = None
        if checked.memory_limit is not None:
            options["memory_limit"] = MemoryFraction(checked.memory_limit, 1 / 2)
            quarter = MemoryFraction(checked.memory_limit, 1 / 4).nbytes
        own = {name: value for name, value in options.items() if name != "progress"}
        inverse: Any = None
        if solver in _FACTORED or isinstance(curvature, KFAC):
            matrix = _factored(curvature, solver, loss, variables, train_data, own)
            inverse = FactoredInverse(matrix, check_damping(damping), quarter)
            self.operator = matrix.damped(damping)
            loss = composed(loss)
            rule, alone = HessianRule(checked_loss(loss)), Options(**own, products=False)
            evaluation = evaluated(rule, variables, train_data, alone)
            point = SymmetricOperator(evaluation.damped(check_damping(damping)))
        else:
            self.operator = _operator(curvature, loss, variables, train_data, own, damping)
            loss, point = composed(loss), self.operator
        self._point = point
        snapshot = evaluation_of(point).snapshot
        if snapshot.facts.draws:
            raise HvpError(
                "the loss draws random numbers, so the gradient at an example is not unique",
                "a deterministic loss",
                "turn off dropout: training=False",
            )
        own_gradients = ExampleGradients(loss, variables, snapshot, quarter)
        own_gradients.check_mean(train.first)
        test_gradients = own_gradients
        if test_loss is not None:
            test_gradients = ExampleGradients(test_loss, variables, snapshot, quarter)
        if inverse is None:
            inverse = DampedInverse(point, solver, rtol, maxiter, quarter)
        store = None
        if gradients is not None:
            form = gradient_form(own_gradients, inverse, projection, train.first)

            def fingerprint() -> dict[str, str]:
                digests = evaluation_of(point).fingerprint()
                loss_now = own_gradients.fingerprint(train.first)
                digests = {**digests, "training data": train.fingerprint()}
                if form.whitens:
                    digests.update(inverse.fingerprint())
                return {**digests, "training loss": loss_now}

            store = GradientStore(gradients, train.count, point.dtype, form, fingerprint)
        self._scoring = Scoring(
            point, train, own_gradients, test_gradients, inverse, checked.progress, store
        )

    @classmethod
    def _of_compiled(cls, compiled: CompiledModel, variables: Any) -> Sequence[Any]:
        model, training, options = compiled.keras_model, compiled.training, compiled.options
        refuse_unknown(options, cls.__name__, inspect.signature(cls).parameters, _INSTEAD)
        _check_projection(options.get("projection"), options.get("gradients"))
        loss, test_loss = (
            loss_of_model(model, training=training, by_examples=True, regularized=regularized)
            for regularized in (True, False)
        )
        # The training loss includes the model's regularizers, the test loss does not.
        options.setdefault("test_loss", test_loss)
        curvature, solver = options.get("curvature", "hessian"), options.get("solver")
        kind: Any = GaussNewtonOperator if curvature == "gauss-newton" else None
        of_matrix = {name: options[name] for name in _OF_MATRIX & set(options)}
        if not isinstance(curvature, str):
            return loss, variables
        if solver in _FACTORED:
            kind = _FACTORED[solver]
            given = {name: options.get(name) for name in _OF_FACTORED}
            of_matrix = {name: value for name, value in given.items() if value is not None}
        elif kind is not None:
            for name in of_matrix:
                del options[name]
            if options.get("memory_limit") is not None:
                of_matrix["memory_limit"] = MemoryFraction(options["memory_limit"], 1 / 2)
        if kind is not None:
            options["curvature"] = kind.from_keras(
                model, compiled.data, variables=variables, training=bool(training), **of_matrix
            )
        return loss, variables

    @outside_strategies
    def scores(self, test_data: Any, *, out: Any = None, checkpoint: Any = None) -> np.ndarray:
        """Predict how the loss of each test example changes when each training example is left out.

        Parameters
        ----------
        test_data : tuple or dict of arrays, or iterable of such
            Examples like the training data.
        out : str or Path, optional
            A file in NumPy's ``.npy`` format that receives the scores as they are computed, for
            scores that do not fit in memory. Its disk space is allocated at the start.
        checkpoint : str or Path, optional
            A file that saves the progress: every 30 seconds, after each block of test examples, and
            when the solver is interrupted. Further files, whose names start with this one, exist
            meanwhile. The same call resumes from it, even if the process was killed; a call with
            other data, weights or settings raises an error. With `out`, the scores themselves stay
            in that file.

        Returns
        -------
        ndarray
            The scores, of shape `(n_test, n_train)` and in the operator's dtype; positive if the
            training example is helpful. With `out`, a memory map of the file.

        Raises
        ------
        StaleOperatorError
            If variables have changed: call `refresh`.
        CheckpointError
            If the checkpoint cannot be written, or belongs to another run.
        HvpError
            If `out` cannot be written, or if there is no room for it.

        Notes
        -----
        The cost is one linear solve for each test example, and a product with ``"ekfac"`` or
        ``"kfac"``. The gradients of all training examples are computed once for each block of 128
        test examples, or of fewer if `memory_limit` requires it, unless they are stored.
        """
        return self._scoring.scores(test_data, out, checkpoint)

    @outside_strategies
    def self_influence(self, *, checkpoint: Any = None) -> np.ndarray:
        """Predict how the loss of each training example changes when it is itself left out.

        The prediction for example `i` is `g_i . (H + damping I)^-1 g_i / n`. It is large for
        examples that the model memorizes, such as mislabeled or unusual ones.

        Parameters
        ----------
        checkpoint : str or Path, optional
            As for `scores`.

        Returns
        -------
        ndarray
            The predictions, of shape `(n_train,)`. They are not negative if the damped Hessian is
            positive definite.

        Notes
        -----
        The cost is one linear solve for each training example.
        """
        return self._scoring.self_influence(checkpoint)

    @outside_strategies
    def top(self, test_data: Any, k: int = 10) -> TopInfluences:
        """Find the training examples that influence each test example most.

        Parameters
        ----------
        test_data : tuple or dict of arrays, or iterable of such
            Examples like the training data.
        k : int, optional
            Number of helpful and of harmful examples.

        Returns
        -------
        TopInfluences

        Notes
        -----
        The scores of all training examples are never in memory together.
        """
        check_count(k, "k")
        k = min(k, self.n_train)
        numbers, scores = self._scoring.top(test_data, k)
        return TopInfluences(
            helpful=numbers[:, ::-1][:, :k],
            helpful_scores=scores[:, ::-1][:, :k],
            harmful=numbers[:, :k],
            harmful_scores=scores[:, :k],
        )

    @outside_strategies
    def parameter_change(self, indices: Any) -> np.ndarray:
        """Predict how the weights change when training examples are left out together.

        Parameters
        ----------
        indices : int, or array_like of int or bool
            Numbers of training examples, or a mask of length `n_train`.

        Returns
        -------
        ndarray
            `(H + damping I)^-1 g / n`, of shape `(n,)`, where `g` is the sum of the examples'
            gradients. To first order it is the sum of the changes by each example. Use
            `operator.unflatten` to turn it into a nest like the variables.
        """
        return self._scoring.parameter_change(indices)

    @outside_strategies
    def group(self, indices: Any, test_data: Any = None) -> np.ndarray:
        """Predict how losses change when training examples are left out together.

        Parameters
        ----------
        indices : int, or array_like of int or bool
            Numbers of training examples, or a mask of length `n_train`.
        test_data : tuple or dict of arrays, or iterable of such, optional
            The examples whose losses are predicted. The default is the training data.

        Returns
        -------
        ndarray
            `g_t . parameter_change(indices)` for each example, of shape `(n_test,)`. To first order
            it is the sum of the scores of the examples that are left out.

        Notes
        -----
        The cost is one linear solve, regardless of the number of examples.
        """
        return self._scoring.loss_changes(self.parameter_change(indices), test_data)

    @outside_strategies
    def scores_by_layer(self, test_data: Any) -> dict[str, np.ndarray]:
        """Return the contribution of each layer's weights to the scores.

        Parameters
        ----------
        test_data : tuple or dict of arrays, or iterable of such
            Examples like the training data.

        Returns
        -------
        dict of str to ndarray
            Arrays of shape `(n_test, n_train)` by the path of the layer; their sum is `scores`.

        Raises
        ------
        HvpError
            If gradients are stored as projections.
        """
        evaluation = evaluation_of(self._point)
        starts = np.cumsum([0, *evaluation.space.sizes])
        places = {
            layer: np.concatenate([np.arange(starts[i], starts[i + 1]) for i in own])
            for layer, own in groups(evaluation.variable_names).items()
        }
        return self._scoring.scores_by_part(test_data, places)

    @outside_strategies
    def scores_by_token(self, test_data: Any, examples: Any = None) -> TokenScores:
        """Divide scores among the tokens of the training examples.

        The gradient of an example in a layer's weights is a sum over the positions to which the
        layer is applied. A token contributes the sum over its positions, in all layers that are
        applied to each token (Grosse et al. 2023 [GR]_).

        Parameters
        ----------
        test_data : tuple or dict of arrays, or iterable of such
            Examples like the training data.
        examples : int, or array_like of int or bool, optional
            The training examples whose scores to divide, such as the most helpful ones that `top`
            found. By default all of them.

        Returns
        -------
        TokenScores
            ``tokens.sum(axis=-1) + rest`` equals the scores.

        Raises
        ------
        HvpError
            If no layer is applied to each token, or if the layers of the loss cannot be found.

        Notes
        -----
        Tokens are counted along the second axis of the first element of the data. Embeddings,
        projections of attention, dense layers, normalizations and convolutions of sequences belong
        to tokens. Recurrent layers, layers after pooling, and penalties on the weights do not:
        their share is in `rest`, which may be most of the score of a recurrent model. The loss is
        attributed to the token that a layer processes, which need not be the token whose prediction
        is wrong.

        References
        ----------
        .. [GR] R. Grosse et al., "Studying large language model generalization with influence
           functions", 2023. https://arxiv.org/abs/2308.03296
        """
        return TokenScores(*self._scoring.scores_by_token(test_data, examples))

    @Uninterrupted()
    def refresh(self) -> None:
        """Evaluate the matrix again, at the current values of the variables.

        Gradients stored in a folder belong to the old values; the new values need another folder.
        """
        self._point.refresh()
        inverse = self._scoring.inverse
        if isinstance(inverse, FactoredInverse):
            inverse.refresh()
            self.operator = inverse.operator

    def __repr__(self) -> str:
        solver = self._scoring.inverse.solver
        return (
            f"InfluenceFunctions({self.n_train} training examples, {self.operator.shape[0]} "
            f"variables, damping {self._point.damping:g}, solver {solver!r})"
        )


def _check_projection(projection: Any, gradients: Any) -> None:
    if projection is None:
        return
    check_count(projection, "projection")
    if gradients is None:
        raise HvpError(
            "projection is passed, but gradients are not kept",
            "a folder to keep them in",
            "pass gradients='a folder', or leave out projection",
        )


_FACTORED: dict[Any, type[KFAC]] = {"ekfac": EKFAC, "kfac": KFAC}
# Options that Kronecker-factored matrices have.
_OF_FACTORED = frozenset("batch_size devices device_timeout".split())


def _factored(
    curvature: Any, solver: Any, loss: Any, variables: Any, data: Any, options: dict[str, Any]
) -> KFAC:
    """Return the Kronecker-factored matrix of the training loss."""
    if isinstance(curvature, KFAC):
        if solver not in ("auto", *_FACTORED):
            raise HvpError(
                f"the solver is {solver!r}, and the curvature a Kronecker-factored matrix",
                "its own inverse",
                "leave out solver",
            )
        matrix = curvature
    else:
        is_pair = isinstance(loss, (tuple, list)) and len(loss) == 2
        if not is_pair:
            raise HvpError(
                f"solver={solver!r} is passed with a loss that does not tell the model from the "
                "loss of its predictions",
                "a pair (model, output_loss), or a KFAC matrix as the curvature",
                "pass (model, output_loss) as the loss, or curvature=hvp.EKFAC(...); of a compiled "
                "Keras model use from_keras",
            )
        if options.get("regularization") is not None:
            raise HvpError(
                "a regularization is passed, which has no Kronecker factors",
                "damping: an L2 penalty c adds 2 c",
                "leave it out, and raise damping",
            )
        own = {k: options[k] for k in _OF_FACTORED if options.get(k) is not None}
        model, output_loss = loss
        matrix = _FACTORED[solver](model, output_loss, variables, data, **own)
    if not matrix.is_of(collect_variables(variables)):
        raise HvpError(
            "the Kronecker-factored matrix has other variables",
            "the variables of the loss, in the same order",
            "pass the same nest of variables to both",
        )
    return matrix


def _operator(
    curvature: Any,
    loss: Any,
    variables: Any,
    data: Any,
    options: dict[str, Any],
    damping: float,
) -> SymmetricOperator:
    """Return the damped matrix of the training loss."""
    if not isinstance(curvature, SymmetricOperator):
        check_curvature(curvature)
        rule_of(loss, curvature, data, options)  # which checks the loss
        if curvature == "hessian":
            return HessianOperator(loss, variables, data, damping=damping, **options)
        model, output_loss = loss
        return GaussNewtonOperator(model, output_loss, variables, data, damping=damping, **options)
    given = sorted(name for name in _OF_MATRIX & set(options) if options[name] is not None)
    if given:
        raise HvpError(
            f"the argument {given[0]} is given together with an operator",
            "an operator that was made with it",
            f"pass {given[0]} to the operator, and leave it out here",
        )
    own = evaluation_of(curvature).variables
    others = collect_variables(variables).variables
    if [id(v.handle) for v in own] != [id(v.handle) for v in others]:
        raise HvpError(
            "the operator given as curvature has other variables",
            "the variables of the loss, in the same order",
            "pass the same nest of variables to both",
        )
    return curvature.damped(damping)
