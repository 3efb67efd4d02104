"""TensorFlow servers on this machine, to try out code for several machines."""

from __future__ import annotations

import atexit
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import tensorflow as tf

from hvp._devices import loopback
from hvp._devices.device import Device, device_named
from hvp._devices.membership import leave_lost
from hvp._errors import DeviceError, HvpError
from hvp._runtime.arguments import check_count
from hvp._runtime.interrupts import Uninterrupted

_WORKER = Path(__file__).with_name("worker.py")
_JOB = "worker"


class Cluster:
    """TensorFlow servers on this machine, one process each, and this process connected to them.

    Use it to try out `devices`, and in tests. It makes nothing faster, because the workers share
    the processors of this machine. On several machines, start TensorFlow's own servers, and connect
    with `tf.config.experimental_connect_to_cluster`.

    Parameters
    ----------
    workers : int
        The number of servers.
    cores : sequence of (collection of int), optional
        The processor cores that each server may use, on Linux. The default is all.
    any_interface : bool, optional
        TensorFlow's servers, and this process once it is connected, listen on all network
        interfaces and execute the requests of anyone who can reach them. On Linux, they are
        therefore restricted to connections from this machine. Pass True to lift this restriction,
        as is necessary on other systems.
    timeout : float, optional
        Seconds that the servers may take to start.

    Attributes
    ----------
    devices : list of str
        The names of their CPUs, for the argument `devices`.

    Raises
    ------
    HvpError
        If an argument is invalid, or if this process is, or was, connected to a cluster, whose
        tensors TensorFlow would lose.
    DeviceError
        If a server does not start, or the system does not restrict it to this machine.

    Notes
    -----
    The servers end when the cluster is closed, or when this process ends for any reason. A process
    can create only one `Cluster`.

    Examples
    --------
    The code runs in a process of its own::

        with hvp.Cluster(2) as cluster:
            H = hvp.HessianOperator(loss, model, (x, y), devices=cluster.devices)
            hvp.solve(H.damped(0.1), H.gradient)
    """

    @Uninterrupted()
    def __init__(
        self,
        workers: int,
        *,
        cores: Sequence[Any] | None = None,
        any_interface: bool = False,
        timeout: float = 120.0,
    ) -> None:
        check_count(workers, "workers")
        if cores is not None and len(cores) != workers:
            raise HvpError(f"there are {len(cores)} sets of cores", f"one for each of {workers}")
        if any("/job:" in device.name for device in tf.config.list_logical_devices()):
            raise HvpError(
                "this process is, or was, connected to a cluster, and TensorFlow would forget all "
                "tensors there",
                "one cluster in the life of a process",
                "use the devices of that cluster, or start another process",
            )
        self._cores, self._loopback, self._timeout = cores, not any_interface, timeout
        self._addresses = _free_addresses(workers)
        self._processes: list[Any] = [None] * workers
        self._devices: list[Device] = []
        self._logs: dict[int, Any] = {}
        _open.add(self)
        try:
            for index in range(workers):
                self._start(index)
            for index in range(workers):
                self._wait(index)
            self._connect()
        except BaseException:
            self.close()
            raise
        names = [f"/job:{_JOB}/replica:0/task:{i}/device:CPU:0" for i in range(workers)]
        self._devices = [device_named(name) for name in names]
        self.devices = names

    def __repr__(self) -> str:
        return f"Cluster({len(self._processes)} workers on {', '.join(self._addresses)})"

    def pid(self, index: int) -> int:
        """Return the number of a worker's process."""
        return int(self._processes[index].pid)

    def kill(self, index: int) -> None:
        """Kill a worker at once (SIGKILL), as if its machine had failed."""
        self._processes[index].kill()
        self._processes[index].wait()

    @Uninterrupted()
    def restart(self, index: int) -> None:
        """Restart a worker that has ended; operators use it again after their next `refresh`."""
        if self._processes[index].poll() is None:
            raise HvpError(f"worker {index} is running", "a worker that has ended")
        _close_pipes(self._processes[index])
        self._start(index)
        self._wait(index)

    def close(self) -> None:
        """End all servers. Closing twice does nothing."""
        for device in self._devices:
            device.lost = device.lost or "its cluster was closed"
        for process in self._processes:
            if process is not None:
                process.kill()
                process.wait()
                _close_pipes(process)
        for log in self._logs.values():
            log.close()
        self._processes, self._logs, self._devices = [], {}, []
        _open.discard(self)
        if not _at_exit:
            leave_lost()

    def __enter__(self) -> Cluster:
        """Return the cluster."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """End all servers."""
        self.close()

    def _start(self, index: int) -> None:
        where = "loopback" if self._loopback else "anywhere"
        command = [sys.executable, str(_WORKER), self._addresses[index], _JOB, str(index), where]
        before = None
        if self._cores is not None:
            # A new process inherits them from the thread that starts it.
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, set(self._cores[index]))
        try:
            self._processes[index] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log_file(index),
                text=True,
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        finally:
            if before is not None:
                os.sched_setaffinity(0, before)

    def _connect(self) -> None:
        spec = tf.train.ClusterSpec({_JOB: self._addresses})
        if not self._loopback:
            tf.config.experimental_connect_to_cluster(spec)
            return
        try:
            before = loopback.listening()
            tf.config.experimental_connect_to_cluster(spec)
            loopback.restrict(loopback.listening() - before)
        except OSError as error:
            raise DeviceError(
                f"this process could not be restricted to its own machine ({error})",
                "Linux 5.7 or newer",
                "pass any_interface=True, on a network that only you can reach",
            ) from error

    def _log_file(self, index: int) -> Any:
        """Return the file for a worker's output, since a pipe that nobody reads would block it."""
        if index not in self._logs:
            self._logs[index] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the rest
        return self._logs[index]

    def _wait(self, index: int) -> None:
        """Wait until a server is ready."""
        process, end = self._processes[index], time.monotonic() + self._timeout
        while True:
            left = end - time.monotonic()
            ready = select.select([process.stdout], [], [], max(0.0, left))[0]
            line = process.stdout.readline() if ready else ""
            if line.startswith("ready"):
                break
            if not ready or not line:
                process.kill()
                process.wait()
                self._logs[index].seek(0)
                said = self._logs[index].read().strip().splitlines() or ["it said nothing"]
                raise DeviceError(
                    f"worker {index} did not start within {self._timeout:g} seconds: {said[-1]}"
                    if not ready
                    else f"worker {index} ended: {said[-1]}",
                    "a TensorFlow server",
                )


def _free_addresses(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _close_pipes(process: Any) -> None:
    for pipe in (process.stdin, process.stdout):
        pipe.close()


_open: weakref.WeakSet[Cluster] = weakref.WeakSet()
# Whether this process ends: then there is nobody left to wait for workers.
_at_exit = False


@atexit.register
def _close_all() -> None:
    global _at_exit
    _at_exit = True
    for cluster in list(_open):
        cluster.close()
