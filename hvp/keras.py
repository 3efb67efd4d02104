"""What plugs into Keras: callbacks.

`CurvatureMonitor`
    Logs eigenvalues and the trace of the Hessian during training.
`LaplaceCallback`
    Chooses the strength of weight decay during training.
"""

from hvp._laplace.callback import LaplaceCallback
from hvp._spectra.monitor import CurvatureMonitor

__all__ = ["CurvatureMonitor", "LaplaceCallback"]
