"""Hessian-vector products in TensorFlow, from one evaluation of the gradient.

The public names:

`HessianOperator`
    The Hessian of a loss as a scipy `LinearOperator`.
`GaussNewtonOperator`
    The Gauss-Newton matrix, which is positive semi-definite if the loss is convex in the
    predictions.
`FisherOperator`
    The Fisher information matrix, exact, by drawing targets, or with the targets of the data.
`JacobianOperator`
    The Jacobian of any function, such as the predictions of a model, and its transpose.
`hessian_vector_product`, `third_order_product`
    A single product with the second or third derivative.
`minimize`
    scipy's optimizers on a loss, with the derivatives that each of them takes.
`NewtonCG`
    A truncated Newton method whose inner iterations run in a graph.
`fit`
    Least squares for models with named parameters, with standard errors.
`ScipyObjective`
    The functions that scipy's optimizers ask for, if you want to call these yourself.
`check`
    A report on whether an operator is the Hessian you meant.
`solve`
    Linear systems with a Hessian, for one or many right-hand sides.
`Solver`
    Solves with one operator, each of which uses what the earlier ones have learned.
`NystromPreconditioner`, `DiagonalPreconditioner`, `BlockDiagonalPreconditioner`
    Approximate inverses that make such systems easier; they also serve as scipy's `M`.
`ExactInverse`, `SparseInverse`, `NeumannInverse`
    Inverses as operators: by all eigenvalues, by sparse factors, and by a series.
`standard_errors`
    Standard errors of all parameters, or of some of many.
`trace`, `diagonal`, `norm`, `logdet`, `quadratic_forms`
    Numbers that describe any symmetric operator, with their standard errors.
`eigsh`
    Eigenvalues at the ends of a spectrum or nearest to zero, with residuals that were checked.
`spectral_density`
    The density of all eigenvalues.
`loss_slice`
    The loss along eigenvectors or other directions, with its quadratic model.
`plot_layers`
    A picture of one number for each layer.
`Laplace`
    How sure a model is: variances of weights and predictions, and the evidence for its prior.
`calibration`
    How well predicted probabilities agree with what happened.
`KFAC`, `EKFAC`
    Kronecker-factored approximations of these matrices, with their inverses in closed form.
`InfluenceFunctions`
    Predictions of how weights and losses change if training examples are left out.
`linear_datamodeling_score`
    How much such predictions are worth, by training on part of the data.
`argmin`, `root`, `fixed_point`
    Solutions whose derivatives in everything else are right under a tape.
`laplacian`, `bilaplacian`, `hessian_trace`, `partial_derivatives`, `jet`
    Derivatives of a function in its inputs, as tensors that can be differentiated further.
`Laplacian`
    A value with its gradient and Laplacian.
`linearize`
    The value of any function, and its derivative as a linear map.
`recompute`
    A function whose intermediate values are computed again instead of kept, in every derivative.
`recompute_model`
    A Keras model that is recomputed in segments.
`Cluster`
    TensorFlow servers on this machine, to try out what runs on several.
`HvpError`
    The base of all errors, which the documentation lists.
"""

from __future__ import annotations

