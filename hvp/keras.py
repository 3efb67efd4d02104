"""What plugs into Keras: callbacks.

`CurvatureMonitor`
    Logs eigenvalues and the trace of the Hessian during training.
"""

from hvp._spectra.monitor import CurvatureMonitor

__all__ = ["CurvatureMonitor"]
