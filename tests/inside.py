"""The one place where tests look behind the public interface.

Its functions show what an operator holds, set limits that the library chooses for itself, count or
interrupt the steps of a computation, and pretend things about the machine. Those that take
`monkeypatch` last until the end of the test, and fail if the name that they patch has moved.
`test_rooms.py` holds that other tests use no underscored name of the package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hvp
from hvp._data import budget, joint
from hvp._devices import device, replica, work
from hvp._devices.device import LostDeviceError
from hvp._engines import graph_map, graph_program, single_plan, trace
from hvp._graphs import low_precision, rematerialize, sizes
from hvp._influence import damped_inverse, example_gradients, gradient_forms, gradient_store
from hvp._minimize import subproblem
from hvp._operators import jacobian, operator
from hvp._operators.matrix import Evaluation
from hvp._operators.symmetric import evaluation_of, matrix_of
from hvp._runtime import checkpoint, guard
from hvp._snapshots.nearby import Gradients
from hvp._snapshots.snapshot import Snapshot
from hvp._solve import equations, krylov, solve
from hvp._solve.rank import sketch_that_pays
from hvp._solve.steihaug import Steihaug
from hvp._spectra import eigsh
from hvp._vectors import packing

# Limits that the library chooses for itself: the module that has the constant, and its name.
LIMITS: dict[str, tuple[Any, str]] = {
    "bytes of a long vector": (operator, "_LONG"),
    "bytes that a worker fetches": (replica, "_LARGE"),
    "bytes of rows times residuals": (graph_map, "_BLOCK_BYTES"),
    "entries of a Jacobian that is kept": (jacobian, "_KEPT_ENTRIES"),
    "bytes that are packed": (packing, "_MAX_BYTES"),
    "columns of a solve": (equations, "_MAX_COLUMNS"),
    "iterations in one call": (krylov, "_MAX_ITERATIONS"),
    "size of a dense solve": (solve, "_DENSE"),
    "right-hand sides of influence": (damped_inverse, "_MAX_WIDTH"),
    "bytes of example gradients": (example_gradients, "_GRADIENT_BYTES"),
    "seconds to trace a step": (example_gradients, "_SECONDS_PER_STEP"),
    "bytes of a shard": (gradient_store, "_SHARD"),
    "space of factors worth keeping": (gradient_forms, "_WORTH_IT"),
    "bytes of large values": (sizes, "_SMALL"),
    "bytes of many values": (sizes, "_FEW"),
    "multiplications per entry in low precision": (low_precision, "_LEAST_INTENSITY"),
    "large values computed meanwhile": (rematerialize, "_WORTH_IT"),
    "size of dense eigenvalues": (eigsh, "_DENSE"),
    "largest size of dense eigenvalues": (eigsh, "_DENSE_LARGEST"),
    "seconds between saves": (checkpoint, "INTERVAL"),
}

# Steps that tests count or interrupt: the class or module that has the function, and its name.
STEPS: dict[str, tuple[Any, str]] = {
    "check for changed variables": (Snapshot, "make_sure"),
    "gradient at a nearby point": (Gradients, "again"),
    "call of the graph of a Krylov method": (krylov.Krylov, "_parameters"),
    "update of a solution": (krylov, "norms"),
    "merging of directions": (subproblem, "merged"),
    "solve of a subproblem": (Steihaug, "solve"),
    "save of a checkpoint": (checkpoint.Checkpoint, "save"),
}


def snapshot(operator: Any) -> Any:
    """What an operator evaluated last."""
    if isinstance(operator, hvp.JacobianOperator):
        return operator._snapshot
    return evaluation_of(operator).snapshot


def held(operator: Any) -> Any:
    """The linear map that is held, with its residuals; None if there is none."""
    return snapshot(operator).held


def program(operator: Any) -> Any:
    """The compiled functions of the graph engine."""
    return held(operator).program


def evaluation(operator: Any) -> Any:
    """Return the graph of what runs once per point."""
    return program(operator)._once.graph


def variables(operator: Any) -> Any:
    """The variables of an operator."""
    return snapshot(operator).plan.nest.variables


def solver_count(operator: Any) -> int:
    """The number of compiled solvers that are cached with an operator."""
    return evaluation_of(operator).cached_count


def multiply_rows(operator: Any, rows: Any) -> Any:
    """Products with the rows of a block."""
    return evaluation_of(operator).damped_map.apply(rows)


def multiply_in_float64(operator: Any, rows: Any) -> Any:
    """Float32 products with the rows of a block, computed in float64."""
    with evaluation_of(operator).in_float64() as evaluation:
        assert evaluation is not None, "there is no evaluation in float64"
        return evaluation.damped_map.apply(rows)


def has_wide_evaluation(operator: Any) -> bool:
    """Whether a float32 operator has been evaluated in float64."""
    return "float64" in evaluation_of(operator)._others


def forbid_wide_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no solve compute residuals in float64 that are not float64 anyway."""
    monkeypatch.setattr(Evaluation, "may_be_wide", False)


