"""The workloads' networks in PyTorch.

Images and convolution kernels are channels-first tensors stored with channels last, which is
faster here than storing them in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from workloads import HEADS, Workload, from_layout, resnet_blocks, to_layout

# The axes of TensorFlow's kernels, in the order PyTorch is made to store them.
STORED = (3, 0, 1, 2)


def mlp(parameters: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Dense layers with tanh between them."""
    *hidden, kernel, bias = parameters
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = torch.tanh(torch.addmm(b, x, w))
    return torch.addmm(bias, x, kernel)


def cnn(parameters: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Convolutions with tanh and average pooling, and a dense layer."""
    *hidden, kernel, bias = parameters
    for w, b in zip(hidden[::2], hidden[1::2]):
        x = F.avg_pool2d(torch.tanh(F.conv2d(x, w, b, padding=1)), 2)
    return torch.addmm(bias, x.permute(0, 2, 3, 1).reshape(len(x), -1), kernel)


def _normalize(
    x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, axes: Sequence[int]
) -> torch.Tensor:
    # Written out: torch.func's jvp of jacrev, which curvlinops takes, is wrong for F.layer_norm
    # and F.batch_norm.
    centred = x - x.mean(axes, keepdim=True)
    variance = (centred**2).mean(axes, keepdim=True)
    return centred * torch.rsqrt(variance + 1e-5) * scale + offset


def _attend(x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    batch, tokens, width = x.shape
    heads = (x @ kernel + bias).reshape(batch, tokens, 3, HEADS, width // HEADS)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    scores = query @ key.transpose(-1, -2) / float(np.sqrt(width // HEADS))
    mixed = torch.softmax(scores, -1) @ value
    return mixed.transpose(1, 2).reshape(batch, tokens, width)


def transformer(parameters: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Pre-norm blocks of attention and a feed-forward layer."""
    *blocks, scale, offset, kernel, bias = parameters

    for start in range(0, len(blocks), 12):
        s1, o1, w_qkv, b_qkv, w_out, b_out, s2, o2, w_up, b_up, w_down, b_down = blocks[
            start : start + 12
        ]
        x = x + _attend(_normalize(x, s1, o1, [-1]), w_qkv, b_qkv) @ w_out + b_out
        x = x + torch.tanh(_normalize(x, s2, o2, [-1]) @ w_up + b_up) @ w_down + b_down
    return torch.addmm(bias, _normalize(x, scale, offset, [-1]).mean(1), kernel)


def resnet18(parameters: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """ResNet-18 with the batch's statistics."""
    rest = iter(parameters)

    def convolve(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        kernel, scale, offset = next(rest), next(rest)[:, None, None], next(rest)[:, None, None]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        return _normalize(x, scale, offset, [0, 2, 3])

    x = F.avg_pool2d(torch.relu(convolve(x, 2)), 2)
    for _, _, stride in resnet_blocks():
        y = convolve(torch.relu(convolve(x, stride)))
        x = torch.relu(y + (convolve(x, stride) if stride > 1 else x))
    return x.mean((2, 3)) @ next(rest) + next(rest)


def lstm(parameters: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Loop over the steps; a dense layer on the last state."""
    w_input, w_state, b, kernel, bias = parameters
    state = cell = x.new_zeros(x.shape[0], w_state.shape[0])
    for inputs in (x @ w_input + b).unbind(1):
        i, f, c, o = torch.addmm(inputs, state, w_state).chunk(4, -1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(c)
        state = torch.sigmoid(o) * torch.tanh(cell)
    return torch.addmm(bias, state, kernel)


class Network(torch.nn.Module):
    """A workload's network as a module, its parameters in the workload's order."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._network = globals()[workload.network]
        flat = np.concatenate([parameter.ravel() for parameter in workload.parameters])
        arrays = split(workload, torch.tensor(to_layout(workload, flat, STORED)))
        self._names = [f"parameter_{i}" for i in range(len(arrays))]
        for name, array in zip(self._names, arrays):
            self.register_parameter(name, torch.nn.Parameter(array))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch."""
        return self._network([getattr(self, name) for name in self._names], x)


def batch(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels."""
    x, y = workload.batch
    inputs = torch.tensor(x)
    return inputs.permute(0, 3, 1, 2) if x.ndim == 4 else inputs, torch.tensor(y, dtype=torch.int64)


def split(workload: Workload, flat: torch.Tensor) -> list[torch.Tensor]:
    """Cut a flat vector, kernels in the order they are stored, into the parameters' shapes."""
    parts = []
    for part, shape in zip(flat.split(workload.sizes), workload.shapes):
        if len(shape) == 4:
            stored = [shape[axis] for axis in STORED]
            parts.append(part.view(stored).permute(0, 3, 1, 2))
        else:
            parts.append(part.view(shape))
    return parts


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate to one flat vector, kernels in the order they are stored."""
    stored = [part.permute(0, 2, 3, 1) if part.ndim == 4 else part for part in parts]
    return torch.cat([part.reshape(-1) for part in stored])


def evaluate(workload: Workload, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss, gradient and Hessian-vector product, reverse over reverse."""
    network = Network(workload)
    parameters = list(network.parameters())
    x, y = batch(workload)
    value = F.cross_entropy(network(x), y)
    gradient = torch.autograd.grad(value, parameters, create_graph=True)
    vectors = split(workload, torch.tensor(to_layout(workload, v, STORED)))
    product = torch.autograd.grad(gradient, parameters, vectors)
    answers = [join(parts).detach().numpy() for parts in (gradient, product)]
    return value.detach().numpy(), *(from_layout(workload, a, STORED) for a in answers)
