"""Reading a saved model and its data."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError, InvalidLossError

# Names of the arrays, in the order in which `model.fit` takes them.
_ARRAYS = ("x", "y", "sample_weight")


def load_data(path: Path, examples: int | None, seed: int) -> tuple[np.ndarray, ...]:
    """Read the arrays `x`, `y` and optionally `sample_weight` of an `.npz` file.

    Parameters
    ----------
    path : Path
        The file.
    examples : int or None
        Draw so many of the examples, if there are more.
    seed : int
        What these depend on.

    Raises
    ------
    InvalidDataError
        If the file cannot be read, or lacks an array.
    """
    expected = "a file that np.savez(file, x=..., y=...) wrote"
    if not path.exists():
        raise InvalidDataError(f"there is no file {path}", expected)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, AttributeError) as error:
        raise InvalidDataError(
            f"{path} cannot be read as an .npz file: {error}", expected
        ) from error
    if not {"x", "y"} <= set(arrays):
        raise InvalidDataError(
            f"{path} has the arrays {', '.join(sorted(arrays)) or 'none'}",
            "arrays called x and y, and optionally sample_weight",
            "write it by np.savez(file, x=..., y=...)",
        )
    data = tuple(arrays[name] for name in _ARRAYS if name in arrays)
    lengths = [len(array) if array.ndim else 0 for array in data]
    if len(set(lengths)) > 1 or not lengths[0]:
        shapes = ", ".join(f"{n} {a.shape}" for n, a in zip(_ARRAYS, data))
        raise InvalidDataError(
            f"the arrays in {path} have the shapes {shapes}", "the same number of examples in all"
        )
    if examples is not None and examples < lengths[0]:
        places = np.random.default_rng(seed).choice(lengths[0], examples, replace=False)
        data = tuple(array[np.sort(places)] for array in data)
    return data


def load_model(path: Path, modules: list[str]) -> Any:
    """Read a compiled model.

    Parameters
    ----------
    path : Path
        A file that `model.save` wrote.
    modules : list of str
        Modules to import before, which register custom objects.

    Raises
    ------
    InvalidLossError
        If the file cannot be read, or the model is not compiled.
    HvpError
        If a module cannot be imported.
    """
    import keras

    sys.path.insert(0, "")  # as for a script in this folder
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise HvpError(
                f"the module {module} cannot be imported: {error}",
                "a module in this folder, or one that is installed",
            ) from error
    if not path.exists():
        raise InvalidLossError(f"there is no file {path}", "a file that model.save wrote")
    try:
        model = keras.models.load_model(path)
    except (TypeError, ValueError, OSError, KeyError) as error:
        text = str(error)
        is_custom = "register" in text or "custom_object" in text or "Could not locate" in text
        raise InvalidLossError(
            f"{path} cannot be loaded: {text.splitlines()[0]}",
            "a file that model.save wrote, ending with .keras",
            "name the modules that register its custom objects by --import MODULE"
            if is_custom
            else "",
        ) from error
    if getattr(model, "optimizer", None) is None and not getattr(model, "compiled", False):
        raise InvalidLossError(
            f"the model in {path} is not compiled, so that it has no loss",
            "a compiled model",
            "call model.compile(loss=...) before model.save",
        )
    return model


def check_fit(model: Any, data: tuple[np.ndarray, ...]) -> None:
    """Evaluate the loss of the first example.

    Raises
    ------
    InvalidDataError
        If the model or its loss does not take the arrays.
    """
    x, *rest = (array[:1] for array in data)
    try:
        model.compute_loss(x, rest[0], model(x), *rest[1:])
    except (TypeError, ValueError, tf.errors.OpError) as error:
        cause = next(line for line in _plain(str(error)).splitlines() if "xception" not in line)
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(_ARRAYS, data))
        raise InvalidDataError(
            f"the model does not take the data: {cause}; their shapes are {shapes}",
            f"what the model was trained with: x of shape {model.input_shape}",
        ) from error


def _plain(text: str) -> str:
    """Return a text without colors and empty lines."""
    lines = re.sub(r"\x1b\[\d+m", "", text).splitlines()
    return "\n".join(line for line in lines if line.strip()) or "an error without a message"
