"""Collection of the `tf.Variable` objects in nests of variables, modules and Keras models."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvp._errors import InvalidVariablesError

_KINDS = "tf.Variable, keras.Variable, a tf.Module or a Keras layer or model"


@dataclass(frozen=True)
class VariableNest:
    """A nest of variables, flattened in `tf.nest` order.

    `source` is the caller's nest. In `structure`, each module is replaced by the list of its
    trainable variables. The names are distinct: where several variables share one, as all without a
    name of their own do, those after the first have their place in it, as in ``"Variable_2:0"``.
    """

    structure: Any
    variables: tuple[tf.Variable, ...]
    names: tuple[str, ...]
    source: Any

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(variable.shape.as_list()) for variable in self.variables)

    @property
    def dtypes(self) -> tuple[tf.DType, ...]:
        return tuple(variable.dtype for variable in self.variables)


def collect_variables(variables: Any) -> VariableNest:
    """Flatten and check a nest of variables, in which modules stand for trainable variables.

    The nest may contain `tf.Variable` and `keras.Variable` objects, modules, Keras layers and
    models. The variables in the result are distinct, at least one, of real floating dtypes and
    known shapes.
    """
    structure = tf.nest.map_structure(_expand_module, variables)
    leaves = tf.nest.flatten(structure)
    if not leaves:
        modules = [leaf for leaf in tf.nest.flatten(variables) if _is_module(leaf)]
        if any(module.variables for module in modules):
            raise InvalidVariablesError(
                f"{_describe(variables)} has no trainable variables",
                "at least one variable",
                "set trainable=True, or pass the variables themselves",
            )
        raise InvalidVariablesError(
            f"the nest of variables is empty: {_describe(variables)}",
            "at least one variable",
            "build the model first, by calling it on a batch"
            if modules
            else "if they are those of a Keras model, build it first, by calling it on a batch",
        )
    resolved = tuple(_tensorflow_variable(leaf) for leaf in leaves)
    names = _distinct([_name(leaf, index) for index, leaf in enumerate(leaves)])
    _check_each(resolved, names)
    _check_distinct(resolved, names)
    return VariableNest(structure, resolved, names, variables)


def all_variables(variables: Any) -> tuple[tf.Variable, ...]:
    """Return the variables in a nest, with all those of its modules, trainable or not."""
    resolved: list[tf.Variable] = []
    for leaf in tf.nest.flatten(variables):
        leaves = leaf.variables if _is_module(leaf) else [leaf]
        resolved += [_tensorflow_variable(variable) for variable in leaves]
    return tuple(resolved)


def _is_module(leaf: Any) -> bool:
    return hasattr(leaf, "trainable_variables") and not isinstance(leaf, (tf.Variable, type))


def _expand_module(leaf: Any) -> Any:
    return list(leaf.trainable_variables) if _is_module(leaf) else leaf


def _tensorflow_variable(leaf: Any) -> tf.Variable:
    if isinstance(leaf, tf.Variable):
        return leaf
    # Keras variables are recognized by their attributes, because some Keras versions have ones that
    # do not derive from keras.Variable.
    value = getattr(leaf, "value", None)
    if isinstance(value, tf.Variable):
        return value
    keras = sys.modules.get("keras")
    if keras is not None and hasattr(leaf, "path") and value is not None:
        raise InvalidVariablesError(
            f"the Keras variable {leaf.path!r} holds a {type(value).__module__} value: Keras runs "
            f"on the {keras.config.backend()!r} backend",
            "Keras on the TensorFlow backend",
            "set KERAS_BACKEND=tensorflow before importing keras",
        )
    raise InvalidVariablesError(
        f"{_describe(leaf)} is not a variable",
        f"a nest of {_KINDS}",
        "wrap a tensor or array in tf.Variable and let the loss read that variable",
    )


def _name(leaf: Any, index: int) -> str:
    return getattr(leaf, "path", None) or getattr(leaf, "name", None) or f"variable {index}"


def _distinct(names: list[str]) -> tuple[str, ...]:
    taken = set(names)
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            path, colon, output = name.partition(":")
            while name in taken:
                path = f"{path}_{place}"
                name = f"{path}{colon}{output}"
            names[place] = name
            taken.add(name)
        seen.add(name)
    return tuple(names)


def _check_each(variables: tuple[tf.Variable, ...], names: tuple[str, ...]) -> None:
    for variable, name in zip(variables, names):
        if not variable.dtype.is_floating:
            raise InvalidVariablesError(
                f"the variable {name!r} is of type {variable.dtype.name}",
                "real floating-point variables",
                "leave it out: there is no derivative with respect to it",
            )
        if not variable.shape.is_fully_defined():
            raise InvalidVariablesError(
                f"the variable {name!r} has the partly unknown shape {variable.shape}",
                "fully known shapes",
                "create the variable with a static shape",
            )
    if not any(variable.shape.num_elements() for variable in variables):
        raise InvalidVariablesError("the variables have no entries", "at least one entry")


def _check_distinct(variables: tuple[tf.Variable, ...], names: tuple[str, ...]) -> None:
    first_name: dict[int, str] = {}
    for variable, name in zip(variables, names):
        key = id(variable.handle)
        if key in first_name:
            raise InvalidVariablesError(
                f"one variable is in the nest twice, as {first_name[key]!r} and as {name!r}",
                "each variable once",
                "drop one of the two: a shared variable is one block of the Hessian",
            )
        first_name[key] = name


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
