"""One device: whether it can be reached, and threads that wait for it.

TensorFlow sets no limit on how long an operation on a remote worker may take. Work for a device
therefore runs in a thread of that device. Code that needs the result waits for a limited time, and
a worker that has failed is not used until it is back. A thread that waits for a worker which
neither answers nor breaks the connection ends with that worker, or with this process.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import queue
import re
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvp._devices.names import device_names, task_of
from hvp._devices.reach import answers, takes_connections
from hvp._devices.versions import own_version, version_of
from hvp._errors import HvpError, line_of
from hvp._graphs.private import addresses_of_workers, send_operations_one_by_one
from hvp._runtime.interrupts import deliver_interrupt

_log = logging.getLogger("hvp")

# Seconds in which a worker that is alive runs one small operation.
_PROBE_SECONDS = 10.0
# Seconds after which a thread that waits looks whether the worker is still there, and whether it
# was interrupted.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.3, 1.0
_PAUSE_SECONDS = 0.1
# Seconds without work after which a thread ends.
_IDLE_SECONDS = 2.0
# Characters of TensorFlow's reason for a loss that are shown.
_REASON = 120
_LOSSES = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
# What other errors say about a worker that was started again, and knows nothing of what was there.
_FORGOTTEN = re.compile(
    r"context_id|remote_handle|unknown device|worker session|incarnation|nor a name of a function",
    re.I,
)
# What they say where a worker is missing that an operation had to do with.
_MISTAKEN = re.compile(r"poisoned|primary device is not remote", re.I)


class LostDeviceError(Exception):
    """Raised if a device cannot be reached; its text is the reason."""


class Device:
    """A device of TensorFlow, by its full name; get it from `device_named`.

    `task` is the job and the number of its worker, or None for a device of this process, and
    `address` is that of the worker in the network. `lost` says why the device is not used; it is
    empty while it is. `lives` counts how often it came back: whatever it held in an earlier life is
    gone.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.task = task_of(name)
        self.is_remote = self.task is not None
        self.lost, self.lives = "", 0
        self._version_is_known = not self.is_remote
        self._runner = Runner()
        self.address = addresses_of_workers().get(self.task) if self.task else None

    def __repr__(self) -> str:
        return f"Device({self.name!r}{', lost' if self.lost else ''})"

    def start(self, function: Callable[[], Any]) -> Job:
        """Run a function in the device's thread; it may wait for this device and for no other."""
        return self._runner.start(function)

    def explain(self, error: Exception) -> str:
        """Return why the device is lost, judging by an error; empty if it is not.

        An error of one worker may surface in the next call to another. A device that can be reached
        is therefore tested with one small operation.
        """
        if not (self.is_remote and isinstance(error, tf.errors.OpError)):
            return ""
        line = textwrap.shorten(line_of(error), _REASON, placeholder=" ...")
        reason = f"{type(error).__name__}: {line}"
        if _FORGOTTEN.search(error.message) or not self.takes_connections():
            return reason
        return reason if self.may_be_of_another(error) and self._fails_probe() else ""

    def may_be_of_another(self, error: Exception) -> bool:
        """Return whether an error shows that some device is lost, not necessarily this one."""
        if not isinstance(error, tf.errors.OpError):
            return False
        return isinstance(error, _LOSSES) or bool(_MISTAKEN.search(error.message))

    def check_version(self) -> None:
        """Check, once for each life of a worker, that it runs the same TensorFlow as this process.

        Raise `HvpError` if it does not.
        """
        if self._version_is_known or self.lost:
            return
        job = in_new_thread(functools.partial(version_of, self.name))
        try:
            version = job.wait(_PROBE_SECONDS, self.takes_connections)
        except (LostDeviceError, tf.errors.OpError) as error:  # what uses it will tell
            _log.info("the version of TensorFlow at %s is not known: %s", self.name, error)
            return
        if version not in ("", own_version()):
            raise HvpError(
                f"{self.name} runs TensorFlow {version}, and this process {own_version()}",
                "one version, as TensorFlow supports no cluster of several",
                "install the same version there, and start the worker again",
            )
        self._version_is_known = True

    def give_up(self, reason: str) -> None:
        """Stop using the device."""
        self.lost = reason
        _log.info("the device %s is lost: %s", self.name, reason)

    def come_back(self) -> None:
        """Use the device again; what it held before is gone."""
        self._runner = Runner()  # the one before may hang
        self.lost = ""
        self.lives += 1
        self._version_is_known = False
        _log.warning("the device %s is back", self.name)

    def takes_connections(self) -> bool:
        """Return whether the worker's address accepts connections."""
        return takes_connections(self.address)

    def answers(self) -> bool:
        """Return whether the worker responds; a suspended one accepts connections, but does not."""
        return answers(self.address)

    def _fails_probe(self) -> bool:
        def probe() -> None:
            with tf.device(self.name):
                one = tf.ones([])
            one.numpy()

        for _ in range(2):  # the first may still tell of another worker
            try:
                in_new_thread(probe).wait(_PROBE_SECONDS)
            except (LostDeviceError, tf.errors.OpError):
                continue
            return False
        return True


