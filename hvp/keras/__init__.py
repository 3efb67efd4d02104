"""What plugs into Keras: callbacks, models and optimizers.

`CurvatureMonitor`
    Logs eigenvalues and the trace of the Hessian during training.
`LaplaceCallback`
    Chooses the strength of weight decay during training.
`Model`, `Trainer`
    Models whose optimizer sees the data, and what makes such models.
`optimizers`
    Optimizers that `model.compile` takes.
"""

from hvp._laplace.callback import LaplaceCallback
from hvp._spectra.monitor import CurvatureMonitor
from hvp._training.trainer import Model, Trainer
from hvp.keras import optimizers

__all__ = ["CurvatureMonitor", "LaplaceCallback", "Model", "Trainer", "optimizers"]
