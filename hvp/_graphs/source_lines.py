"""Where in the user's code an operation of a traced graph was made."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf

# What TensorFlow's tapes put in front of the names of operations they add.
_TAPE = "gradient_tape/"


def source_line(graph: tf.Graph, operation_name: str) -> str:
    """Return the file and line that made an operation, or, of a gradient, what it is a gradient of.

    Parameters
    ----------
    graph : tf.Graph
        That was traced.
    operation_name : str
        Of the outermost graph: for what is inside a function, the operation that calls it.

    Returns
    -------
    str
        As ``"model.py, line 12"``; empty where no line outside of TensorFlow, Keras and this
        package made it.
    """
    try:
        operation = graph.get_operation_by_name(operation_name)
    except KeyError:  # inside a gradient that was made anew, as for a loop
        return ""
    if operation_name.startswith(_TAPE):
        operation = _differentiated(graph, operation)
    if operation is None:
        return ""
    ours, libraries = _folders()
    for frame in reversed(operation.traceback):
        path = Path(frame.filename)
        if ours in path.parents:
            return ""  # what called this package is not what made the operation
        if not any(folder in path.parents for folder in libraries):
            return f"{path.name}, line {frame.lineno}"
    return ""


def _differentiated(graph: tf.Graph, gradient: tf.Operation) -> tf.Operation | None:
    """Find the operation of which another is the gradient.

    A tape keeps the scope of its name, but not the name. It is of a type that begins alike, and
    most have an input in common.
    """
    scope = gradient.name[len(_TAPE) :].rpartition("/")[0]
    alike = [
        operation
        for operation in graph.get_operations()
        if operation.name.rpartition("/")[0] == scope
        and gradient.type.startswith(operation.type)
        and not operation.name.startswith(_TAPE)
    ]
    if not alike:
        return None
    inputs = _names(gradient.inputs)
    return max(alike, key=lambda operation: len(inputs & _names(operation.inputs)))


def _names(tensors: Iterable[Any]) -> set[str]:
    return {tensor.name for tensor in tensors}


@functools.cache
def _folders() -> tuple[Path, list[Path]]:
    """Return the folders of this package, and of those between it and the user's code."""
    ours = Path(__file__).parents[1]
    others = [sys.modules.get(name) for name in ("tensorflow", "keras", "tf_keras")]
    files: list[str | None] = [
        module.__file__ for module in others if module is not None and module.__file__
    ]
    # TensorFlow's own modules tell where it is; its public name may be a package beside it.
    files.append(sys.modules[tf.Graph.__module__].__file__)
    return ours, [_root(Path(file)) for file in files if file]


def _root(path: Path) -> Path:
    while (path.parent / "__init__.py").exists():
        path = path.parent
    return path
