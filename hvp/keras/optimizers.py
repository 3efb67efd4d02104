"""Optimizers that `model.compile` takes.

`KFAC`
    Natural gradients by Kronecker factors.
`Sophia`
    Momentum over a diagonal of curvature, clipped.
`SOAP`
    Adam in the eigenvectors of Shampoo's preconditioner.

`KFAC` and `Sophia` are for models that let their optimizer see the data.
"""

from hvp._training.kfac import KFACOptimizer
from hvp._training.soap import SOAP
from hvp._training.sophia import Sophia

KFAC = KFACOptimizer

__all__ = ["KFAC", "SOAP", "Sophia"]
