"""The command line."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import keras

from hvp._command.load import check_fit, load_data, load_model
from hvp._command.report import Curvature, Subject
from hvp._errors import HvpError
from hvp._operators.gauss_newton import GaussNewtonOperator
from hvp._operators.hessian import HessianOperator
from hvp._spectra.trace import FEWEST_PRODUCTS

_DESCRIPTION = """\
Shows the curvature of the loss of a saved Keras model: whether the Hessian is right, its
largest and smallest eigenvalues, the trace with that of each layer, and the spectral density.
"""

_EPILOG = """\
example:
  %(prog)s model.keras data.npz --figure curvature.png

Compile the model before you save it with model.save("model.keras"). Save the data with
np.savez("data.npz", x=x, y=y), and sample_weight=... if there are weights. A model of several
inputs takes np.savez("data.npz", **{"x/NAME": ..., "x/OTHER": ..., "y": ...}), after the names of
its inputs; one that was made of a list of inputs takes x/0, x/1 in its order, too. Likewise y.
DATA may also be a folder that dataset.save(folder) wrote, or a Python file with a function data()
that returns what model.fit takes.

Layers run in inference mode, as in model.evaluate, unless you pass --training. Estimates are
printed with their standard errors, and eigenvalues with the norms of their residuals: an eigenvalue
of the matrix is no farther away than that.
"""


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a nonnegative integer")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a nonnegative number")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="hvp",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("model", type=Path, help="a compiled Keras model: a .keras or .h5 file")
    add("data", type=Path, help="an .npz file with the arrays x and y; see below for others")
    add("--matrix", choices=["hessian", "gauss-newton"], default="hessian",
        help="which matrix to look at (default: hessian)")  # fmt: skip
    add("--training", action="store_true", help="run the layers in training mode")
    add("--eigenvalues", type=_count, default=5, metavar="K",
        help="number of largest eigenvalues (default: 5)")  # fmt: skip
    add("--rtol", type=_tolerance, default=0.02,
        help="relative standard error of the trace (default: 0.02)")  # fmt: skip
    add("--max-products", type=_count, default=1000, metavar="N",
        help="upper bound on the products for the trace, and on those for the smallest eigenvalue "
        f"(default: 1000; the trace may always take {FEWEST_PRODUCTS})")  # fmt: skip
    add("--examples", type=_count, metavar="N", help="use a random subset of N examples")
    add("--batch-size", type=_count, metavar="N", help="process the data in batches of N examples")
    add("--memory-limit", metavar="SIZE", help='upper bound on memory, such as "2GiB"')
    add("--no-check", action="store_true", help="skip the comparison with finite differences")
    add("--no-density", action="store_true", help="skip the density, which takes 320 products")
    add("--seed", type=_seed, default=0, help="random seed (default: 0)")
    add("--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="a module that registers custom objects; may be repeated")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write all results to FILE as JSON")
    add("--figure", type=Path, metavar="FILE", help="draw all results into FILE; needs matplotlib")
    add("--html", type=Path, metavar="FILE",
        help="write a page with all results and their figure; needs matplotlib")  # fmt: skip
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except HvpError as error:
        print(f"hvp: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Load the model and the data, compute the curvature, and print and write it."""
    taken = {options.model.resolve(), options.data.resolve()}
    for path in (options.json, options.figure, options.html):
        if path is None:
            continue
        if path.resolve() in taken:
            raise HvpError(f"{path} is used twice", "another file for each input and output")
        taken.add(path.resolve())
        if not path.absolute().parent.is_dir():
            raise HvpError(f"there is no folder {path.parent}", "a folder that exists")
        if path.is_dir():
            raise HvpError(f"{path} is a folder", "the name of a file to write")
        _refuse_unwritable(path)
    if options.figure is not None or options.html is not None:
        _use_files_only(options.figure)
    # Layers that draw random numbers take their seeds from here when they are loaded.
    keras.utils.set_random_seed(options.seed)
    data, count, unused = load_data(options.data, options.examples, options.seed)
    if unused:
        print(f"hvp: arrays that are not used: {', '.join(unused)}", file=sys.stderr)
    model = load_model(options.model, options.modules)
    check_fit(model, data)
    operator = GaussNewtonOperator if options.matrix == "gauss-newton" else HessianOperator
    more = {"batch_size": options.batch_size, "memory_limit": options.memory_limit}
    with operator.from_keras(model, data, training=options.training, **more) as H:
        subject = Subject(
            model=str(options.model),
            data=str(options.data),
            examples=count,
            matrix=options.matrix,
            mode="training" if options.training else "inference",
            seed=options.seed,
        )
        print(subject.as_text(H.shape[0]), flush=True)
        curvature = Curvature.of(H, subject, options)
    print(curvature.as_text())
    if options.json is not None:
        curvature.save_json(options.json)
    if options.figure is not None:
        curvature.save_figure(options.figure, options.figure.suffix[1:])
    if options.html is not None:
        curvature.save_html(options.html)


def _refuse_unwritable(path: Path) -> None:
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise HvpError(
            f"{path} cannot be written ({error.strerror})", "a file that can be written"
        ) from error
    if is_new:
        path.unlink()


def _use_files_only(path: Path | None) -> None:
    """Let matplotlib draw without a screen; refuse what it cannot do before any work is done."""
    try:
        import matplotlib
    except ImportError as error:
        raise HvpError(
            "a figure was requested, but matplotlib is not installed",
            "matplotlib, which draws it",
            "pip install matplotlib, or leave out --figure and --html",
        ) from error
    matplotlib.use("agg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    endings = [f".{name}" for name in sorted(FigureCanvasAgg.get_supported_filetypes())]
    if path is not None and path.suffix.lower() not in endings:
        raise HvpError(
            f"the figure is to be written to {path}, whose format is unknown",
            f"a file name that ends with one of {', '.join(endings)}",
        )
