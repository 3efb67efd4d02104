"""Replaces TensorFlow functions whose derivatives are wrong as a whole, where a loss calls them.

Most wrong derivatives are those of single operations, and are corrected by the type of the
operation (see the module `registry`). A few functions combine operations whose derivatives are
right separately and wrong together, or have a gradient of their own. These are replaced by name,
not in the graph, because the tape engine has no graph.

A name is replaced only in the context that linearizes, which belongs to one thread: properties of
TensorFlow's modules look up the context, and return TensorFlow's own function everywhere else.
References that were bound earlier are not replaced (`from tensorflow.nn import moments`, or an
older trace of a `tf.function`). The module `suspects` refuses them if they would be wrong.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvp._derivatives.corrections import corrected_derivatives
from hvp._derivatives.ctc import ctc_loss, ctc_loss_of_version_1
from hvp._derivatives.forward import OnlyForwardAccumulator
from hvp._derivatives.moments import moments, moments_of_version_1
from hvp._derivatives.zeros import weighted_cross_entropy_with_logits
from hvp._runtime.context import assigned

_is_exact = contextvars.ContextVar("hvp_exact_functions", default=False)


@contextlib.contextmanager
def exact_functions() -> Iterator[None]:
    """Replace the functions in this context, and correct the derivatives of operations."""
    _install()  # again, because `import tensorflow.nn` may have replaced the module
    with assigned(_is_exact, True), corrected_derivatives():
        yield


def pulled_back(
    function: Callable[[], Any], sources: Sequence[Any], cotangents: Any = None
) -> list[tf.Tensor]:
    """Return the gradients of a function's results with respect to `sources`, with zeros for None.

    The results and their derivatives are exact. The results are multiplied by `cotangents`, by
    default ones, before they are summed.
    """
    with exact_functions():
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            results = function()
        return tape.gradient(
            results, sources, cotangents, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )


_REPLACED: dict[str, dict[str, Callable[..., Any]]] = {
    "nn": {
        "moments": moments,
        "weighted_cross_entropy_with_logits": weighted_cross_entropy_with_logits,
        "ctc_loss": ctc_loss,
    },
    "autodiff": {"ForwardAccumulator": OnlyForwardAccumulator},
}
_REPLACED_IN_VERSION_1: dict[str, dict[str, Callable[..., Any]]] = {
    "nn": {
        "moments": moments_of_version_1,
        "weighted_cross_entropy_with_logits": weighted_cross_entropy_with_logits,
        "ctc_loss": ctc_loss_of_version_1,
        "ctc_loss_v2": ctc_loss,
    },
}


def _install() -> None:
    for name, functions in _REPLACED.items():
        for module in _modules(name):
            if type(module) is types.ModuleType:
                module.__class__ = _class_of(functions)


def _install_in_version_1() -> None:
    # The class of these modules does not allow properties. A function that looks up the context
    # replaces TensorFlow's permanently.
    for name, functions in _REPLACED_IN_VERSION_1.items():
        module = getattr(tf.compat.v1, name)
        for function, replacement in functions.items():
            setattr(module, function, _choosing(getattr(module, function), replacement))


def _modules(name: str) -> list[Any]:
    """Return TensorFlow's modules of this name; `import tensorflow.nn` creates another one."""
    modules = [getattr(tf, name), getattr(tf.compat.v2, name)]
    modules.append(sys.modules.get(f"tensorflow.{name}", modules[0]))
    return list({id(module): module for module in modules}.values())


def _class_of(functions: dict[str, Callable[..., Any]]) -> type:
    """Return a class for modules in which some names depend on the context."""
    names = {name: _property(name, replacement) for name, replacement in functions.items()}
    return type("module", (types.ModuleType,), names)


def _property(name: str, replacement: Callable[..., Any]) -> property:
    def get(module: Any) -> Any:
        return replacement if _is_exact.get() else vars(module)[name]

    def assign(module: Any, value: Any) -> None:
        vars(module)[name] = value

    return property(get, assign)


def _choosing(tensorflows: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tensorflows)
    def function(*arguments: Any, **named: Any) -> Any:
        return (replacement if _is_exact.get() else tensorflows)(*arguments, **named)

    return function


_install()
_install_in_version_1()
