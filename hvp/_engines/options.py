# ruff: noqa: RUF009 - `_option` returns a field
"""The options that every matrix takes, declared once: name, default, check and documentation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from hvp._devices.device import devices_of
from hvp._errors import HvpError
from hvp._graphs.compiled import JitCompile
from hvp._runtime.arguments import check_count, check_number, refuse_unknown
from hvp._runtime.progress import check_progress

Engine = Literal["graph", "tape"]
Precision = Literal["bfloat16", "float16"]
OnStale = Literal["raise", "refresh", "ignore"]
# The rounding units of these.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

Target = TypeVar("Target", bound=Callable[..., Any])


def _option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    return dataclasses.field(default=default, metadata={"check": check})


def one_of(*choices: Any) -> Callable[[str, Any], Any]:
    """Return a check that refuses anything but some values."""
    names = [repr(choice) for choice in choices]
    expected = f"{', '.join(names[:-1])} or {names[-1]}"

    def check(name: str, value: Any) -> Any:
        for choice in choices:
            if isinstance(value, type(choice)) and value == choice:
                return choice
        raise HvpError(f"the argument {name} is {value!r}", expected)

    return check


def _any(name: str, value: Any) -> Any:
    del name
    return value


def _count(name: str, value: Any) -> Any:
    return None if value is None else check_count(value, name)


def _function(name: str, value: Any) -> Any:
    if not (value is None or callable(value)):
        raise HvpError(f"the argument {name} is {type(value).__name__}", "a function, or None")
    return value


def _weight(name: str, value: Any) -> Any:
    if not (value is None or callable(value) or isinstance(value, Mapping)):
        what = f"the argument {name} is {type(value).__name__}"
        raise HvpError(what, "a function, a dict of numbers by the terms of the loss, or None")
    if not isinstance(value, Mapping):
        return value
    return {
        term: float(check_number(number, f"{name}[{term!r}]", positive=True))
        for term, number in value.items()
    }


def _jit_compile(name: str, value: Any) -> Any:
    if value not in (True, False, "auto"):
        raise HvpError(f"the argument {name} is {value!r}", "True, False or 'auto'")
    return value if value == "auto" else bool(value)


def _progress(name: str, value: Any) -> Any:
    del name
    check_progress(value)
    return value


def _devices(name: str, value: Any) -> Any:
    del name
    return None if value is None else tuple(devices_of(value))


def _seconds(name: str, value: Any) -> Any:
    return check_number(value, name, positive=True, finite=False)


@dataclass(frozen=True)
class Options:
    """How data are divided, and how a matrix is evaluated and multiplied by.

    Attributes
    ----------
    batch_size : int, optional
        Divide a tuple or dict of arrays into batches of this many examples. The last batch may be
        smaller.
    memory_limit : int or str, optional
        Upper bound on memory for cached residuals plus the batch being processed, in bytes or as a
        string such as ``"2GiB"``. The operator keeps the residuals of as many batches as fit, and
        evaluates the others again for each product. A batch that does not fit is divided. By
        default all residuals are kept, and a `RuntimeWarning` is issued if memory runs short.
    reduction : {"mean", "sum"}, optional
        With ``"sum"``, multiply the loss, which must be a mean, by the number of examples, or by
        the sum of the weights. This gives the matrix of the sum over all examples.
    regularization : callable, optional
        A function of no arguments that returns a scalar. It is added once, regardless of batches
        and `reduction`.
    weight : callable, optional
        Set this if the loss averages over something other than examples, such as unmasked tokens.
        The function takes the elements of a batch, as the loss does, and returns how much the batch
        counts. If the loss is a dict of losses, a dict of numbers by which these are multiplied.
    progress : bool or "always", optional
        Show a progress bar over the batches in a terminal, or anywhere if ``"always"``. This
        requires tqdm.
    on_stale : {"raise", "refresh", "ignore"}, optional
        What to do when the operator is used after a variable changed that the loss reads, trained
        or frozen: raise `StaleOperatorError`, evaluate again, or return products for the old
        values. Integers that the loss itself updates (dropout seeds, counters) do not matter, nor
        do variables that the loss writes without reading (moving averages in training mode).
    engine : {"graph", "tape"}, optional
        How to compute products. The graph engine traces the loss once and compiles two functions,
        one for the evaluation and one for the product. The tape engine runs operation by operation
        from a persistent tape. If a loss cannot be traced, or not be divided in two because effects
        depend on the vector, the tape engine is used instead; ``stats`` and the log say why.
    jit_compile : bool or "auto", optional
        Whether XLA compiles the products of the graph engine. Compilation happens at the first
        product, which then takes seconds. ``"auto"`` times one product both ways and keeps the
        faster one. Products that XLA cannot compile (loops and branches, max pooling) are computed
        without it; ``stats`` and the log say why.
    recompute : bool, int or sequence of layers, optional
        Whether to save memory by recomputing a Keras model, which must be passed as `variables`.
        Only the tensors between segments of the model are kept, and each segment is computed again
        for each product. With ``True`` the segments are chosen automatically, an integer is their
        number, and a sequence lists sublayers: see `recompute_model`. Functions made by `recompute`
        are recomputed in any case, by either engine.
    precision : {"bfloat16", "float16"}, optional
        Compute the matrix products and convolutions of each product in this type, and store large
        residuals in it, which then take half the memory. Vectors, sums and everything else stay in
        the type of the variables, as do the loss and the gradient. The relative error of a product
        is then a few tenths of a percent, and at most about one percent; `hvp.check` measures it.
        `hvp.solve` refines its solutions to the tolerance that you ask for, and optimizers use the
        true gradient. Where the device is not faster in this type, ``stats`` and the log say so,
        and nothing changes. Loops and branches, and products of the tape engine, stay in full
        precision. On GPUs that have it, TensorFlow itself computes float32 products in TF32: see
        `tf.config.experimental.enable_tensor_float_32_execution`.
    devices : sequence of str or tf.config.LogicalDevice, or tf.distribute.Strategy, optional
        The devices to compute on, of this process or, after
        `tf.config.experimental_connect_to_cluster`, of others: ``["GPU:0", "GPU:1"]``,
        ``["/job:worker/task:0/device:CPU:0", ...]``. A strategy stands for the devices of its
        replicas. Data are divided among them, so that the loss must be a mean over examples; each
        device holds the residuals of its own part, and `memory_limit` holds for each. If a remote
        device fails, the others take over what it held. By default, variables that a strategy keeps
        on several devices let all of these take part if the data are divided; if the strategy
        connects several processes, each of them passes its share of the data, and makes the same
        calls.
    device_timeout : float, optional
        Seconds after which a remote device that does not answer counts as lost, and to wait for
        other processes of a strategy.
    products : bool
        Whether to prepare products, and not only values and gradients. Not for users.
    wide : bool
        Whether the graph engine computes in float64 what is traced in float32. Vectors and results
        stay float32. Not for users.

    Raises
    ------
    HvpError
        If one of them is invalid.
    """

    batch_size: int | None = _option(None, _count)
    memory_limit: Any = _option(None, _any)
    reduction: Literal["mean", "sum"] = _option("mean", one_of("mean", "sum"))
    regularization: Callable[[], Any] | None = _option(None, _function)
    weight: Any = _option(None, _weight)
    progress: bool | Literal["always"] = _option(False, _progress)
    on_stale: OnStale = _option("raise", one_of("raise", "refresh", "ignore"))
    engine: Engine = _option("graph", one_of("graph", "tape"))
    jit_compile: JitCompile = _option(False, _jit_compile)
    recompute: bool | int | Sequence[Any] = _option(False, _any)
    precision: Precision | None = _option(None, one_of("bfloat16", "float16", None))
    devices: Any = _option(None, _devices)
    device_timeout: float = _option(600.0, _seconds)
    products: bool = True
    wide: bool = False

    def __post_init__(self) -> None:
        for name, field in _DECLARED.items():
            value = field.metadata["check"](name, getattr(self, name))
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        call: str,
        options: Mapping[str, Any],
        known: Collection[str] | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> Options:
        """Parse the keyword arguments of a call.

        Parameters
        ----------
        call : str
            The public function or class that they were passed to.
        options : mapping
            The keyword arguments.
        known : collection of str, optional
            The options that this call takes; all of them by default.
        instead : mapping of str to str, optional
            What to do instead of passing some others.

        Raises
        ------
        InvalidOptionError
            If an option does not exist, which names the nearest one.
        HvpError
            If the value of an option is invalid.
        """
        names = {*(NAMES if known is None else known), *_own.get(call, ())}
        refuse_unknown(options, call, names, instead)
        return cls(**options)


# The other arguments of calls that take options, by name.
_own: dict[str, list[str]] = {}
_DECLARED = {f.name: f for f in dataclasses.fields(Options) if f.metadata}
# All options, in the order in which they are documented.
NAMES = tuple(_DECLARED)


def without(*names: str) -> tuple[str, ...]:
    """Return all options but some, in their order."""
    return tuple(name for name in NAMES if name not in names)


def declared(names: Collection[str] = NAMES) -> Callable[[Target], Target]:
    """Return a decorator that writes options into the documentation and signature of a call.

    In the docstring, a line ``{options}`` stands for the documentation of all of them, and
    ``{option_names}`` for their names.

    Parameters
    ----------
    names : collection of str
        The options that the call takes as further keyword arguments.
    """

    def declare(call: Target) -> Target:
        if call.__doc__:
            call.__doc__ = _filled(call.__doc__, names)
        # Python and scipy look for the signature in different places, also of subclasses.
        function: Any = call.__init__ if isinstance(call, type) else call  # type: ignore[misc]
        signature = inspect.signature(function)
        own = dict(signature.parameters)
        further = next(reversed(own))
        rest = own.pop(further)
        _own[call.__name__] = [name for name in own if name != "self"]
        own.update({name: _parameter(name) for name in names if name not in own})
        if further != "options":  # of minimize, which also takes the options of scipy's methods
            own[further] = rest
        function.__signature__ = signature.replace(parameters=list(own.values()))
        if isinstance(call, type):
            del own["self"]
            call.__signature__ = signature.replace(parameters=list(own.values()))  # type: ignore[attr-defined]
        return call

    return declare


def _parameter(name: str) -> inspect.Parameter:
    field, kind = _DECLARED[name], inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=field.default, annotation=field.type)


def _filled(text: str, names: Collection[str]) -> str:
    """Fill the places that a docstring leaves for options, at the indentation that they have."""

    def entries(place: re.Match[str]) -> str:
        documented = "\n".join(_DOCUMENTED[name] for name in names)
        return textwrap.indent(documented, place[1])

    def listed(place: re.Match[str]) -> str:
        quoted = ", ".join(f"`{name}`" for name in names)
        text = place[2].format(option_names=quoted)
        return textwrap.fill(text, 100, initial_indent=place[1], subsequent_indent=place[1])

    text = re.sub(r"^( *)\{options\}$", entries, text, flags=re.MULTILINE)
    return re.sub(r"^( *)(.*\{option_names\}.*)$", listed, text, flags=re.MULTILINE)


def _documented() -> dict[str, str]:
    """Return what the docstring of `Options` says about each of them."""
    text = inspect.cleandoc(Options.__doc__ or "")  # which Python leaves out with -OO
    found = {name: re.search(rf"^{name} : .*(\n .*)*", text, re.MULTILINE) for name in NAMES}
    return {name: match[0] if match else "" for name, match in found.items()}


_DOCUMENTED = _documented()
