"""The line of the user's code that made an operation of a traced graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvp._graphs.private import TAPE_PREFIX


def source_line(graph: tf.Graph, operation_name: str) -> str:
    """Return the file and line of the code that made an operation, such as "model.py, line 12".

    For a gradient, this is the line of the operation that it is the gradient of. The operation is
    one of the outermost graph: for an operation inside a function, pass the operation that calls
    the function. The result is empty if TensorFlow, Keras or this package made the operation.
    """
    try:
        operation = graph.get_operation_by_name(operation_name)
    except KeyError:  # in the gradient of a loop, for example, which TensorFlow adds later
        return ""
    if operation_name.startswith(TAPE_PREFIX):
        operation = _differentiated(graph, operation)
    if operation is None:
        return ""
    ours, libraries = _folders()
    for frame in reversed(operation.traceback or ()):
        path = Path(frame.filename)
        if ours in path.parents:
            return ""  # this package made the operation, not the code that called it
        if not any(folder in path.parents for folder in libraries):
            return f"{path.name}, line {frame.lineno}"
    return ""


def _differentiated(graph: tf.Graph, gradient: tf.Operation) -> tf.Operation | None:
    """Find the operation that a gradient is the gradient of.

    The name of a gradient contains the scope of this operation, but not its name. The type of a
    gradient begins with the type of this operation, and the two mostly have an input in common.
    """
    scope = gradient.name[len(TAPE_PREFIX) :].rpartition("/")[0]
    alike = [
        operation
        for operation in graph.get_operations()
        if operation.name.rpartition("/")[0] == scope
        and gradient.type.startswith(operation.type)
        and not operation.name.startswith(TAPE_PREFIX)
    ]
    if not alike:
        return None
    inputs = _names(gradient.inputs)
    return max(alike, key=lambda operation: len(inputs & _names(operation.inputs)))


def _names(tensors: Iterable[Any]) -> set[str]:
    return {tensor.name for tensor in tensors}


@functools.cache
def _folders() -> tuple[Path, list[Path]]:
    """Return the folder of this package, and the folders of TensorFlow and Keras."""
    ours = Path(__file__).parents[1]
    others = [sys.modules.get(name) for name in ("tensorflow", "keras", "tf_keras")]
    files: list[str | None] = [
        module.__file__ for module in others if module is not None and module.__file__
    ]
    # The public package may be in another folder than TensorFlow's own modules.
    files.append(sys.modules[tf.Graph.__module__].__file__)
    return ours, [_root(Path(file)) for file in files if file]


def _root(path: Path) -> Path:
    while (path.parent / "__init__.py").exists():
        path = path.parent
    return path
