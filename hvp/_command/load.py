"""Loading a saved model and its data."""

from __future__ import annotations

import importlib
import runpy
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvp._errors import HvpError, InvalidDataError, InvalidLossError, reason_of

# What `model.fit` takes, in its order.
_NAMES = ("x", "y", "sample_weight")
_BATCHES = "(x, y) or (x, y, sample_weight), or batches of these"
_WRITTEN = "a file that np.savez(file, x=..., y=...) wrote"


def load_data(path: Path, examples: int | None, seed: int) -> tuple[Any, int | None, list[str]]:
    """Read data: an `.npz` file, a folder that `tf.data.Dataset.save` wrote, or a Python file.

    If `examples` is a smaller number than there are, as many are drawn at random. Return the data,
    the number of examples (None for batches, which are not counted), and the names of arrays that
    are not used.
    """
    if not path.exists():
        raise InvalidDataError(f"there is no file {path}", _WRITTEN)
    unused: list[str] = []
    if path.is_dir():
        data = _of_folder(path)
    elif path.suffix == ".py":
        data = _of_script(path)
    else:
        data, unused = _of_arrays(path)
    if not isinstance(data, tuple):
        if examples is not None:
            raise HvpError(
                f"{path} holds batches, of which --examples cannot draw",
                "arrays",
                "leave out --examples, and save fewer examples: dataset.take(count)",
            )
        return data, None, unused
    count = _count(path, data)
    if examples is not None and examples < count:
        places = np.random.default_rng(seed).choice(count, examples, replace=False)
        data = tf.nest.map_structure(lambda array: np.asarray(array)[np.sort(places)], data)
        count = examples
    return data, count, unused


def _of_folder(path: Path) -> Any:
    try:
        return tf.data.Dataset.load(str(path))
    except (tf.errors.OpError, ValueError) as error:
        raise InvalidDataError(
            f"{path} is no data set: {reason_of(error)}",
            "a folder that dataset.save(folder) wrote, of batches (x, y)",
        ) from error


def _of_script(path: Path) -> Any:
    make = runpy.run_path(str(path)).get("data")
    if not callable(make):
        raise InvalidDataError(
            f"{path} defines no function data", "def data() that returns (x, y), or batches of them"
        )
    return make()


def _of_arrays(path: Path) -> tuple[tuple[Any, ...], list[str]]:
    try:
        with path.open("rb") as stream:
            content = np.load(stream, allow_pickle=False)
            is_single = isinstance(content, np.ndarray)
            arrays = {} if is_single else {name: content[name] for name in content.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidDataError(f"{path} is not an .npz file of numbers", _WRITTEN) from error
    if is_single:
        raise InvalidDataError(f"{path} holds a single array without a name", _WRITTEN)
    found = {name: _part(arrays, name) for name in _NAMES}
    if found["x"] is None or found["y"] is None:
        raise InvalidDataError(
            f"{path} has the arrays {', '.join(sorted(arrays)) or 'none'}",
            "arrays called x and y, and optionally sample_weight; of several inputs x/NAME each",
            "write it with np.savez(file, x=..., y=...)",
        )
    unused = sorted(name for name in arrays if name.split("/")[0] not in _NAMES)
    return tuple(part for part in found.values() if part is not None), unused


def _part(arrays: dict[str, np.ndarray], name: str) -> Any:
    """Return one array, or a dict or list of those that are called `name/...`; None without any."""
    if name in arrays:
        return arrays[name]
    several = {key[len(name) + 1 :]: a for key, a in arrays.items() if key.startswith(name + "/")}
    if several and all(key.isdecimal() for key in several):
        return [several[key] for key in sorted(several, key=int)]
    return several or None


def _count(path: Path, data: Any) -> int:
    """Return the number of examples in arrays, after checking that all have the same."""
    arrays = [(n, np.asarray(a)) for n, part in zip(_NAMES, data) for a in tf.nest.flatten(part)]
    for name, array in arrays:
        if array.dtype.kind not in "fiub":
            raise InvalidDataError(
                f"the array {name} in {path} has the dtype {array.dtype}",
                "numbers",
                "encode labels as integers, as by np.unique(y, return_inverse=True)[1]",
            )
    lengths = {len(array) if array.ndim else 0 for _, array in arrays}
    if len(lengths) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays)
        raise InvalidDataError(
            f"the arrays in {path} have the shapes {shapes}", "the same number of examples in all"
        )
    if lengths == {0}:
        raise InvalidDataError(f"the arrays in {path} contain no examples", "at least one example")
    return lengths.pop()


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
        with warnings.catch_warnings():
            # The state of the optimizer is not needed.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
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


