"""How an operator works, as opposed to what it is of: one frozen object, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hvp._devices.device import devices_of
from hvp._errors import HvpError
from hvp._graphs.compiled import JitCompile
from hvp._runtime.progress import check_progress

Engine = Literal["graph", "tape"]
Precision = Literal["bfloat16", "float16"]
# The rounding units of these.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
OnStale = Literal["raise", "refresh", "ignore"]


@dataclass(frozen=True)
class Settings:
    """How to evaluate and multiply.

    Attributes
    ----------
    engine : {"graph", "tape"}
        What holds a linear map; the tape serves where the graph cannot.
    jit_compile : bool or "auto"
        Whether XLA compiles the graph engine's products.
    on_stale : {"raise", "refresh", "ignore"}
        What to do when something is asked for after a variable that was read has changed.
    memory_limit : int, str, Share or None
        Upper bound on the memory for residuals and the batch being processed.
    recompute : bool, int or sequence of layers
        Which parts of a Keras model to compute again instead of keeping them.
    precision : {"bfloat16", "float16"} or None
        The type in which products are computed, and residuals stored; None for the operator's own.
    progress : bool or "always"
        Whether to show a bar over batches.
    devices : sequence of Device or None
        The devices to compute on; None to leave it to TensorFlow.
    device_timeout : float
        Seconds after which a remote device that does not answer counts as lost.
    products : bool
        Whether to prepare products, and not only values and gradients.
    wide : bool
        Whether the graph engine computes in float64 what is traced in float32. Vectors and results
        stay float32.

    Raises
    ------
    HvpError
        If one of them is invalid.
    """

    engine: Engine = "graph"
    jit_compile: JitCompile = False
    on_stale: OnStale = "raise"
    memory_limit: Any = None
    recompute: bool | int | Sequence[Any] = False
    precision: Precision | None = None
    progress: bool | Literal["always"] = False
    devices: Any = None
    device_timeout: float = 600.0
    products: bool = True
    wide: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ("graph", "tape"):
            raise HvpError(f"the argument engine is {self.engine!r}", "'graph' or 'tape'")
        if self.jit_compile not in (True, False, "auto"):
            raise HvpError(
                f"the argument jit_compile is {self.jit_compile!r}", "True, False or 'auto'"
            )
        jit_compile = "auto" if self.jit_compile == "auto" else bool(self.jit_compile)
        object.__setattr__(self, "jit_compile", jit_compile)
        if self.on_stale not in ("raise", "refresh", "ignore"):
            raise HvpError(
                f"the argument on_stale is {self.on_stale!r}", "'raise', 'refresh' or 'ignore'"
            )
        if self.precision not in (None, *get_args(Precision)):
            raise HvpError(
                f"the argument precision is {self.precision!r}",
                "'bfloat16' or 'float16'; or None, for the precision of the variables",
            )
        check_progress(self.progress)
        if self.devices is not None:
            object.__setattr__(self, "devices", tuple(devices_of(self.devices)))
        timeout = self.device_timeout
        if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
            raise HvpError(f"the argument device_timeout is {timeout!r}", "a number of seconds")
