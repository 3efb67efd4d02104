"""The command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hvp._command.load import check_fit, load_data, load_model
from hvp._command.report import Curvature
from hvp._errors import HvpError
from hvp._operators.gauss_newton import GaussNewtonOperator
from hvp._operators.hessian import HessianOperator

_EPILOG = """\
example:
  %(prog)s model.keras data.npz --figure curvature.png

The model is one that model.compile and model.save were called of; the data are those that
np.savez("data.npz", x=x, y=y) writes, optionally with sample_weight. Estimates are followed by
their standard errors, and eigenvalues by the norms of their residuals.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="hvp",
        description="The curvature of the loss of a saved Keras model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("model", type=Path, help="a compiled model, saved by model.save: a .keras file")
    add("data", type=Path, help="an .npz file with the arrays x and y")
    add("--matrix", choices=["hessian", "gauss-newton"], default="hessian", help="which matrix")
    add("--eigenvalues", type=int, default=5, metavar="K", help="how many of the largest (5)")
    add("--rtol", type=float, default=0.02, help="relative standard error of the trace (0.02)")
    add("--examples", type=int, metavar="N", help="draw N of the examples, if there are more")
    add("--batch-size", type=int, metavar="N", help="divide the data into batches of N examples")
    add("--memory-limit", metavar="SIZE", help='bound on memory, such as "2GiB"')
    add("--no-check", action="store_true", help="do not check the matrix by differences")
    add("--no-density", action="store_true", help="leave out the density, 320 products")
    add("--seed", type=int, default=0, help="what random vectors depend on (0)")
    add("--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="a module that registers custom objects; may be repeated")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")
    add("--figure", type=Path, metavar="FILE", help="draw everything into FILE; needs matplotlib")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except HvpError as error:
        print(f"hvp: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Load, compute, print and write."""
    for path in (options.json, options.figure):
        if path is not None and not path.absolute().parent.is_dir():
            raise HvpError(f"there is no folder {path.parent}", "a folder that exists")
    if options.figure is not None:
        _use_files_only()
    data = load_data(options.data, options.examples, options.seed)
    model = load_model(options.model, options.modules)
    check_fit(model, data)
    operator = GaussNewtonOperator if options.matrix == "gauss-newton" else HessianOperator
    more = {"batch_size": options.batch_size, "memory_limit": options.memory_limit}
    with operator.from_keras(model, data, **more) as H:
        print(f"{H!r}, {len(data[0])} examples", flush=True)
        curvature = Curvature.of(
            H,
            eigenvalues=options.eigenvalues,
            rtol=options.rtol,
            checks=not options.no_check,
            density=not options.no_density,
            seed=options.seed,
            progress=find_spec("tqdm") is not None,
        )
    print(curvature.as_text())
    if options.json is not None:
        curvature.save_json(options.json)
    if options.figure is not None:
        curvature.save_figure(options.figure)


def _use_files_only() -> None:
    """Let matplotlib draw without a screen; say that it is missing before any work is done."""
    try:
        import matplotlib
    except ImportError as error:
        raise HvpError(
            "a figure was requested, but matplotlib is not installed",
            "matplotlib, which draws it",
            "pip install matplotlib, or leave out --figure",
        ) from error
    matplotlib.use("agg")
