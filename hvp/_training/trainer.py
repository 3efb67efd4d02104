"""Keras models whose optimizer sees the data."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from hvp._engines.fisher import FisherRule
from hvp._errors import HvpError
from hvp._keras.compiled_loss import CompiledModel
from hvp._operators.predictions import checked_model, checked_output_loss


class CurvatureOptimizer(keras.optimizers.Optimizer):
    """Base class of optimizers that see the model and the data.

    `observe` is called in the graph of each training step, with the batch, before the step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._model: Any = lambda: None
        self._traced: Any = None

    def attach(self, model: Any) -> None:
        """Show the optimizer the model that it trains; `Trainer` does."""
        self._refuse_replicas()
        self._model = weakref.ref(model)
        self._traced = None  # of the loss that the model had

    def build(self, variables: Any) -> None:
        """Refuse a model that does not show its data."""
        self.shown_model()
        super().build(variables)
        # Of random numbers, which differ in each step.
        self._seed = tf.Variable(0, trainable=False, dtype=tf.int32)

    def shown_model(self) -> Any:
        """Return the model; raise an error if there is none, or several replicas."""
        self._refuse_replicas()
        model = self._model()
        if model is None:
            raise HvpError(
                f"the optimizer {self.name!r} does not see the data of its model",
                "a model that shows them",
                "make it with hvp.keras.Model(inputs, outputs), or let its class inherit from "
                "hvp.keras.Trainer before keras.Model; or use hvp.keras.optimizers.SOAP, which "
                "needs gradients alone",
            )
        return model

    def _refuse_replicas(self) -> None:
        count = tf.distribute.get_strategy().num_replicas_in_sync
        if count > 1:
            raise HvpError(
                f"the optimizer {self.name!r} measures curvature on one device, and the strategy "
                f"has {count}",
                "a model outside of the strategy's scope",
                "use hvp.keras.optimizers.SOAP, which needs gradients alone",
            )

    def observe(self, data: tuple[Any, ...]) -> None:
        """Look at a batch ``(x, y)`` or ``(x, y, sample_weight)``, in a training step's graph."""
        if not self.built:
            with tf.init_scope():
                self.build(self._model().trainable_variables)
        self.measure(data)

    def measure(self, data: tuple[Any, ...]) -> None:
        """Update what is known of the curvature, from a batch, perhaps with weights."""
        raise NotImplementedError

    def steps(self) -> tf.Tensor:
        """Return the number of steps so far."""
        return tf.cast(tf.convert_to_tensor(self.iterations), tf.int32)

    def rule(self) -> FisherRule:
        """Return the Fisher matrix of the compiled model, with targets drawn by the seed."""
        compiled = CompiledModel(self._model(), None, False, {})
        if compiled.likelihoods is None:
            raise HvpError(
                "the compiled loss is no likelihood from which targets can be drawn",
                "a cross-entropy or the mean square error",
                "use hvp.keras.optimizers.SOAP",
            )

        def outputs(*inputs: Any) -> Any:
            return compiled.model(inputs[0] if len(inputs) == 1 else list(inputs))

        functions = checked_model(outputs), checked_output_loss(compiled.output_loss)
        return FisherRule(*functions, None, compiled.likelihoods, 1, self._seed)


class Trainer:
    """A mixin of Keras models whose optimizer needs the data, and not only gradients.

    Let the class of a model inherit from it before `keras.Model`; `Model` is that of functional
    models. Everything else is as with `keras.Model`, with any optimizer.
    """

    def compile(self, optimizer: Any = "rmsprop", *arguments: Any, **options: Any) -> None:
        """Compile, and show the model to its optimizer; without XLA unless `jit_compile` is set."""
        options.setdefault("jit_compile", False)
        super().compile(optimizer, *arguments, **options)  # type: ignore[misc]
        attach = getattr(self._own_optimizer(), "attach", None)
        if attach is not None:
            attach(self)

    def compile_from_config(self, config: Any) -> None:
        """Compile as before the model was saved; Keras calls it."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:  # type: ignore[attr-defined]
            self.optimizer.build(self.trainable_variables)  # type: ignore[attr-defined]

    def train_step(self, data: Any) -> Any:
        """Let the optimizer look at the batch, and take a step."""
        observe = getattr(self._own_optimizer(), "observe", None)
        if observe is not None:
            x, *rest = keras.utils.unpack_x_y_sample_weight(data)
            weighted = rest if rest[-1] is not None else rest[:1]
            observe((tuple(x) if isinstance(x, list) else x, *weighted))
        return super().train_step(data)  # type: ignore[misc]

    def _own_optimizer(self) -> Any:
        """Return the optimizer, without what scales losses around it."""
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        return getattr(optimizer, "inner_optimizer", optimizer)


@keras.saving.register_keras_serializable(package="hvp")
class Model(Trainer, keras.Model):
    """A functional Keras model that is trained with an optimizer of `hvp.keras.optimizers`.

    Parameters
    ----------
    inputs, outputs
        As for `keras.Model`. For a model that exists: ``hvp.keras.Model(m.inputs, m.outputs)``,
        which shares its layers.

    Examples
    --------
    >>> import keras
    >>> import hvp
    >>> inputs = keras.Input((3,))
    >>> model = hvp.keras.Model(inputs, keras.layers.Dense(1)(inputs))
    >>> model.count_params()
    4
    """
