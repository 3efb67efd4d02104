"""Batches dealt out to devices at one moment: who holds what, and what to do when one is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvp._data.budget import Budget
from hvp._data.elements import Elements
from hvp._data.joint import JointProducts, JointWork, Part
from hvp._devices.device import Device, LostDeviceError
from hvp._devices.replica import DeviceReplica, VariableValues
from hvp._devices.work import Work
from hvp._engines.linear_map import LinearMap, Sum, Terms
from hvp._errors import DeviceError
from hvp._runtime.user_warning import warn
from hvp._vectors.space import Space

# The number of the regularization, among those of batches.
REGULARIZATION = -1


@dataclass(frozen=True)
class BatchTask:
    """A batch that is to be evaluated, in pieces that fit into memory.

    Attributes
    ----------
    index : int
        The number of the batch.
    pieces : list of (Elements, float)
        Its examples, with their weights.
    site : DeviceReplica or None
        Where the data are; None while they are here.
    alone : bool
        Whether nothing else may run meanwhile.
    """

    index: int
    pieces: list[tuple[Elements, float]]
    site: DeviceReplica | None = None
    alone: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return sum(elements.nbytes for elements, _ in self.pieces)


@dataclass(frozen=True)
class Term:
    """The linear map of one batch, with the weight of the batch and the bytes that both hold."""

    weight: float
    map: LinearMap
    nbytes: int


@dataclass(eq=False)
class DeviceShard:
    """What one device holds of a moment.

    Attributes
    ----------
    site : DeviceReplica
        The device, and what stands there for variables.
    budget : Budget
        How much may be held there.
    load : int
        Bytes of the data that were dealt to it.
    terms : dict of int to Term
        The linear maps that are held, by the number of the batch.
    """

    site: DeviceReplica
    budget: Budget
    load: int = 0
    terms: dict[int, Term] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """How many batches are held."""
        return len(self.terms.keys() - {REGULARIZATION})

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(term.nbytes for term in self.terms.values())

    def hold(self, index: int, term: Term) -> bool:
        """Hold a linear map if it fits; returns whether it does."""
        self.budget.record(term.nbytes)
        # Without a limit, what memory is left on another machine is not known.
        looks = self.budget.limited or not self.site.device.is_remote
        if looks and not self.budget.can_hold(self.nbytes + term.nbytes):
            return False
        self.terms[index] = term
        return True


# Takes a share, an item and what the device computed from earlier items, None at first; returns a
# function that runs on the device, and returns the same with this item.
Step = Callable[[DeviceShard, BatchTask, Any], Callable[[], Any]]


class DeviceEvaluation:
    """What all devices together hold of one moment.

    Parameters
    ----------
    moment : VariableValues
        The values of the variables.
    sites : list of DeviceReplica
        Those of the devices that are there.
    devices : sequence of Device
        All devices, for the error if none is left.
    memory_limit : int, str, DeviceShard or None
        How much each of them may hold.
    seconds : float
        How long a remote device may take for one piece of work.
    items : callable
        Takes the numbers of batches, or None for all; returns an iterator over them as items.
    evaluate : callable
        Takes numbers of batches; evaluates them on the devices that are left, so that they are
        held or streamed.
    prepared : set
        Which functions have been called before. The first call makes them: one device at a time.
    joint : JointProducts
        Functions that multiply on several devices.

    Attributes
    ----------
    shares : list of DeviceShard
        What each device holds, of those that are there.
    streamed : set of int
        Batches that no device holds.
    scale, scale_of_regularization : float
        What weights of batches, and of the regularization, are multiplied by.
    """

    def __init__(
        self,
        moment: VariableValues,
        sites: list[DeviceReplica],
        devices: Sequence[Device],
        memory_limit: Any,
        seconds: float,
        items: Callable[[set[int] | None], Iterable[BatchTask]],
        evaluate: Callable[[DeviceEvaluation, set[int]], None],
        prepared: set[Any],
        joint: JointProducts,
    ) -> None:
        self.moment, self._seconds, self._devices = moment, seconds, devices
        self._items, self._evaluate = items, evaluate
        self.shares = [DeviceShard(site, Budget(memory_limit)) for site in sites]
        self.streamed: set[int] = set()
        self.scale = self.scale_of_regularization = 1.0
        self._prepared, self._joint = prepared, joint

    @property
    def held(self) -> int:
        """How many batches are held."""
        return sum(share.batches for share in self.shares)

    @property
    def nbytes(self) -> int:
        """Bytes that all devices hold."""
        return sum(share.nbytes for share in self.shares)

    def close(self) -> None:
        """Release what is held. What a lost device holds is gone anyway."""
        for share in self.shares:
            for term in share.terms.values():
                term.map.close()
            share.terms.clear()

    def gather(
        self,
        wanted: set[int] | None,
        step: Step,
        give: Callable[[DeviceShard, Any], Callable[[], Any]],
        take: Callable[[DeviceShard, BatchTask, Any], Any] = lambda share, item, result: result,
        forget: Callable[[DeviceShard, Iterable[int]], None] = lambda share, indices: None,
        kept: Iterable[BatchTask] = (),
    ) -> list[Any]:
        """Let devices work through batches; what a lost one did is done again by the others.

        Parameters
        ----------
        wanted : set of int or None
            The numbers of the batches; None for all.
        step : callable
            Computes with one batch, see `Step`.
        give : callable
            Takes a share and what was computed there; returns a function that brings it home.
        take : callable, optional
            Takes a share, an item and what `step` computed; returns what to go on with there.
        forget : callable, optional
            Takes a share whose device is lost, and the numbers of batches that `take` got for it;
            they will be given to others.
        kept : iterable of BatchTask
            Those of the batches whose data are on devices already.

        Returns
        -------
        list
            What `give` returned, for each device that had something to do.
        """
        collected: list[Any] = []
        every, finished = wanted, set[int]()
        first = list(kept)
        while every is None or every - finished:
            todo = None if every is None else every - finished
            states: dict[DeviceShard, Any] = {}
            done: dict[DeviceShard, set[int]] = {}
            seen: set[int] = set()
            if first:
                self._pass(first, step, take, forget, states, done)
                todo = None if todo is None else todo - _union(done.values())
                first = []
            if todo is None or todo:
                skipped = _union(done.values())
                items = (i for i in self._items(todo) if i.index not in skipped)
                self._pass(_noting(items, seen), step, take, forget, states, done)
            every = seen | _union(done.values()) if every is None else every
            works = [(s, Work(s.site, give(s, state))) for s, state in states.items()]
            for share, work in works:
                result = self._result(share, work)
                if result is None:
                    forget(share, done[share])
                else:
                    collected.append(result[0])
                    finished |= done[share]
        return collected

    def forget(self, share: DeviceShard, indices: Iterable[int]) -> None:
        """Forget what a lost share holds of batches that the others will be given."""
        for index in indices:
            share.terms.pop(index, None)
            self.streamed.discard(index)

    def multiply(self, v: tf.Tensor, space: Space) -> tuple[list[tf.Tensor], set[int]]:
        """Multiply what is held by a vector, or a block of rows.

        Parameters
        ----------
        v : tf.Tensor
            The vector, of shape `(n,)`, or rows of shape `(k, n)`.
        space : Space
            The space of vectors and products.

        Returns
        -------
        products : list of tf.Tensor
            Those of each device, to be added up.
        counted : set of int
            The batches whose products these are. One of them may be lost in the meantime, and be
            held or streamed by another device: it must not count twice.
        """
        products: list[tf.Tensor] = []
        counted = set[int]()
        todo = {share: list(share.terms) for share in self.shares}
        self._replace_into(todo, counted)
        joint = True
        while todo:
            todo = {share: indices for share, indices in todo.items() if indices}
            work = self._start_joint(todo, v, space) if joint else None
            sites = [] if work is None else work.sites
            alone = {share: i for share, i in todo.items() if share.site not in sites}
            self._multiply_alone(alone, v, space, products, counted)
            todo = {share: i for share, i in todo.items() if share.site in sites}
            product = None if work is None else work.result()
            for share in todo:
                if share.site.device.lost:
                    _warn_of(share.site.device, share.site.device.lost)
            if product is not None:
                products.append(product)
                counted |= _union(set(indices) for indices in todo.values())
                todo = {}
            joint = False  # should it fail, each device tells by itself what is wrong
            self._replace_into(todo, counted)
        return products, counted

    def _start_joint(
        self, todo: dict[DeviceShard, list[int]], v: tf.Tensor, space: Space
    ) -> JointWork | None:
        """Start to multiply on all workers that can do it together, if any."""
        parts = [Part(share.site, self._weighted(share, i)) for share, i in todo.items()]
        joint = [part for part in parts if part.is_joint and self._is_prepared(v, part.terms)]
        return self._joint.start(joint, v, space, self._seconds)

    def _multiply_alone(
        self,
        todo: dict[DeviceShard, list[int]],
        v: tf.Tensor,
        space: Space,
        products: list[tf.Tensor],
        counted: set[int],
    ) -> None:
        """Multiply on each device by itself; add the products, and whose they are, to the last."""
        works: list[tuple[DeviceShard, Work]] = []
        sent = self._sent(v, list(todo))

        def finish(share: DeviceShard, work: Work) -> None:
            result = self._result(share, work)
            if result is not None:
                products.append(result[0])
                counted.update(todo[share])

        for share, indices in todo.items():
            terms = self._weighted(share, indices)
            there = sent.get(share, v)
            works.append((share, self._product(share, terms, there, v.device, space)))
            if not self._is_prepared(v, terms):  # functions are made, and serve all devices
                finish(*works.pop())
                self._prepared |= _kinds(v, terms)
        for share, work in works:
            finish(share, work)

    def _is_prepared(self, v: tf.Tensor, terms: Terms) -> bool:
        return _kinds(v, terms) <= self._prepared

    def _weighted(self, share: DeviceShard, indices: Iterable[int]) -> Terms:
        held = [(index, share.terms[index]) for index in indices]
        return [(self.weight_of(index, term.weight), term.map) for index, term in held]

    def _sent(self, v: tf.Tensor, shares: Sequence[DeviceShard]) -> dict[DeviceShard, tf.Tensor]:
        """Move a large vector to remote devices, before any of them computes.

        While one computes, TensorFlow would not let another one fetch it.
        """
        works = [
            (share, Work(share.site, functools.partial(share.site.fetch, v)))
            for share in shares
            if share.site.fetches(v)
        ]
        results = [(share, self._result(share, work)) for share, work in works]
        return {share: result[0] for share, result in results if result is not None}

    def _product(
        self, share: DeviceShard, terms: Terms, v: tf.Tensor, home: str, space: Space
    ) -> Work:
        weights, maps = [weight for weight, _ in terms], [term for _, term in terms]
        # A remote operation takes as long as a hundred here: what all terms share comes last.
        common = weights[0] if len(set(weights)) == 1 else 1.0
        weights = [1.0 if weight == common else weight for weight in weights]
        weighted, site = Sum(list(zip(weights, maps)), space, space), share.site

        def product() -> tf.Tensor:
            product = weighted.apply(site.take(v, uses=len(terms)))
            return site.give(product, home, times=common)

        return Work(site, product)

    def weight_of(self, index: int, weight: float) -> float:
        """Return what a batch counts in the whole."""
        if index == REGULARIZATION:
            return weight * self.scale_of_regularization
        return weight * self.scale

    def _replace_into(self, todo: dict[DeviceShard, list[int]], counted: set[int]) -> None:
        """Evaluate what lost devices held on the others, and add it to what is to be multiplied.

        Parameters
        ----------
        todo : dict of DeviceShard to list of int
            What is to be multiplied.
        counted : set of int
            Batches whose products are there already.
        """
        while True:
            lost = [share for share in self.shares if not share.site.is_there]
            if not lost:
                return
            self.shares = [share for share in self.shares if share not in lost]
            for share in lost:
                todo.pop(share, None)
            before = {share: set(share.terms) for share in self.shares}
            self._evaluate(self, {index for share in lost for index in share.terms})
            for share in self.shares:
                known = before.get(share, set()) | counted
                new = [index for index in share.terms if index not in known]
                todo[share] = todo.get(share, []) + new

    def _pass(
        self,
        items: Iterable[BatchTask],
        step: Step,
        take: Callable[[DeviceShard, BatchTask, Any], Any],
        forget: Callable[[DeviceShard, Iterable[int]], None],
        states: dict[DeviceShard, Any],
        done: dict[DeviceShard, set[int]],
    ) -> None:
        """Deal items out, each device working at one at a time."""
        running: dict[DeviceShard, tuple[BatchTask, Work]] = {}

        def finish(share: DeviceShard) -> None:
            if share not in running:
                return
            item, work = running.pop(share)
            result = self._result(share, work)
            if result is None:
                states.pop(share, None)
                forget(share, done.pop(share, ()))
                return
            states[share] = take(share, item, result[0])
            done.setdefault(share, set()).add(item.index)

        try:
            for item in items:
                if item.site is not None and not item.site.is_there:
                    continue  # its data are gone: it will be asked for again
                share = self._share_for(item)
                finish(share)
                share = self._share_for(item)  # another one, if that was lost
                finish(share)
                if item.alone:
                    for other in list(running):
                        finish(other)
                if item.site is not None and item.site is not share.site:
                    continue
                share.load += item.nbytes
                running[share] = item, Work(share.site, step(share, item, states.get(share)))
                if item.alone:
                    finish(share)
        except BaseException:
            for _, work in running.values():
                work.abandon(self._seconds)
            raise
        for share in list(running):
            finish(share)

    def _share_for(self, item: BatchTask) -> DeviceShard:
        live = [share for share in self.shares if share.site.is_there]
        if not live:
            raise no_device_left(self._devices)
        own = [share for share in live if share.site is item.site]
        return own[0] if own else min(live, key=lambda share: share.load)

    def _result(self, share: DeviceShard, work: Work) -> tuple[Any] | None:
        """Return the result, in a tuple; None if the device is lost."""
        try:
            return (work.result(self._seconds),)
        except LostDeviceError as error:
            _warn_of(share.site.device, str(error))
            return None


def no_device_left(devices: Iterable[Device]) -> DeviceError:
    """Return the error to raise when all devices are lost."""
    reasons = "; ".join(f"{d.name}: {d.lost or 'it was started again'}" for d in devices)
    return DeviceError(
        f"no device is left ({reasons})",
        "at least one that can be reached",
        "start a worker at the same address and call refresh(), or build the operator with other "
        "devices",
    )


def _warn_of(device: Device, reason: str) -> None:
    warn(
        f"the device {device.name} is lost ({reason}); the other devices take over what it held",
        RuntimeWarning,
    )


def _kinds(v: tf.Tensor, terms: Terms) -> set[Any]:
    """Return which functions a product calls."""
    return {(len(v.shape), id(getattr(term, "program", None))) for _, term in terms}


def _union(sets: Iterable[set[int]]) -> set[int]:
    return set().union(*sets)


def _noting(items: Iterable[BatchTask], seen: set[int]) -> Iterator[BatchTask]:
    for item in items:
        seen.add(item.index)
        yield item
