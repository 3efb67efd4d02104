"""A piece of work on one device, which is tried again if another device was the cause."""

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

    It must leave nothing half-changed where it fails: it may be called again. Operations on a
    remote worker wait for it, without end if it does not answer. So none may run in the thread of
    whoever wants the result.

    Parameters
    ----------
    site : ExecutionTarget
        The device, and what is there.
    function : callable
        Takes nothing.
    """

    def __init__(self, site: ExecutionTarget, function: Callable[[], Any]) -> None:
        self._function = function
        self._site = site if isinstance(site, DeviceReplica) else None
        self._here = None if self._site is not None else (function(),)
        self._job = self._start() if self._site is not None and site.is_there else None

    def result(self, seconds: float) -> Any:
        """Wait for the result.

        Parameters
        ----------
        seconds : float
            How long to wait for a remote device, which counts as lost after that.

        Raises
        ------
        LostDeviceError
            If the device is lost. It is left alone from then on.
        Exception
            What the function raised.
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
        """Wait until nothing runs any more, whatever comes of it."""
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
