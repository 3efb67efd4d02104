"""One device: whether it can be reached, and threads that wait for it.

TensorFlow has no limit on how long an operation on a remote worker may take, and after a worker has
died a second call to it never returns. So each piece of work runs in a thread of its own; whoever
needs its result waits for it as long as was agreed, and a worker that failed once is left alone
until it is back. A thread that waits for a worker which neither answers nor breaks the connection
ends with that worker, or with this process.
"""

from __future__ import annotations

import contextvars
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._devices.names import device_names, task_of
from hvp._errors import line_of
from hvp._graphs.private import addresses_of_workers, connect_again

_log = logging.getLogger("hvp")

# Seconds in which a worker that is alive takes a connection, and runs one small operation.
_CONNECTION_SECONDS = 2.0
_PROBE_SECONDS = 10.0
_LOSSES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
# What other errors say about a worker that was started again, and knows nothing of what was there.
_FORGOTTEN = re.compile(r"context_id|remote_handle|unknown device|worker session|incarnation", re.I)


class LostDeviceError(Exception):
    """A device cannot be reached; its text is the reason."""


class Device:
    """A device of TensorFlow; get it from `device_named`.

    Parameters
    ----------
    name : str
        The full name.

    Attributes
    ----------
    name : str
        The same.
    task : (str, int) or None
        The job and the number of the worker; None for a device of this process.
    address : str or None
        Where the worker is in the network.
    is_remote : bool
        Whether it belongs to another process.
    lost : str
        Why it is left alone; empty while it is used.
    lives : int
        How often it came back: what an earlier life held is gone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.task = task_of(name)
        self.is_remote = self.task is not None
        self.lost, self.lives = "", 0
        self.address = addresses_of_workers().get(self.task) if self.task else None

    def __repr__(self) -> str:
        return f"Device({self.name!r}{', lost' if self.lost else ''})"

    def start(self, function: Callable[[], Any]) -> Job:
        """Run a function in a thread; it may wait for this device and for no other."""
        return Job(self, function)

    def explain(self, error: Exception) -> str:
        """Return why the device is lost, judging by an error; empty if it is not.

        An error of one worker may surface in the next call to another. So a device that can be
        reached is asked for one small operation.
        """
        forgotten = isinstance(error, tf.errors.OpError) and _FORGOTTEN.search(error.message)
        if not (self.is_remote and (forgotten or self.may_be_of_another(error))):
            return ""
        reason = f"{type(error).__name__}: {line_of(error)}"
        if forgotten or not self._takes_connections():
            return reason
        return reason if self._fails_probe() else ""

    def may_be_of_another(self, error: Exception) -> bool:
        """Whether an error tells that some device is lost, not necessarily this one."""
        return isinstance(error, _LOSSES)

    def give_up(self, reason: str) -> None:
        """Leave the device alone from now on."""
        self.lost = reason
        _log.warning("the device %s is lost: %s", self.name, reason)

    def come_back(self, others: list[Device]) -> bool:
        """Use a lost device again, if it is there again. Returns whether it is.

        Parameters
        ----------
        others : list of Device
            All devices; those that are lost are not waited for.
        """
        if not (self.lost and self._takes_connections()):
            return False
        absent = {other.task for other in others if other.lost and other is not self}
        every = addresses_of_workers()
        every.update({d.task: d.address for d in others if d.task and d.address})
        wanted = {task: address for task, address in every.items() if task not in absent}
        job = Job(self, lambda: connect_again(wanted))
        try:
            job.wait(_PROBE_SECONDS)
        except (LostDeviceError, tf.errors.OpError, RuntimeError) as error:
            _log.info("the device %s did not come back: %s", self.name, error)
            return False
        self.lost = ""
        self.lives += 1
        _log.warning("the device %s is back", self.name)
        return True

    def _takes_connections(self) -> bool:
        host, _, port = (self.address or "").rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _CONNECTION_SECONDS):
                return True
        except (OSError, ValueError):
            return False

    def _fails_probe(self) -> bool:
        def probe() -> None:
            with tf.device(self.name):
                one = tf.ones([])
            one.numpy()

        for _ in range(2):  # the first may still tell of another worker
            try:
                Job(self, probe).wait(_PROBE_SECONDS)
            except (LostDeviceError, tf.errors.OpError):
                continue
            return False
        return True


class Job:
    """A function that runs in a thread of its own, in the context in which it was started."""

    def __init__(self, device: Device, function: Callable[[], Any]) -> None:
        self._device = device
        self._result: Any = None
        self._error: BaseException | None = None
        self._context = contextvars.copy_context()
        self._function: Callable[[], Any] | None = function
        # Nobody could end a thread that waits for a worker which does not answer: such a thread
        # must not keep the process.
        self._thread = threading.Thread(target=self._run, name="hvp device", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None) -> Any:
        """Return what the function returned.

        Parameters
        ----------
        seconds : float or None
            How long to wait at most; None for as long as it takes.

        Raises
        ------
        LostDeviceError
            If the time is over.
        Exception
            What the function raised.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while self._thread.is_alive():
            left = _TICK if end is None else min(_TICK, end - time.monotonic())
            if left <= 0:
                raise LostDeviceError(f"it did not answer within {seconds:g} seconds")
            self._thread.join(left)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result

    def join(self, seconds: float | None) -> None:
        """Wait until the function has ended, for so long at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        assert self._function is not None
        try:
            self._result = self._context.run(self._function)
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            self._error = error
        finally:
            self._function = None


# Seconds after which a waiting thread looks around.
_TICK = 3600.0
_known: dict[str, Device] = {}
_lock = threading.Lock()


def device_named(name: str) -> Device:
    """Return the device with a full name: one object in the process, which knows if it is lost."""
    with _lock:
        device = _known.get(name)
        task = None if device is None else device.task
        # At another address it is a worker of another cluster. Without one, it was left out.
        address = None if task is None else addresses_of_workers().get(task)
        if device is None or (address is not None and address != device.address):
            device = _known[name] = Device(name)
        return device


def all_devices() -> list[Device]:
    """Return all devices that were asked for so far."""
    with _lock:
        return list(_known.values())


def devices_of(argument: Any) -> list[Device]:
    """Return the devices that the argument `devices` of an operator stands for.

    Raises
    ------
    HvpError
        As `device_names`.
    """
    lost = [device.name for device in all_devices() if device.lost]
    return [device_named(name) for name in device_names(argument, lost)]
