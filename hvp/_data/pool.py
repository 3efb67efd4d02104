"""Devices that share the work on batches: which does what, and what happens when one is lost.

Without devices, all work is done here, one batch after the other: this process is a pool of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvp._data.elements import Elements
from hvp._data.joint import JointProducts
from hvp._devices.device import Device, LostDeviceError
from hvp._devices.membership import take_back
from hvp._devices.processes import Processes
from hvp._devices.replica import DeviceReplica
from hvp._devices.work import Work
from hvp._errors import DeviceError
from hvp._graphs.target import LOCAL, ExecutionTarget
from hvp._runtime.user_warning import warn

# Takes a place, a task and what the place has computed from earlier tasks, None at first; returns a
# function that runs there, and returns the same with this task.
Step = Callable[[ExecutionTarget, "Task", Any], Callable[[], Any]]


@dataclass(frozen=True)
class Task:
    """A batch to be evaluated, in pieces that fit into memory; or several batches that are held.

    `indices` are the numbers of the batches. `pieces` are the examples of the batch with their
    weights, empty if a place holds what was evaluated. `site` is where that is, or where the data
    are; None for data that are here. If `alone` is set, nothing else may run meanwhile.
    """

    indices: frozenset[int]
    pieces: list[tuple[Elements, float]]
    site: ExecutionTarget | None = None
    alone: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return sum(elements.nbytes for elements, _ in self.pieces)


class Pool:
    """The devices that work, and the processes that do the same with other data.

    Without `devices`, work is done here. `seconds` is how long a remote device may take for one
    piece of work. `processes` hold the other shares of the data.

    Attributes
    ----------
    kept
        The batches whose data are on a device already, by their number.
    joint
        Functions that multiply on several devices.
    prepared
        Functions that have been called before. The first call makes them: one device at a time.
    """

    def __init__(
        self, devices: Sequence[Device], seconds: float, processes: Processes | None
    ) -> None:
        self.devices, self.seconds, self.processes = devices, seconds, processes
        self.kept: dict[int, Task] = {}
        self.joint, self.prepared = JointProducts(), set[Any]()
        self._replicas: dict[str, DeviceReplica] = {}
        # Bytes of data that each place was given since the pool was opened.
        self._loads: dict[ExecutionTarget, int] = {}

    @property
    def is_local(self) -> bool:
        """Whether all work is done here, in the calling thread."""
        return not self.devices

    @property
    def sites(self) -> list[ExecutionTarget]:
        """The places where work can be done now; DeviceError is raised if there are none."""
        if self.is_local:
            return [LOCAL]
        live = [site for site in self._replicas.values() if site.is_there]
        if not live:
            reasons = (f"{d.name}: {d.lost or 'it was started again'}" for d in self.devices)
            raise DeviceError(
                f"no device is left ({'; '.join(reasons)})",
                "at least one that can be reached",
                "start a worker at the same address and call refresh(), or build the operator with "
                "other devices",
            )
        return [*live]

    def replica(self, device: Device) -> DeviceReplica | None:
        """Return what stands on a device; None if nothing does."""
        return self._replicas.get(device.name)

    def open(self, batches: int | None) -> None:
        """Take lost devices back, and forget what is gone.

        `batches` is the number of batches; None if it is not known yet.
        """
        if self.is_local:
            return
        take_back()
        for device in self.devices:
            site = self._replicas.get(device.name)
            if site is None or not (device.lost or site.is_there):
                self._replicas[device.name] = DeviceReplica(device)
        sites = self.sites
        self._loads = dict.fromkeys(sites, 0)
        self.kept = {} if batches is None else self.kept
        self.kept = {i: task for i, task in self.kept.items() if task.site in sites}
        if len(self.kept) == batches:
            self._forget_surplus(sites)

    def fold(
        self,
        tasks: Callable[[set[int] | None], Iterable[Task]],
        wanted: set[int] | None,
        step: Step,
        bring: Callable[[ExecutionTarget, Any], Any],
        take: Callable[[ExecutionTarget, Task, Any], None] = lambda site, task, state: None,
        forget: Callable[[ExecutionTarget, Iterable[int]], None] = lambda site, indices: None,
    ) -> list[Any]:
        """Let each place work through some of the batches; what a lost one did is done again.

        `tasks` takes the numbers of batches, or None for all, and returns an iterator over tasks.
        `step` computes with one batch, see `Step`, and `take` is called here with its result.
        `bring` runs at a place and brings what was computed there to this process. `forget` takes a
        lost place and the numbers of the batches that `take` got for it, which others will be
        given. Return what `bring` returned for each place that had something to do.
        """
        collected: list[Any] = []
        finished = set[int]()
        while wanted is None or wanted - finished:
            states: dict[ExecutionTarget, Any] = {}
            done: dict[ExecutionTarget, set[int]] = {}
            seen = set[int]()
            todo = tasks(None if wanted is None else wanted - finished)
            self._deal(_noting(todo, seen), step, take, forget, states, done)
            wanted = seen if wanted is None else wanted
            works = [
                (s, Work(s, functools.partial(bring, s, state))) for s, state in states.items()
            ]
            for site, work in works:
                result = self.result(site, work)
                if result is None:
                    forget(site, done[site])
                else:
                    collected.append(result[0])
                    finished |= done[site]
        return collected

    def result(self, site: ExecutionTarget, work: Work) -> tuple[Any] | None:
        """Return the result in a tuple; if the device is lost, warn and return None."""
        try:
            return (work.result(self.seconds),)
        except LostDeviceError as error:
            warn_of_loss(site, str(error))
            return None

    def _deal(
        self,
        tasks: Iterable[Task],
        step: Step,
        take: Callable[[ExecutionTarget, Task, Any], None],
        forget: Callable[[ExecutionTarget, Iterable[int]], None],
        states: dict[ExecutionTarget, Any],
        done: dict[ExecutionTarget, set[int]],
    ) -> None:
        """Deal out tasks, so that each place works on one at a time."""
        running: dict[ExecutionTarget, tuple[Task, Work]] = {}

        def finish(site: ExecutionTarget) -> None:
            if site not in running:
                return
            task, work = running.pop(site)
            result = self.result(site, work)
            if result is None:
                states.pop(site, None)
                forget(site, done.pop(site, ()))
                return
            states[site] = result[0]
            take(site, task, result[0])
            done.setdefault(site, set()).update(task.indices)

        try:
            for task in tasks:
                if task.site is not None and not task.site.is_there:
                    continue  # its data are gone: it will be asked for again
                site = self._site_for(task)
                finish(site)
                site = self._site_for(task)  # another one, if that was lost
                finish(site)
                if task.alone:
                    for other in list(running):
                        finish(other)
                if task.site is not None and task.site is not site:
                    continue
                self._loads[site] = self._loads.get(site, 0) + task.nbytes
                running[site] = task, Work(site, step(site, task, states.get(site)))
                if task.alone:
                    finish(site)
        except BaseException:
            for _, work in running.values():
                work.abandon(self.seconds)
            raise
        for site in list(running):
            finish(site)

    def _site_for(self, task: Task) -> ExecutionTarget:
        sites = self.sites
        own = [site for site in sites if site is task.site]
        return own[0] if own else min(sites, key=lambda site: self._loads.get(site, 0))

    def _forget_surplus(self, sites: Sequence[ExecutionTarget]) -> None:
        """Forget so many data that devices without any get a share."""
        loads: dict[ExecutionTarget | None, int] = dict.fromkeys(sites, 0)
        for task in self.kept.values():
            loads[task.site] += task.nbytes
        if all(loads.values()):
            return
        for index, task in list(self.kept.items()):
            lightest = min(loads.values())
            if loads[task.site] - task.nbytes >= lightest + task.nbytes:
                loads[task.site] -= task.nbytes
                loads[min(loads, key=lambda site: loads[site])] += task.nbytes
                del self.kept[index]


def warn_of_loss(site: ExecutionTarget, reason: str) -> None:
    """Warn that a device is lost."""
    warn(
        f"the device {site.name} is lost ({reason}); others, if any, take over what it held",
        RuntimeWarning,
    )


def _noting(tasks: Iterable[Task], seen: set[int]) -> Iterator[Task]:
    for task in tasks:
        seen.update(task.indices)
        yield task
