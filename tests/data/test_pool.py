"""Tasks dealt out to places, of which some are lost: each batch counts once."""

import threading
import time
import warnings
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvp._data.elements import convert_batch
from hvp._data.pool import Pool, Task
from hvp._devices.device import Device, LostDeviceError
from hvp._graphs.target import LOCAL
from tests.cases import examples

CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(3)]


def task(index, size=1, **more):
    elements = convert_batch((np.zeros((size, 2)),), "data")
    return Task(frozenset([index]), [(elements, 1.0)], **more)


def opened(count):
    """A pool of devices that nothing else uses."""
    pool = Pool([Device(name) for name in CPUS[:count]], 60.0, None)
    pool.open(None)
    return pool


def bring(site, state):
    return state


def test_a_pool_without_devices_works_here_in_order():
    pool, taken, threads = Pool([], 1.0, None), [], set()

    def step(site, task, state):
        threads.add(threading.get_ident())
        return lambda: (*(state or ()), *task.indices)

    def tasks(wanted):
        return [task(i) for i in (3, 1, 2) if wanted is None or i in wanted]

    for wanted, want in ((None, (3, 1, 2)), ({1, 3}, (3, 1))):
        taken.clear()
        assert pool.fold(tasks, wanted, step, bring, lambda *one: taken.append(one)) == [want]
        assert [(site, *one.indices) for site, one, _ in taken] == [(LOCAL, i) for i in want]
    assert (pool.fold(tasks, set(), step, bring), pool.sites) == ([], [LOCAL])
    assert threads == {threading.get_ident()}


numbers = st.integers(0, 2)


@examples(150)
@given(
    st.integers(0, 9),
    st.dictionaries(numbers, st.integers(1, 6), max_size=2),
    st.dictionaries(numbers, st.integers(0, 8), max_size=1),
    st.sets(st.integers(0, 9)),
    st.booleans(),
)
def test_each_batch_counts_once_whatever_is_lost(count, at_event, at_task, alone, has_data):
    """At work or when results are brought; or meanwhile. Data that were there are sent again."""
    pool, events, lost, held, running = opened(3), Counter(), set(), {}, set()
    at_task = {i: at for i, at in at_task.items() if len({i, *at_event}) < 3}  # one is left
    places = dict(zip(range(0, 9, 2), pool.sites * 2)) if has_data else {}

    def tasks(wanted):
        for i in range(count):
            for number in at_task if i in at_task.values() else ():
                pool.devices[number].give_up("unplugged meanwhile")
                lost.add(CPUS[number])
            if wanted is None or i in wanted:
                site = places.get(i)
                yield task(
                    i, i + 1, alone=i in alone, site=site if site and site.is_there else None
                )

    def may_be_lost(site, value):
        events[site.name] += 1
        if at_event.get(CPUS.index(site.name)) == events[site.name]:
            lost.add(site.name)
            raise LostDeviceError("unplugged")
        return value

    def step(site, task, state):
        assert task.site in (None, site)

        def run():
            running.add(id(task))
            assert running == {id(task)} or not task.alone
            time.sleep(0)  # for other threads
            running.discard(id(task))
            return may_be_lost(site, (*(state or ()), *task.indices))

        return run

    def take(site, task, state):
        assert not task.indices & set().union(*held.values())
        held.setdefault(site, set()).update(task.indices)

    def forget(site, indices):
        assert held.get(site, set()) >= set(indices)
        held.setdefault(site, set()).difference_update(indices)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        collected = pool.fold(tasks, None, step, may_be_lost, take, forget)
    assert sorted(sum(collected, ())) == list(range(count))
    assert sorted(i for indices in held.values() for i in indices) == list(range(count))
    assert lost == {device.name for device in pool.devices if device.lost}
    shown = {name for one in warned for name in CPUS if f"device {name} " in str(one.message)}
    assert shown - lost == set()
    assert {name for name in lost if events[name]} <= shown


def test_tasks_go_to_the_device_with_the_fewest_bytes_so_far():
    def step(site, task, state):
        return lambda: (*(state or ()), *task.indices)

    tasks = [task(i, size) for i, size in enumerate([8, 4, 2, 3, 2, 6])]
    collected = opened(3).fold(lambda wanted: tasks, None, step, bring)
    assert sorted(collected) == [(0,), (1, 4), (2, 3, 5)]
