"""A piece of work on one device, which is retried if another device caused its failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from hvp._devices.device import Job, LostDeviceError
from hvp._devices.replica import DeviceReplica
from hvp._graphs.target import ExecutionTarget

# Where several devices are lost, the error of each may come up in work on another one.
_TRIES = 4


class Work:
    """A function that runs on a device, in the device's thread; or here, at once.

    The function must not leave anything half-changed if it fails, since it may be called again.
    Operations on a remote worker wait for it, forever if it does not answer, so none may run in the
    thread of the code that needs the result.
    """

    def __init__(self, site: ExecutionTarget, function: Callable[[], Any]) -> None:
        self._function = function
        self._site = site if isinstance(site, DeviceReplica) else None
        self._here = None if self._site is not None else (function(),)
        self._job = self._start() if self._site is not None and site.is_there else None

    def result(self, seconds: float) -> Any:
        """Return the result of the function, or raise its error.

        A remote device counts as lost after this many seconds. Raise `LostDeviceError` if the
        device is lost; it is not used from then on.
        """
        if self._here is not None:
            return self._here[0]
        assert self._site is not None
        device = self._site.device
        if self._job is None:
            raise LostDeviceError(device.lost or "it was started again")
        for left in reversed(range(_TRIES)):
            try:
                return self._wait(self._job, seconds)
            except LostDeviceError as error:
                device.give_up(str(error))
                raise
            except Exception as error:
                reason = device.explain(error)
                if reason:
                    device.give_up(reason)
                    raise LostDeviceError(reason) from error
                if not (left and device.is_remote and device.may_be_of_another(error)):
                    raise
            self._job = self._start()
        raise AssertionError("not reached")

    def abandon(self, seconds: float) -> None:
        """Wait until the function has ended, and ignore its result."""
        if self._job is not None and self._site is not None and self._site.is_there:
            with contextlib.suppress(Exception):
                self._wait(self._job, seconds)

    def _wait(self, job: Job, seconds: float) -> Any:
        assert self._site is not None
        device = self._site.device
        if not device.is_remote:
            return job.wait(None)
        return job.wait(seconds, device.takes_connections)

    def _start(self) -> Job:
        site, function = self._site, self._function
        assert site is not None
        return site.device.start(lambda: site.run(function))