# Not when it is first used: Keras finds the classes of a saved model once they are registered.
from hvp import keras as keras
from hvp._check.check import check
from hvp._check.report import CheckReport, Finding
from hvp._devices.cluster import Cluster
from hvp._devices.statistics import DeviceStatistics
from hvp._errors import (
    CheckpointError,
    ClosedOperatorError,
    ConvergenceWarning,
    DeviceError,
    FailedCheckError,
    GraphModeError,
    HvpError,
    InvalidDataError,
    InvalidLossError,
    InvalidOptionError,
    InvalidVariablesError,
    InvalidVectorError,
    NonFiniteError,
    OutOfMemoryError,
    ProcessError,
    RecomputeError,
    SecondDerivativeError,
    StaleOperatorError,
    TooLargeError,
)
from hvp._implicit.argmin import argmin
from hvp._implicit.roots import fixed_point, root
from hvp._influence.datamodeling import DatamodelingScore, linear_datamodeling_score
from hvp._influence.influence import InfluenceFunctions, TokenScores, TopInfluences
from hvp._kronecker.factored import FactoredOperator
from hvp._kronecker.kfac import EKFAC, KFAC, BlockDescription
from hvp._laplace.calibration import Calibration, calibration
from hvp._laplace.laplace import Laplace
from hvp._minimize.fit import FitResult, fit
from hvp._minimize.minimize import minimize
from hvp._minimize.newton_cg import NewtonCG, NewtonStep
from hvp._minimize.objective import ScipyObjective
from hvp._minimize.profile import Profile
from hvp._operators.fisher import FisherOperator
from hvp._operators.gauss_newton import GaussNewtonOperator
from hvp._operators.hessian import HessianOperator, hessian_vector_product
from hvp._operators.jacobian import JacobianOperator
from hvp._operators.linearization import Linearization, linearize
from hvp._operators.sparse import Sparsity
from hvp._operators.third_order import third_order_product
from hvp._recompute.keras_segments import recompute_model
from hvp._recompute.recompute import recompute
from hvp._snapshots.statistics import Statistics
from hvp._solve.inverses import ExactInverse, NeumannInverse
from hvp._solve.preconditioners import (
    BlockDiagonalPreconditioner,
    DiagonalPreconditioner,
    NystromPreconditioner,
)
from hvp._solve.solve import SolveResult, solve
from hvp._solve.solver import Solver
from hvp._solve.sparse import SparseInverse
from hvp._solve.standard_errors import standard_errors
from hvp._spectra.density import SpectralDensity, spectral_density
from hvp._spectra.diagonal import diagonal
from hvp._spectra.eigsh import EigenResult, eigsh
from hvp._spectra.estimate import Estimate
from hvp._spectra.functions import logdet, quadratic_forms
from hvp._spectra.landscape import LossSlice, loss_slice
from hvp._spectra.norm import norm
from hvp._spectra.pictures import plot_layers
from hvp._spectra.trace import trace
from hvp._taylor.inputs import (
    Laplacian,
    bilaplacian,
    hessian_trace,
    jet,
    laplacian,
    partial_derivatives,
)

__version__ = "0.2.0"

__all__ = [
    "EKFAC",
    "KFAC",
    "BlockDescription",
    "BlockDiagonalPreconditioner",
    "Calibration",
    "CheckReport",
    "CheckpointError",
    "ClosedOperatorError",
    "Cluster",
    "ConvergenceWarning",
    "DatamodelingScore",
    "DeviceError",
    "DeviceStatistics",
    "DiagonalPreconditioner",
    "EigenResult",
    "Estimate",
    "ExactInverse",
    "FactoredOperator",
    "FailedCheckError",
    "Finding",
    "FisherOperator",
    "FitResult",
    "GaussNewtonOperator",
    "GraphModeError",
    "HessianOperator",
    "HvpError",
    "InfluenceFunctions",
    "InvalidDataError",
    "InvalidLossError",
    "InvalidOptionError",
    "InvalidVariablesError",
    "InvalidVectorError",
    "JacobianOperator",
    "Laplace",
    "Laplacian",
    "Linearization",
    "LossSlice",
    "NeumannInverse",
    "NewtonCG",
    "NewtonStep",
    "NonFiniteError",
    "NystromPreconditioner",
    "OutOfMemoryError",
    "ProcessError",
    "Profile",
    "RecomputeError",
    "ScipyObjective",
    "SecondDerivativeError",
    "SolveResult",
    "Solver",
    "SparseInverse",
    "Sparsity",
    "SpectralDensity",
    "StaleOperatorError",
    "Statistics",
    "TokenScores",
    "TooLargeError",
    "TopInfluences",
    "argmin",
    "bilaplacian",
    "calibration",
    "check",
    "diagonal",
    "eigsh",
    "fit",
    "fixed_point",
    "hessian_trace",
    "hessian_vector_product",
    "jet",
    "laplacian",
    "linear_datamodeling_score",
    "linearize",
    "logdet",
    "loss_slice",
    "minimize",
    "norm",
    "partial_derivatives",
    "plot_layers",
    "quadratic_forms",
    "recompute",
    "recompute_model",
    "root",
    "solve",
    "spectral_density",
    "standard_errors",
    "third_order_product",
    "trace",
]
