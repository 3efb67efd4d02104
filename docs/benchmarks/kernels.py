"""Print which kernels TensorFlow runs for one product, how often, and for how long.

The times are those that TensorFlow's profiler notes for each operation, summed over one product.
Operations run at the same time, so that the sum is larger than the time of the product. Before, the
rates of some matrix products are printed: of several one after the other, and of the same several
that need not wait for each other.

    python docs/benchmarks/kernels.py [--workloads transformer,mlp] [--setting "hvp, graph"]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import variants as ways

# The format of what the profiler writes; there is no public reader of it.
from tensorflow.tsl.profiler.protobuf import xplane_pb2
from workloads import WORKLOADS, make_workload

PRODUCTS = 20
# Rows, inner size and columns: of the transformer, of mlp, and of mlp-large.
SHAPES = [(1024, 128, 128), (1024, 128, 512), (256, 512, 512), (2048, 1024, 1024)]


def matrix_product_rate(rows: int, inner: int, columns: int, in_order: bool) -> float:
    """Return the GFLOP/s of ten products of matrices, one after the other if `in_order`."""
    left = [tf.random.stateless_normal((rows, inner), (0, i)) for i in range(10)]
    right = tf.random.stateless_normal((inner, columns), (1, 0))

    @tf.function
    def multiply() -> list[tf.Tensor]:
        products: list[tf.Tensor] = []
        for matrix in left:
            with tf.control_dependencies(products[-1:] if in_order else []):
                products.append(matrix @ right)
        return products

    multiply()
    return 10 * 2 * rows * inner * columns / np.median([seconds(multiply) for _ in range(30)]) / 1e9


def seconds(function: Callable[[], object]) -> float:
    """Time one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def profile(H: object, v: np.ndarray) -> tuple[Counter, Counter]:
    """Milliseconds and calls per product, by kernel."""
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            for _ in range(PRODUCTS):
                H @ v
        (path,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    milliseconds, calls = Counter(), Counter()
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                # "PartitionedCall/scope/name:Kernel"; what Python runs has no slash before.
                name, _, kernel = plane.event_metadata[event.metadata_id].name.rpartition(":")
                if name and ":" not in name and not name.startswith("$"):
                    milliseconds[kernel.strip()] += event.duration_ps / 1e9 / PRODUCTS
                    calls[kernel.strip()] += 1
    # Not kernels: what calls them.
    groups = {"Run", "Process", "Record", "StartRegion", "StopRegion"}
    for kernel in [name for name in milliseconds if name in groups or "inference" in name]:
        del milliseconds[kernel]
    return milliseconds, calls


def main() -> None:
    """Read the command line, and print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="transformer,mlp", help="names, with commas")
    parser.add_argument("--setting", default="hvp, graph", choices=list(ways.SETTINGS))
    options = parser.parse_args()
    print(f"{'matrix product':<20}{'in order':>12}{'at once':>12}  GFLOP/s")
    for shape in SHAPES:
        rates = [matrix_product_rate(*shape, in_order) for in_order in (True, False)]
        print(f"{' x '.join(map(str, shape)):<20}" + "".join(f"{rate:>12.0f}" for rate in rates))
    for name in options.workloads.split(","):
        if name not in WORKLOADS:
            parser.error(f"no workload {name}; there are {', '.join(WORKLOADS)}")
        workload = make_workload(name)
        H = ways.make_operator(workload, options.setting)
        v = np.random.default_rng(0).standard_normal(workload.size, np.float32)
        times = [seconds(lambda: H @ v) for _ in range(PRODUCTS)]  # noqa: B023
        milliseconds, calls = profile(H, v)
        print(f"\n{name}: {1e3 * np.median(times):.2f} ms a product")
        print(f"{'kernel':<32}{'calls':>8}{'ms':>10}")
        for kernel, total in milliseconds.most_common(12):
            print(f"{kernel:<32}{calls[kernel] / PRODUCTS:>8.0f}{total:>10.2f}")
        print(f"{'all':<32}{calls.total() / PRODUCTS:>8.0f}{milliseconds.total():>10.2f}")


if __name__ == "__main__":
    main()
