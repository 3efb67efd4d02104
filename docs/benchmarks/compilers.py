"""Import this before TensorFlow: it loads PyTorch's compiler, if PyTorch is installed.

Loaded after TensorFlow, the compiler ends the process (PyTorch 2.14, TensorFlow 2.21).
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch"):
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401
