"""Loading a saved model and its data."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError, InvalidLossError, reason_of

# Names of the arrays, in the order in which `model.fit` takes them.
_ARRAYS = ("x", "y", "sample_weight")


def load_data(
    path: Path, examples: int | None, seed: int
) -> tuple[tuple[np.ndarray, ...], list[str]]:
    """Read the arrays `x`, `y` and optionally `sample_weight` of an `.npz` file.

    The second result lists the other arrays in the file, which are not used. If `examples` is a
    smaller number than there are, as many are drawn at random.
    """
    expected = "a file that np.savez(file, x=..., y=...) wrote"
    if not path.exists():
        raise InvalidDataError(f"there is no file {path}", expected)
    try:
        with path.open("rb") as stream:
            content = np.load(stream, allow_pickle=False)
            is_single = isinstance(content, np.ndarray)
            arrays = {} if is_single else {name: content[name] for name in content.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidDataError(f"{path} is not an .npz file of numbers", expected) from error
    if is_single:
        raise InvalidDataError(f"{path} holds a single array without a name", expected)
    if not {"x", "y"} <= set(arrays):
        raise InvalidDataError(
            f"{path} has the arrays {', '.join(sorted(arrays)) or 'none'}",
            "arrays called x and y, and optionally sample_weight",
            "write it with np.savez(file, x=..., y=...)",
        )
    for name in _ARRAYS:
        if name in arrays and arrays[name].dtype.kind not in "fiub":
            raise InvalidDataError(
                f"the array {name} in {path} has the dtype {arrays[name].dtype}",
                "numbers",
                "encode labels as integers, as by np.unique(y, return_inverse=True)[1]",
            )
    data = tuple(arrays[name] for name in _ARRAYS if name in arrays)
    lengths = [len(array) if array.ndim else 0 for array in data]
    if not any(lengths):
        raise InvalidDataError(f"the arrays in {path} contain no examples", "at least one example")
    if len(set(lengths)) > 1:
        shapes = ", ".join(f"{n} {a.shape}" for n, a in zip(_ARRAYS, data))
        raise InvalidDataError(
            f"the arrays in {path} have the shapes {shapes}", "the same number of examples in all"
        )
    if examples is not None and examples < lengths[0]:
        places = np.random.default_rng(seed).choice(lengths[0], examples, replace=False)
        data = tuple(array[np.sort(places)] for array in data)
    return data, sorted(set(arrays) - set(_ARRAYS))


def load_model(path: Path, modules: list[str]) -> Any:
    """Load a compiled model, after importing the modules that register its custom objects."""
    import keras

    sys.path.insert(0, "")  # as for a script in this folder
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise HvpError(
                f"the module {module} cannot be imported: {error}",
                "a module in this folder, or one that is installed",
                f"write --import {module[:-3]}, without .py" if module.endswith(".py") else "",
            ) from error
    if not path.exists():
        raise InvalidLossError(f"there is no file {path}", "a file that model.save wrote")
    if path.is_dir():
        raise InvalidLossError(
            f"{path} is a folder",
            "a .keras or .h5 file",
            "load the model in Python, and save it with model.save('model.keras')",
        )
    try:
        model = keras.models.load_model(path)
    except (TypeError, ValueError, OSError, KeyError) as error:
        text = str(error)
        is_custom = "register" in text or "custom_object" in text or "Could not locate" in text
        # Keras says of a file of another kind that it was not found.
        cause = "it is not a Keras model" if "File not found" in text else text.splitlines()[0]
        raise InvalidLossError(
            f"the model in {path} cannot be loaded: {cause}",
            "a file that model.save wrote, ending with .keras",
            "name the modules that register its custom objects by --import MODULE"
            if is_custom
            else "",
        ) from error
    if getattr(model, "optimizer", None) is None and not getattr(model, "compiled", False):
        raise InvalidLossError(
            f"the model in {path} is not compiled, so it has no loss",
            "a compiled model",
            "call model.compile(loss=...) before model.save",
        )
    return model


def check_fit(model: Any, data: tuple[np.ndarray, ...]) -> None:
    """Evaluate the loss of the first example, to refuse data that do not fit the model."""
    for name in ("inputs", "outputs"):
        count = len(getattr(model, name, None) or [None])
        if count > 1:
            raise InvalidLossError(
                f"the model has {count} {name}",
                "one input and one output",
                "use hvp.HessianOperator.from_keras(model, data) in Python",
            )
    if getattr(model, "loss", None) is None:
        raise InvalidLossError(
            "the model was compiled without a loss",
            "a compiled loss",
            "call model.compile(loss=...) before model.save",
        )
    x, *rest = (array[:1] for array in data)
    expected = f"arrays like those the model was trained with: x of shape {model.input_shape}"
    try:
        outputs = model(x)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise InvalidDataError(
            f"the model does not accept x of shape {data[0].shape}: {reason_of(error)}", expected
        ) from error
    try:
        model.compute_loss(x, rest[0], outputs, *rest[1:])
    except (TypeError, ValueError, tf.errors.OpError) as error:
        shapes = ", ".join(f"{name} of shape {a.shape}" for name, a in zip(_ARRAYS[1:], data[1:]))
        raise InvalidDataError(
            f"the loss does not accept {shapes}: {reason_of(error)}",
            f"targets for outputs of shape {model.output_shape}",
        ) from error