def check_fit(model: Any, data: Any) -> None:
    """Evaluate the loss of the first example, to refuse data that do not fit the model."""
    if getattr(model, "loss", None) is None:
        raise InvalidLossError(
            "the model was compiled without a loss",
            "a compiled loss",
            "call model.compile(loss=...) before model.save",
        )
    whole = _first_batch(data)
    x, *rest = tf.nest.map_structure(lambda array: array[:1], whole)
    shapes = [f"{name} of shape {_shapes(part)}" for name, part in zip(_NAMES, whole)]
    expected = f"arrays like those of its training: {_inputs(model)}"
    try:
        outputs = model(x)
    except (TypeError, ValueError, KeyError, tf.errors.OpError) as error:
        raise InvalidDataError(
            f"the model does not accept {shapes[0]}: {reason_of(error)}", expected
        ) from error
    named, names = _of(model, "output"), _of(model, "output_names")
    try:
        model.compute_loss(x, rest[0], outputs, *rest[1:])
    except (TypeError, ValueError, KeyError, tf.errors.OpError) as error:
        raise InvalidDataError(
            f"the loss does not accept {', '.join(shapes[1:])}: {reason_of(error)}",
            f"targets for outputs {list(named) if isinstance(named, dict) else names} of shape "
            f"{_of(model, 'output_shape')}",
        ) from error


def _first_batch(data: Any) -> tuple[Any, ...]:
    """Return the data, or their first batch; refuse what is no batch of examples."""
    try:
        whole = data if isinstance(data, tuple) else next(iter(data), None)
    except TypeError as error:
        raise InvalidDataError(f"the data are {type(data).__name__}", _BATCHES) from error
    if not isinstance(whole, (tuple, list)) or not 2 <= len(whole) <= len(_NAMES):
        found = f"{len(whole)} parts" if isinstance(whole, (tuple, list)) else f"{whole!r:.60}"
        raise InvalidDataError(f"the first of the data has or is {found}", _BATCHES)
    if not all(np.ndim(array) for array in tf.nest.flatten(whole)):
        raise InvalidDataError(
            "the data are single examples", _BATCHES, "save dataset.batch(32) instead"
        )
    return tuple(whole)


def _of(model: Any, name: str) -> Any:
    """Return a shape of the model; a class of one's own has none."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError):
        return "unknown"


def _inputs(model: Any) -> str:
    """Return the names and shapes of the arrays that a model takes."""
    inputs = _of(model, "inputs")
    if not isinstance(inputs, (list, tuple)) or len(inputs) < 2:
        return f"x of shape {_of(model, 'input_shape')}"
    keys = model.input if isinstance(model.input, dict) else range(len(inputs))
    tensors = model.input.values() if isinstance(model.input, dict) else inputs
    if not all(hasattr(tensor, "shape") for tensor in tensors):  # a nest, which arrays cannot have
        return f"x of shapes {tf.nest.map_structure(lambda t: tuple(t.shape), model.input)}"
    return ", ".join(f"x/{key} of shape {tuple(t.shape)}" for key, t in zip(keys, tensors))


def _shapes(part: Any) -> Any:
    """Return the shapes of a nest of arrays in its structure."""
    return tf.nest.map_structure(lambda array: tuple(np.shape(array)), part)
