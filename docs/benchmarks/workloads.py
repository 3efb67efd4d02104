"""The workloads of the benchmarks: arrays, and one loss written in three frameworks.

Every loss is the mean softmax cross-entropy over ten classes with integer labels. The networks are
in `networks_tensorflow`, `networks_jax` and `networks_torch`; `check` tells how far their losses,
gradients and products are apart.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CLASSES = 10
HEADS = 4
FRAMEWORKS = ("tensorflow", "jax", "torch")

# The largest relative error, in the Euclidean norm, at which two answers count as the same.
TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Workload:
    """A network at one point, with one batch.

    Attributes
    ----------
    name : str
        What the command line calls it.
    architecture : str
        Layers, widths, activation, loss and batch, for people.
    network : str
        The function in each of the `networks_*` modules.
    parameters : tuple of ndarray
        float32, in TensorFlow's layouts.
    batch : tuple of ndarray
        Inputs, float32, and labels, int32.
    block : int
        Columns of a block product that fits this size.
    """

    name: str
    architecture: str
    network: str
    parameters: tuple[np.ndarray, ...]
    batch: tuple[np.ndarray, np.ndarray]
    block: int = 32

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters."""
        return [parameter.shape for parameter in self.parameters]

    @property
    def sizes(self) -> list[int]:
        """Entries of each parameter."""
        return [parameter.size for parameter in self.parameters]

    @property
    def size(self) -> int:
        """Entries of all parameters."""
        return sum(self.sizes)


class _Initializer:
    """Draws parameters: Glorot-normal kernels, small offsets, scales near one."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> np.ndarray:
        return mean + np.float32(scale) * self._rng.standard_normal(shape, np.float32)

    def kernel(self, *shape: int) -> np.ndarray:
        window = int(np.prod(shape[:-2]))
        return self.normal(*shape, scale=np.sqrt(2 / (window * (shape[-2] + shape[-1]))))

    def dense(self, inputs: int, outputs: int) -> list[np.ndarray]:
        return [self.kernel(inputs, outputs), self.normal(outputs, scale=0.1)]

    def norm(self, width: int) -> list[np.ndarray]:
        return [self.normal(width, scale=0.1, mean=1.0), self.normal(width, scale=0.1)]

    def batch(self, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        labels = self._rng.integers(CLASSES, size=shape[0]).astype(np.int32)
        return self.normal(*shape), labels


def _mlp(name: str, layers: int, width: int, batch: int, block: int = 32) -> Workload:
    draw = _Initializer()
    parameters = []
    for _ in range(layers):
        parameters += draw.dense(width, width)
    parameters += draw.dense(width, CLASSES)
    return Workload(
        name,
        f"input {width}; {layers} dense layers of {width}, tanh; dense to 10; "
        f"softmax cross-entropy; batch {batch}",
        "mlp",
        tuple(parameters),
        draw.batch(batch, width),
        block,
    )


def _cnn(name: str) -> Workload:
    draw = _Initializer()
    parameters = []
    channels = [3, 32, 64, 128]
    for inputs, outputs in zip(channels, channels[1:]):
        parameters += [draw.kernel(3, 3, inputs, outputs), draw.normal(outputs, scale=0.1)]
    parameters += draw.dense(4 * 4 * 128, CLASSES)
    return Workload(
        name,
        "images of 32x32x3; 3x3 convolutions of 32, 64, 128 channels, each with tanh and 2x2 "
        "average pooling; dense to 10; softmax cross-entropy; batch 64",
        "cnn",
        tuple(parameters),
        draw.batch(64, 32, 32, 3),
    )


def _transformer(name: str) -> Workload:
    draw = _Initializer()
    parameters = []
    width = 128
    for _ in range(4):
        parameters += draw.norm(width) + draw.dense(width, 3 * width) + draw.dense(width, width)
        parameters += draw.norm(width) + draw.dense(width, 4 * width) + draw.dense(4 * width, width)
    parameters += draw.norm(width) + draw.dense(width, CLASSES)
    return Workload(
        name,
        "64 embedded tokens of width 128; 4 pre-norm blocks of 4-head attention and a feed-forward "
        "layer of 512, tanh; layer normalization; mean over tokens; dense to 10; softmax "
        "cross-entropy; batch 16",
        "transformer",
        tuple(parameters),
        draw.batch(16, 64, width),
        block=8,
    )


def resnet_blocks() -> Iterator[tuple[int, int, int]]:
    """Channels in, channels out and stride of ResNet-18's eight blocks."""
    inputs = 64
    for stage, outputs in enumerate([64, 128, 256, 512]):
        for block in range(2):
            yield inputs, outputs, 2 if stage and not block else 1
            inputs = outputs