class Job:
    """A function that runs in another thread, in the context in which this object was made."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._context = contextvars.copy_context()
        self._function: Callable[[], Any] | None = function
        self._ended = threading.Event()

    def run(self) -> None:
        """Call the function, in the current thread."""
        assert self._function is not None
        try:
            self._result = self._context.run(self._function)
        except BaseException as error:
            self._error = error
        finally:
            self._function = None
            self._ended.set()

    def wait(self, seconds: float | None, is_there: Callable[[], bool] | None = None) -> Any:
        """Return the result of the function, or raise its error.

        Raise `LostDeviceError` after this many seconds, if they are not None, or as soon as
        `is_there` returns False, which means that there is nothing left to wait for.
        """
        start = time.monotonic()
        end = float("inf") if seconds is None else start + seconds
        look = start + _FIRST_LOOK_SECONDS if is_there else float("inf")
        while not self._ended.wait(max(0.0, min(_PAUSE_SECONDS, end - time.monotonic()))):
            deliver_interrupt()  # TensorFlow runs in another thread
            now = time.monotonic()
            if now >= end:
                raise LostDeviceError(f"it did not answer within {seconds:g} seconds")
            if is_there and now >= look:
                if not is_there() and not self._ended.is_set():
                    raise LostDeviceError("it no longer accepts connections")
                look = now + _LOOK_SECONDS
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result


class Runner:
    """A thread that runs jobs, one after the other, and ends when it has been idle for a while.

    A thread that waits for an unresponsive worker cannot be ended. It is therefore a daemon, which
    does not keep the process alive.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._runs = False

    def start(self, function: Callable[[], Any]) -> Job:
        """Run a function after those submitted before it."""
        job = Job(function)
        self._submit(job)
        return job

    def _submit(self, job: Job) -> None:
        with self._lock:
            self._jobs.put(job)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="hvp device", daemon=True).start()

    def _run(self) -> None:
        forget_errors = send_operations_one_by_one()
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._runs = False
                        return
                continue
            job.run()
            del job  # with what it holds
            forget_errors()


def in_new_thread(function: Callable[[], Any]) -> Job:
    """Run a function in its own thread, which does not keep the process alive."""
    return Runner().start(function)


_known: dict[str, Device] = {}
_lock = threading.Lock()


def device_named(name: str) -> Device:
    """Return the device with a full name, which is one object in the whole process."""
    with _lock:
        device = _known.get(name)
        task = None if device is None else device.task
        # At another address it is a worker of another cluster. Without one, it was left out.
        address = None if task is None else addresses_of_workers().get(task)
        if device is None or (address is not None and address != device.address):
            device = _known[name] = Device(name)
        return device


def all_devices() -> list[Device]:
    """Return all devices that have been requested in this process."""
    with _lock:
        return list(_known.values())


def devices_of(argument: Any) -> list[Device]:
    """Return the devices that an operator's argument `devices` names; see `device_names`."""
    lost = [device.name for device in all_devices() if device.lost]
    return [device_named(name) for name in device_names(argument, lost)]