def fail_in_float64(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let evaluations in float64 fail, as on a device without such a kernel."""

    def fail(graph_def: Any, inputs: Any) -> Any:
        raise error

    monkeypatch.setattr(graph_program, "in_float64", fail)


def rank_that_pays(operator: Any, b: Any, damping: float) -> int:
    """The rank of the preconditioner `M="auto"` of conjugate gradients."""
    sketch = sketch_that_pays(
        matrix_of(operator), damping, b.shape[1], are_together=False, rtol=1e-5
    )
    return sketch.rank


def fingerprint(operator: Any) -> dict[str, str]:
    """What tells an operator's weights, data and loss from others."""
    return evaluation_of(operator).fingerprint()


def scoring(influence: hvp.InfluenceFunctions) -> Any:
    """The object that computes scores, with its `gradients` and its `inverse`."""
    return influence._scoring


def set_limit(monkeypatch: pytest.MonkeyPatch, limit: str, value: float) -> None:
    """Set one of the `LIMITS`."""
    module, name = LIMITS[limit]
    monkeypatch.setattr(module, name, value)


def before_each(monkeypatch: pytest.MonkeyPatch, step: str, function: Callable[[], Any]) -> None:
    """Call a function before each run of one of the `STEPS`."""
    owner, name = STEPS[step]
    original = getattr(owner, name)

    def run(*arguments: Any, **options: Any) -> Any:
        function()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, run)


@contextlib.contextmanager
def interrupted(step: str, runs: int) -> Iterator[None]:
    """Press Ctrl-C before one of the `STEPS`, once it has run so many times."""
    count = 0

    def interrupt() -> None:
        nonlocal count
        count += 1
        if count == runs + 1:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        before_each(patch, step, interrupt)
        yield


@contextlib.contextmanager
def forked(before_use: bool = False) -> Iterator[None]:
    """Pretend that this process was forked, after the library was used in it or before."""
    process = guard._Process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "is_broken", False)
        if before_use:
            patch.setattr(process, "in_use", False)
        process.after_fork()
        yield


def pretend_available(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Pretend that the machine has so much memory left."""
    monkeypatch.setattr(budget, "_available", lambda: nbytes)


def is_fast(dtype: Any) -> bool:
    """Whether the machine multiplies faster in a type than in float32."""
    return low_precision.is_fast(dtype)


def pretend_fast(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """Pretend that the machine multiplies faster in low precision, or not."""
    monkeypatch.setattr(single_plan, "is_fast", lambda dtype: fast)


def use_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in low precision, where it is asked for, whatever the machine and the sizes."""
    pretend_fast(monkeypatch, True)
    set_limit(monkeypatch, "bytes of large values", 1)
    set_limit(monkeypatch, "multiplications per entry in low precision", 0)


def use_tensorflow_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave operations in graphs that the library would replace because TensorFlow has them wrong.

    No pool counts as one whose second derivative TensorFlow may have wrong.
    """
    monkeypatch.setattr(graph_program, "replace_operations", lambda graph_def: graph_def)
    monkeypatch.setattr(trace, "has_risky_pools", lambda nodes: False)


def held_by_devices(operator: Any) -> dict[str, list[Any]]:
    """The linear maps that devices hold for an operator, by the names of the devices."""
    by_site = snapshot(operator).plan.last.held
    return {site.name: [term.map for term in terms.values()] for site, terms in by_site.items()}


def products_of_devices(operator: Any, v: Any) -> list[Any]:
    """The products with what each device holds, as they come back."""
    return snapshot(operator).plan.last._multiply_everywhere(v, False)


def sites(operator: Any) -> Any:
    """The devices of an operator that something was moved to or from."""
    return snapshot(operator).plan.pool.sites


def pretend_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Let this process have another version of TensorFlow than workers, which are asked again."""
    monkeypatch.setattr(device, "own_version", lambda: version)
    monkeypatch.setattr(device, "_known", {})


def lose_devices(monkeypatch: Any, lost: Callable[[str], bool]) -> None:
    """Let devices be lost just when they have a result, where `lost` says so of their names."""
    original = work.Work.result

    def result(self: Any, seconds: float) -> Any:
        value = original(self, seconds)
        one = self._site.device
        if lost(one.name):
            one.give_up("it is a test")
            raise LostDeviceError("it is a test")
        return value

    monkeypatch.setattr(work.Work, "result", result)


def count_joint_products(monkeypatch: pytest.MonkeyPatch, *, local: bool) -> list[Any]:
    """Return what will hold the products of one call for all workers, or for local devices too."""
    products: list[Any] = []
    original = joint.JointProducts.start

    def start(self: Any, *arguments: Any) -> Any:
        wait = original(self, *arguments)

        def result() -> Any:
            products.append(wait())
            return products[-1]

        return None if wait is None else result

    if local:
        monkeypatch.setattr(joint, "_pays_at", lambda site: True)
    monkeypatch.setattr(joint.JointProducts, "start", start)
    return products


def find_lost_devices(operator: Any) -> None:
    """Let devices that were lost be there again, as if a worker had been started anew."""
    for one in snapshot(operator).plan.pool.devices:
        if one.lost:
            one.come_back()