def _resnet18(name: str) -> Workload:
    draw = _Initializer()
    parameters = [draw.kernel(7, 7, 3, 64), *draw.norm(64)]
    for inputs, outputs, stride in resnet_blocks():
        parameters += [draw.kernel(3, 3, inputs, outputs), *draw.norm(outputs)]
        parameters += [draw.kernel(3, 3, outputs, outputs), *draw.norm(outputs)]
        if stride > 1:
            parameters += [draw.kernel(1, 1, inputs, outputs), *draw.norm(outputs)]
    parameters += draw.dense(512, CLASSES)
    return Workload(
        name,
        "images of 64x64x3; ResNet-18 (7x7 convolution of stride 2, 2x2 average pooling, two basic "
        "blocks each of 64, 128, 256, 512 channels, global average), ReLU, batch normalization "
        "with the batch's statistics; dense to 10; softmax cross-entropy; batch 8",
        "resnet18",
        tuple(parameters),
        draw.batch(8, 64, 64, 3),
        block=4,
    )


def _lstm(name: str) -> Workload:
    draw = _Initializer()
    units = 128
    bias = draw.normal(4 * units, scale=0.1)
    bias[units : 2 * units] += 1  # the forget gate
    recurrent = [draw.kernel(32, 4 * units), draw.kernel(units, 4 * units), bias]
    return Workload(
        name,
        "64 steps of 32 inputs; LSTM of 128 units, tanh; last state; dense to 10; softmax "
        "cross-entropy; batch 32",
        "lstm",
        tuple(recurrent + draw.dense(units, CLASSES)),
        draw.batch(32, 64, 32),
    )


WORKLOADS = {
    "mlp-small": functools.partial(_mlp, layers=3, width=64, batch=64),
    "mlp": functools.partial(_mlp, layers=4, width=512, batch=256),
    "mlp-large": functools.partial(_mlp, layers=4, width=1024, batch=2048, block=4),
    "cnn": _cnn,
    "transformer": _transformer,
    "resnet18": _resnet18,
    "lstm": _lstm,
}


def make_workload(name: str) -> Workload:
    """Draw the arrays of one workload, the same every time."""
    return WORKLOADS[name](name)


def installed_frameworks() -> list[str]:
    """Those of the three frameworks that can be imported."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name)]


def to_layout(workload: Workload, flat: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Reorder a flat vector: the axes of convolution kernels are permuted to `axes`."""
    parts = np.split(flat, np.cumsum(workload.sizes)[:-1])
    parts = [part.reshape(shape) for part, shape in zip(parts, workload.shapes)]
    return np.concatenate(
        [(part.transpose(axes) if part.ndim == 4 else part).ravel() for part in parts]
    )


def from_layout(workload: Workload, flat: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Undo `to_layout`."""
    answer = np.empty_like(flat)
    answer[to_layout(workload, np.arange(workload.size), axes)] = flat
    return answer


def relative_error(answer: np.ndarray, expected: np.ndarray) -> float:
    """Return the distance of two arrays, in units of the second."""
    difference = np.asarray(answer, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def check(workload: Workload) -> dict[str, dict[str, float]]:
    """Compare loss, gradient and product of all installed frameworks with TensorFlow's.

    Returns
    -------
    dict
        Relative errors, by framework and quantity.

    Raises
    ------
    AssertionError
        If one exceeds `TOLERANCE`.
    """
    v = np.random.default_rng(1).standard_normal(workload.size, np.float32)
    answers = {
        framework: importlib.import_module(f"networks_{framework}").evaluate(workload, v)
        for framework in installed_frameworks()
    }
    expected = answers.pop("tensorflow")
    errors = {
        framework: {
            quantity: relative_error(*pair)
            for quantity, *pair in zip(("loss", "gradient", "product"), answer, expected)
        }
        for framework, answer in answers.items()
    }
    for framework, quantities in errors.items():
        worst = max(quantities.values())
        if not worst <= TOLERANCE:
            raise AssertionError(
                f"{workload.name}: {framework} and TensorFlow differ by {worst:.1e} of the norm, "
                f"more than {TOLERANCE:.0e}: {quantities}"
            )
    return errors
