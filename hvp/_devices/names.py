"""The argument `devices`: the TensorFlow devices that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvp._errors import HvpError

_EXPECTED = "names of TensorFlow's logical devices, the devices themselves, or a strategy"
_FIELDS = ("job", "replica", "task", "device_type", "device_index")


def device_names(devices: Any, lost: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the full names of the devices that the argument `devices` stands for.

    A name may be incomplete if it fits only one device; without a job, that device is one of this
    process. A strategy stands for the devices of its replicas in this process. `lost` are the names
    of devices that TensorFlow may not list because it is no longer connected to them.

    Raise `HvpError` if there is no device, if a name fits none or several, or if one is named
    twice.
    """
    if isinstance(devices, tf.distribute.Strategy):
        devices = devices.extended.worker_devices
    every = [devices] if isinstance(devices, (str, tf.config.LogicalDevice)) else devices
    try:
        names = [device if isinstance(device, str) else device.name for device in every]
    except (AttributeError, TypeError):
        remedy = "pass cluster.devices" if hasattr(devices, "devices") else ""
        raise HvpError(f"the argument devices is {devices!r}", _EXPECTED, remedy) from None
    if not names:
        raise HvpError("the argument devices is empty", _EXPECTED, "leave it out, or name one")
    existing = [device.name for device in tf.config.list_logical_devices()]
    existing += [name for name in lost if name not in existing]
    found = [_full_name(name, existing) for name in names]
    for index, name in enumerate(found):
        if name in found[:index]:
            raise HvpError(f"the device {name!r} is named twice in devices", "each device once")
    return tuple(found)


def task_of(name: str) -> tuple[str, int] | None:
    """Return the job and task of a device; None if it belongs to this process."""
    spec = tf.DeviceSpec.from_string(name)
    if spec.job in (None, "localhost") or _fields(spec)[:3] == _fields(_own())[:3]:
        return None
    return str(spec.job), int(spec.task or 0)


def own_device_like(name: str) -> str:
    """Return the full name of this process's device with the type and index of another one.

    If the process is a task of a cluster, tensors in Python code called by a graph name a device
    that TensorFlow does not know.
    """
    spec = tf.DeviceSpec.from_string(name)
    asked = (spec.device_type, spec.device_index)
    for device in tf.config.list_logical_devices():
        other = tf.DeviceSpec.from_string(device.name)
        if (other.device_type, other.device_index) == asked and task_of(device.name) is None:
            return str(device.name)
    return name


def _full_name(name: str, existing: Sequence[str]) -> str:
    try:
        spec = tf.DeviceSpec.from_string(name if "/" in name else f"/device:{name}")
    except ValueError:
        raise HvpError(f"{name!r} does not name a device", _listed(existing)) from None
    fitting = [other for other in existing if _fits(spec, other)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise HvpError(
            f"the name {name!r} fits several devices: {', '.join(fitting)}",
            "one device for each name",
            "pass their names one by one",
        )
    remedy = "make local devices before TensorFlow is used for the first time"
    if spec.job is None and spec.device_type not in ("CPU", "GPU", "TPU"):
        remedy = (
            "for another machine, call tf.config.experimental_connect_to_cluster with its address, "
            "and pass a name such as '/job:worker/task:0/device:CPU:0'"
        )
    elif spec.device_type != "CPU" and spec.job in (None, "localhost"):
        remedy = f"leave it out, because TensorFlow finds no such {spec.device_type} here"
    elif spec.job not in (None, "localhost"):
        remedy = (
            "call tf.config.experimental_connect_to_cluster first; it forgets any cluster that "
            "was connected before, so put all workers in one"
        )
    raise HvpError(f"there is no device {name!r}", _listed(existing), remedy)


def _fits(spec: tf.DeviceSpec, name: str) -> bool:
    other = tf.DeviceSpec.from_string(name)
    is_own = task_of(name) is None
    if spec.job in (None, "localhost"):
        asked = (spec.device_type, spec.device_index)
        return is_own and _agree(asked, (other.device_type, other.device_index))
    full = _fields(other)
    if other.job is None:  # TensorFlow leaves this out for devices of this process
        full = _fields(_own())[:3] + full[3:]
    return _agree(_fields(spec), full)


def _agree(asked: Sequence[Any], fields: Sequence[Any]) -> bool:
    return all(want is None or want == have for want, have in zip(asked, fields))


def _fields(spec: tf.DeviceSpec) -> tuple[Any, ...]:
    return tuple(getattr(spec, field) for field in _FIELDS)


def _own() -> tf.DeviceSpec:
    """Return the job, replica and task of this process."""
    return tf.DeviceSpec.from_string(tf.zeros([]).device)


def _listed(names: Sequence[str]) -> str:
    return f"one of {', '.join(map(repr, names))}"
