"""TensorFlow functions whose derivatives are wrong, replaced by exact ones.

Their names are replaced where Keras and users look them up, only while a function is traced or run
to be linearized. Values are the same, and first derivatives where TensorFlow has them right, so a
thread that meets a replacement meanwhile notices nothing. A copy bound earlier (`from tensorflow.nn
import moments`, or an older trace of a `tf.function`) escapes. What the module `derivatives`
corrects does not need a name, and is in force at the same time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvp._derivatives.corrections import corrected_derivatives
from hvp._derivatives.ctc import ctc_loss, ctc_loss_of_version_1
from hvp._derivatives.forward import OnlyForwardAccumulator
from hvp._derivatives.logsumexp import cumulative_logsumexp
from hvp._derivatives.moments import moments, moments_of_version_1
from hvp._derivatives.norms import reduce_euclidean_norm
from hvp._derivatives.zeros import weighted_cross_entropy_with_logits, xdivy, xlog1py, xlogy

_lock = threading.Lock()
_users = 0
_replaced: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def exact_functions() -> Iterator[None]:
    """Replace TensorFlow's functions in its public namespaces, in this context.

    And correct derivatives of operations, as the module `derivatives` does.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            for namespace, name, function in _replacements():
                _replaced.append((namespace, name, getattr(namespace, name)))
                setattr(namespace, name, function)
    try:
        with corrected_derivatives():
            yield
    finally:
        with _lock:
            _users -= 1
            while _users == 0 and _replaced:
                setattr(*_replaced.pop())


def _replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Give the modules that have a name, the name, and what to put there."""
    for module in _modules("nn"):
        yield module, "moments", moments_of_version_1 if module is tf.compat.v1.nn else moments
        yield module, "weighted_cross_entropy_with_logits", weighted_cross_entropy_with_logits
        is_first = module is tf.compat.v1.nn
        yield module, "ctc_loss", ctc_loss_of_version_1 if is_first else ctc_loss
        if is_first:
            yield module, "ctc_loss_v2", ctc_loss
    for module in _modules("autodiff"):
        yield module, "ForwardAccumulator", OnlyForwardAccumulator
    for module in _modules("math"):
        for function in (cumulative_logsumexp, reduce_euclidean_norm, xdivy, xlog1py, xlogy):
            yield module, function.__name__, function


def _modules(name: str) -> list[Any]:
    """Return TensorFlow's modules of a name; an `import tensorflow.nn` makes a further one."""
    namespaces = (tf, tf.compat.v2, tf.compat.v1)
    modules = [getattr(namespace, name) for namespace in namespaces if hasattr(namespace, name)]
    modules.append(sys.modules.get(f"tensorflow.{name}", modules[0]))
    return list({id(module): module for module in modules}.values())
